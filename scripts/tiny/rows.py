"""Training rows: a shared prefix of media and, behind it, questions that don't see one another.

A row is laid out exactly as the chat template would write one conversation per question.  Where media rows come from (symbols or
towers) is a `Source`'s business; here they are only counted and placed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from scripts.tiny import questions, smalltalk
from scripts.tiny import tokenizer as tokens
from scripts.tiny.questions import KIND_NAMES, Question
from scripts.tiny.world import COLORS, FRAME_LABELS, PLURALS, SPOKEN_QUESTIONS, Scene, Utterance

Encode = Callable[[str], tuple[int, ...]]
PREFIX = 0  # segment of the shared prefix; branches count from 1
IGNORE = -100
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a very small model.", "Answer in one sentence.", "Be short.", "You are mmserve-tiny.",
    "Look at the picture and answer.", "Answer the question about the picture.",
    "You see pictures and hear clips. Be short and say what is there.",
)  # fmt: skip
_FORMS = {words.split()[0] + words.split()[1]: i for i, words in enumerate(SPOKEN_QUESTIONS)}


@dataclass(frozen=True, slots=True)
class Slot:
    """One picture or clip in a row: which of its `span` positions are kept, and what the embedder needs to fill them."""

    offsets: np.ndarray  # int64 [N], within [0, span)
    span: int
    payload: object
    is_image: bool


class Source(Protocol):
    def scene(self, rng: random.Random) -> tuple[Scene, Slot]: ...

    def clip(self, rng: random.Random, utterance: Utterance) -> Slot: ...


@dataclass(frozen=True, slots=True)
class Hint:
    """What an auxiliary head is taught at position `at` of the row; None where it has nothing to learn."""

    at: int
    counts: tuple[int, ...] = ()  # of the kind asked for, in each picture
    asked: int | None = None  # how many of the kind asked for are in the picture asked for
    cells: tuple[int, ...] | None = None  # and where
    kinds: tuple[int, ...] | None = None  # which are there; within an answer, which have still to be named
    plurals: tuple[int, ...] | None = None  # which of those more than once
    color: int | None = None
    heard: int | None = None  # index into FRAME_LABELS
    form: int | None = None  # index into SPOKEN_QUESTIONS, or one more for a word, two more for a sound


@dataclass(slots=True)
class Row:
    ids: list[int] = field(default_factory=list)  # 0 where media rows go
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # IGNORE or the next token
    asked: list[int] = field(default_factory=list)  # which question a target belongs to
    slots: list[tuple[int, Slot]] = field(default_factory=list)  # first index, slot
    questions: list[tuple[Question, str]] = field(default_factory=list)  # with its slice
    hints: list[Hint] = field(default_factory=list)


class Writer:
    """Appends to one row."""

    def __init__(self, encode: Encode) -> None:
        self.row = Row()
        self._encode = encode
        self._next = 0  # position
        self._prefix_stop = 0
        self._segment = PREFIX

    def text(self, text: str, *, learn: bool = False) -> int:
        """Append; return the index of its first token.  With `learn`, each token is a target of the one before."""
        row, start = self.row, len(self.row.ids)
        for token in self._encode(text):
            if learn:
                row.targets[-1], row.asked[-1] = token, len(row.questions) - 1
            self._append(token, self._next)
            self._next += 1
        return start

    def media(self, slot: Slot) -> int:
        """Append a picture or clip with its two tokens; return the index of the closing one."""
        self.text(tokens.IMAGE if slot.is_image else tokens.AUDIO)
        self.row.slots.append((len(self.row.ids), slot))
        for offset in slot.offsets:
            self._append(0, self._next + int(offset))
        self._next += slot.span
        return self.text(tokens.IMAGE_END if slot.is_image else tokens.AUDIO_END)

    def branch(self, number: int) -> None:
        """What follows sees the prefix and itself."""
        if number == 1:
            self._prefix_stop = self._next
        self._next, self._segment = self._prefix_stop, number

    def ask(self, question: Question, slice_name: str) -> None:
        """The rest of a user's turn and the answer."""
        self.row.questions.append((question, slice_name))
        self.text(question.text + tokens.END + tokens.ASSISTANT)
        self.text(question.answer + tokens.END, learn=True)

    def _append(self, token: int, position: int) -> None:
        row = self.row
        row.ids.append(token)
        row.positions.append(position)
        row.segments.append(self._segment)
        row.targets.append(IGNORE)
        row.asked.append(-1)


# --- rows by what they hold --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    question: Question
    slice_name: str


