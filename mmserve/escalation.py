"""From small to large when the small decoder turns out to be uncertain: once, and before the client has seen anything.

The first tokens of an answer are held back.  Each comes with the entropy of the distribution that it was drawn from; if that of one is
above what the model's own measurements say (`router.json`), the large decoder answers instead.  What the small one has cost stays on the
request's bill.  If the large one can't take it, the small one's answer goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from mmserve.active_request import ActiveRequest
from mmserve.doubt import Doubt
from mmserve.errors import MmserveError
from mmserve.model_router import LARGE
from mmserve.prompt_maker import Prompt
from mmserve.request import ChatRequest
from mmserve.scheduler.scheduler import TokenUpdate

log = logging.getLogger(__name__)


class Escalations:
    """`make` and `check` prepare a request for a decoder, `begin` moves it there, `deliver` takes what was held and is not moved."""

    def __init__(
        self,
        make: Callable[[ChatRequest, str, Mapping[int, str]], Awaitable[Prompt]],
        check: Callable[[ChatRequest, str, Prompt], int],
        begin: Callable[[ActiveRequest, Prompt, int], None],
        deliver: Callable[[list[TokenUpdate]], None],
    ) -> None:
        self._make = make
        self._check = check
        self._begin = begin
        self._deliver = deliver
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def sift(self, active: ActiveRequest, update: TokenUpdate) -> Sequence[TokenUpdate]:
        """What of a request's updates may go to the client now."""
        doubt = active.doubt
        if doubt is None:
            return (update,)
        if doubt.take(update) and not doubt.is_moving:
            doubt.is_moving = True
            task = asyncio.create_task(self._move(active, doubt), name=f"escalate-{active.generation.request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not doubt.is_dispelled:
            return ()
        active.doubt = None
        return doubt.held

    async def _move(self, active: ActiveRequest, doubt: Doubt) -> None:
        try:
            prompt = await self._make(active.request, LARGE, dict(active.left_out))
            max_total_tokens = self._check(active.request, LARGE, prompt)
        except Exception as error:  # also a mistake of ours: nobody must wait for it for ever
            if isinstance(error, MmserveError):
                log.info("request=%s stays with the small decoder code=%s", active.generation.request_id, error.code)
            else:
                log.exception("request=%s could not be moved to the large decoder", active.generation.request_id)
            if active.doubt is doubt:
                active.doubt = None
                self._deliver(doubt.held)
            return
        if active.doubt is doubt:  # else it ended meanwhile, or began anew for another reason
            self._begin(active, prompt, max_total_tokens)
