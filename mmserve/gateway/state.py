"""The state of one server: the engine behind it, whether it is open, and who is inside.  Written by `server` and the handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from aiohttp import web

from mmserve.config import Config
from mmserve.errors import MmserveError, Overloaded
from mmserve.gateway.body_room import BodyRoom
from mmserve.gateway.call import Bounds
from mmserve.gateway.face import EngineFace
from mmserve.gateway.idempotency import Answers
from mmserve.gateway.refusals import SHUTDOWN
from mmserve.token_stream import Generation

REQUEST_ID = web.RequestKey("request_id", str)


class Phase(Enum):
    STARTING = "starting"
    OPEN = "open"
    CLOSING = "closing"


class ServerState:
    """`phase` goes from STARTING over OPEN to CLOSING, once."""

    def __init__(self, engine: EngineFace, config: Config) -> None:
        self.engine = engine
        self.config = config
        self.created = int(time.time())
        self.phase = Phase.STARTING
        self.answers = Answers(engine.submit)
        self.bodies = BodyRoom(config.server.max_bodies_bytes)
        self._inside: set[Generation] = set()
        self._num_inside = 0
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._is_cut_off = False

    @property
    def served_name(self) -> str:
        return self.config.model.served_model_name or self.engine.composition.name

    @property
    def bounds(self) -> Bounds:
        sizes = [decoder.vocab_size for decoder in self.engine.composition.decoders.values()]
        return Bounds(vocab_size=min(sizes), limits=self.engine.limits)

    def shown_model(self, asked: str) -> str:
        """The name in an answer: the one the client used."""
        return self.served_name if asked == "auto" else asked

    @contextmanager
    def visit(self) -> Iterator[None]:
        """A generating request, from its first byte read to its last one written."""
        self._num_inside += 1
        self._nobody.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._nobody.set()

    @contextmanager
    def hold(self, generation: Generation) -> Iterator[None]:
        """While its answer is being sent.  However that ends, the generation is cancelled: a no-op after its own end."""
        self._inside.add(generation)
        try:
            yield
        finally:
            self._inside.discard(generation)
            generation.cancel()

    async def wait_empty(self) -> None:
        await self._nobody.wait()

    def cut_off(self) -> None:
        """End what still runs, each stream with an error event."""
        self._is_cut_off = True
        for generation in list(self._inside):
            generation.cancel()
            generation.fail(shutting_down())

    def ended_early(self) -> MmserveError:
        """Why a generation stopped before all its choices had."""
        return shutting_down() if self._is_cut_off else MmserveError("the answer ended early")


def shutting_down() -> Overloaded:
    return Overloaded("the server is shutting down", code=SHUTDOWN, retry_after_s=5.0)


STATE = web.AppKey("state", ServerState)
