"""One encoder and its cache: whoever needs the rows of a window gets them, from the cache, from an encode under way, or from a new one.

Work belongs to the pool, not to who asked first: a caller that leaves or a neighbour whose picture is broken hurts nobody else.  Rows
are cached only when they are complete and finite, and are pinned for each caller before it wakes.  Doesn't know who encodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mmserve.composition import Composition
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.encoders.encode_order import ROOM_TIMEOUT_S, EncodeOrder, Encoder
from mmserve.encoders.encoder_health import EncoderHealth
from mmserve.encoders.to_the_end import to_the_end
from mmserve.errors import EncoderFailed, MmserveError, Overloaded, WorkerLost
from mmserve.media import MediaKind, MediaWindow, PreparedMedia
from mmserve.metrics import Metrics

log = logging.getLogger(__name__)

Pay = Callable[[float, int], None]
"""Told the GPU-seconds of an encode that a caller has to bear, and among how many callers it was shared."""


class _Waiter(NamedTuple):
    landed: asyncio.Future[str]
    pay: Pay | None  # None: it is no request


@dataclass(eq=False)
class _Flight:
    """Rows on their way for everybody in `waiters`."""

    media: PreparedMedia
    window: MediaWindow
    decoder: str
    waiters: list[_Waiter] = field(default_factory=list)
    source: str = "encoded"
    order: EncodeOrder | None = None
    task: asyncio.Task[None] | None = None


class EncoderPool:
    """Owned by the event loop.  `on_lost` is told the content of an item that was aboard more dying workers than chance explains."""

    def __init__(
        self,
        kind: MediaKind,
        encoder: Encoder,
        cache: EmbeddingCache,
        metrics: Metrics,
        *,
        composition: Composition,
        rows_dtype: str,
        name: str,
        on_lost: Callable[[bytes], None],
    ) -> None:
        self.composition = composition  # in which this pool's encoder is the one of its kind
        self.health = EncoderHealth(name, encoder, metrics)
        self._kind = kind
        self._encoder = encoder
        self._cache = cache
        self._metrics = metrics
        self._rows_dtype = rows_dtype
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._flights: dict[bytes, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # of flights, forgotten ones too
        encoder.report_to(self.health)

    def acquire(self, window: MediaWindow) -> bool:
        """Pin rows that are in memory already, once for the caller.  Without waiting, and without starting anything."""
        if not self._cache.acquire(window.key):
            return False
        self._metrics.mm_cache_queries.labels(self._kind.value).inc()
        self._note_hit(window, "memory")
        return True

    async def can_serve(self, media: PreparedMedia) -> bool:
        """Whether the encoder works, or all rows of the item are there already."""
        if self.health.is_closed:
            return True
        return all([await self._cache.has(window.key) for window in media.windows])

    async def fetch(self, media: PreparedMedia, window: MediaWindow, decoder: str, pay: Pay | None = None) -> str:
        """Rows of `window` for `decoder` are in memory and pinned once for the caller, who unpins.

        All who wait when an encode lands share it evenly, whoever came first: each of them would have caused it.  Rows that are found are
        free.  Returns where they came from: memory, disk, joined or encoded.  Raises the MmserveError of whatever went wrong.
        """
        if self.acquire(window):
            return "memory"
        self._metrics.mm_cache_queries.labels(self._kind.value).inc()
        flight, leads = self._flights.get(window.key), False
        if flight is None:
            flight, leads = self._launch(media, window, decoder), True
        else:
            self._metrics.single_flight_joins.labels(self._kind.value).inc()
            if flight.order is not None and flight.order.job is not None:
                flight.order.job.wanted = True
        waiter = _Waiter(self._loop.create_future(), pay)
        flight.waiters.append(waiter)
        landed = waiter.landed
        try:
            source = await landed
        except asyncio.CancelledError:
            if landed.done() and not landed.cancelled() and landed.exception() is None:
                self._cache.unpin(window.key)  # it landed, and we were cancelled before we woke
            self._leave(flight, waiter)
            raise
        except MmserveError as error:  # an own copy: the others' names another place in another request
            raise error.again(param=media.item.param) from None
        if leads and source == "disk":
            self._note_hit(window, "disk")
        return source if leads else "joined"

    async def close(self) -> None:
        """Whoever still waits gets Overloaded."""
        await self.health.close()
        await self._encoder.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Idle books: nothing under way, nothing held."""
        assert not self._flights
        self._encoder.check()

    def _launch(self, media: PreparedMedia, window: MediaWindow, decoder: str) -> _Flight:
        flight = self._flights[window.key] = _Flight(media, window, decoder)
        flight.task = asyncio.create_task(self._fly(flight), name=f"fly-{window.key.hex()[:12]}")
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._tasks.discard)
        return flight

    def _leave(self, flight: _Flight, waiter: _Waiter) -> None:
        """A caller is gone.  The last one takes the flight with it, unless a worker has it already."""
        if waiter in flight.waiters:
            flight.waiters.remove(waiter)
        if flight.waiters or flight.task is None or flight.task.done():
            return
        job = None if flight.order is None else flight.order.job
        if job is not None and job.aboard:
            job.wanted = False
        else:
            self._forget(flight)
            flight.task.cancel()

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.window.key) is flight:
            del self._flights[flight.window.key]

    async def _fly(self, flight: _Flight) -> None:
        """From nothing to rows in the cache, and everybody told."""
        error: MmserveError | None = None
        try:
            await self._bring(flight)
        except MmserveError as failure:
            error = failure
        except asyncio.CancelledError:
            error = Overloaded("the server is shutting down")
        except Exception:
            log.exception("window=%s could not be encoded", flight.window.key.hex()[:12])
            error = EncoderFailed("the media could not be encoded")
        self._forget(flight)
        waiters = [waiter for waiter in flight.waiters if not waiter.landed.done()]  # the others were cancelled a moment ago
        flight.waiters.clear()
        self._settle(flight, waiters, has_landed=error is None)
        for landed, _ in waiters:
            if error is not None:
                landed.set_exception(error)
            else:
                self._cache.pin(flight.window.key)
                landed.set_result(flight.source)

    def _settle(self, flight: _Flight, waiters: list[_Waiter], *, has_landed: bool) -> None:
        """Have those who wait bear what the encode took.  One for which nobody waits any more is overhead."""
        gpu_s = 0.0 if flight.order is None else flight.order.gpu_s
        payers = [waiter.pay for waiter in waiters if waiter.pay is not None] if has_landed else []
        if payers and gpu_s:
            for pay in payers:
                pay(gpu_s / len(payers), len(payers))
        else:
            self._metrics.gpu_overhead_seconds.labels("unclaimed_encode").inc(gpu_s)

    async def _bring(self, flight: _Flight) -> None:
        window, cache = flight.window, self._cache
        hidden = self.composition.decoders[flight.decoder].hidden_size
        rows = await cache.allocate((window.num_rows, hidden), self._rows_dtype, ROOM_TIMEOUT_S)
        try:
            left_s = await to_the_end(cache.load(window, rows))
            if left_s is None:
                flight.order = EncodeOrder(flight.media, window, flight.decoder, rows)
                await self._make(flight.order)
        except BaseException:
            cache.release(rows)
            raise
        flight.source = "encoded" if left_s is None else "disk"
        cache.insert(window, rows, left_s)
        if left_s is None:
            cache.save(window)

    async def _make(self, order: EncodeOrder) -> None:
        """Encode, unless the breaker is open, and tell it how that went.  What is unavailable has said so itself."""
        if not self.health.is_closed:
            raise self.health.refusal(order.media.item.param)
        try:
            await self._encoder.make(order)
        except EncoderFailed as error:
            self.health.failed(error.code)
            raise
        except WorkerLost:  # its deaths were reported, each of them
            self._on_lost(order.media.content)
            raise
        self.health.succeeded()

    def _note_hit(self, window: MediaWindow, tier: str) -> None:
        self._metrics.mm_cache_hits.labels(self._kind.value, tier).inc()
        self._cache.note_hit(window, tier)
