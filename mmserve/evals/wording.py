"""Words of an answer: normal form, objects named, yes or no, and which of several choices.  Pure, linear in the text.

The normal form is that of the VQA evaluation: lower case, no punctuation, no articles, number words as digits; object words of the
vocabulary, in singular or plural, become the object's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from mmserve.grounding.mentions import Stance, find_mentions
from mmserve.grounding.vocabulary import Term, Vocabulary, words_of

_ARTICLES = {"a", "an", "the"}
_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)}
_SENTENCE = re.compile(r"[^.!?;:\n]*[^\W_][^.!?;:\n]*")
_CLAIMED = (Stance.ASSERTED, Stance.HEARD)


def named(text: str, vocabulary: Vocabulary) -> frozenset[str]:
    """The objects that a text says are there or were heard."""
    return frozenset(mention.name for mention in find_mentions(text, vocabulary) if mention.stance in _CLAIMED)


def object_of(term: str, vocabulary: Vocabulary) -> str | None:
    """The object that a term stands for, all of it; None if it stands for none."""
    words = words_of(term)
    found = vocabulary.match(words, 0) if words else None
    return found[1] or None if found is not None and found[0] == len(words) else None


def normal_form(text: str, vocabulary: Vocabulary) -> Term:
    return tuple(_normal_words(words_of(text), vocabulary))


def yes_or_no(text: str) -> str | None:
    """The first of the two words in the first sentence; None if neither stands there."""
    sentence = _SENTENCE.search(text)
    words = words_of(sentence[0]) if sentence is not None else ()
    return next((word for word in words if word in ("yes", "no")), None)


def chosen(answer: Term, choices: Iterable[Term]) -> Term | None:
    """The one choice that the answer names, all in normal form; None if it names none or several.  "top left" doesn't name "left"."""
    rest: list[str] = list(answer)
    found: list[Term] = []
    for choice in sorted(choices, key=len, reverse=True):
        starts = [i for i in range(len(rest) - len(choice) + 1) if rest[i : i + len(choice)] == list(choice)]
        if starts:
            found.append(choice)
        for start in starts:
            rest[start : start + len(choice)] = [""] * len(choice)
    return found[0] if len(found) == 1 else None


def _normal_words(words: Sequence[str], vocabulary: Vocabulary) -> Iterator[str]:
    index = 0
    while index < len(words):
        length, name = vocabulary.match(words, index) or (1, "")
        if name:
            yield name
        else:
            yield from (_DIGITS.get(word, word) for word in words[index : index + length] if word not in _ARTICLES)
        index += length