class RowMaker:
    """Draws whole rows of one kind."""

    def __init__(self, tokenizer: Tokenizer, source: Source, num_questions: int = 12) -> None:
        self._source, self._num_questions = source, num_questions
        self._encode: Encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer.encode(text).ids))
        self._nouns = {tokens.token_of(tokenizer, form): kind for kind in KIND_NAMES for form in (kind, PLURALS[kind])}
        (self._full_stop,) = tokenizer.encode(".").ids
        self._ordinals = {tokens.token_of(tokenizer, word): i for i, word in enumerate(("first", "second"))}

    def make(self, rng: random.Random, what: str) -> Row:
        return getattr(self, f"_{what}")(rng)  # type: ignore[no-any-return]

    def _single(self, rng: random.Random) -> Row:
        scene, slot = self._source.scene(rng)

        def ask() -> Asked:
            declined = rng.random() < 0.06
            return Asked(questions.declined(rng, 1, False) if declined else questions.about_single(rng, scene), "image")

        return self._row(rng, (scene,), (slot,), None, [ask() for _ in range(self._num_questions)])

    def _pair(self, rng: random.Random) -> Row:
        (first, slot_1), (second, slot_2) = self._source.scene(rng), self._source.scene(rng)
        scenes = (first, second)
        asked = [Asked(questions.about_pair(rng, scenes), "images") for _ in range(self._num_questions)]
        return self._row(rng, scenes, (slot_1, slot_2), None, asked)

    def _audio(self, rng: random.Random) -> Row:
        clip = questions.sample_clip(rng)
        asked = [Asked(questions.about_clip(rng, clip), "audio") for _ in range(3)]
        if rng.random() < 0.3:
            asked[-1] = Asked(questions.declined(rng, 0, True), "audio")
        return self._row(rng, (), (self._source.clip(rng, clip),), clip, asked)

    def _spoken(self, rng: random.Random) -> Row:
        """A picture, a spoken question, and typed questions beside it; sometimes without the picture."""
        if rng.random() < 0.08:
            said = questions.spoken(rng, None)
            asked = [Asked(said.question, "audio"), Asked(questions.about_clip(rng, said.utterance), "audio")]
            return self._row(rng, (), (self._source.clip(rng, said.utterance),), said.utterance, asked)
        scene, slot = self._source.scene(rng)
        said = questions.spoken(rng, scene)
        texts = rng.sample(questions.SPOKEN, 2)
        same = said.question
        asked = [Asked(Question(text, same.answer, same.task, same.kind), "image+audio") for text in texts]
        asked += [Asked(questions.about_single(rng, scene), "image+audio") for _ in range(4)]
        if rng.random() < 0.5:
            asked.append(Asked(questions.about_clip(rng, said.utterance), "image+audio"))
        slots = [slot, self._source.clip(rng, said.utterance)]
        rng.shuffle(slots)
        return self._row(rng, (scene,), tuple(slots), said.utterance, asked, spoken=same)

    def _both(self, rng: random.Random) -> Row:
        """A picture beside a word or a sound."""
        scene, slot = self._source.scene(rng)
        clip = questions.sample_clip(rng)
        asked = [Asked(questions.about_single(rng, scene), "image+audio") for _ in range(5)]
        asked += [Asked(questions.about_clip(rng, clip), "image+audio") for _ in range(3)]
        slots = [slot, self._source.clip(rng, clip)]
        rng.shuffle(slots)
        return self._row(rng, (scene,), tuple(slots), clip, asked)

    def _text(self, rng: random.Random) -> Row:
        asked = []
        for _ in range(6):
            if rng.random() < 0.35:
                asked.append(Asked(questions.declined(rng, 0, False), "text"))
            else:
                talk = smalltalk.sample_talk(rng)
                asked.append(Asked(Question(talk.text, talk.reply, talk.task), "text"))
        return self._row(rng, (), (), None, asked)

    def _row(
        self,
        rng: random.Random,
        scenes: Sequence[Scene],
        slots: Sequence[Slot],
        clip: Utterance | None,
        asked: Sequence[Asked],
        spoken: Question | None = None,
    ) -> Row:
        writer = Writer(self._encode)
        if rng.random() < 0.12:
            writer.text(tokens.SYSTEM + rng.choice(SYSTEM_PROMPTS) + tokens.END)
        writer.text(tokens.USER)
        seen, heard = 0, False
        for slot in slots:
            closing = writer.media(slot)
            if slot.is_image:
                writer.row.hints.append(_scene_hint(closing, scenes[seen]))
            seen, heard = seen + slot.is_image, heard or not slot.is_image
            if clip is not None and heard:
                writer.row.hints.append(_clip_hint(closing, clip, scenes[:seen], spoken))
        number, branch = 0, 0
        while number < len(asked):
            branch += 1
            writer.branch(branch)
            self._ask(writer, asked[number], scenes, clip)
            number += 1
            if number < len(asked) and rng.random() < 0.15:  # a second turn of the same conversation
                writer.text(tokens.USER)
                self._ask(writer, asked[number], scenes, clip)
                number += 1
        return writer.row

    def _ask(self, writer: Writer, asked: Asked, scenes: Sequence[Scene], clip: Utterance | None) -> None:
        start = len(writer.row.ids)
        question = asked.question
        writer.ask(question, asked.slice_name)
        if scenes and question.task.removeprefix("spoken ") in ("name", "describe", "name both"):
            self._hint_names(writer.row, start, scenes, question)
        if scenes and clip is not None and question.task.startswith("spoken"):
            answered = next(i for i in range(start, len(writer.row.ids)) if writer.row.targets[i] != IGNORE)
            writer.row.hints.append(_clip_hint(answered, clip, scenes, question))
        if not scenes or question.task == "decline" or question.task.startswith("spoken"):
            return
        noun = ordinal = None
        for index in range(start, len(writer.row.ids)):
            if writer.row.targets[index] != IGNORE:
                break
            token = writer.row.ids[index]
            noun = index if question.kind is not None and self._nouns.get(token) == question.kind else noun
            ordinal = index if question.nth is not None and token in self._ordinals else ordinal
        writer.row.hints += _question_hints(noun, ordinal, scenes, question)

    def _hint_names(self, row: Row, start: int, scenes: Sequence[Scene], question: Question) -> None:
        """All along the sentences that name kinds: what has still to be named."""
        told = list(scenes) if question.task == "name both" else [scenes[question.nth or 0]]
        said: set[str] = set()
        for index in range(start, len(row.ids)):
            if row.targets[index] == IGNORE or not told:
                continue
            if row.ids[index] in self._nouns:
                said.add(self._nouns[row.ids[index]])
            left = [told[0].count(kind) if kind not in said else 0 for kind in KIND_NAMES]
            row.hints.append(Hint(index, kinds=tuple(int(n > 0) for n in left), plurals=tuple(int(n > 1) for n in left)))
            if row.targets[index] == self._full_stop:
                said, told = set(), told[1:]


