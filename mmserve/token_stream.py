"""What an accepted request looks like from the door: a stream that the engine fills and the door drains.  It outlives workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from mmserve.errors import MmserveError
from mmserve.request import FinishReason, TokenLogprob, Usage


@dataclass(slots=True)
class Delta:
    """What one choice said since the last delta.  The one with a finish reason is its last.

    Nobody changes one; it isn't frozen because one is made for every token, and a frozen one takes three times as long to make.
    """

    index: int  # which of n choices
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


class Generation:
    """One accepted request.  Iterate over it, or take batches; `cancel` is idempotent and also right after the end.

    Written by the engine (`push`, `fail`), read by one reader.
    """

    def __init__(self, *, request_id: str, model: str, route_reason: str, usage: Usage, num_choices: int) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self.model = model  # small or large
        self.route_reason = route_reason
        self.usage = usage
        self.timings: dict[str, float] = {}  # seconds by stage
        self.on_cancel: Callable[[], None] | None = None
        self._waiting: list[Delta] = []
        self._num_open = num_choices
        self._error: MmserveError | None = None
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._num_open == 0 or self._error is not None

    def push(self, delta: Delta) -> None:
        self._waiting.append(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
        self._changed.set()

    def fail(self, error: MmserveError) -> None:
        """End the stream with an error, once everything pushed before it is read.  Later calls change nothing."""
        if not self.done:
            self._error = error
            self._changed.set()

    def cancel(self) -> None:
        if self.on_cancel is not None and not self.done:
            self.on_cancel()

    async def next_batch(self) -> list[Delta]:
        """All deltas that wait, as soon as there are any; empty at the end.  Raises the error that ended the stream, after them."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return []
            self._changed.clear()
            await self._changed.wait()
        batch, self._waiting = self._waiting, []
        return batch

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while batch := await self.next_batch():
            for delta in batch:
                yield delta
