"""Utterance -> clip: speech by espeak-ng in many voices, sounds by numpy, with the truth about every token frame.

The only module that knows espeak-ng (`libespeak-ng.so.1`, loaded on first use; its state is global, so one thread at a time).
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from scripts.tiny.sounds import make_sound
from scripts.tiny.world import (
    FRAME_LABELS,
    KINDS,
    PLURALS,
    SAMPLE_RATE,
    SOUNDS,
    SPOKEN_QUESTIONS,
    SPOKEN_WORDS,
    TOKENS_PER_SECOND,
    Utterance,
)

FRAME_SAMPLES = SAMPLE_RATE // TOKENS_PER_SECOND  # 640
LABEL_OF = {name: index for index, name in enumerate(FRAME_LABELS)}

# Accents with how often each is drawn.  Caribbean English is left out: its "three" is a "tree".
ACCENTS = {
    "en-us": 5,
    "gmw/en": 4,
    "gmw/en-GB-scotland": 2,
    "gmw/en-GB-x-rp": 2,
    "gmw/en-GB-x-gbclan": 1,
    "gmw/en-GB-x-gbcwmd": 1,
    "gmw/en-US-nyc": 1,
}
VARIANTS = (
    "", "m1", "m2", "m3", "m5", "m7", "m8", "f1", "f2", "f4", "f5", "klatt", "klatt2", "klatt4", "Alex", "Alicia", "Andrea", "Andy",
    "Annie", "Gene", "Lee", "Mario", "Michael", "aunty", "belinda", "boris", "david", "grandma", "grandpa", "iven4", "john", "max",
    "norbert", "paul", "quincy", "rob", "sandro", "shelby", "victor",
)  # fmt: skip
# Never heard in training: what the scores are measured on.
HELD_OUT_VARIANTS = ("m4", "m6", "f3", "klatt3", "linda", "robert", "Mike", "zac", "miguel", "adam")


@dataclass(frozen=True, slots=True)
class Span:
    """`label` (an index into FRAME_LABELS) is heard in samples [start, stop)."""

    label: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Clip:
    waveform: np.ndarray  # float32 [n], mono, 16 kHz
    spans: tuple[Span, ...]  # in order, not overlapping; between them is silence

    @property
    def labels(self) -> np.ndarray:
        """int64 [ceil(n / 640)]: what is heard in the middle of each token frame."""
        heard = np.zeros(len(self.waveform), np.int64)
        for span in self.spans:
            heard[span.start : span.stop] = span.label
        middles = np.arange(FRAME_SAMPLES // 2, len(heard) + FRAME_SAMPLES // 2, FRAME_SAMPLES)
        return heard[np.minimum(middles, len(heard) - 1)]


def spoken_questions() -> tuple[tuple[str, ...], ...]:
    """Every question that can be asked aloud, as words."""
    texts = dict.fromkeys(form.format(kind=kind, kinds=PLURALS[kind]) for form in SPOKEN_QUESTIONS for kind in KINDS)
    return tuple(tuple(text.split()) for text in texts)


def every_utterance() -> tuple[Utterance, ...]:
    """All that a clip can hold: single words, questions, sounds."""
    words = [Utterance((word,)) for word in SPOKEN_WORDS]
    questions = [Utterance(question) for question in spoken_questions()]
    return (*words, *questions, *(Utterance(sound=sound) for sound in SOUNDS))


def speak(utterance: Utterance, rng: random.Random, *, held_out: bool = False) -> Clip:
    """The bare utterance: no silence around it, no noise.  `held_out` draws from the voices kept for scoring."""
    if utterance.sound is not None:
        waveform = make_sound(utterance.sound, np.random.default_rng(rng.randrange(2**63)))
        return Clip(waveform, (Span(LABEL_OF[utterance.sound], 0, len(waveform)),))
    accent = rng.choices(tuple(ACCENTS), tuple(ACCENTS.values()))[0]
    variant = rng.choice(HELD_OUT_VARIANTS if held_out else VARIANTS)
    voice = f"{accent}+{variant}" if variant else accent
    text = list(utterance.words)
    # People say "an apple"; the label stays "a".
    for i, following in enumerate(text[1:]):
        if text[i] == "a" and following[0] in "aeiou" and rng.random() < 0.7:
            text[i] = "an"
    raw, starts = _espeak().say(text, voice, rng.randint(120, 190), rng.randint(25, 75), rng.randint(25, 80))
    spans = [Span(LABEL_OF[word], start, stop) for word, start, stop in zip(utterance.words, starts, (*starts[1:], len(raw)), strict=True)]
    return _trim(Clip(raw, tuple(spans)))


def place(clip: Clip, before_s: float, after_s: float) -> Clip:
    """With silence around it."""
    before, after = int(before_s * SAMPLE_RATE), int(after_s * SAMPLE_RATE)
    spans = tuple(Span(span.label, span.start + before, span.stop + before) for span in clip.spans)
    return Clip(np.pad(clip.waveform, (before, after)), spans)


def join(clips: Sequence[Clip]) -> Clip:
    """One after the other."""
    spans, offset = [], 0
    for clip in clips:
        spans += [Span(span.label, span.start + offset, span.stop + offset) for span in clip.spans]
        offset += len(clip.waveform)
    return Clip(np.concatenate([clip.waveform for clip in clips]), tuple(spans))


def save_wav(path: Path, waveform: np.ndarray) -> None:
    """16-bit PCM, mono, 16 kHz; what exceeds [-1, 1] is clipped."""
    soundfile.write(path, np.clip(waveform, -1, 1), SAMPLE_RATE, subtype="PCM_16")


def _trim(clip: Clip) -> Clip:
    """Cut what is 45 dB or more below the peak at both ends."""
    loud = np.flatnonzero(np.abs(clip.waveform) > np.abs(clip.waveform).max() * 10 ** (-45 / 20))
    start, stop = int(loud[0]), int(loud[-1]) + 1
    spans = (Span(s.label, max(s.start, start) - start, min(s.stop, stop) - start) for s in clip.spans)
    return Clip(clip.waveform[start:stop], tuple(span for span in spans if span.start < span.stop))


class _Event(ctypes.Structure):
    """espeak_EVENT of espeak-ng/speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),  # characters, from 1
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),  # milliseconds
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


