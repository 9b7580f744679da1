"""Rows are found by their key alone, stay while pinned, and what lies broken on disk is never served."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from mmserve.config import ConfigError
from mmserve.encoders.disk_entry import HEADER, pack, unpack
from mmserve.encoders.disk_tier import DiskTier
from mmserve.encoders.embedding_cache import CacheEvent, EmbeddingCache
from mmserve.errors import Overloaded
from mmserve.media import MediaKind, MediaWindow
from mmserve.shared_buffer import BufferSlice, SharedBuffer

ROWS = (4, 8)
SLICE_BYTES = 4 * 8 * 4
SLOT = 256  # what one slice takes of the buffer


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def window(name: str, kind: MediaKind = MediaKind.IMAGE) -> MediaWindow:
    return MediaWindow(hashlib.sha256(name.encode()).digest(), kind, ROWS[0])


class House:
    """A cache with room for `slots` windows, and everything that was said about it."""

    def __init__(self, slots: int = 3, disk: DiskTier | None = None) -> None:
        self.clock = Clock()
        self.events: list[tuple[str, str, bytes]] = []
        self.buffer = SharedBuffer(slots * SLOT)
        self.cache = EmbeddingCache(self.buffer, disk, now_s=self.clock, on_event=self._note)

    def _note(self, event: CacheEvent) -> None:
        self.events.append((event.what, event.tier, event.key))

    async def put(self, name: str, kind: MediaKind = MediaKind.IMAGE, value: float = 1.0) -> BufferSlice:
        rows = await self.cache.allocate(ROWS, "float32", 0.01)
        self.buffer.array(rows)[...] = value
        self.cache.insert(window(name, kind), rows)
        return rows

    def has(self, name: str) -> bool:
        return self.cache.lookup(window(name).key) is not None


async def test_rows_are_found_where_they_were_put() -> None:
    house = House()
    rows = await house.put("a", value=5.0)
    assert house.cache.lookup(window("a").key) == rows
    assert house.cache.lookup(window("b").key) is None
    assert house.events == [("stored", "memory", window("a").key)]
    house.cache.check()


async def test_the_least_recently_used_goes_first() -> None:
    house = House(3)
    for name in "abc":
        await house.put(name)
    assert house.cache.acquire(window("a").key)
    house.cache.unpin(window("a").key)
    await house.put("d")
    assert [house.has(name) for name in "abcd"] == [True, False, True, True]
    assert house.events[-2] == ("dropped", "memory", window("b").key)
    house.cache.check()


async def test_pinned_rows_are_never_evicted_and_the_caller_who_finds_no_room_is_told_to_come_back() -> None:
    house = House(2)
    for name in "ab":
        await house.put(name)
        house.cache.pin(window(name).key)
    with pytest.raises(Overloaded):
        await house.cache.allocate(ROWS, "float32", 0.01)
    assert house.has("a")
    assert house.has("b")
    assert house.cache.num_pinned == 2


async def test_waiting_for_room_ends_when_something_is_unpinned() -> None:
    house = House(1)
    await house.put("a")
    house.cache.pin(window("a").key)
    house.cache.pin(window("a").key)
    waiting = asyncio.create_task(house.cache.allocate(ROWS, "float32", 60.0))
    for _ in range(3):
        await asyncio.sleep(0)
    house.cache.unpin(window("a").key)
    await asyncio.sleep(0)
    assert not waiting.done()
    house.cache.unpin(window("a").key)
    await waiting
    assert not house.has("a")


async def test_all_who_wait_for_room_get_it_when_there_is_enough() -> None:
    house = House(3)
    rows = [await house.cache.allocate(ROWS, "float32", 0.01) for _ in range(3)]
    waiting = [asyncio.create_task(house.cache.allocate(ROWS, "float32", 60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    for where in rows:
        house.cache.release(where)
    assert len({where.offset for where in await asyncio.gather(*waiting)}) == 3


async def test_those_who_wait_for_more_than_there_is_sleep_and_do_not_wake_each_other_for_ever() -> None:
    house = House(3)
    rows = [await house.cache.allocate(ROWS, "float32", 0.01) for _ in range(3)]
    waiting = [asyncio.create_task(house.cache.allocate((3 * ROWS[0] * 2, ROWS[1]), "float32", 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    attempts, allocate = [0], house.buffer.allocate

    def count(shape: tuple[int, ...], dtype: str) -> BufferSlice:
        attempts[0] += 1
        return allocate(shape, dtype)

    house.buffer.allocate = count  # type: ignore[method-assign]
    house.cache.release(rows[0])
    for _ in range(50):
        await asyncio.sleep(0)
    assert attempts == [2]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_unpinning_twice_is_a_bug_of_ours() -> None:
    house = House()
    await house.put("a")
    house.cache.pin(window("a").key)
    house.cache.unpin(window("a").key)
    with pytest.raises(AssertionError, match="unpinned twice"):
        house.cache.unpin(window("a").key)


async def test_pictures_live_a_day_and_clips_an_hour() -> None:
    house = House()
    await house.put("picture", MediaKind.IMAGE)
    await house.put("clip", MediaKind.AUDIO)
    house.clock.now_s += 3599
    assert house.cache.acquire(window("clip").key)
    house.cache.unpin(window("clip").key)
    house.clock.now_s += 2
    assert not house.cache.acquire(window("clip").key)
    assert house.cache.acquire(window("picture").key)
    house.cache.unpin(window("picture").key)
    house.clock.now_s += 86_400
    assert not house.cache.acquire(window("picture").key)
    assert len(house.cache) == 0


async def test_rows_that_grow_too_old_while_pinned_stay_until_unpinned() -> None:
    house = House()
    await house.put("a")
    house.cache.pin(window("a").key)
    house.clock.now_s += 90_000
    assert house.has("a")
    house.cache.unpin(window("a").key)
    assert not house.cache.acquire(window("a").key)


async def test_the_wrong_number_of_rows_is_never_taken() -> None:
    house = House()
    rows = await house.cache.allocate((3, 8), "float32", 0.01)
    with pytest.raises(AssertionError, match="3 rows for a window of 4"):
        house.cache.insert(window("a"), rows)


# --- on disk


@asynccontextmanager
async def disk_tier(directory: Path, now_s: Clock | None = None, max_bytes: int = 2**24) -> AsyncIterator[tuple[DiskTier, list[int]]]:
    corrupt = [0]

    def count() -> None:
        corrupt[0] += 1

    tier = DiskTier(directory, max_bytes, on_corrupt=count, now_s=now_s)
    await tier.open()
    try:
        yield tier, corrupt
    finally:
        await tier.close()


KEY, OTHER_KEY = window("a").key, window("b").key
VALUES = np.arange(32, dtype=np.float32).reshape(ROWS)
DAY_S = 86_400.0


async def read(tier: DiskTier, key: bytes = KEY, dtype: str = "float32") -> np.ndarray | None:
    rows = np.zeros(ROWS, np.uint16 if dtype == "bfloat16" else np.float32)
    return None if await tier.read(key, rows, dtype, DAY_S) is None else rows


def value_files(directory: Path) -> list[Path]:
    return list(directory.glob("??/??/*.val"))


def value_file(directory: Path) -> Path:
    (path,) = value_files(directory)
    return path


async def test_rows_survive_a_restart(tmp_path: Path) -> None:
    async with disk_tier(tmp_path) as (tier, _):
        assert await tier.write(KEY, VALUES, "float32", DAY_S)
    async with disk_tier(tmp_path) as (tier, corrupt):
        rows = await read(tier)
        assert rows is not None
        assert (rows == VALUES).all()
        assert await read(tier, OTHER_KEY) is None
        assert corrupt == [0]


async def test_the_cache_loads_from_disk_what_another_life_saved(tmp_path: Path) -> None:
    async with disk_tier(tmp_path) as (tier, _):
        house = House(disk=tier)
        await house.put("a", value=5.0)
        house.cache.save(window("a"))
        await house.cache.flush()
        assert house.cache.num_pinned == 0
        assert house.events[-1] == ("stored", "disk", KEY)
    async with disk_tier(tmp_path) as (tier, _):
        house = House(disk=tier)
        rows = await house.cache.allocate(ROWS, "float32", 0.01)
        left_s = await house.cache.load(window("a"), rows)
        assert left_s is not None
        assert 0 < left_s <= DAY_S
        assert (house.buffer.array(rows) == 5.0).all()


class SlowDisk(DiskTier):
    """Writes take as long as the test wants."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 2**24)
        self.gate = asyncio.Event()

    async def write(self, key: bytes, rows: np.ndarray, dtype: str, ttl_s: float) -> bool:
        await self.gate.wait()
        return True


