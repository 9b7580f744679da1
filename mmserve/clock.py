"""Time of day for what is written down, from a clock that nobody sets while we run."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_epoch() -> Callable[[], float]:
    """Seconds since the epoch as the clock showed it now, and monotonic from here on."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
