"""The disk cache on disks that are full, slow, locked or replaced: requests go on without it, and nothing wrong comes out of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import disk_writer
import numpy as np
import pytest
from disk_writer import TTL_S, key_of, rows_of
from small_disk import SmallDisk
from test_encoder_pool import picture, running

from mmserve.clock import steady_epoch
from mmserve.config import ConfigError
from mmserve.encoders import disk_tier
from mmserve.encoders.disk_tier import BytesDisk, DiskTier

LARGE = np.random.default_rng(0).standard_normal((64, 1024), np.float32)  # 256 KiB
TURN_OFF = "--embedding-disk-bytes 0"


@asynccontextmanager
async def opened(directory: Path, max_bytes: int = 2**24, **kwargs: Callable[[], float]) -> AsyncIterator[DiskTier]:
    tier = DiskTier(directory, max_bytes, **kwargs)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def read(tier: DiskTier, number: int, like: np.ndarray | None = None) -> np.ndarray | None:
    rows = np.zeros_like(rows_of(0) if like is None else like)
    return None if await tier.read(key_of(number), rows, "float32", TTL_S) is None else rows


async def write(tier: DiskTier, number: int, rows: np.ndarray | None = None) -> bool:
    return await tier.write(key_of(number), rows_of(number) if rows is None else rows, "float32", TTL_S)


def value_files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.glob("??/??/*.val")}


def num_bytes(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in value_files(directory))


def names_in_index(directory: Path) -> set[str]:
    db = sqlite3.connect(directory / "cache.db")
    names = {name for (name,) in db.execute("SELECT filename FROM Cache")}
    db.close()
    return names


# --- full


async def test_a_full_disk_leaves_no_halves_says_so_once_a_minute_and_takes_new_rows_once_there_is_room(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that had found no room used to stay behind, cut short, and no row named it: the disk stayed full of those for ever."""
    directory = small_disk.directory / "cache"
    async with opened(directory) as tier:
        assert await write(tier, 0, LARGE)
        small_disk.fill()
        assert [await write(tier, number, LARGE) for number in range(1, 21)] == [False] * 20
        assert len(caplog.records) == 1
        tier._warned_s -= 61.0
        assert not await write(tier, 1, LARGE)
        assert len(caplog.records) == 2
        assert value_files(directory) == names_in_index(directory)
        assert (await read(tier, 0, LARGE) == LARGE).all()
        small_disk.free()
        assert await write(tier, 1, LARGE)
        assert (await read(tier, 1, LARGE) == LARGE).all()
    assert all("space left" in record.message or "too large" in record.message for record in caplog.records)


async def test_a_server_starts_on_a_full_disk_and_keeps_what_lies_there(small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index could not be opened, was taken for a damaged one, and was moved aside with everything in it."""
    directory = small_disk.directory / "cache"
    async with opened(directory) as tier:
        assert await write(tier, 0)
    small_disk.fill()
    async with opened(directory) as tier:
        await write(tier, 1, LARGE)
        small_disk.free()
        monkeypatch.setattr(disk_tier, "REOPEN_AFTER_S", 0.0)
        assert await write(tier, 1, LARGE)
        assert (await read(tier, 0) == rows_of(0)).all()
    assert not list(directory.glob("*.corrupt-*"))


# --- killed


async def test_a_writer_killed_fifty_times_leaves_only_rows_that_are_right(tmp_path: Path) -> None:
    """Sound hits, no file that no row names, and no more bytes than allowed; whatever it was doing when it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["disk_writer"])
    draw = random.Random(16)
    num_orphans = num_hits = last = 0
    for _ in range(50):
        progress, theirs = context.Pipe(duplex=False)
        writer = context.Process(target=disk_writer.fill, args=(tmp_path, last + 1, theirs))
        writer.start()
        theirs.close()
        for _ in range(draw.randint(1, 8)):
            last = progress.recv()
        await asyncio.sleep(draw.uniform(0.0, 0.004))  # anywhere within a write
        writer.kill()
        writer.join()
        progress.close()
        num_orphans += len(value_files(tmp_path) - names_in_index(tmp_path))
        async with opened(tmp_path, disk_writer.MAX_BYTES) as tier:
            for number in range(disk_writer.NUM_KEYS):
                rows = await read(tier, number)
                if rows is not None:
                    assert (rows == rows_of(number)).all()
                    num_hits += 1
            assert value_files(tmp_path) <= names_in_index(tmp_path)
            assert num_bytes(tmp_path) <= disk_writer.MAX_BYTES
    assert num_hits > 500
    assert num_orphans > 0, "no kill came between a file and its row: this test has tested nothing"


