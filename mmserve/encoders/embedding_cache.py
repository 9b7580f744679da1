"""Finished embedding rows, by window key: in the shared buffer, where workers read them, and on disk, where they outlive us.

Keeps the books of what is in memory.  Rows that somebody has pinned stay where they are; the rest goes least recently used first.
Knows nothing of encoders: rows are put here when they are right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmserve.encoders.disk_tier import DiskTier
from mmserve.errors import OutOfBuffer, Overloaded
from mmserve.media import MediaKind, MediaWindow
from mmserve.shared_buffer import BufferSlice, SharedBuffer

log = logging.getLogger(__name__)

DAY_S, HOUR_S = 86_400.0, 3_600.0
DEFAULT_TTL_S = {MediaKind.IMAGE: DAY_S, MediaKind.AUDIO: HOUR_S}
SHARE_FOR_WRITES = 0.125  # of the buffer, pinned by writes to disk; past that rows are only kept in memory


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Something happened to the rows of one window.  What an index of the cache is made from."""

    what: str  # stored, hit, dropped, or moved: only in `tier` from now on
    tier: str  # memory or disk
    key: bytes  # the window's
    kind: MediaKind | None = None  # dropped or moved: neither this nor what follows
    num_rows: int = 0
    expires_in_s: float = 0.0  # from now


@dataclass(slots=True)
class _Entry:
    window: MediaWindow
    rows: BufferSlice
    expires_s: float
    num_pins: int = 0


class EmbeddingCache:
    """One for all pools.  Owned by the event loop; only the disk tier works elsewhere."""

    def __init__(
        self,
        buffer: SharedBuffer,
        disk: DiskTier | None = None,
        *,
        ttl_s: Mapping[MediaKind, float] = DEFAULT_TTL_S,
        now_s: Callable[[], float] = time.monotonic,
        on_event: Callable[[CacheEvent], None] = lambda event: None,
    ) -> None:
        self.buffer = buffer
        self.disk = disk
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._on_event = on_event
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._room = asyncio.Event()  # set whenever bytes may have become free
        self._writes: set[asyncio.Task[None]] = set()
        self._num_saving_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: bytes) -> BufferSlice | None:
        """Where the rows are, if they are in memory.  They stay there only while pinned."""
        entry = self._entries.get(key)
        return entry.rows if entry is not None else None

    async def has(self, key: bytes) -> bool:
        """Whether the rows are in memory or on disk, at the moment."""
        return key in self._entries or (self.disk is not None and await self.disk.has(key))

    def acquire(self, key: bytes) -> bool:
        """Pin the rows if they are in memory and not too old."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.expires_s <= self._now_s() and not entry.num_pins:
            self._drop(entry)
            return False
        self.pin(key)
        return True

    def pin(self, key: bytes) -> None:
        """Keep rows that are in memory where they are until `unpin`, once for each `pin`."""
        self._entries[key].num_pins += 1
        self._entries.move_to_end(key)

    def unpin(self, key: bytes) -> None:
        entry = self._entries[key]
        assert entry.num_pins > 0, f"window {key.hex()[:12]} unpinned twice"
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._room.set()

    def note_hit(self, window: MediaWindow, tier: str) -> None:
        entry = self._entries[window.key]
        self._on_event(CacheEvent("hit", tier, window.key, window.kind, window.num_rows, entry.expires_s - self._now_s()))

    async def allocate(self, shape: tuple[int, ...], dtype: str, timeout_s: float) -> BufferSlice:
        """Room for one array, made by eviction, or waited for when all is pinned.  Raises Overloaded after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._room.clear()
                    try:
                        return self._allocate_now(shape, dtype)
                    except OutOfBuffer:
                        await self._room.wait()
        except TimeoutError:
            raise Overloaded("no room for more media at the moment") from None

    def release(self, where: BufferSlice) -> None:
        """Give back what `allocate` gave and `insert` did not take over."""
        self.buffer.release(where)
        self._room.set()

    def insert(self, window: MediaWindow, rows: BufferSlice, ttl_s: float | None = None) -> None:
        """Take over rows that are complete and finite.  Not pinned: the caller pins before it next waits for anything."""
        assert window.key not in self._entries, f"window {window.key.hex()[:12]} inserted twice"
        assert rows.shape[0] == window.num_rows, f"{rows.shape[0]} rows for a window of {window.num_rows}"
        ttl_s = self._ttl_s[window.kind] if ttl_s is None else ttl_s
        self._entries[window.key] = _Entry(window, rows, self._now_s() + ttl_s)
        self._on_event(CacheEvent("stored", "memory", window.key, window.kind, window.num_rows, ttl_s))

    async def load(self, window: MediaWindow, rows: BufferSlice) -> float | None:
        """Fill `rows` from disk.  Returns the seconds they have left to live, or None: not there, or not sound."""
        if self.disk is None:
            return None
        age_s = await self.disk.read(window.key, self.buffer.array(rows), rows.dtype, self._ttl_s[window.kind])
        return None if age_s is None else self._ttl_s[window.kind] - age_s

    def save(self, window: MediaWindow) -> None:
        """Start writing the rows to disk, unless the disk is too far behind.  Nobody waits for it; they are pinned meanwhile."""
        if self.disk is None:
            return
        num_bytes = self._num_saving_bytes + self.buffer.array(self._entries[window.key].rows).nbytes
        if self._writes and num_bytes > SHARE_FOR_WRITES * self.buffer.memory.num_bytes:
            return
        self._num_saving_bytes = num_bytes
        self.pin(window.key)
        task = asyncio.create_task(self._save(self.disk, window), name="save-embedding")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def flush(self) -> None:
        """Wait for the writes under way."""
        while self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)

    async def close(self) -> None:
        await self.flush()
        if self.disk is not None:
            await self.disk.close()

    def check(self) -> None:
        """The books of cache and buffer agree."""
        self.buffer.check()
        held = [entry.rows.offset for entry in self._entries.values()]
        assert len(set(held)) == len(held), "two windows share a slice"
        assert all(key == entry.window.key for key, entry in self._entries.items())
        assert all(entry.num_pins >= 0 for entry in self._entries.values())

    @property
    def num_pinned(self) -> int:
        return sum(entry.num_pins > 0 for entry in self._entries.values())

    async def _save(self, disk: DiskTier, window: MediaWindow) -> None:
        entry = self._entries[window.key]
        try:
            if await disk.write(window.key, self.buffer.array(entry.rows), entry.rows.dtype, self._ttl_s[window.kind]):
                ttl_s = self._ttl_s[window.kind]
                self._on_event(CacheEvent("stored", "disk", window.key, window.kind, window.num_rows, ttl_s))
            for key in disk.take_dropped():
                self._on_event(CacheEvent("moved", "memory", key) if key in self._entries else CacheEvent("dropped", "disk", key))
        finally:
            self._num_saving_bytes -= self.buffer.array(entry.rows).nbytes
            self.unpin(window.key)

    def _allocate_now(self, shape: tuple[int, ...], dtype: str) -> BufferSlice:
        while True:
            try:
                return self.buffer.allocate(shape, dtype)
            except OutOfBuffer:
                victim = next((entry for entry in self._entries.values() if not entry.num_pins), None)
                if victim is None:
                    raise
                self._drop(victim)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.window.key]
        self.release(entry.rows)
        self._on_event(CacheEvent("dropped", "memory", entry.window.key))
