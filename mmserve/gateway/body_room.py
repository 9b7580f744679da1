"""The memory that clients' bodies may take, all together.  Knows no body, only how many bytes there are or will be."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from mmserve.errors import Overloaded


class BodyRoom:
    """Bytes that all requests together may hold: of bodies being read, and of the text and media of those that were.

    A request counts from before its body is read until its answer has ended, for that is how long its media are kept.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_held = 0

    def enter(self) -> Held:
        return Held(self)


class Held:
    """One request's share.  A context manager: it is given back on exit."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.resize(0)

    def grow_to(self, num_bytes: int) -> None:
        """Raises Overloaded if all requests together would hold too much."""
        if num_bytes > self._num_bytes:
            if self._room.num_held + num_bytes - self._num_bytes > self._room.num_bytes:
                raise Overloaded("too many large requests are being read or answered", code="bodies_full", retry_after_s=1.0)
            self.resize(num_bytes)

    def resize(self, num_bytes: int) -> None:
        self._room.num_held += num_bytes - self._num_bytes
        self._num_bytes = num_bytes
