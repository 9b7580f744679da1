"""Ways to kill workers under a load, and the moments at which it hurts.  Knows nothing of what must hold afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from scripts.faults.family import DECODE_PROCESS, DECODERS, ENCODERS, worker
from scripts.faults.mixed_load import MODELS, PICTURE_SIZE, Request

UNDER_WAY = 4  # pieces that a stream has brought when it counts as running
LARGE_PICTURE = (2000, 1500)  # takes a decode process long enough to be hit at it


class Progress:
    """Pieces that each request has brought so far, and a way to wait for some."""

    def __init__(self) -> None:
        self._pieces: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def note(self, name: str) -> None:
        self._pieces[name] += 1
        self._changed.set()

    async def until(self, requests: list[Request], num_pieces: int, count: int) -> None:
        """Until `count` of these (or all, where there are fewer) have brought `num_pieces`."""
        while sum(self._pieces[request.name] >= num_pieces for request in requests) < min(count, len(requests)):
            self._changed.clear()
            await self._changed.wait()


@dataclass(frozen=True, slots=True)
class Strike:
    role: str
    pid: int
    at_s: float  # monotonic


def needs(request: Request, role: str) -> bool:
    """Whether that process does anything for this request."""
    return (
        role == DECODERS[request.model]
        or (role == ENCODERS["image"] and request.has_picture)
        or (role == ENCODERS["audio"] and request.has_clip)
        or (role == DECODE_PROCESS and (request.has_picture or request.has_clip))
    )


@dataclass(slots=True)
class Attack:
    """One round's: whom it may hit, when, and what it has hit."""

    main_pid: int
    index: int  # of the round
    rng: random.Random
    signal: signal.Signals
    requests: list[Request]
    progress: Progress = field(default_factory=Progress)
    strikes: list[Strike] = field(default_factory=list)

    async def hit(self, *roles: str, other_than: int | None = None) -> int:
        """All at the same moment; returns the pid of the last."""
        pids = [await worker(self.main_pid, role, other_than=other_than) for role in roles]
        for role, pid in zip(roles, pids, strict=True):
            os.kill(pid, self.signal)
            self.strikes.append(Strike(role, pid, time.monotonic()))
        return pids[-1]

    async def streams_run(self, *models: str) -> None:
        """Until some streams of each of these models, how many is left to chance, are well under way."""
        for model in models:
            mine = [request for request in self.requests if request.model == model and request.body["stream"]]
            await self.progress.until(mine, UNDER_WAY, self.rng.randint(1, max(1, len(mine) // 2)))


async def _decoder(attack: Attack) -> None:
    model = MODELS[attack.index % len(MODELS)]
    await attack.streams_run(model)
    await attack.hit(DECODERS[model])


async def _both_decoders(attack: Attack) -> None:
    await attack.streams_run(*MODELS)
    await attack.hit(*DECODERS.values())


async def _twice(attack: Attack) -> None:
    """The second time while the worker that takes over is starting, or has only just begun."""
    role = DECODERS[MODELS[attack.index % len(MODELS)]]
    await attack.streams_run(MODELS[attack.index % len(MODELS)])
    first = await attack.hit(role)
    second = await worker(attack.main_pid, role, other_than=first)
    await asyncio.sleep(attack.rng.uniform(0.0, 3.0))
    assert await attack.hit(role) == second


async def _encoder(attack: Attack) -> None:
    """When the first few have their rows, and the others wait for theirs."""
    mine = [request for request in attack.requests if request.has_picture]
    await attack.progress.until(mine, 1, attack.rng.randint(1, 4))
    await attack.hit(ENCODERS["image"])


async def _audio_encoder(attack: Attack) -> None:
    mine = [request for request in attack.requests if request.has_clip]
    await attack.progress.until(mine, 1, attack.rng.randint(1, 4))
    await attack.hit(ENCODERS["audio"])


async def _decode_process(attack: Attack) -> None:
    await asyncio.sleep(attack.rng.uniform(0.0, 1.0))  # nothing outside shows when it has a picture in its hands
    await attack.hit(DECODE_PROCESS)


async def _nobody(attack: Attack) -> None:
    """So that the others have something to be compared with."""


@dataclass(frozen=True, slots=True)
class Kind:
    strike: Callable[[Attack], Awaitable[None]]
    fresh_media: bool = False  # each round has some that no cache knows
    picture_size: tuple[int, int] = PICTURE_SIZE
    carries_streams: bool = False  # whoever is hit has streams aboard
    is_worker: bool = True  # readiness and `worker_restarts` speak of it


KINDS: Mapping[str, Kind] = {
    "nobody": Kind(_nobody, is_worker=False),
    "decoder": Kind(_decoder, carries_streams=True),
    "both-decoders": Kind(_both_decoders, carries_streams=True),
    "twice": Kind(_twice, carries_streams=True),
    "encoder": Kind(_encoder, fresh_media=True),
    "audio-encoder": Kind(_audio_encoder, fresh_media=True),
    "decode-process": Kind(_decode_process, fresh_media=True, picture_size=LARGE_PICTURE, is_worker=False),
}
