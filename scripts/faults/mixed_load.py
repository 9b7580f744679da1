"""Requests of every kind there is: text, pictures and clips in any mix, greedy and sampled, one choice and two, streamed and whole.

A request is a function of its seed, so that an undisturbed server can be asked the very same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmserve.bench.content import random_clip, random_picture
from scripts.loopback import audio_part, image_part, text_part, user

KINDS = ("text", "picture", "two pictures", "clip", "picture and clip")
MODELS = ("small", "large")
PICTURE_SIZE = (336, 336)
CLIP_S = 1.5
MAX_TOKENS = 64
MIN_TOKENS = 48  # so that nearly every stream still runs when something is killed
STYLES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "n=2": {"temperature": 0.8, "n": 2},
    "stops": {"temperature": 0, "stop": [" the ", "."], "min_tokens": MIN_TOKENS // 2},
    "whole": {"temperature": 0.7, "stream": False},
}
_WORDS = ("Tell me a story about a cat.", "What is this?", "Describe what you see and hear.", "How many are there?", "Who are you?")


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    kind: str
    model: str
    body: dict[str, Any]

    @property
    def has_picture(self) -> bool:
        return "picture" in self.kind

    @property
    def has_clip(self) -> bool:
        return "clip" in self.kind


def mixed_requests(count: int, seed: int, picture_size: tuple[int, int] = PICTURE_SIZE, kinds: Sequence[str] = KINDS) -> list[Request]:
    """No two alike.  Kinds and models take turns; how tokens are drawn is shuffled among them."""
    rng = random.Random(seed)
    styles = [*STYLES] * (count // len(STYLES) + 1)
    rng.shuffle(styles)
    pairs = itertools.cycle(itertools.product(kinds, MODELS))
    first = rng.randrange(len(kinds) * len(MODELS))
    return [
        _request(i, kind, model, style, rng.getrandbits(32), picture_size)
        for i, ((kind, model), style) in enumerate(zip(itertools.islice(pairs, first, first + count), styles, strict=False))
    ]


def _request(index: int, kind: str, model: str, style: str, seed: int, picture_size: tuple[int, int]) -> Request:
    drawn = np.random.default_rng(seed)
    num_pictures = {"picture": 1, "two pictures": 2, "picture and clip": 1}.get(kind, 0)
    parts = [image_part(random_picture(drawn, picture_size), "image/jpeg") for _ in range(num_pictures)]
    if "clip" in kind:
        parts.append(audio_part(random_clip(drawn, CLIP_S)))
    parts.append(text_part(f"{_WORDS[seed % len(_WORDS)]} ({seed})"))
    settings = {"stream": True, "min_tokens": MIN_TOKENS, "max_tokens": MAX_TOKENS, "seed": seed, **STYLES[style]}
    if settings["stream"]:
        settings["stream_options"] = {"include_usage": True}
    return Request(f"{index} {model} {kind} {style}", kind, model, {"model": model, "messages": user(*parts), **settings})
