"""How likely a question is one that the small decoder gets wrong and the large one right: logistic regression over its words.  Pure.

Words and pairs of neighbours are hashed into buckets, so that there is no vocabulary to keep.  It knows the model it was trained on, by
`scripts/train_router.py`, and no other: weights lie beside a model's own, in `router.json`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zlib import crc32

from mmserve.config import ConfigError

FILE = "router.json"
NUM_BUCKETS = 1024
MAX_CHARACTERS = 512  # that are read at each end of a text: a decision is to take well under a millisecond
COUNTS = ("bias", "characters", "images", "clips", "several_images", "images_and_clips")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request before anything is computed."""

    text: str  # of the last message
    num_characters: int  # of all messages
    num_images: int = 0
    num_clips: int = 0


def features(asked: Asked) -> dict[str, float]:
    """Buckets, by their number, and counts by name.  All words together weigh 1, however many they are."""
    text = asked.text if len(asked.text) <= 2 * MAX_CHARACTERS else asked.text[:MAX_CHARACTERS] + " " + asked.text[-MAX_CHARACTERS:]
    words = _WORD.findall(text.lower())
    grams = {*words, *(f"{first} {second}" for first, second in itertools.pairwise(words))}
    found: dict[str, float] = {}
    for gram in grams:
        bucket = str(crc32(gram.encode()) % NUM_BUCKETS)
        found[bucket] = found.get(bucket, 0.0) + 1 / math.sqrt(len(grams))
    values = (
        1.0,
        math.log1p(asked.num_characters) / 5,
        float(min(asked.num_images, 4)),
        float(asked.num_clips),
        float(asked.num_images > 1),
        float(asked.num_images > 0 and asked.num_clips > 0),
    )
    return found | dict(zip(COUNTS, values, strict=True))


@dataclass(frozen=True, slots=True)
class RouteClassifier:
    """What was learnt from one model's answers."""

    weights: Mapping[str, float]
    threshold: float  # gain from which the large decoder is worth its price
    escalate_above: float | None = None  # nats: when a token at the small one's start is less certain than that, the large one answers
    num_judged: int = 0  # tokens at the start that are looked at

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """None if there is no such file.  Raises ConfigError for one that isn't a classifier."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                {str(name): float(weight) for name, weight in data["weights"].items()},
                float(data["threshold"]),
                None if data["escalate_above"] is None else float(data["escalate_above"]),
                int(data["num_judged"]),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file.name} of the model can't be used: {type(error).__name__} {error}") from error

    def gain(self, asked: Asked) -> float:
        """Probability that the small decoder is wrong and the large one right."""
        score = sum(self.weights.get(name, 0.0) * value for name, value in features(asked).items())
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, score))))