async def test_a_slow_disk_holds_no_more_memory_than_its_share(tmp_path: Path) -> None:
    """Rows are pinned while they are written: sixty-four of them took more than the buffer had left for requests, who then waited."""
    tier = SlowDisk(tmp_path)
    await tier.open()
    house = House(32, tier)
    for i in range(32):
        await house.put(str(i))
        house.cache.save(window(str(i)))
    assert 0 < house.cache.num_pinned * SLICE_BYTES <= 32 * SLOT // 8
    tier.gate.set()
    await house.cache.flush()
    assert house.cache.num_pinned == 0
    house.cache.save(window("31"))
    assert house.cache.num_pinned == 1
    await house.cache.close()


class MakingRoom(DiskTier):
    """Whatever is written, two others make room for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 2**24)
        self._dropped.extend([window("a").key, window("b").key])


async def test_rows_that_leave_the_disk_are_gone_or_have_moved_to_memory(tmp_path: Path) -> None:
    tier = MakingRoom(tmp_path)
    await tier.open()
    house = House(disk=tier)
    await house.put("a")
    await house.put("c")
    house.cache.save(window("c"))
    await house.cache.close()
    assert house.events[-2:] == [("moved", "memory", window("a").key), ("dropped", "disk", window("b").key)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
        lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
        lambda data: data + b"\0",
        lambda data: b"XXROWS1\n" + data[8:],
        lambda data: pickle.dumps({"rows": 1}),
    ],
)
async def test_a_damaged_entry_is_a_miss_is_counted_and_is_dropped(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    async with disk_tier(tmp_path) as (tier, corrupt):
        await tier.write(KEY, VALUES, "float32", DAY_S)
        path = value_file(tmp_path)
        path.write_bytes(damage(path.read_bytes()))
        assert await read(tier) is None
        assert corrupt == [1]
        assert await read(tier) is None
        assert corrupt == [1]
        assert await tier.write(KEY, VALUES, "float32", DAY_S)
        assert await read(tier) is not None


async def test_rows_are_never_served_under_another_key(tmp_path: Path) -> None:
    """A forged index that names one picture's file under another's key."""
    async with disk_tier(tmp_path) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
    with sqlite3.connect(tmp_path / "cache.db") as db:
        db.execute("UPDATE Cache SET key = ?", (OTHER_KEY,))
    db.close()
    async with disk_tier(tmp_path) as (tier, corrupt):
        assert await read(tier, OTHER_KEY) is None
        assert corrupt == [1]


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
@pytest.mark.parametrize("inline", [True, False])
async def test_a_forged_row_runs_no_code(tmp_path: Path, mode: int, inline: bool) -> None:
    house, flag = tmp_path / "cache", tmp_path / "flag"
    bomb = pickle.dumps(Bomb(flag))
    async with disk_tier(house) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
    value_file(house).write_bytes(bomb)
    with sqlite3.connect(house / "cache.db") as db:
        if inline:
            db.execute("UPDATE Cache SET mode = ?, filename = NULL, value = ?", (mode, bomb))
        else:
            db.execute("UPDATE Cache SET mode = ?", (mode,))
    db.close()
    async with disk_tier(house) as (tier, corrupt):
        assert await read(tier) is None
        assert corrupt == [1]
    assert not flag.exists()


@pytest.mark.parametrize("name", ["/etc/hostname", "../../victim", "aa/bb/../../../victim"])
async def test_a_forged_file_name_leads_nowhere(tmp_path: Path, name: str) -> None:
    house, victim = tmp_path / "x" / "cache", tmp_path / "victim"
    victim.write_bytes(pack(KEY, VALUES, "float32", 0.0))
    async with disk_tier(house) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
    with sqlite3.connect(house / "cache.db") as db:
        db.execute("UPDATE Cache SET filename = ?", (name,))
    db.close()
    async with disk_tier(house) as (tier, _):
        assert await read(tier) is None
    assert victim.exists()


async def test_a_link_in_place_of_a_value_is_not_followed(tmp_path: Path) -> None:
    house, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    async with disk_tier(house) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
        path = value_file(house)
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        assert await read(tier) is None


async def test_an_entry_of_another_precision_is_a_miss_and_no_damage(tmp_path: Path) -> None:
    async with disk_tier(tmp_path) as (tier, corrupt):
        await tier.write(KEY, VALUES, "float32", DAY_S)
        assert await read(tier, dtype="bfloat16") is None
        assert corrupt == [0]


async def test_an_entry_grows_old_by_our_clock_and_no_other(tmp_path: Path) -> None:
    clock = Clock()
    async with disk_tier(tmp_path, clock) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
        clock.now_s += DAY_S - 1
        assert await read(tier) is not None
        clock.now_s += 2
        assert await read(tier) is None


async def test_a_clock_set_back_makes_no_entry_immortal_or_dead(tmp_path: Path) -> None:
    clock = Clock()
    async with disk_tier(tmp_path, clock) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
        clock.now_s -= 3600
        rows = np.zeros(ROWS, np.float32)
        assert await tier.read(KEY, rows, "float32", DAY_S) == 0.0
        clock.now_s += 3600 + DAY_S
        assert await read(tier) is None


async def test_a_ruined_index_is_moved_aside_and_the_cache_starts_empty(tmp_path: Path) -> None:
    async with disk_tier(tmp_path) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
    (tmp_path / "cache.db").write_bytes(b"this was a database" * 500)
    async with disk_tier(tmp_path) as (tier, _):
        assert await read(tier) is None
        assert await tier.write(KEY, VALUES, "float32", DAY_S)
        assert await read(tier) is not None
    assert any(name.startswith("cache.db.corrupt-") for name in os.listdir(tmp_path))


async def test_files_of_an_interrupted_write_are_swept_at_the_start(tmp_path: Path) -> None:
    orphan = tmp_path / "aa" / "bb" / ("c" * 28 + ".val")
    async with disk_tier(tmp_path) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
    orphan.parent.mkdir(parents=True, exist_ok=True)
    orphan.write_bytes(b"half")
    async with disk_tier(tmp_path) as (tier, _):
        assert not orphan.exists()
        assert await read(tier) is not None


async def test_a_vanished_file_is_a_miss(tmp_path: Path) -> None:
    async with disk_tier(tmp_path) as (tier, _):
        await tier.write(KEY, VALUES, "float32", DAY_S)
        value_file(tmp_path).unlink()
        assert await read(tier) is None


async def test_a_full_disk_is_survived_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with disk_tier(tmp_path) as (tier, _):

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("mmserve.encoders.disk_tier.BytesDisk._write", full)
            assert [await tier.write(KEY, VALUES, "float32", DAY_S) for _ in range(3)] == [False, False, False]
        assert [record.message for record in caplog.records] == ["disk cache: No space left on device; going on without"]
        assert await tier.write(KEY, VALUES, "float32", DAY_S)


async def test_the_size_stays_within_its_limit(tmp_path: Path) -> None:
    big = np.zeros((64, 1024), np.float32)
    async with disk_tier(tmp_path, max_bytes=2**20) as (tier, _):
        for i in range(12):
            await tier.write(window(str(i)).key, big, "float32", DAY_S)
    assert sum(path.stat().st_size for path in value_files(tmp_path)) <= 2**20 + big.nbytes + HEADER.size


async def test_a_link_or_a_file_in_place_of_the_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="must be a directory"):
            async with disk_tier(tmp_path / name):
                pass


def test_an_entry_says_all_that_matters_about_itself() -> None:
    entry = pack(KEY, VALUES, "float32", 12.5)
    unpacked = unpack(KEY, entry)
    assert unpacked is not None
    created_s, dtype, shape, payload = unpacked
    assert (created_s, dtype, shape, bytes(payload)) == (12.5, "float32", ROWS, VALUES.tobytes())
    assert unpack(OTHER_KEY, entry) is None
    assert len(entry) == HEADER.size + SLICE_BYTES
