"""Brings the rows that sequences wait for, once for each request, and begins a request again when an encoder fails it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from mmserve.active_request import ActiveRequest
from mmserve.errors import ENCODER_FAULTS, EncoderUnavailable, MmserveError
from mmserve.media_service import MediaService
from mmserve.prompt_maker import Prompt
from mmserve.request import ChatRequest

log = logging.getLogger(__name__)


class MediaFetches:
    """`make` and `check` prepare a request anew, `begin` has it begin again, `fail` ends it, `landed` hears of rows that are there.

    `move` says whether the request goes on at another decoder, whose encoders are others.

    Its length is the number of fetches on their way.
    """

    def __init__(
        self,
        media: MediaService,
        make: Callable[[ChatRequest, str, Mapping[int, str]], Awaitable[Prompt]],
        check: Callable[[ChatRequest, str, Prompt], int],
        begin: Callable[[ActiveRequest, Prompt, int], None],
        fail: Callable[[ActiveRequest, MmserveError], None],
        move: Callable[[ActiveRequest, MmserveError], bool],
        landed: Callable[[ActiveRequest], None],
        is_running: Callable[[ActiveRequest], bool],
    ) -> None:
        self._media = media
        self._make = make
        self._check = check
        self._begin = begin
        self._fail = fail
        self._move = move
        self._landed = landed
        self._is_running = is_running
        self._tasks: dict[tuple[str, bytes], asyncio.Task[None]] = {}  # (request id, window key)

    def __len__(self) -> int:
        return len(self._tasks)

    def want(self, active: ActiveRequest, key: bytes) -> None:
        """The request can't go on without the rows of this window.  May be said any number of times."""
        flight = (active.generation.request_id, key)
        if flight in self._tasks:
            return
        task = asyncio.create_task(self._fetch(active, key), name=f"fetch-{flight[0]}")
        self._tasks[flight] = task
        task.add_done_callback(partial(self._ended, active, flight))

    def leave(self, active: ActiveRequest) -> None:
        """It waits for nothing any more."""
        for key in active.windows:
            task = self._tasks.pop((active.generation.request_id, key), None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def _ended(self, active: ActiveRequest, flight: tuple[str, bytes], task: asyncio.Task[None]) -> None:
        if self._tasks.get(flight) is task:
            del self._tasks[flight]
        if not task.cancelled() and (error := task.exception()) is not None:  # a mistake of ours: nobody must wait for it for ever
            log.error("request=%s media could not be brought", flight[0], exc_info=error)
            self._fail(active, MmserveError("internal error"))

    async def _fetch(self, active: ActiveRequest, key: bytes) -> None:
        item, window = active.windows[key]
        try:
            active.sources[key] = await self._media.fetch(item, window, active.generation.model, active.bill.payer(window))
        except ENCODER_FAULTS as error:
            await self._do_without(active, key, error)
            return
        except MmserveError as error:
            self._fail(active, error)
            return
        active.pinned.append(key)
        self._landed(active)

    async def _do_without(self, active: ActiveRequest, key: bytes, error: MmserveError) -> None:
        """An encoder failed a request that waits for it: begin again with another encoder, or without the item if the client allows that.

        Where an answer has begun, it is too late: what was said knew the item.
        """
        if self._move(active, error):
            return
        model = active.generation.model
        failed = [item for item in active.media if any(window.key == key for window in item.windows)]
        has_other = isinstance(error, EncoderUnavailable) and all(self._media.is_open(item, model) for item in failed)
        if not has_other and active.request.allow_degraded:
            active.left_out |= {id(item.item): error.code for item in failed}
            has_other = True
        if not has_other or active.first_token_s is not None:
            self._fail(active, error)
            return
        left_out = dict(active.left_out)
        try:
            prompt = await self._make(active.request, model, left_out)
            max_total_tokens = self._check(active.request, model, prompt)
        except MmserveError as refusal:
            self._fail(active, refusal)
            return
        if left_out == active.left_out and self._is_running(active):  # else another fault came, and sees to it
            log.info("request=%s begins again code=%s left_out=%d", active.generation.request_id, error.code, len(prompt.degraded))
            self._begin(active, prompt, max_total_tokens)
