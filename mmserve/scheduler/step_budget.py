"""How much one step may hold: shrinks when the device runs out of memory, grows back slowly."""

from __future__ import annotations

RECOVERY_STEPS = 32  # good steps in a row before a larger one is tried


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
