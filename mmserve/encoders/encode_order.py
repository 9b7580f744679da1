"""What a pool asks of whatever makes rows, be it workers of our own or somebody else's service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mmserve.encoders.encode_queue import EncodeJob
from mmserve.encoders.encoder_health import EncoderHealth, Patient
from mmserve.media import MediaWindow, PreparedMedia
from mmserve.shared_buffer import BufferSlice

ROOM_TIMEOUT_S = 10.0  # waiting for space in the shared buffer before the caller is told to come back


@dataclass(eq=False, slots=True)
class EncodeOrder:
    """One window, and the place for its rows."""

    media: PreparedMedia
    window: MediaWindow
    decoder: str
    rows: BufferSlice
    job: EncodeJob | None = None  # where it is in the queue of a worker, once it is

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of ours that went into it, as far as is known."""
        return 0.0 if self.job is None else self.job.gpu_s


class Encoder(Patient, Protocol):
    """Makes rows."""

    def report_to(self, health: EncoderHealth) -> None:
        """Whatever makes it unavailable is told there, and faults that no order ends with: a worker's death is made good."""

    async def make(self, order: EncodeOrder) -> None:
        """Write the rows.  Raises the MmserveError of this order alone; cancelled, returns when nobody writes any more."""

    async def close(self) -> None:
        """Whoever still waits gets Overloaded."""

    def check(self) -> None:
        """Idle books."""
