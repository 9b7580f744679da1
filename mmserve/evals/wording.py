"""Words of an answer: normal form, objects named, yes or no, which of several choices, and whether it declines.  Pure, linear in the text.

The normal form is that of the VQA evaluation: lower case, no punctuation, no articles, number words as digits; object words of the
vocabulary, in singular or plural, become their canonical word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_TOKEN = re.compile(rf"{_WORD.pattern}|[.!?;:\n,]")
_ARTICLES = {"a", "an", "the"}
_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)}
_NEGATIONS = {"no", "not", "neither", "nor", "without", "none", "never", "nothing", "cannot"}
_ENDS_SENTENCE = {".", "!", "?", ";", ":", "\n"}
_ENDS_NEGATION = {"but", "however", "though", "although", "instead", "only", "just", "except"}
_CLAUSE_OPENERS = {"i", "it", "there", "he", "she", "they", "we", "you", "this", "that", "these", "those"}
_REFUSALS = re.compile(
    r"\b(?:i(?:'m| am) (?:sorry|unable|not able)|i (?:can't|cannot|can not|could not|couldn't)|as an ai|i only see one picture"
    r"|i (?:don't|do not) (?:see a|see any|hear a|know)|(?:unable|impossible) to (?:tell|say|determine|answer|see|hear))\b"
)


@dataclass(frozen=True, slots=True)
class Mention:
    """An object's canonical word; negated in "there is no dog"."""

    word: str
    is_negated: bool


class Vocabulary:
    """Canonical object words with their synonyms.  Terms may have several words; plurals of regular ones needn't be listed.

    Raises ValueError if one term stands for two objects.
    """

    def __init__(self, synonyms: Mapping[str, Sequence[str]]) -> None:
        self.words = frozenset(synonyms)
        self._of: dict[tuple[str, ...], str] = {}
        for word, others in synonyms.items():
            for listed in (word, *others):
                self._add(word, tuple(_words(listed)))
        plurals = {_plural(term): word for term, word in self._of.items()}
        self._of = plurals | self._of  # a listed term wins over a plural that was only guessed
        self._longest: dict[str, int] = {}
        for term in self._of:
            self._longest[term[0]] = max(len(term), self._longest.get(term[0], 0))

    def canonical(self, term: str) -> str | None:
        return self._of.get(tuple(_words(term)))

    def mentions(self, text: str) -> tuple[Mention, ...]:
        """In order.  A negation reaches to the end of its sentence, to "but" and the like, or to a comma that opens a new clause."""
        found: list[Mention] = []
        tokens = _TOKEN.findall(_plain(text))
        is_negated, index = False, 0
        while index < len(tokens):
            token = tokens[index]
            following = tokens[index + 1] if index + 1 < len(tokens) else "."
            if token in _ENDS_SENTENCE or token in _ENDS_NEGATION or (token == "," and following in _CLAUSE_OPENERS):
                is_negated = False
            elif token in _NEGATIONS or token.endswith("n't"):
                is_negated = following != ","  # "No, ..." answers a question
            length = self._match(tokens, index)
            if length:
                found.append(Mention(self._of[tuple(tokens[index : index + length])], is_negated))
            index += length or 1
        return tuple(found)

    def named(self, text: str) -> frozenset[str]:
        """The objects that a text says are there."""
        return frozenset(mention.word for mention in self.mentions(text) if not mention.is_negated)

    def normal_form(self, text: str) -> tuple[str, ...]:
        return tuple(self._normal_words(_words(text)))

    def _normal_words(self, words: list[str]) -> Iterator[str]:
        index = 0
        while index < len(words):
            length = self._match(words, index)
            if length:
                yield self._of[tuple(words[index : index + length])]
            elif words[index] not in _ARTICLES:
                yield _DIGITS.get(words[index], words[index])
            index += length or 1

    def _add(self, word: str, term: tuple[str, ...]) -> None:
        if not term:
            raise ValueError(f"{word!r} has a term without letters")
        if self._of.setdefault(term, word) != word:
            raise ValueError(f"{' '.join(term)!r} stands for both {self._of[term]!r} and {word!r}")

    def _match(self, tokens: Sequence[str], start: int) -> int:
        """Words of the longest term that starts there, 0 if none does."""
        for length in range(self._longest.get(tokens[start], 0), 0, -1):
            if tuple(tokens[start : start + length]) in self._of:
                return length
        return 0


def yes_or_no(text: str) -> str | None:
    """The first of the two words in the first sentence; None if neither stands there."""
    for token in _TOKEN.findall(_plain(text)):
        if token in ("yes", "no"):
            return str(token)
        if token in _ENDS_SENTENCE:
            return None
    return None


def chosen(answer: Sequence[str], choices: Iterable[Sequence[str]]) -> Sequence[str] | None:
    """The one choice that the answer names, all in normal form; None if it names none or several.  "top left" doesn't name "left"."""
    rest, found = list(answer), []
    for choice in sorted(choices, key=len, reverse=True):
        starts = [i for i in range(len(rest) - len(choice) + 1) if rest[i : i + len(choice)] == list(choice)]
        if starts:
            found.append(choice)
        for start in starts:
            rest[start : start + len(choice)] = [""] * len(choice)
    return found[0] if len(found) == 1 else None


def declines(text: str) -> bool:
    """Whether it says that it can't answer, by the usual phrases."""
    return _REFUSALS.search(_plain(text)) is not None


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().replace("\u2019", "'")


def _words(text: str) -> list[str]:
    return _WORD.findall(_plain(text))


def _plural(term: tuple[str, ...]) -> tuple[str, ...]:
    """By the rules of regular nouns."""
    *before, last = term
    if re.search(r"[^aeiou]y$", last):
        return (*before, last[:-1] + "ies")
    return (*before, last + ("es" if re.search(r"(?:s|x|z|ch|sh)$", last) else "s"))