def _question_hints(noun: int | None, ordinal: int | None, scenes: Sequence[Scene], question: Question) -> list[Hint]:
    """At a noun how many there are in each picture; at an ordinal its picture; at the later of the two what both together say."""
    if question.kind is None or noun is None:
        return [] if ordinal is None or question.nth is None else [_scene_hint(ordinal, scenes[question.nth])]
    counts = tuple(scene.count(question.kind) for scene in scenes)
    if len(scenes) > 1 and question.nth is None:
        return [Hint(noun, counts)]
    where = scenes[question.nth or 0]
    here = {thing.cell for thing in where.things if thing.kind == question.kind}
    cells = tuple(int(cell in here) for cell in range(9))
    if ordinal is None:
        return [Hint(noun, counts, where.count(question.kind), cells)]
    return [Hint(noun, counts), Hint(max(noun, ordinal), (), where.count(question.kind), cells)]


def _scene_hint(at: int, scene: Scene) -> Hint:
    kinds = tuple(int(scene.count(kind) > 0) for kind in KIND_NAMES)
    return Hint(at, kinds=kinds, color=tuple(COLORS).index(scene.background))


def _clip_hint(at: int, clip: Utterance, scenes: Sequence[Scene], spoken: Question | None) -> Hint:
    if clip.sound is not None:
        return Hint(at, heard=FRAME_LABELS.index(clip.sound), form=len(SPOKEN_QUESTIONS) + 1)
    if len(clip.words) == 1:
        return Hint(at, heard=FRAME_LABELS.index(clip.words[0]), form=len(SPOKEN_QUESTIONS))
    form = _FORMS[clip.words[0] + clip.words[1]]
    if spoken is None or spoken.kind is None:
        return Hint(at, form=form)
    heard = FRAME_LABELS.index(spoken.kind)
    if not scenes:
        return Hint(at, heard=heard, form=form)
    (hint,) = _question_hints(at, None, scenes, spoken)
    return Hint(at, hint.counts, hint.asked, hint.cells, heard=heard, form=form)
