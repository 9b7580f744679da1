"""How well frame labels name what was said, on voices and seeds no training ever drew.

Votes, not frames: a word is heard right if most of its frames say so.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scripts.tiny.clips import make_clip
from scripts.tiny.speak import Clip, every_utterance
from scripts.tiny.world import FRAME_LABELS, KINDS, PLURALS, SPOKEN_QUESTIONS, Utterance

HELD_OUT_SEED = 2**30
_KIND_OF = {plural: kind for kind, plural in PLURALS.items()} | {kind: kind for kind in KINDS}
_FORM_WORDS = [frozenset(word for word in form.split() if "{" not in word) for form in SPOKEN_QUESTIONS]

Example = tuple[Utterance, Clip]


def held_out_clips(per_utterance: int) -> list[Example]:
    """Every utterance `per_utterance` times; the rarer sounds and questions without a noun eight times as often."""
    examples: list[Example] = []
    for utterance in every_utterance():
        rare = utterance.sound is not None or not (len(utterance.words) == 1 or _KIND_OF.keys() & set(utterance.words))
        for _ in range(per_utterance * (8 if rare else 1)):
            rng = random.Random(HELD_OUT_SEED + len(examples))
            examples.append((utterance, make_clip(utterance, rng, held_out=True)))
    return examples


@dataclass(slots=True)
class Score:
    """Right and total by task, and what was mistaken for what."""

    right: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    confusions: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # task, said, heard

    def add(self, task: str, said: str, heard: str) -> None:
        self.total[task] += 1
        self.right[task] += said == heard
        if said != heard:
            self.confusions[task, said, heard] += 1

    def rate(self, task: str) -> float:
        return self.right[task] / self.total[task]

    def meets(self, gate: Mapping[str, float]) -> bool:
        return all(self.rate(task) >= rate for task, rate in gate.items())

    def line(self) -> str:
        return " ".join(f"{task}={self.rate(task):.3f}" for task in self.total)

    def report(self) -> str:
        rows = [f"{task:<10} {self.total[task]:>5} {self.rate(task):.3f}" for task in self.total]
        rows += [f"{count}x {task}: {said} heard as {heard}" for (task, said, heard), count in self.confusions.most_common(40)]
        return "\n".join(rows)


def score(frame_labels: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]], examples: Sequence[Example]) -> Score:
    """Tasks: `word` alone, `sound`, `noun` and `plural` (the exact form) within a question, `form` of the question."""
    result = Score()
    for (utterance, clip), predicted in zip(examples, frame_labels([clip.waveform for _, clip in examples]), strict=True):
        heard = [FRAME_LABELS[label] for label in predicted]
        if utterance.sound is not None:
            result.add("sound", utterance.sound, _vote(heard))
        elif len(utterance.words) == 1:
            result.add("word", utterance.words[0], _vote(heard))
        else:
            result.add("form", SPOKEN_QUESTIONS[_form(utterance.words)], SPOKEN_QUESTIONS[_form(heard)])
            noun = next((word for word in utterance.words if word in _KIND_OF), None)
            if noun is not None:
                within = _vote([h for h, true in zip(heard, clip.labels, strict=True) if FRAME_LABELS[true] == noun])
                result.add("noun", _KIND_OF[noun], _KIND_OF.get(within, within))
                result.add("plural", noun, within)
    return result


def _vote(heard: Sequence[str]) -> str:
    counts = Counter(word for word in heard if word != FRAME_LABELS[0])
    return counts.most_common(1)[0][0] if counts else FRAME_LABELS[0]


def _form(words: Sequence[str]) -> int:
    """Index of the question form that explains most of the words (or frames) that are no nouns."""
    counts = Counter(word for word in words if word not in _KIND_OF and word != FRAME_LABELS[0])
    fits = [sum(n if word in form else -n for word, n in counts.items()) - 0.1 * len(form) for form in _FORM_WORDS]
    return int(np.argmax(fits))
