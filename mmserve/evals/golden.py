"""Golden sets: questions about media with their right answers, written by hand or by a program.

A set is a directory with `items.jsonl`, one question a line, `vocabulary.json` if objects are annotated, and the media files they name;
docs/evals.md describes the fields.  It is parsed once, here: what is wrong with it is a BadGoldenSet that names file, line and field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from mmserve.config import ConfigError
from mmserve.evals.wording import normal_form, object_of
from mmserve.grounding.refusals import declines
from mmserve.grounding.vocabulary import Vocabulary
from mmserve.media import MediaKind

BUNDLED = Path(__file__).parent / "tiny"
ITEMS, VOCABULARY = "items.jsonl", "vocabulary.json"
MEDIA_SLICES = ("image", "images", "audio", "image+audio")
SLICES = ("text", *MEDIA_SLICES)
MEDIA_TYPES = {
    MediaKind.IMAGE: {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".gif": "image/gif", ".webp": "image/webp"},
    MediaKind.AUDIO: {
        ".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg", ".oga": "audio/ogg", ".opus": "audio/ogg",
    },
}  # fmt: skip
_MEDIA_NAMES = [kind.value for kind in MediaKind]


class BadGoldenSet(Exception):
    """A golden set can't be read as it stands; the message says where and why."""


class AnswerKind(StrEnum):
    YES_NO = "yes_no"  # the first yes or no of the first sentence
    CHOICE = "choice"  # the only one of the item's choices that the answer names
    SHORT = "short"  # the whole answer, in normal form
    OPEN = "open"  # by claims, which takes a judge


@dataclass(frozen=True, slots=True)
class Media:
    kind: MediaKind
    path: Path

    @property
    def mime(self) -> str:
        return MEDIA_TYPES[self.kind][self.path.suffix.lower()]


Part = str | Media


@dataclass(frozen=True, slots=True)
class Item:
    """One question.  `parts` are texts and media in the order in which they are sent."""

    id: str
    parts: tuple[Part, ...]
    category: str
    kind: AnswerKind
    expected: tuple[str, ...]  # all of them right; for an open item what a judge compares with, perhaps nothing
    choices: tuple[str, ...] = ()
    objects: frozenset[str] | None = None  # what is there, as canonical words; None: not annotated
    asks_for_all: bool = False  # whether a good answer names all of `objects`
    asks_about: str | None = None  # the only object that `objects` tells about: a yes names it, and nothing else is looked for
    if_swapped: tuple[str, ...] = ()  # right answers when its two pictures change places: makes it an order probe

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if isinstance(part, Media))

    @property
    def text(self) -> str:
        return " ".join(part for part in self.parts if isinstance(part, str))

    @property
    def slice_name(self) -> str:
        num_images = sum(media.kind is MediaKind.IMAGE for media in self.media)
        if len(self.media) > num_images:
            return "image+audio" if num_images else "audio"
        return ("text", "image")[num_images] if num_images < 2 else "images"

    @property
    def expects_refusal(self) -> bool:
        return any(declines(answer) for answer in self.expected)


