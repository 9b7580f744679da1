"""Requests that fill whatever remembers the last so many requests, media or blocks, so that what grows afterwards grows for good."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mmserve.bench.content import random_clip
from scripts.faults.strict_client import StrictClient
from scripts.loopback import audio_part, text_part, user

NUM_REQUESTS = 2**13 + 2**8  # a little more than any of these tables holds
NUM_AT_ONCE = 4
CLIP_S = 0.1


async def fill(client: StrictClient, seed: int) -> None:
    """Ask for one token about each of NUM_REQUESTS new clips.  Raises RuntimeError at the first that isn't answered."""
    questions = itertools.islice(_questions(seed), NUM_REQUESTS)

    async def ask() -> None:
        for body in questions:
            answer = await client.ask(body)
            if answer.status != 200:
                raise RuntimeError(f"nothing is broken yet, and a request was refused: {answer.status} {answer.code}")

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(ask())


def _questions(seed: int) -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        drawn = np.random.default_rng([seed, number])
        clip = audio_part(random_clip(drawn, CLIP_S))
        yield {"model": ("small", "large")[number % 2], "messages": user(clip, text_part(f"{number}?")), "max_tokens": 1}
