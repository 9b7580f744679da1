"""What an accepted request looks like from the door: a stream that the engine fills and the door drains.  It outlives workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from mmserve.errors import MmserveError
from mmserve.grounding.verdict import Report
from mmserve.request import Cost, FinishReason, MediaNotice, TokenLogprob, Usage


@dataclass(slots=True)
class Delta:
    """What one choice said since the last delta.  The one with a finish reason is its last.

    Only the stream on which it waits changes one.  It isn't frozen because one is made for every token, and a frozen one takes three times
    as long to make.
    """

    index: int  # which of n choices
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


_MANY = 32  # deltas: when more wait, the reader is far behind, and what else comes is told in one with what waits
_LONG_TEXT, _MANY_IDS = 4096, 256  # of one delta: nothing more is joined to it
_ID_BYTES = 16  # a token's id, or an alternative, as the backlog counts it


class Generation:
    """One accepted request.  Iterate over it, or take batches; `cancel` is idempotent and also right after the end.

    Written by the engine (`push`, `fail`), read by one reader.
    """

    def __init__(self, *, request_id: str, model: str, route_reason: str, usage: Usage, num_choices: int) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self.model = model  # small or large, or a canary; this and the reason are certain with the first delta
        self.route_reason = route_reason
        self.usage = usage
        self.degraded: tuple[MediaNotice, ...] = ()  # items that were left out; certain with the first delta
        self.fallback: tuple[MediaNotice, ...] = ()  # items that a fallback encoder encoded; likewise
        self.timings: dict[str, float] = {}  # seconds by stage
        self.grounding: Report | None = None  # what the guardrail found, there before the last delta; None: it wasn't asked
        self.cost: Cost | None = None  # known at the end
        self.on_cancel: Callable[[], object] | None = None
        self._waiting: list[Delta] = []
        self.num_choices = num_choices
        self._num_open = num_choices
        self._error: MmserveError | None = None
        self._changed = asyncio.Event()
        self._last_waiting: dict[int, Delta] = {}  # by choice, once many wait
        self._backlog_bytes = 0  # of what came since
        self._max_backlog_bytes: int | None = None
        self._on_excess: Callable[[], None] = lambda: None

    def follow(self, source: Generation) -> None:
        """Say of the answer what `source` says of it: this one is told what that one is."""
        self.created, self.model, self.route_reason = source.created, source.model, source.route_reason
        self.usage, self.timings, self.cost, self.grounding = source.usage, source.timings, source.cost, source.grounding
        self.degraded, self.fallback = source.degraded, source.fallback

    @property
    def done(self) -> bool:
        return self._num_open == 0 or self._error is not None

    def push(self, delta: Delta) -> None:
        if len(self._waiting) < _MANY:
            self._waiting.append(delta)
        else:
            self._push_late(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
        self._changed.set()

    def bound(self, max_bytes: int, on_excess: Callable[[], None]) -> None:
        """When about `max_bytes` of text and ids wait for the reader, call `on_excess`, and again for each delta beyond."""
        self._max_backlog_bytes = max_bytes
        self._on_excess = on_excess

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
        self._last_waiting, self._backlog_bytes = {}, 0
        return batch

    def _push_late(self, delta: Delta) -> None:
        """Join it with the last of its choice: a reader that comes back wants the text, not a thousand pieces of it."""
        last = self._last_waiting.get(delta.index)
        if last is None or len(last.text) > _LONG_TEXT or len(last.token_ids) > _MANY_IDS:  # each join copies all of it
            last = self._last_waiting[delta.index] = delta
            self._waiting.append(delta)
        else:
            last.text += delta.text
            last.token_ids += delta.token_ids
            last.logprobs += delta.logprobs
            last.finish_reason = delta.finish_reason
        num_ids = len(delta.token_ids) + sum(len(token.top) for token in delta.logprobs)
        self._backlog_bytes += len(delta.text) + _ID_BYTES * num_ids
        if self._max_backlog_bytes is not None and self._backlog_bytes > self._max_backlog_bytes:
            self._on_excess()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while batch := await self.next_batch():
            for delta in batch:
                yield delta
