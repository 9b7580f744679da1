"""Embedding rows on disk, through diskcache.  Whatever is wrong there (forged, full, locked, slow, gone) is a miss, never an error.

Only bytes go in and only bytes come out: diskcache would unpickle what a forged row says.  Work is done by two threads of its own, one
for reads, so that nobody who wants rows waits behind those who leave some, and nobody waits for a disk that hangs.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import sqlite3
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import diskcache
import numpy as np
from diskcache.core import DBNAME, MODE_BINARY, MODE_RAW

from mmserve.clock import steady_epoch
from mmserve.config import ConfigError
from mmserve.encoders.disk_entry import pack, unpack
from mmserve.encoders.disk_thread import Claim, DiskThread, Withdrawn

log = logging.getLogger(__name__)
R = TypeVar("R")

READ_TIMEOUT_S = 3.0  # from the question to the rows; encoding them anew takes about as long on a busy machine
WRITE_TIMEOUT_S = 5.0
OPEN_TIMEOUT_S = 5.0
REOPEN_AFTER_S = 60.0  # between attempts to open an index that can't be opened just now
LOCK_TIMEOUT_S = 1.0
LOCK_PAUSE_S = 5.0  # an index that somebody holds locked is left alone for so long
SQLITE_CACHE_PAGES = 256  # a megabyte
MAX_USED = 10_000
_SLACK_S = 25 * 3600.0  # diskcache goes by the wall clock: its own expiry only sweeps up, ours decides
_WARN_EVERY_S = 60.0
_VALUE_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")
_DROPPED = (  # in the transaction that drops an entry, whoever decides it
    "CREATE TABLE IF NOT EXISTS Dropped (key BLOB PRIMARY KEY)",
    "CREATE TRIGGER IF NOT EXISTS Dropped_delete AFTER DELETE ON Cache BEGIN INSERT OR REPLACE INTO Dropped VALUES (OLD.key); END",
)
_TURN_OFF = "or turn the disk cache off with --embedding-disk-bytes 0"


class NotOurs(Exception):
    """An entry that this module can't have written.  Not an OSError, which diskcache takes for a file that is gone."""


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Bytes keys, bytes values, nothing else: no pickle, and no file but those diskcache names itself."""

    last_name = ""  # of the file written last

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
            fd = os.open(os.path.join(self._directory, filename), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise NotOurs("a pipe or a device")
                return file.read()
        except FileNotFoundError:
            raise
        except OSError as error:  # a link, a directory, or a disk that gives up
            raise NotOurs("a file that can't be read") from error

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        name, path = super().filename()
        self.last_name = name
        return name, path

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
        on_timeout: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._on_corrupt = on_corrupt
        self._on_timeout = on_timeout
        self._now_s = now_s or steady_epoch()
        self._reader = DiskThread("mmserve-disk-read")
        self._writer = DiskThread("mmserve-disk-write")
        self._cache: diskcache.Cache | None = None  # None: can't be opened just now, or has to be anew
        self._opened_s = -math.inf
        self._unlocked_s = -math.inf  # when a locked index may be written again
        self._warned_s = -math.inf
        self._dropped: deque[bytes] = deque()
        self._used: deque[bytes] = deque(maxlen=MAX_USED)  # keys found since the last write

    async def open(self) -> int | None:
        """Sweep what a killed predecessor left.  Returns the number of entries that it left, None if the disk can't say just now.

        Raises ConfigError when there is something wrong with the directory that only its owner can cure.
        """
        try:
            return await self._ask(self._writer, lambda claim: self._open(), OPEN_TIMEOUT_S)
        except BaseException:
            await self.close()
            raise

    async def read(self, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> float | None:
        """Fill `rows` [num_rows, hidden] and return the entry's age in seconds.  None is a miss, and then `rows` holds no promise.

        Nobody writes into `rows` when this has returned, however the disk hangs.
        """
        return await self._ask(self._reader, lambda claim: self._read(claim, key, rows, dtype, ttl_s), READ_TIMEOUT_S)

    async def has(self, key: bytes) -> bool:
        """Whether there is an entry, sound or not."""
        return bool(await self._ask(self._reader, lambda claim: self._cache is not None and key in self._cache, READ_TIMEOUT_S))

    async def write(self, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> bool:
        """True if the entry is there now.  Nobody reads `rows` when this has returned."""
        return bool(await self._ask(self._writer, lambda claim: self._write(claim, key, rows, dtype, ttl_s), WRITE_TIMEOUT_S))

    def take_dropped(self) -> list[bytes]:
        """Keys of entries that have been dropped, for their age or to make room, since this was last asked."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    async def close(self) -> None:
        for thread in (self._reader, self._writer):
            await self._ask(thread, lambda claim: self._disconnect(), WRITE_TIMEOUT_S)
            thread.stop()
        self._cache = None

    # --- waiting for a thread ------------------------------------------------------------------------------------------------

    async def _ask(self, thread: DiskThread, work: Callable[[Claim], R], timeout_s: float) -> R | None:
        if thread.hangs:
            return None
        try:
            return await thread.do(lambda claim: self._guarded(lambda: work(claim)), timeout_s)
        except TimeoutError:
            self._on_timeout()
            self._warn(f"no answer for {timeout_s:g} s")
            return None

    def _guarded(self, work: Callable[[], R]) -> R | None:
        try:
            return work()
        except Withdrawn:
            return None
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError, TypeError) as error:
            first = _first(error)
            self._warn(_name(first))
            if isinstance(error, diskcache.Timeout):
                self._unlocked_s = time.monotonic() + LOCK_PAUSE_S
            self._disconnect()  # a transaction that could be neither committed nor rolled back ends with its connection
            if _is_damage(first):
                self._cache = None
            return None

    def _warn(self, what: str) -> None:
        if time.monotonic() - self._warned_s > _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            log.warning("disk cache: %s; going on without", what)

    def _disconnect(self) -> None:
        """diskcache has one connection for each thread that used it."""
        if self._cache is not None:
            with suppress(sqlite3.Error):
                self._cache.close()

    # --- the writer's thread -------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        self._opened_s = time.monotonic()
        _require_directory(self._directory)
        try:
            cache = self._prepare()
        except (sqlite3.Error, TypeError, ValueError) as error:
            if not _is_damage(_first(error), sqlite3.SQLITE_ERROR):  # that: other tables or settings than ours
                raise
            self._move_aside()
            cache = self._prepare()
        self._cache = cache
        return len(cache)

    def _prepare(self) -> diskcache.Cache:
        cache = self._connect()
        try:
            for statement in _DROPPED:
                cache._sql(statement)
            self._sweep(cache)
            cache.cull()
            self._collect_dropped(cache)
        except BaseException:
            cache.close()
            raise
        return cache

    def _connect(self) -> diskcache.Cache:
        """Reading writes nothing, so that it works on a full disk, too; `_note_used` makes up for it.

        The file is never mapped: somebody who cuts it short must not end us with SIGBUS.  What SQLite keeps of it in memory is little: each
        thread has its own.
        """
        cache = diskcache.Cache(
            str(self._directory), timeout=LOCK_TIMEOUT_S, disk=BytesDisk, disk_min_file_size=0, size_limit=self._max_bytes,
            eviction_policy="least-recently-stored", cull_limit=10, statistics=0, tag_index=0, sqlite_mmap_size=0,
            sqlite_cache_size=SQLITE_CACHE_PAGES,
        )  # fmt: skip
        try:
            if cache._sql("PRAGMA quick_check").fetchone() != ("ok",):
                damaged = sqlite3.DatabaseError("quick_check failed")
                damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise damaged
        except BaseException:
            cache.close()
            raise
        return cache

    def _move_aside(self) -> None:
        """Kept for somebody to look at, the last one only."""
        log.warning("disk cache index is damaged: moved aside, starting empty")
        for old in self._directory.glob(f"{DBNAME}.corrupt-*"):
            old.unlink()
        for suffix in ("-wal", "-shm"):
            (self._directory / f"{DBNAME}{suffix}").unlink(missing_ok=True)
        (self._directory / DBNAME).rename(self._directory / f"{DBNAME}.corrupt-{int(time.time())}")

    def _sweep(self, cache: diskcache.Cache) -> None:
        """Files that no row names: a write that was killed halfway."""
        known = {name for (name,) in cache._sql("SELECT filename FROM Cache WHERE filename IS NOT NULL")}
        for path in _value_files(self._directory):
            if str(path.relative_to(self._directory)) not in known:
                path.unlink(missing_ok=True)

    def _write(self, claim: Claim, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> bool:
        with claim:
            copied = rows.copy()
        entry = pack(key, copied, dtype, self._now_s())
        if self._cache is None and time.monotonic() - self._opened_s > REOPEN_AFTER_S:
            self._open()
        cache = self._cache
        if cache is None or time.monotonic() < self._unlocked_s:
            return False
        cache.disk.last_name = ""
        try:
            self._note_used(cache)
            cache.set(key, entry, expire=ttl_s + _SLACK_S)
        except BaseException as error:
            cache.disk.remove(cache.disk.last_name)  # else a full disk stays full of halves that no row names
            if _is_full(_first(error)):
                with suppress(sqlite3.Error, diskcache.Timeout):
                    cache.expire()
            raise
        self._collect_dropped(cache)
        return True

    def _note_used(self, cache: diskcache.Cache) -> None:
        """Just before others may have to make room: what was stored longest ago goes first, and what was found is as good as new."""
        if used := {self._used.popleft() for _ in range(len(self._used))}:
            with cache.transact():
                for key in used:
                    cache._sql("UPDATE Cache SET store_time = ? WHERE key = ?", (time.time(), key))

    def _collect_dropped(self, cache: diskcache.Cache) -> None:
        with cache.transact():
            keys = cache._sql("SELECT key FROM Dropped WHERE key NOT IN (SELECT key FROM Cache)").fetchall()
            if keys:
                cache._sql("DELETE FROM Dropped")
        self._dropped.extend(key for (key,) in keys if type(key) is bytes)

    # --- the reader's thread -------------------------------------------------------------------------------------------------

    def _read(self, claim: Claim, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> float | None:
        cache = self._cache
        if cache is None:
            return None
        try:
            entry = cache.get(key)
        except NotOurs:
            entry = b""
        if entry is None:
            return None
        parsed = unpack(key, entry)
        if parsed is None:
            self._on_corrupt()
            cache.delete(key)
            return None
        created_s, stored_dtype, shape, payload = parsed
        if stored_dtype != dtype or shape != rows.shape:
            return None  # sound, but of another precision: the next write replaces it
        age_s = self._now_s() - created_s
        if not -_SLACK_S < age_s < ttl_s:  # a clock that was a day ahead, and then right, must not make it immortal
            cache.delete(key)
            return None
        with claim:
            rows[...] = np.frombuffer(payload, rows.dtype).reshape(rows.shape)
        self._used.append(key)
        return max(age_s, 0.0)


def _is_damage(error: BaseException, *also: int) -> bool:
    """Starting anew is the cure.  A full, locked or failing disk may hold a perfectly sound index."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, *also)


def _is_full(error: BaseException) -> bool:
    return getattr(error, "errno", None) == errno.ENOSPC or getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _first(error: BaseException) -> BaseException:
    """What went wrong before diskcache tried to roll back and failed at that."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _name(error: BaseException) -> str:
    """For a log line, without the path that str() would show."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return getattr(error, "sqlite_errorname", None) or type(error).__name__


def _value_files(directory: Path) -> Iterator[Path]:
    """Whatever lies where values lie.  A link in place of one of our folders is taken away, not followed."""
    for folders in ("??", "??/??"):
        for folder in list(directory.glob(folders)):
            if folder.is_symlink():
                folder.unlink()
    yield from directory.glob("??/??/*.val")


def _require_directory(directory: Path) -> None:
    """The data directory may be reached through links, its owner's own choice; nothing that we make inside may be one."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        pass  # a file, or a link to nothing
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
            raise ConfigError(f"the data directory can't be written: name another with --data-dir, {_TURN_OFF}") from None
        raise
    index = [directory / f"{DBNAME}{suffix}" for suffix in ("", "-wal", "-shm")]
    if directory.is_symlink() or not directory.is_dir() or any(path.is_symlink() for path in index):
        raise ConfigError(
            f"embeddings in the data directory must be a directory, no link, and have no links for an index: move it away, {_TURN_OFF}"
        )
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o002:
        raise ConfigError(f"embeddings in the data directory must be ours and nobody else's to write: mend its owner or mode, {_TURN_OFF}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"embeddings in the data directory can't be written: mend its mode, {_TURN_OFF}")
