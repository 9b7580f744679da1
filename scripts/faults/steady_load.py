"""Clients that never stop asking: questions whose answers are known, and new pictures and clips, each of which is asked about twice.

An answer that is late is fine, and so is a 503 that says when to come back; everything else that is not the right answer is off.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import aiohttp

from scripts.faults.mixed_load import Request, mixed_requests
from scripts.faults.rounds import FIRST_SEED, how_it_differs
from scripts.faults.strict_client import Answer, BrokenProtocol, StrictClient

NUM_KNOWN = 30
SHARE_NEW = 0.2
LONGEST_REST_S = 3.0  # after a refusal


class Tally:
    """What became of all requests, and what should not have."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.ends: Counter[str] = Counter()
        self.landed: list[tuple[float, Answer]] = []  # monotonic seconds; accepted answers that the ledger has not been asked about
        self.latencies_s: list[float] = []
        self.num_media_lost = 0  # 422 for media that are sound: at most one for each decode process that was killed or hung
        self._report = report

    def off(self, what: str) -> None:
        self.ends["off"] += 1
        self._report(what)

    def take(self, name: str, outcome: Answer | BaseException, expected: Answer | None) -> None:
        """Of a request with sound contents."""
        if isinstance(outcome, Answer) and outcome.status == 503:
            self.ends["refused"] += 1
        elif isinstance(outcome, Answer) and outcome.code == "undecodable_media":
            self.ends["media lost"] += 1
            self.num_media_lost += 1
        elif isinstance(outcome, Answer) and outcome.code is not None:
            self.off(f"{name}: failed with {outcome.status} {outcome.code}")
        elif expected is not None and (difference := how_it_differs(outcome, expected)) is not None:
            self.off(f"{name}: {difference}")
        elif isinstance(outcome, BaseException):
            self.off(f"{name}: {type(outcome).__name__} {outcome}")
        else:
            self.ends["right"] += 1
            self.landed.append((time.monotonic(), outcome))


class SteadyLoad:
    """A few clients in a closed loop; `pause` and `go_on` may be called at any time."""

    def __init__(self, client: StrictClient, known: Sequence[tuple[Request, Answer]], tally: Tally, num_clients: int, seed: str) -> None:
        self._client = client
        self._known = known
        self._tally = tally
        self._num_clients = num_clients
        self._rng = random.Random(seed)
        self._going = asyncio.Event()
        self._going.set()
        self._idle = asyncio.Condition()
        self._num_asking = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._one_client() for _ in range(self._num_clients)))

    async def pause(self) -> None:
        """Until the last answer is there."""
        self._going.clear()
        async with self._idle:
            await self._idle.wait_for(lambda: not self._num_asking)

    def go_on(self) -> None:
        self._going.set()

    async def burst(self, count: int) -> None:
        """So many known questions at once."""
        await asyncio.gather(*(self._ask(*self._rng.choice(self._known)) for _ in range(count)))

    async def _one_client(self) -> None:
        while True:
            await self._going.wait()
            self._num_asking += 1
            try:
                rest_s = await self._turn()
            finally:
                self._num_asking -= 1
                async with self._idle:
                    self._idle.notify_all()
            await asyncio.sleep(rest_s)

    async def _turn(self) -> float:
        """One question, or a new one twice.  Seconds to stay away."""
        if self._rng.random() >= SHARE_NEW:
            answer = await self._ask(*self._rng.choice(self._known))
        else:
            (new,) = await asyncio.to_thread(
                mixed_requests, 1, self._rng.getrandbits(40) + FIRST_SEED, kinds=(self._rng.choice(_WITH_MEDIA),)
            )
            answer = await self._ask(new, None)
            if answer is not None and answer.code is None:
                answer = await self._ask(new, answer)
        return min(answer.retry_after_s, LONGEST_REST_S) if answer is not None else LONGEST_REST_S

    async def _ask(self, request: Request, expected: Answer | None) -> Answer | None:
        began_s = time.monotonic()
        outcome: Answer | BaseException
        try:
            outcome = await self._client.ask(request.body)
        except (BrokenProtocol, aiohttp.ClientError, TimeoutError) as error:
            outcome = error
        self._tally.take(request.name, outcome, expected)
        self._tally.latencies_s.append(time.monotonic() - began_s)
        return outcome if isinstance(outcome, Answer) else None


_WITH_MEDIA = ("picture", "two pictures", "clip", "picture and clip")