@dataclass(frozen=True, slots=True)
class GoldenSet:
    name: str
    items: tuple[Item, ...]
    vocabulary: Vocabulary

    def clusters(self) -> dict[str, str]:
        """Item id -> its cluster: items of a slice that share a medium, directly or by way of others, or that are all text and equal."""
        parent: dict[str, str] = {}

        def root(name: str) -> str:
            while (above := parent.setdefault(name, name)) != name:
                parent[name] = parent[above]
                name = parent[name]
            return name

        for item in self.items:
            for key in _shared_keys(item):
                parent[root(key)] = root(item.id)
        return {item.id: root(item.id) for item in self.items}

    def only(self, slices: Collection[str]) -> GoldenSet:
        return GoldenSet(self.name, tuple(item for item in self.items if item.slice_name in slices), self.vocabulary)

    def thinned(self, per_slice: int) -> GoldenSet:
        """At most so many items of each slice, evenly spread over it in its order."""
        kept: set[str] = set()
        for name in SLICES:
            ids = [item.id for item in self.items if item.slice_name == name]
            count = min(per_slice, len(ids))
            kept |= {ids[i * len(ids) // count] for i in range(count)}
        return GoldenSet(self.name, tuple(item for item in self.items if item.id in kept), self.vocabulary)


def load_golden_set(directory: Path) -> GoldenSet:
    """Raises BadGoldenSet."""
    vocabulary = _load_vocabulary(directory / VOCABULARY)
    path = directory / ITEMS
    items: dict[str, Item] = {}
    for value, where in read_lines(path):
        record = Record(value, where)
        item = _item(record, directory, vocabulary)
        if item.id in items:
            raise record.error("id", f"{item.id!r} stands in an earlier line, too")
        items[item.id] = item
    if not items:
        raise BadGoldenSet(f"{path} has no items")
    return GoldenSet(directory.resolve().name, tuple(items.values()), vocabulary)


def _shared_keys(item: Item) -> Iterator[str]:
    if not item.media:
        yield f"text\n{item.text}"
    for media in item.media:
        yield f"{item.slice_name}\n{media.path}"


# --- parsing -----------------------------------------------------------------------------------------------------------------


class Record:
    """One JSON object, whose fields are taken one by one; what is left at the end is unknown."""

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise BadGoldenSet(f"{where}: must be an object")
        self._fields: dict[str, Any] = value

    def error(self, field: str, problem: str) -> BadGoldenSet:
        return BadGoldenSet(f"{self.where}: {field}: {problem}")

    def has(self, field: str) -> bool:
        return field in self._fields

    def take(self, field: str) -> Any:
        if field not in self._fields:
            raise self.error(field, "is missing")
        return self._fields.pop(field)

    def text(self, field: str) -> str:
        value = self.take(field)
        if not isinstance(value, str) or not value.strip():
            raise self.error(field, "must be a text that isn't empty")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """One text or several; none if the field isn't there."""
        value = self._fields.pop(field, [])
        several = [value] if isinstance(value, str) else value
        if not isinstance(several, list) or not all(isinstance(text, str) and text.strip() for text in several):
            raise self.error(field, "must be a text or a list of texts, none of them empty")
        return tuple(several)

    def flag(self, field: str) -> bool:
        value = self._fields.pop(field, False)
        if not isinstance(value, bool):
            raise self.error(field, "must be true or false")
        return value

    def done(self) -> None:
        if self._fields:
            raise self.error(next(iter(self._fields)), "is not a field of an item")


def read_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """Each line's JSON value, and where it stands as FILE:LINE.  Raises BadGoldenSet."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield _parsed(line, where), where


def _item(record: Record, directory: Path, vocabulary: Vocabulary) -> Item:
    name = record.text("id")
    parts = _parts(record, directory)
    kind = _kind(record)
    expected, choices = record.texts("expected"), record.texts("choices")
    objects = _objects(record, vocabulary) if record.has("objects") else None
    item = Item(
        id=name, parts=parts, category=record.text("category"), kind=kind, expected=expected, choices=choices, objects=objects,
        asks_for_all=record.flag("asks_for_all"), asks_about=_asks_about(record, vocabulary), if_swapped=record.texts("if_swapped"),
    )  # fmt: skip
    record.done()
    _check(record, item, vocabulary)
    return item


def _check(record: Record, item: Item, vocabulary: Vocabulary) -> None:
    if item.kind is not AnswerKind.OPEN and not item.expected:
        raise record.error("expected", "is missing; only an open item may do without")
    answers = [("expected", answer) for answer in item.expected] + [("if_swapped", answer) for answer in item.if_swapped]
    if item.kind is AnswerKind.YES_NO:
        allowed = {"yes", "no"}
    elif item.kind is AnswerKind.CHOICE:
        allowed = set(item.choices)
        if len({normal_form(choice, vocabulary) for choice in item.choices} - {()}) < max(2, len(item.choices)):
            raise record.error("choices", "must be two or more that differ in normal form")
    else:
        allowed = {answer for _, answer in answers}
    for field, answer in answers:
        if answer not in allowed:
            raise record.error(field, f"{answer!r} is not one of {', '.join(sorted(allowed))}")
    if item.choices and item.kind is not AnswerKind.CHOICE:
        raise record.error("choices", "is for kind choice only")
    if item.asks_for_all and not item.objects:
        raise record.error("asks_for_all", "needs objects")
    if item.asks_about is not None and (item.kind is not AnswerKind.YES_NO or item.objects is None):
        raise record.error("asks_about", "is for kind yes_no with objects")
    if item.if_swapped and (item.slice_name != "images" or len(item.media) != 2 or item.kind is AnswerKind.OPEN):
        raise record.error("if_swapped", "is for closed items about two pictures")


def _parts(record: Record, directory: Path) -> tuple[Part, ...]:
    values = record.take("parts")
    if not isinstance(values, list) or not values:
        raise record.error("parts", "must be a list of texts and media")
    return tuple(_part(record, f"parts[{index}]", value, directory) for index, value in enumerate(values))


def _part(record: Record, field: str, value: object, directory: Path) -> Part:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in _MEDIA_NAMES:
        raise record.error(field, 'must be a text, {"image": FILE} or {"audio": FILE}')
    [(kind, name)] = value.items()
    types = MEDIA_TYPES[MediaKind(kind)]
    if not isinstance(name, str) or Path(name).suffix.lower() not in types:
        raise record.error(field, f"must name a file that ends in {', '.join(types)}")
    path = directory / name
    if not path.is_file():
        raise record.error(field, f"there is no file {path}")
    return Media(MediaKind(kind), path)


def _kind(record: Record) -> AnswerKind:
    value = record.text("kind")
    if value not in list(AnswerKind):
        raise record.error("kind", f"{value!r} is not one of {', '.join(AnswerKind)}")
    return AnswerKind(value)


def _objects(record: Record, vocabulary: Vocabulary) -> frozenset[str]:
    found = set()
    for term in record.texts("objects"):
        word = object_of(term, vocabulary)
        if word is None:
            raise record.error("objects", f"{term!r} is not in {VOCABULARY}")
        found.add(word)
    return frozenset(found)


def _asks_about(record: Record, vocabulary: Vocabulary) -> str | None:
    if not record.has("asks_about"):
        return None
    term = record.text("asks_about")
    word = object_of(term, vocabulary)
    if word is None:
        raise record.error("asks_about", f"{term!r} is not in {VOCABULARY}")
    return word


def _load_vocabulary(path: Path) -> Vocabulary:
    if not path.exists():
        return Vocabulary({})
    try:
        return Vocabulary.read(path)
    except ConfigError as error:
        raise BadGoldenSet(error.message) from None


def read_text(path: Path) -> str:
    """Raises BadGoldenSet."""
    try:
        return path.read_text()
    except OSError as error:
        raise BadGoldenSet(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadGoldenSet(f"{path} is not UTF-8: {error.reason}") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadGoldenSet(f"{where}: not JSON: {error}") from None
