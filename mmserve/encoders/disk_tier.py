"""Embedding rows on disk, through diskcache.  Whatever is wrong there (corrupt, forged, full, locked, gone) is a miss, never an error.

An entry is a header and the rows as they lie in memory.  The header's digest covers everything, the window's key included, so rows
can't be served under another picture's name.  Only bytes go in and only bytes come out: diskcache would unpickle what a forged row says.
Work is done by two threads of its own, one for reads, so that nobody who wants rows waits behind those who leave some.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import sqlite3
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import diskcache
import numpy as np
from diskcache.core import MODE_BINARY, MODE_RAW

log = logging.getLogger(__name__)
R = TypeVar("R")

MAGIC = b"MMROWS1\n"
_HEADER = struct.Struct("<8s32s12sIIdQ32s")  # magic, key, dtype, rows, hidden, created (s since the epoch), bytes, SHA-256
_SLACK_S = 25 * 3600.0  # diskcache goes by the wall clock: its own expiry only sweeps up, ours decides
_WARN_EVERY_S = 60.0
_VALUE_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")


class NotOurs(Exception):
    """An entry that this module can't have written.  Not an OSError, which diskcache takes for a file that is gone."""


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Bytes keys, bytes values, nothing else: no pickle, and no file but those diskcache names itself."""

    def put(self, key: Any) -> tuple[Any, bool]:
        if type(key) is not bytes:
            raise TypeError("keys are bytes")
        return sqlite3.Binary(key), True

    def get(self, key: Any, raw: bool) -> bytes:
        if not raw:
            raise NotOurs("a key that is not bytes")
        return bytes(key)

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, str | None, Any]:
        if type(value) is not bytes or read:
            raise TypeError("values are bytes")
        return super().store(value, False, key)  # type: ignore[no-any-return]

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
        if mode == MODE_RAW and type(value) in (bytes, memoryview):
            return bytes(value)
        if mode != MODE_BINARY or filename is None or not _VALUE_NAME.fullmatch(filename):
            raise NotOurs("an entry that is not bytes")
        try:
            fd = os.open(os.path.join(self._directory, filename), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise
        except OSError as error:  # a link, a directory, or a disk that gives up
            raise NotOurs("a file that can't be read") from error

    def remove(self, file_path: str) -> None:
        if _VALUE_NAME.fullmatch(file_path):
            super().remove(file_path)


class DiskTier:
    """`await open()` before use; `now_s` gives seconds since the epoch."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        *,
        on_corrupt: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._on_corrupt = on_corrupt
        self._now_s = now_s or steady_epoch()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="mmserve-disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mmserve-disk-write")
        self._cache: diskcache.Cache | None = None
        self._warned_s = -math.inf

    async def open(self) -> None:
        """Sweep what a killed predecessor left.  Raises OSError when the directory is a link, not ours, or not writable."""
        await _do(self._writer, self._open)

    async def read(self, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> float | None:
        """Fill `rows` [num_rows, hidden] and return the entry's age in seconds.  None is a miss, and then `rows` holds no promise."""
        return await _do(self._reader, self._guarded, lambda: self._read(key, rows, dtype, ttl_s))

    async def write(self, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> bool:
        """True if the entry is there now."""
        return bool(await _do(self._writer, self._guarded, lambda: self._write(key, rows, dtype, ttl_s)))

    async def close(self) -> None:
        for thread in (self._reader, self._writer):
            await _do(thread, self._disconnect)
            thread.shutdown()
        self._cache = None

    def _open(self) -> None:
        _require_directory(self._directory)
        try:
            self._cache = self._connect()
        except (sqlite3.DatabaseError, OSError):
            aside = self._directory / f"cache.db.corrupt-{int(time.time())}"
            log.warning("disk cache index is damaged: moved aside, starting empty")
            for suffix in ("-wal", "-shm"):
                (self._directory / f"cache.db{suffix}").unlink(missing_ok=True)
            (self._directory / "cache.db").rename(aside)
            self._cache = self._connect()
        self._sweep(self._cache)

    def _connect(self) -> diskcache.Cache:
        cache = diskcache.Cache(
            str(self._directory), timeout=1.0, disk=BytesDisk, disk_min_file_size=0, size_limit=self._max_bytes,
            eviction_policy="least-recently-used", statistics=0, tag_index=0,
        )  # fmt: skip
        try:
            if cache._sql("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("quick_check failed")
        except BaseException:
            cache.close()
            raise
        return cache

    def _sweep(self, cache: diskcache.Cache) -> None:
        """Files that no row names: a write that was killed halfway."""
        known = {name for (name,) in cache._sql("SELECT filename FROM Cache WHERE filename IS NOT NULL")}
        for path in self._directory.glob("??/??/*.val"):
            if str(path.relative_to(self._directory)) not in known:
                path.unlink(missing_ok=True)

    def _disconnect(self) -> None:
        """diskcache has one connection for each thread that used it."""
        if self._cache is not None:
            self._cache.close()

    def _guarded(self, work: Callable[[], R]) -> R | None:
        try:
            return work()
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError, TypeError) as error:
            if time.monotonic() - self._warned_s > _WARN_EVERY_S:
                self._warned_s = time.monotonic()
                log.warning("disk cache: %s; going on without", type(error).__name__)
            return None

    def _read(self, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> float | None:
        if self._cache is None:
            return None
        try:
            entry = self._cache.get(key)
        except NotOurs:
            entry = b""
        if entry is None:
            return None
        parsed = unpack(key, entry)
        if parsed is None:
            self._on_corrupt()
            self._forget(key)
            return None
        created_s, stored_dtype, shape, payload = parsed
        if stored_dtype != dtype or shape != rows.shape:
            return None  # sound, but of another precision: the next write replaces it
        age_s = self._now_s() - created_s
        if age_s >= ttl_s:
            self._forget(key)
            return None
        rows[...] = np.frombuffer(payload, rows.dtype).reshape(rows.shape)
        return max(age_s, 0.0)

    def _write(self, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> bool:
        if self._cache is None:
            return False
        return bool(self._cache.set(key, pack(key, rows, dtype, self._now_s()), expire=ttl_s + _SLACK_S))

    def _forget(self, key: bytes) -> None:
        assert self._cache is not None
        with suppress(sqlite3.Error, diskcache.Timeout, OSError):
            self._cache.delete(key)


def _do(thread: ThreadPoolExecutor, work: Callable[..., R], *args: Any) -> asyncio.Future[R]:
    return asyncio.get_running_loop().run_in_executor(thread, work, *args)


def pack(key: bytes, rows: np.ndarray, dtype: str, created_s: float) -> bytes:
    """Header and rows [num_rows, hidden] as one entry."""
    payload = rows.tobytes()
    fields = (MAGIC, key, dtype.encode(), rows.shape[0], rows.shape[1], created_s, len(payload))
    digest = hashlib.sha256(_HEADER.pack(*fields, b""))
    digest.update(payload)
    return _HEADER.pack(*fields, digest.digest()) + payload


def unpack(key: bytes, entry: bytes) -> tuple[float, str, tuple[int, int], memoryview] | None:
    """(created, dtype, shape, rows as bytes) of a sound entry of this very key, else None."""
    if len(entry) < _HEADER.size:
        return None
    *fields, stored = _HEADER.unpack_from(entry)
    magic, stored_key, dtype, num_rows, hidden, created_s, num_bytes = fields
    payload = memoryview(entry)[_HEADER.size :]
    if (magic, stored_key, num_bytes) != (MAGIC, key, len(payload)) or not math.isfinite(created_s):
        return None
    digest = hashlib.sha256(_HEADER.pack(*fields, b""))
    digest.update(payload)
    if digest.digest() != stored:
        return None
    return created_s, dtype.rstrip(b"\0").decode(errors="replace"), (num_rows, hidden), payload


def steady_epoch() -> Callable[[], float]:
    """Seconds since the epoch that no setting of the clock moves while we run."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def _require_directory(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if directory.is_symlink() or not directory.is_dir():
        raise NotADirectoryError("the disk cache must be a directory, not a link")
    if directory.stat().st_uid != os.geteuid() or not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError("the disk cache's directory must be ours and writable")