# --- somebody else's directory


def make_link(path: Path) -> None:
    path.with_name("real").mkdir()
    path.symlink_to(path.with_name("real"))


def link_index(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "cache.db").symlink_to(path.with_name("victim"))


def let_others_write(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize("make", [make_link, Path.touch, link_index, let_others_write])
async def test_a_directory_that_is_not_ours_alone_is_refused_and_the_message_names_the_ways_out(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "embeddings")
    with pytest.raises(ConfigError, match="embeddings in the data directory") as error:
        await DiskTier(tmp_path / "embeddings", 2**20).open()
    assert TURN_OFF in error.value.message
    assert str(tmp_path) not in error.value.message
    assert not (tmp_path / "victim").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "embeddings").mkdir(mode=0o700)
    os.chown(tmp_path / "embeddings", 65534, 65534)
    with pytest.raises(ConfigError, match="mend its owner"):
        await DiskTier(tmp_path / "embeddings", 2**20).open()


async def test_a_read_only_disk_is_refused(small_filesystem: SmallDisk) -> None:
    small_filesystem.freeze()
    with pytest.raises(ConfigError, match="can't be written"):
        await DiskTier(small_filesystem.directory / "embeddings", 2**20).open()


def test_the_command_line_says_so_in_one_sentence(tmp_path: Path) -> None:
    make_link(tmp_path / "embeddings")
    command = [sys.executable, "-m", "mmserve", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert TURN_OFF in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


async def test_a_data_directory_may_be_reached_through_a_link(tmp_path: Path) -> None:
    """Its owner put it there.  What we make inside it may not be one."""
    make_link(tmp_path / "data")
    async with opened(tmp_path / "data" / "embeddings") as tier:
        assert await write(tier, 0)


async def test_a_link_in_place_of_a_folder_is_taken_away_and_what_it_leads_to_is_not_touched(tmp_path: Path) -> None:
    """The sweep of files that no row names went through such links, and deleted what it found there."""
    victim = tmp_path / "elsewhere" / "bb" / f"{'c' * 28}.val"
    victim.parent.mkdir(parents=True)
    victim.touch()
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "aa").symlink_to(tmp_path / "elsewhere")
    (cache / "dd").mkdir()
    (cache / "dd" / "bb").symlink_to(victim.parent)
    async with opened(cache) as tier:
        assert await write(tier, 0)
    assert victim.exists()
    assert not [path for path in cache.rglob("*") if path.is_symlink()]


async def test_a_pipe_in_place_of_a_value_holds_up_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        assert await write(tier, 0)
        (name,) = value_files(tmp_path)
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        assert await read(tier, 0) is None
        assert await write(tier, 0)
        assert await read(tier, 0) is not None


# --- the index


async def test_an_index_ruined_while_we_run_is_moved_aside_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "REOPEN_AFTER_S", 0.0)
    async with opened(tmp_path) as tier:
        assert await write(tier, 0)
        await tier._writer.do(lambda claim: tier._cache._sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall(), 10.0)  # type: ignore[union-attr]
        (tmp_path / "cache.db").write_bytes(b"this was a database" * 5000)
        async with asyncio.timeout(30):
            while not (await write(tier, 1) and await read(tier, 1) is not None):
                pass
    assert sum(name.startswith("cache.db.corrupt-") for name in os.listdir(tmp_path)) == 1


