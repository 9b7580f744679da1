"""How late the event loop is: a timer that should fire every so often, and when it does."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

from mmserve.metrics import Metrics

log = logging.getLogger(__name__)

INTERVAL_S = 0.05
LONG_LAG_S = 0.5  # worth a line in the log


async def watch_lag(metrics: Metrics) -> NoReturn:
    """Until it is cancelled."""
    while True:
        due = time.monotonic() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lag_s = max(0.0, time.monotonic() - due)
        metrics.event_loop_lag_seconds.observe(lag_s)
        if lag_s >= LONG_LAG_S:
            log.warning("the event loop stood still for %.1f s", lag_s)