class _Espeak:
    _SYNCHRONOUS, _CHARS_UTF8, _END_OF_LIST, _WORD = 2, 1, 0, 1
    _RATE, _PITCH, _RANGE = 1, 3, 4

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libespeak-ng.so.1")
        self._rate_hz = self._lib.espeak_Initialize(self._SYNCHRONOUS, 0, None, 0)
        if self._rate_hz <= 0:
            raise RuntimeError("espeak-ng does not start: is espeak-ng-data installed?")
        self._waves: list[np.ndarray] = []
        self._words: list[tuple[int, int]] = []  # text position, sample
        signature = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
        self._callback = signature(self._receive)  # espeak keeps only the address
        self._lib.espeak_SetSynthCallback(self._callback)

    def say(self, words: Sequence[str], voice: str, words_per_minute: int, pitch: int, pitch_range: int) -> tuple[np.ndarray, list[int]]:
        """Waveform at 16 kHz, and the sample at which each word starts."""
        self._waves.clear()
        self._words.clear()
        if self._lib.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice {voice!r}")
        for parameter, value in ((self._RATE, words_per_minute), (self._PITCH, pitch), (self._RANGE, pitch_range)):
            self._lib.espeak_SetParameter(parameter, value, 0)
        text = " ".join(words).encode() + b"\0"
        self._lib.espeak_Synth(text, len(text), 0, 1, 0, self._CHARS_UTF8, None, None)
        raw = np.concatenate(self._waves).astype(np.float32) / 32768
        starts = _word_starts(words, self._words, len(raw))
        scale = SAMPLE_RATE / self._rate_hz
        return soxr.resample(raw, self._rate_hz, SAMPLE_RATE), [int(start * scale) for start in starts]

    def _receive(self, wave: Any, num_samples: int, events: Any) -> int:
        if num_samples > 0:
            self._waves.append(np.ctypeslib.as_array(wave, (num_samples,)).copy())
        i = 0
        while events[i].type != self._END_OF_LIST:
            if events[i].type == self._WORD and events[i].length > 0:
                self._words.append((events[i].text_position - 1, events[i].sample))
            i += 1
        return 0


@functools.cache
def _espeak() -> _Espeak:
    return _Espeak()


def _word_starts(words: Sequence[str], events: Sequence[tuple[int, int]], num_samples: int) -> list[int]:
    """Samples.  espeak speaks some pairs ("in the") as one word: their time is shared out by letters."""
    sample_of = dict(events)
    starts: list[int] = []
    position = 0
    run: list[str] = []  # words since the last event
    anchor = 0
    for word in (*words, None):
        sample = num_samples if word is None else sample_of.get(position)
        if sample is not None:
            letters = np.cumsum([0, *(len(w) for w in run)])
            starts += [int(anchor + (sample - anchor) * part / letters[-1]) for part in letters[:-1]]
            run, anchor = [], sample
        if word is not None:
            run.append(word)
            position += len(word) + 1
    return starts
