"""Object words: which terms stand for which object, in singular and plural, and which phrases only look like it.

    {"objects": {"dog": ["puppy", "golden retriever"], "mouse": []}, "plurals": {"mouse": "mice"}, "not_objects": ["hot dog"]}

Terms are sequences of words and match whole words only; the longest that fits counts.  Regular plurals of English needn't be listed,
nor the commonest irregular ones.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from mmserve.config import ConfigError

_MARKS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"  # accents written apart from their letter
_LETTER = rf"(?:[^\W_]|[{_MARKS}])"
WORD = rf"{_LETTER}+(?:['\u2019]{_LETTER}+)*"  # dog, dog's, 3; a hyphen stands between two words
_WORD = re.compile(WORD)
MAX_WORD = 64  # characters; nothing longer is a word of any vocabulary
_IRREGULAR = {
    "calf": "calves", "child": "children", "deer": "deer", "elf": "elves", "fish": "fish", "foot": "feet", "goose": "geese",
    "knife": "knives", "leaf": "leaves", "loaf": "loaves", "man": "men", "mouse": "mice", "ox": "oxen", "person": "people",
    "scarf": "scarves", "sheep": "sheep", "shelf": "shelves", "thief": "thieves", "tooth": "teeth", "wolf": "wolves", "woman": "women",
}  # fmt: skip

Term = tuple[str, ...]
T = TypeVar("T")


class Terms(Generic[T]):
    """What each of many terms stands for, found by walking words: a trie."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node({}, None)

    def add(self, term: Term, meaning: T) -> T:
        """Returns what the term stands for from now on: its first meaning."""
        node = self._root
        for word in term:
            node = node.after.setdefault(word, _Node({}, None))
        if node.meaning is None:
            node.meaning = meaning
        return node.meaning

    def longest(self, words: Sequence[str], start: int) -> tuple[int, T] | None:
        """Number of words and meaning of the longest term that begins at `start`."""
        node, found = self._root, None
        for index in range(start, len(words)):
            following = node.after.get(words[index])
            if following is None:
                break
            node = following
            if node.meaning is not None:
                found = (index + 1 - start, node.meaning)
        return found


@dataclass(slots=True)
class _Node(Generic[T]):
    after: dict[str, _Node[T]]
    meaning: T | None


class Vocabulary:
    """Raises ConfigError when one term would stand for two objects, or for none."""

    def __init__(
        self, objects: Mapping[str, Sequence[str]], *, plurals: Mapping[str, str] | None = None, others: Iterable[str] = ()
    ) -> None:
        self.objects = tuple(objects)
        self._terms: Terms[str] = Terms()
        irregular = _IRREGULAR | {normal(singular): normal(plural) for singular, plural in (plurals or {}).items()}
        listed = [(name, words_of(term)) for name, synonyms in objects.items() for term in (name, *synonyms)]
        for phrase in others:
            self._add(words_of(phrase), "", phrase)
        for name, term in listed:
            self._add(term, name, name)
        for name, term in listed:  # after all that is listed, which goes before what is guessed
            for plural in _plurals(term, irregular):
                self._terms.add(plural, name)

    def match(self, words: Sequence[str], start: int) -> tuple[int, str] | None:
        """Number of words of the longest term that begins there, and its object: empty for a phrase that names something else."""
        return self._terms.longest(words, start)

    @classmethod
    def read(cls, file: Path) -> Vocabulary:
        """Raises ConfigError naming the file and what is wrong with it."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is no vocabulary: {error}") from None
        unknown = set(data) - {"objects", "plurals", "not_objects"} if isinstance(data, dict) else {"anything but an object"}
        if unknown:
            raise ConfigError(f"{file}: a vocabulary has objects, plurals and not_objects, not {', '.join(sorted(unknown))}")
        objects, plurals, others = data.get("objects"), data.get("plurals", {}), data.get("not_objects", [])
        if not (isinstance(objects, dict) and all(_is_list_of_texts(synonyms) for synonyms in objects.values())):
            raise ConfigError(f"{file}: objects must be an object of words and lists of their synonyms")
        if not (isinstance(plurals, dict) and _is_list_of_texts(list(plurals.values())) and _is_list_of_texts(others)):
            raise ConfigError(f"{file}: plurals must be an object of texts, and not_objects a list of texts")
        try:
            return cls(objects, plurals=plurals, others=others)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}") from None

    def _add(self, term: Term, meaning: str, name: str) -> None:
        if not term:
            raise ConfigError(f"a term of {name!r} has no letters")
        if self._terms.add(term, meaning) != meaning:
            raise ConfigError(f"{' '.join(term)!r} stands for {name!r} and for something else")


def words_of(text: str) -> Term:
    return tuple(normal(word) for word in _WORD.findall(text))


def normal(word: str) -> str:
    """A word as terms have it: compatibility forms and case folded, without a possessive's ending.  Empty for one that is too long."""
    if len(word) > MAX_WORD:
        return ""
    if not word.isascii():
        word = unicodedata.normalize("NFKC", word).replace("\u2019", "'")
    return word.casefold().removesuffix("'s")


def _plurals(term: Term, irregular: Mapping[str, str]) -> list[Term]:
    """Of the last word, by the rules of regular nouns and the table of others."""
    *before, last = term
    if last in irregular:
        endings = [irregular[last]]
    elif re.search(r"[^aeiou]y$", last):
        endings = [last[:-1] + "ies"]
    elif re.search(r"(?:s|x|z|ch|sh)$", last):
        endings = [last + "es"]
    elif re.search(r"[^aeiou]o$", last):
        endings = [last + "es", last + "s"]  # potatoes, pianos
    else:
        endings = [last + "s"]
    return [(*before, ending) for ending in endings]


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