@pytest.mark.parametrize(
    "forgery",
    [
        "INSERT INTO Settings VALUES ('disk_unheard_of', 1)",
        "DROP TABLE Cache; CREATE TABLE Cache (picture TEXT)",
        "DROP TABLE Settings; CREATE TABLE Settings (key TEXT NOT NULL UNIQUE, value); INSERT INTO Settings VALUES ('size', 'much')",
    ],
)
async def test_an_index_that_diskcache_cannot_make_sense_of_is_moved_aside(tmp_path: Path, forgery: str) -> None:
    async with opened(tmp_path) as tier:
        assert await write(tier, 0)
    db = sqlite3.connect(tmp_path / "cache.db")
    db.executescript(forgery)
    db.close()
    async with opened(tmp_path) as tier:
        await write(tier, 1)
        assert await write(tier, 1)
        assert (await read(tier, 1) == rows_of(1)).all()


async def test_an_index_cut_short_while_we_run_does_not_end_us(tmp_path: Path) -> None:
    """diskcache maps the file into memory; who reads a mapped page that is gone gets SIGBUS."""
    async with opened(tmp_path) as tier:
        assert await write(tier, 0)
        assert tier._cache is not None
        assert await tier._reader.do(lambda claim: tier._cache._sql("PRAGMA mmap_size").fetchone(), 10.0) == (0,)  # type: ignore[union-attr]
        os.truncate(tmp_path / "cache.db", 4096)
        await read(tier, 0)


async def test_a_locked_index_can_be_read_and_is_waited_for_by_one_write_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads noted when an entry was last used, and so took a second of waiting each: ten pictures waited ten seconds for no rows."""
    monkeypatch.setattr(disk_tier, "LOCK_PAUSE_S", 3600.0)
    async with opened(tmp_path) as tier:
        assert await write(tier, 0)
        other = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        assert not await write(tier, 1)
        tries = []
        with monkeypatch.context() as patch:
            patch.setattr("diskcache.Cache.set", lambda *args, **_: tries.append(args))
            assert not any([await write(tier, number) for number in range(20)])
            assert not tries
        assert await read(tier, 0) is not None
        other.execute("ROLLBACK")
        other.close()
        tier._unlocked_s = 0.0
        assert await write(tier, 1)


async def test_what_was_found_lately_makes_room_last(tmp_path: Path) -> None:
    async with opened(tmp_path, disk_writer.MAX_BYTES) as tier:
        for number in range(disk_writer.NUM_KEYS):
            assert await write(tier, number)
            assert await read(tier, 0) is not None
        assert await read(tier, 1) is None


# --- slow


class Hanging(BytesDisk):
    """Reads hang until the test says so."""

    answers = threading.Event()

    def fetch(self, *args: object) -> bytes:
        self.answers.wait()
        return super().fetch(*args)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(disk_tier, "BytesDisk", Hanging)
    monkeypatch.setattr(disk_tier, "READ_TIMEOUT_S", 0.3)
    Hanging.answers.clear()
    yield Hanging.answers
    Hanging.answers.set()


async def test_a_read_that_hangs_is_a_miss_after_a_while_and_touches_nobodys_memory_when_it_comes_back(
    tmp_path: Path, hanging: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    timeouts: list[int] = []
    tier = DiskTier(tmp_path, 2**24, on_timeout=lambda: timeouts.append(1))
    await tier.open()
    assert await write(tier, 0)
    rows = np.full_like(rows_of(0), -1.0)
    assert await tier.read(key_of(0), rows, "float32", TTL_S) is None
    assert [await read(tier, number) for number in range(100)] == [None] * 100  # at once: nobody asks a disk that hangs
    assert timeouts == [1]
    assert [record.message for record in caplog.records] == ["disk cache: no answer for 0.3 s; going on without"]
    hanging.set()
    async with asyncio.timeout(30):
        while await read(tier, 0) is None:
            await asyncio.sleep(0.01)
    assert (rows == -1.0).all()
    await tier.close()


async def test_a_picture_whose_rows_hang_on_disk_is_encoded_and_others_go_on(tmp_path: Path, hanging: threading.Event) -> None:
    hanging.set()
    tier = DiskTier(tmp_path, 2**24)
    await tier.open()
    async with running(disk=tier) as pool:
        assert await pool.fetch(picture(7)) == ("encoded", 7.0)
    hanging.clear()
    tier = DiskTier(tmp_path, 2**24)
    await tier.open()
    async with running(disk=tier) as pool:
        assert await pool.fetch(picture(7)) == ("encoded", 7.0)
        assert await asyncio.gather(*(pool.fetch(picture(value)) for value in range(20, 40))) == [
            ("encoded", float(v)) for v in range(20, 40)
        ]


async def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, hanging: threading.Event) -> None:
    tier = DiskTier(tmp_path, 2**24)
    await tier.open()
    assert await write(tier, 0)
    assert await read(tier, 0) is None
    async with asyncio.timeout(5):
        await tier.close()
    assert not hanging.is_set()


async def test_a_write_that_hangs_lets_go_of_the_rows_and_further_ones_are_not_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are pinned while they are written; sixty-four that nobody can write would fill the shared buffer."""
    answers = threading.Event()
    monkeypatch.setattr(disk_tier, "WRITE_TIMEOUT_S", 0.3)
    async with opened(tmp_path) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(BytesDisk, "store", lambda *args: answers.wait())
            writes = [asyncio.create_task(write(tier, number)) for number in range(64)]
            assert not any(await asyncio.gather(*writes))
            assert not await write(tier, 99)
        answers.set()
        async with asyncio.timeout(30):
            while not await write(tier, 99):
                await asyncio.sleep(0.01)


