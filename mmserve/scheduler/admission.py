"""Whether a request is taken at all, decided from counts alone, before anything is decoded, encoded or queued."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmserve.errors import BadRequest, ContextLengthExceeded, Overloaded, TooLarge
from mmserve.scheduler.records import Records


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many may wait for a first step, and for how long, as far as can be foreseen."""

    max_num_queued: int
    max_wait_s: float = math.inf


class Admission:
    """The door of one decoder whose KV cache has `num_blocks` blocks."""

    def __init__(self, max_model_len: int, num_blocks: int, block_size: int, queue: QueueLimits, records: Records) -> None:
        self._max_model_len = max_model_len
        self._capacity = num_blocks * block_size  # tokens
        self._queue = queue
        self._records = records

    def check(
        self,
        num_prompt: int,
        max_tokens: int | None,
        num_sequences: int,
        tenant: str,
        num_queued: int,
        now_s: float,
        *,
        num_before: int,
        has_media: bool,
    ) -> int:
        """How long each of `num_sequences` may become, prompt and answer together, given `num_queued` sequences wait already.

        Of its own kind, those with media or those without, `num_before` go before it.  What it will
        wait for them is judged by how fast those of its kind began: text is not refused because there are too many pictures.

        Raises ContextLengthExceeded, TooLarge (it would not fit even alone) or Overloaded, to come back when the queue has drained.
        Without `max_tokens` an answer may be as long as there is room for, but a prompt must leave room for one token.
        """
        if num_prompt < 1:
            raise BadRequest("the prompt is empty", param="messages")
        num_answer = 1 if max_tokens is None else max_tokens
        num_tokens = num_prompt + num_answer
        if num_tokens > self._max_model_len:
            raise ContextLengthExceeded(
                f"the context length is {self._max_model_len} tokens, but {num_tokens} were requested "
                f"({num_prompt} in the prompt, {num_answer} for the answer)",
                param="messages" if num_prompt >= self._max_model_len else "max_tokens",
            )
        if num_tokens > self._capacity:
            raise TooLarge(
                f"the KV cache holds {self._capacity} tokens, but {num_tokens} were requested "
                f"({num_prompt} in the prompt, {num_answer} for the answer)",
                param="messages" if num_prompt >= self._capacity else "max_tokens",
            )
        refusal = self._refusal(num_sequences, tenant, num_queued, num_before, now_s, has_media)
        if has_media:
            self._records.haste.observe(is_taken=refusal is None)
        if refusal is not None:
            raise Overloaded(refusal, retry_after_s=self._records.drain.retry_after_s(num_queued, now_s))
        return min(self._max_model_len, self._capacity) if max_tokens is None else num_tokens

    def check_room(self, num_queued: int, now_s: float) -> None:
        """Raises Overloaded if nothing at all is taken, whatever it may be: the queue is full."""
        if num_queued >= self._queue.max_num_queued:
            raise Overloaded(self._full(num_queued), retry_after_s=self._records.drain.retry_after_s(num_queued, now_s))

    def _full(self, num_queued: int) -> str:
        return f"{num_queued} of at most {self._queue.max_num_queued} sequences are waiting"

    def _refusal(self, num_sequences: int, tenant: str, num_queued: int, num_before: int, now_s: float, has_media: bool) -> str | None:
        """Why the queue is too long for it, if it is."""
        limits, records = self._queue, self._records
        wait_s = records.drain_of(has_media=has_media).wait_s(num_before, now_s, records.usage.setback_s(tenant))
        if num_queued + num_sequences > limits.max_num_queued:
            return self._full(num_queued)
        if wait_s > limits.max_wait_s:
            return f"it would take {wait_s:.1f} s to begin, with {num_before} before it in the queue; {limits.max_wait_s:g} s are the limit"
        return None
