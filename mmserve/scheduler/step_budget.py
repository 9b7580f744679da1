"""How much one step may hold: shrinks when the device runs out of memory, grows back slowly; and how much of it goes to prefill."""

from __future__ import annotations

import math

from mmserve.scheduler.cost_model import CostModel

RECOVERY_STEPS = 32  # good steps in a row before a larger one is tried

PREFILL_FLOOR = 64
"""Tokens of a step that prefill gets whatever decodes take.  Two pictures and a clip, 1,540 tokens, are then computed in 25 steps even
where a decode alone exceeds the target; and on a GPU fewer would hardly be quicker, as a step reads all weights anyway."""


class StepBudget:
    """Tokens of a step and sequences in the running set.  Every running sequence gets its token, so the second never exceeds the first."""

    def __init__(self, max_num_tokens: int, max_num_rows: int) -> None:
        if max_num_tokens < 1 or max_num_rows < 1:
            raise ValueError(f"a step must have room for a token and a row, got {max_num_tokens} and {max_num_rows}")
        self._max_num_tokens = max_num_tokens
        self._max_num_rows = max_num_rows
        self._num_tokens = max_num_tokens
        self._num_rows = max_num_rows
        self._num_good_steps = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_rows(self) -> int:
        return min(self._num_rows, self._num_tokens)

    def shrink(self, num_tokens: int, num_rows: int) -> bool:
        """A step of this size did not fit: allow half the tokens and a row less.  False if it could not have been smaller."""
        if num_tokens <= 1:
            return False
        self._num_tokens = num_tokens // 2
        self._num_rows = max(1, num_rows - 1)
        self._num_good_steps = 0
        return True

    def recover(self) -> None:
        """A step fitted."""
        if self._num_tokens == self._max_num_tokens and self._num_rows == self._max_num_rows:
            return
        self._num_good_steps += 1
        if self._num_good_steps == RECOVERY_STEPS:
            self._num_good_steps = 0
            self._num_tokens = min(self._max_num_tokens, 2 * self._num_tokens)
            self._num_rows = min(self._max_num_rows, self._num_rows + 1 + self._num_rows // 8)


class PrefillRoom:
    """What is left of one step for those who catch up: `num_tokens` at most, no more than add `ms` to it, but not below the floor."""

    def __init__(self, costs: CostModel, num_tokens: int, ms: float) -> None:
        self._costs = costs
        self._num_tokens = num_tokens
        self._ms = ms  # infinite: as long as it takes
        self._floor = PREFILL_FLOOR

    @property
    def is_open(self) -> bool:
        return self._num_tokens > 0 and (self._floor > 0 or self._ms > 0)

    def num_tokens_at(self, start: int) -> int:
        """How many tokens of a sequence may be computed from `start` on: at least one while there is room at all."""
        if not self.is_open:
            return 0
        if math.isinf(self._ms):
            return self._num_tokens
        return min(self._num_tokens, max(1, self._floor, self._costs.num_tokens_within(self._ms, start, self._num_tokens)))

    def take(self, start: int, stop: int) -> None:
        self._num_tokens -= stop - start
        self._floor = max(0, self._floor - (stop - start))
        self._ms -= self._costs.row_ms(start, stop)