# --- what has gone


async def test_the_index_of_the_cache_hears_of_every_entry_that_made_room_for_others(tmp_path: Path) -> None:
    async with opened(tmp_path, disk_writer.MAX_BYTES) as tier:
        for number in range(disk_writer.NUM_KEYS):
            assert await write(tier, number)
        dropped = tier.take_dropped()
        there = [number for number in range(disk_writer.NUM_KEYS) if await read(tier, number) is not None]
    assert 0 < len(there) < disk_writer.NUM_KEYS
    assert sorted(dropped) == sorted(key_of(number) for number in range(disk_writer.NUM_KEYS) if number not in there)


async def test_what_was_dropped_just_before_a_kill_is_still_told(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        assert await write(tier, 0)
        assert await write(tier, 1)
    db = sqlite3.connect(tmp_path / "cache.db")
    db.execute("DELETE FROM Cache WHERE key = ?", (key_of(0),))
    db.commit()
    db.close()
    async with opened(tmp_path) as tier:
        assert tier.take_dropped() == [key_of(0)]


@pytest.mark.parametrize("step_s", [-3600.0, 86_400.0])
async def test_a_clock_that_is_set_while_we_run_makes_no_entry_older_or_younger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """F-40.  Neither purged in a body nor immortal: entries live for their day of monotonic time."""
    now_s, wall_s = steady_epoch(), time.time
    later_s = 0.0
    async with opened(tmp_path, now_s=lambda: now_s() + later_s) as tier:
        for number in range(20):
            assert await write(tier, number)
        monkeypatch.setattr(time, "time", lambda: wall_s() + step_s + later_s)
        for number in range(20, 30):
            assert await write(tier, number)
        assert all([await read(tier, number) is not None for number in range(30)])
        later_s = TTL_S - 60.0
        assert all([await read(tier, number) is not None for number in range(30)])
        later_s = TTL_S + 1.0
        assert not any([await read(tier, number) is not None for number in range(30)])


async def test_an_entry_from_a_clock_that_was_years_ahead_is_not_immortal(tmp_path: Path) -> None:
    """F-40.  A day's error either way makes an entry older or younger by as much, and no more."""
    now = time.time()
    async with opened(tmp_path, now_s=lambda: now + 10 * 365 * 86_400) as tier:
        assert await write(tier, 0)
    async with opened(tmp_path, now_s=lambda: now) as tier:
        assert await read(tier, 0) is None
    async with opened(tmp_path, now_s=lambda: now + 3600) as tier:
        assert await write(tier, 0)
    async with opened(tmp_path, now_s=lambda: now) as tier:
        assert await read(tier, 0) is not None
