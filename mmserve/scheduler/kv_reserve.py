"""Blocks that a newcomer must leave free: for running sequences to grow into, and for the largest prompt that is usual here.

By the average prompt, a queue of small ones would fill the cache to the brim, and one with pictures would wait until all of them are done.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable

from mmserve.paged_kv.block_hash import HASH_STRIDE
from mmserve.scheduler.sequence import Sequence

NUM_RECENT = 512  # prompts that count as recent
PERCENTILE = 0.99
MIN_PROMPT = 2048  # tokens: the 99th percentile of real traffic is no less, whatever was seen so far
MAX_SHARE = 1 / 8  # of a small cache, which may not hold many such prompts
MAX_HORIZON = 16 * HASH_STRIDE
RELAX_STEPS = 256  # good steps for each stride that the horizon comes back


class KVReserve:
    """Adapts to what prompts are like, and to how often memory ran out."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._max_blocks = int(num_blocks * MAX_SHARE)
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []  # the same
        self._num_good_steps = 0
        self.horizon = HASH_STRIDE  # tokens ahead for which running sequences find blocks; doubles when memory runs out

    def observe(self, num_prompt: int) -> None:
        """A prompt of this length has come, media and all."""
        self._recent.append(num_prompt)
        bisect.insort(self._sorted, num_prompt)
        if len(self._recent) > NUM_RECENT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    @property
    def num_prompt_blocks(self) -> int:
        """What the largest usual prompt takes, as far as the cache has room for such a thing."""
        usual = self._sorted[int(PERCENTILE * (len(self._sorted) - 1))] if self._sorted else 0
        return min(-(-max(usual, MIN_PROMPT) // self._block_size), self._max_blocks)

    def num_growth_blocks(self, running: Iterable[Sequence]) -> int:
        """What running sequences will take within the horizon, or before they end."""
        size = self._block_size
        num_blocks = 0
        for sequence in running:
            num_tokens = min(len(sequence.token_ids) + self.horizon, sequence.max_total_tokens)
            num_blocks += max(0, -(-num_tokens // size) - len(sequence.block_table.block_ids))
        return num_blocks

    def tighten(self) -> None:
        """Memory ran out: somebody who was let in had to leave again, or a step failed."""
        self.horizon = min(2 * self.horizon, MAX_HORIZON)
        self._num_good_steps = 0

    def relax(self) -> None:
        """A step went well."""
        if self.horizon == HASH_STRIDE:
            return
        self._num_good_steps += 1
        if self._num_good_steps == RELAX_STEPS:
            self._num_good_steps = 0
            self.horizon -= HASH_STRIDE
