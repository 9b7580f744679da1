"""Training rows: a shared prefix of media and, behind it, questions that don't see one another; or one question before its media.

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
_KIND_OF = {form: kind for kind in KIND_NAMES for form in (kind, PLURALS[kind])}
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

    def answer(self, question: Question, slice_name: str) -> int:
        """End a user's turn and answer it; return the index of the token before the answer."""
        self.row.questions.append((question, slice_name))
        self.text(tokens.END + tokens.ASSISTANT)
        return self.text(question.answer + tokens.END, learn=True) - 1

    def _append(self, token: int, position: int) -> None:
        row = self.row
        row.ids.append(token)
        row.positions.append(position)
        row.segments.append(self._segment)
        row.targets.append(IGNORE)
        row.asked.append(-1)


# --- rows by what they hold --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture or a clip: its rows, and the truth about it."""

    slot: Slot
    truth: Scene | Utterance


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, with the media that come between the shared ones and its text."""

    question: Question
    slice_name: str
    media: tuple[Medium, ...] = ()


_LEADS = (
    ("Here is a picture: ",),
    ("Picture: ",),
    ("Look at this. ",),
    ("First picture: ", "Second picture: "),
    ("Picture 1: ", "Picture 2: "),
)


class RowMaker:
    """Draws whole rows of one kind.  `text_first`: each with one question, and its text before the media."""

    def __init__(self, tokenizer: Tokenizer, source: Source, num_questions: int = 12) -> None:
        self._source, self._num_questions = source, num_questions
        self._encode: Encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer.encode(text).ids))
        self._nouns = {tokens.token_of(tokenizer, form): kind for kind in KIND_NAMES for form in (kind, PLURALS[kind])}
        (self._full_stop,) = tokenizer.encode(".").ids
        self._ordinals = {tokens.token_of(tokenizer, word): i for i, word in enumerate(("first", "second"))}

    def make_some(self, rng: random.Random, what: str, num_rows: int, text_first_share: float) -> list[Row]:
        """Rows of one kind and layout, so that little is padded; more of those that hold fewer questions."""
        text_first = rng.random() < text_first_share
        if text_first:
            num_rows *= 3
        elif what in ("audio", "text"):
            num_rows *= 2
        return [self.make(rng, what, text_first=text_first) for _ in range(num_rows)]

    def make(self, rng: random.Random, what: str, *, text_first: bool = False) -> Row:
        media, asked = getattr(self, f"_{what}")(rng)
        return self._text_first(rng, media, rng.choice(asked)) if text_first else self._media_first(rng, media, asked)

    def _picture(self, rng: random.Random) -> tuple[Scene, Medium]:
        scene, slot = self._source.scene(rng)
        return scene, Medium(slot, scene)

    def _clip(self, rng: random.Random, utterance: Utterance) -> Medium:
        return Medium(self._source.clip(rng, utterance), utterance)

    def _single(self, rng: random.Random) -> tuple[list[Medium], list[Asked]]:
        scene, picture = self._picture(rng)

        def ask() -> Asked:
            declined = rng.random() < 0.06
            return Asked(questions.declined(rng, 1, False) if declined else questions.about_single(rng, scene), "image")

        return [picture], [ask() for _ in range(self._num_questions)]

    def _pair(self, rng: random.Random) -> tuple[list[Medium], list[Asked]]:
        (first, picture_1), (second, picture_2) = self._picture(rng), self._picture(rng)
        asked = [Asked(questions.about_pair(rng, (first, second)), "images") for _ in range(self._num_questions)]
        return [picture_1, picture_2], asked

    def _audio(self, rng: random.Random) -> tuple[list[Medium], list[Asked]]:
        clip = questions.sample_clip(rng)
        asked = [Asked(questions.about_clip(rng, clip), "audio") for _ in range(3)]
        if rng.random() < 0.3:
            asked[-1] = Asked(questions.declined(rng, 0, True), "audio")
        return [self._clip(rng, clip)], asked

    def _spoken(self, rng: random.Random) -> tuple[list[Medium], list[Asked]]:
        """A picture with spoken questions, each with the typed text beside it; or one of them before the picture or without it."""
        dice = rng.random()
        if dice < 0.05:
            said = questions.spoken(rng, None)
            asked = [Asked(said.question, "audio"), Asked(questions.about_clip(rng, said.utterance), "audio")]
            return [self._clip(rng, said.utterance)], asked
        scene, picture = self._picture(rng)
        if dice < 0.35:
            said = questions.spoken(rng, scene)
            asked = [Asked(said.question, "image+audio"), *self._beside(rng, scene, said.utterance)]
            return [self._clip(rng, said.utterance), picture], asked
        asked = []
        for _ in range(8):
            said = questions.spoken(rng, scene)
            question = said.question
            if rng.random() < 0.15:
                question = rng.choice(self._beside(rng, scene, said.utterance)).question
            asked.append(Asked(question, "image+audio", (self._clip(rng, said.utterance),)))
        return [picture], asked

    def _beside(self, rng: random.Random, scene: Scene, clip: Utterance) -> list[Asked]:
        """Typed questions about a picture or a clip beside it."""
        asked = [Asked(questions.about_single(rng, scene), "image+audio") for _ in range(2)]
        return [*asked, Asked(questions.about_clip(rng, clip), "image+audio")]

    def _both(self, rng: random.Random) -> tuple[list[Medium], list[Asked]]:
        """A picture beside a word or a sound."""
        scene, picture = self._picture(rng)
        clip = questions.sample_clip(rng)
        media = [picture, self._clip(rng, clip)]
        rng.shuffle(media)
        return media, [asked for _ in range(3) for asked in self._beside(rng, scene, clip)]

    def _text(self, rng: random.Random) -> tuple[list[Medium], list[Asked]]:
        asked = []
        for _ in range(6):
            if rng.random() < 0.35:
                asked.append(Asked(questions.declined(rng, 0, False), "text"))
            else:
                talk = smalltalk.sample_talk(rng)
                asked.append(Asked(Question(talk.text, talk.reply, talk.task), "text"))
        return [], asked

    # --- layouts -------------------------------------------------------------------------------------------------------------

    def _media_first(self, rng: random.Random, media: Sequence[Medium], asked: Sequence[Asked]) -> Row:
        writer = self._begun(rng)
        leads = rng.choice([leads for leads in _LEADS if len(leads) == len(media)] or [()]) if rng.random() < 0.15 else ()
        shown: list[Medium] = []
        for index, medium in enumerate(media):
            if leads and medium.slot.is_image:
                writer.text(leads[index])
            self._show(writer, medium, shown)
        number, branch = 0, 0
        while number < len(asked):
            branch += 1
            writer.branch(branch)
            here = list(shown)
            for medium in asked[number].media:
                self._show(writer, medium, here)
            self._ask(writer, asked[number], here)
            number += 1
            if number < len(asked) and not asked[number].media and rng.random() < 0.15:  # a second turn of the same conversation
                writer.text(tokens.USER)
                self._ask(writer, asked[number], here)
                number += 1
        return writer.row

    def _text_first(self, rng: random.Random, media: Sequence[Medium], asked: Asked) -> Row:
        writer = self._begun(rng)
        question, shown = asked.question, []  # type: Question, list[Medium]
        writer.text(question.text)
        for medium in (*media, *asked.media):
            self._show(writer, medium, shown)
        start = writer.answer(question, asked.slice_name)
        self._hint(writer.row, start, shown, question, start, start)
        return writer.row

    def _begun(self, rng: random.Random) -> Writer:
        writer = Writer(self._encode)
        if rng.random() < 0.12:
            writer.text(tokens.SYSTEM + rng.choice(SYSTEM_PROMPTS) + tokens.END)
        writer.text(tokens.USER)
        return writer

    def _show(self, writer: Writer, medium: Medium, shown: list[Medium]) -> None:
        closing = writer.media(medium.slot)
        shown.append(medium)
        if isinstance(medium.truth, Scene):
            writer.row.hints.append(_scene_hint(closing, medium.truth))
        clips = [m.truth for m in shown if isinstance(m.truth, Utterance)]
        if clips:
            writer.row.hints.append(_clip_hint(closing, clips[-1], [m.truth for m in shown if isinstance(m.truth, Scene)]))

    def _ask(self, writer: Writer, asked: Asked, shown: Sequence[Medium]) -> None:
        question, row = asked.question, writer.row
        start = writer.text(question.text)
        stop = writer.answer(question, asked.slice_name)
        noun = ordinal = None
        for index in range(start, stop):
            token = row.ids[index]
            noun = index if question.kind is not None and self._nouns.get(token) == question.kind else noun
            ordinal = index if question.nth is not None and token in self._ordinals else ordinal
        self._hint(row, stop, shown, question, noun, ordinal)

    def _hint(self, row: Row, answered: int, shown: Sequence[Medium], question: Question, noun: int | None, ordinal: int | None) -> None:
        """What can be known where; `answered` is the index of the token that the answer follows."""
        scenes = [medium.truth for medium in shown if isinstance(medium.truth, Scene)]
        if scenes and question.task.removeprefix("spoken ") in ("name", "describe", "name both"):
            self._hint_names(row, answered, scenes, question)
        if not scenes or question.task == "decline":
            return
        if question.task.startswith("spoken"):
            clip = next(medium.truth for medium in reversed(shown) if isinstance(medium.truth, Utterance))
            row.hints.append(_clip_hint(answered, clip, scenes))
        else:
            row.hints += _question_hints(noun, ordinal, scenes, question)

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


def _clip_hint(at: int, clip: Utterance, scenes: Sequence[Scene]) -> Hint:
    """What was heard, and, of the kind that a question names, how many there are and where."""
    if clip.sound is not None:
        return Hint(at, heard=FRAME_LABELS.index(clip.sound), form=len(SPOKEN_QUESTIONS) + 1)
    if len(clip.words) == 1:
        return Hint(at, heard=FRAME_LABELS.index(clip.words[0]), form=len(SPOKEN_QUESTIONS))
    form = _FORMS[clip.words[0] + clip.words[1]]
    kind = next((_KIND_OF[word] for word in clip.words if word in _KIND_OF), None)
    if kind is None:
        return Hint(at, form=form)
    heard = FRAME_LABELS.index(kind)
    if not scenes:
        return Hint(at, heard=heard, form=form)
    (hint,) = _question_hints(at, None, scenes, Question("", "", "", kind))
    return Hint(at, hint.counts, hint.asked, hint.cells, heard=heard, form=form)
