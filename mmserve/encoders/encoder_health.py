"""A circuit breaker at work for one encoder: what it shows, whom it refuses, and the probes that find out when all is well again.

The probes are blanks of our own, not somebody's picture: while it is open readiness is off, so that nobody may come whose picture could
be tried; and nobody pays for the trial.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from mmserve.encoders.breaker import BreakerLimits, BreakerState, CircuitBreaker
from mmserve.errors import EncoderFailed, EncoderUnavailable, MmserveError
from mmserve.metrics import Metrics

log = logging.getLogger(__name__)


class Patient(Protocol):
    """An encoder, as far as its health goes."""

    async def wait_ready(self) -> None:
        """Until a probe makes sense."""

    async def probe(self) -> None:
        """Encode a blank.  Raises MmserveError."""

    def fail_waiting(self, error: MmserveError) -> None:
        """What has not begun won't."""


class EncoderHealth:
    """Owned by the event loop.  `name` is the metric's label: image, audio, or one of them and `-fallback`."""

    def __init__(self, name: str, patient: Patient, metrics: Metrics, limits: BreakerLimits | None = None) -> None:
        self.name = name
        self._patient = patient
        self._gauge = metrics.breaker_state.labels(name)
        self._breaker = CircuitBreaker(limits)
        self._shown = BreakerState.CLOSED
        self._gauge.set(self._shown.value)
        self._loop = asyncio.get_running_loop()
        self._recovery: asyncio.Task[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether it takes work."""
        return self._breaker.state is BreakerState.CLOSED

    def refusal(self, param: str | None = None) -> EncoderUnavailable:
        """What a request is told that needs it while it is open."""
        kind = self.name.partition("-")[0]
        retry_after_s = max(1.0, self._breaker.retry_after_s(self._loop.time()))
        return EncoderUnavailable(
            f"the {kind} encoder is failing; requests without such media work", param=param, retry_after_s=retry_after_s
        )

    def succeeded(self) -> None:
        self._breaker.note_success(self._loop.time())

    def failed(self, reason: str, retry_after_s: float | None = None) -> None:
        """The encoder's fault, not an item's.  `retry_after_s` if it says when to come back."""
        self._breaker.note_fault(self._loop.time(), retry_after_s)
        self._show(reason)

    def trip(self, reason: str) -> None:
        """Open at once."""
        self._breaker.trip(self._loop.time())
        self._show(reason)

    async def prove(self) -> None:
        """Probe it before anybody comes; what fails opens the breaker."""
        if (error := await self._try()) is not None:
            self._breaker.trip(self._loop.time(), error.retry_after_s or 0.0)
            self._show(error.code)

    async def close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)

    async def _recover(self) -> None:
        """Probe after probe until the breaker closes."""
        breaker, now_s = self._breaker, self._loop.time
        while breaker.state is not BreakerState.CLOSED:
            await asyncio.sleep(breaker.retry_after_s(now_s()))
            await self._patient.wait_ready()
            if breaker.retry_after_s(now_s()) > 0:
                continue  # told to stay away for longer, meanwhile
            breaker.begin_probe(now_s())
            self._show("probing")
            if (error := await self._try()) is not None:
                breaker.trip(now_s(), error.retry_after_s or 0.0)
                self._show(error.code)
            else:
                breaker.note_good_probe(now_s())
                self._show("good_probes")

    async def _try(self) -> MmserveError | None:
        """How the probe failed, if it did."""
        try:
            await self._patient.probe()
        except MmserveError as error:
            return error
        except Exception:
            log.exception("encoder=%s could not be probed", self.name)
            return EncoderFailed("the probe failed")
        return None

    def _show(self, reason: str) -> None:
        """Whatever follows from a change of state."""
        state = self._breaker.state
        if state is self._shown:
            return
        before, self._shown = self._shown, state
        self._gauge.set(state.value)
        pause_s = self._breaker.retry_after_s(self._loop.time())
        level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
        log.log(level, "encoder=%s breaker=%s was=%s reason=%s pause_s=%.1f", self.name, state.name, before.name, reason, pause_s)
        if state is BreakerState.OPEN:
            self._patient.fail_waiting(self.refusal())
            if self._recovery is None or self._recovery.done():
                self._recovery = asyncio.create_task(self._recover(), name=f"recover-{self.name}")
