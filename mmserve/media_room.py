"""Room in the shared buffer, promised to requests before their first encode."""

from __future__ import annotations

import asyncio


class MediaRoom:
    """Bytes of the shared buffer promised to requests, first come, first served.

    A request takes all it may need before its first encode or waits with nothing, so no two can each hold what the other lacks.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = num_bytes
        self._queue: list[tuple[int, asyncio.Future[None]]] = []

    def has(self, num_bytes: int) -> bool:
        """Whether they could be taken without waiting."""
        return not self._queue and num_bytes <= self._free

    async def take(self, num_bytes: int) -> None:
        if self.has(num_bytes):
            self._free -= num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue = [waiting for waiting in self._queue if waiting[1] is not turn]
                self._serve_queue()
            else:  # it was given just before
                self.give_back(num_bytes)
            raise

    def give_back(self, num_bytes: int) -> None:
        self._free += num_bytes
        assert self._free <= self.num_bytes, "media room given back twice"
        self._serve_queue()

    def _serve_queue(self) -> None:
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            num_bytes, turn = self._queue.pop(0)
            if not turn.cancelled():  # it has left, and its task has not heard of that yet
                self._free -= num_bytes
                turn.set_result(None)
