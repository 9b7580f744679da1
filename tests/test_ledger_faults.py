"""The ledger beside a locked database, on a full disk and through power cuts: nobody waits for it, and no row is lost or counted twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_disk import SmallDisk

from mmserve.config import ConfigError
from mmserve.ledger import CacheDropped, CacheEvent, CacheMoved, Ledger, RequestRow

REQUEST = RequestRow("r", "acme", 1, 12, 0, 0, 81.5, 402.0, "small", 1_800_000_000.0)
STORED = CacheEvent("ab" * 32, "image", 576, "disk:ab", num_hits=0, at=100.0, expires_at=200.0)


def name(number: int) -> str:
    return f"r{number:06d}"


def record(ledger: Ledger, start: int, stop: int) -> None:
    for number in range(start, stop):
        ledger.record_request(replace(REQUEST, request_id=name(number)))


def ids_in(path: Path) -> list[str]:
    db = sqlite3.connect(path)
    ids = [row[0] for row in db.execute("SELECT request_id FROM inference_requests ORDER BY request_id")]
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
    return ids


def ids_spooled(path: Path) -> list[str]:
    lines = [line for file in path.with_name(path.name + ".spool").glob("*.jsonl") for line in file.read_text().splitlines()]
    return [fields["request_id"] for kind, fields in map(json.loads, lines) if kind == "RequestRow"]


def index_of(path: Path) -> dict[str, str]:
    db = sqlite3.connect(path)
    found = dict(db.execute("SELECT content_hash, storage_uri FROM media_embedding_cache"))
    db.close()
    return found


def test_who_records_never_waits_for_a_database_that_is_locked_for_ten_seconds(tmp_path: Path) -> None:
    """F-18.  An attempt to write waits a second for the lock, so a call that took part in one would take as long."""
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    assert ledger.flush()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    longest_s, number, end_s = 0.0, 0, time.monotonic() + 10.0
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        record(ledger, number, number + 1)
        longest_s = max(longest_s, time.monotonic() - began_s)
        number += 1
        time.sleep(0.002)
    assert ids_in(path) == []
    other.execute("ROLLBACK")
    other.close()
    assert ledger.flush()
    ledger.close()
    print(f"rows={number} longest_ms={longest_s * 1e3:.2f}")
    assert longest_s < 0.5
    assert ids_in(path) == [name(i) for i in range(number)]
    assert (ids_spooled(path), ledger.num_lost) == ([], 0)


def test_on_a_full_disk_every_row_is_in_the_database_the_spool_or_memory_and_lands_when_there_is_room(small_disk: SmallDisk) -> None:
    """F-19.  Where the disk has no room for the spool either, rows wait in memory; where it has, they are on it."""
    path = small_disk.directory / "ledger.db"
    ledger = Ledger(path)
    record(ledger, 0, 100)
    assert ledger.flush()
    small_disk.fill()
    for start in range(100, 2100, 100):
        record(ledger, start, start + 100)
        ledger.flush()
    waiting = [row.request_id for row in ledger._pending if isinstance(row, RequestRow)]
    assert sorted([*ids_in(path), *ids_spooled(path), *waiting]) == [name(i) for i in range(2100)]
    assert waiting or ledger.num_spooled
    small_disk.free()
    assert ledger.flush()
    ledger.close()
    assert ids_in(path) == [name(i) for i in range(2100)]
    assert (ids_spooled(path), ledger.num_lost) == ([], 0)


WRITER = """
import sqlite3, sys
from pathlib import Path
from mmserve.ledger import Ledger, RequestRow
path = Path(sys.argv[1])
ledger = Ledger(path, lock_timeout_s=0.01)
other = sqlite3.connect(path, isolation_level=None)
for i in range(1_000_000):
    if i % 100 == 40:
        ledger.flush()
        other.execute("BEGIN IMMEDIATE")  # from here on rows go to the spool
    if i % 100 == 70:
        other.execute("COMMIT")
    ledger.record_request(RequestRow(f"r{i:06d}", "acme", 1, 3, 0, 0, None, 1.0, "small", 0.0))
    if i % 10 == 9:
        assert ledger.flush() or i % 100 >= 40
        assert not ledger._pending
        print(i + 1, flush=True)  # so many are in the database or the spool, for good
"""


@pytest.mark.parametrize("left", ["what was written", "what was synced"])
def test_a_power_cut_at_any_moment_takes_no_row_that_was_final(tmp_path: Path, left: str) -> None:
    """F-20.  A hundred cuts: at each, the disk's state is copied while the writer is stopped.

    With `synchronous = NORMAL` a commit was not yet on the disk when the spool file that it had taken in was removed: such rows were in
    neither.  Nor was the name of a new spool directory.
    """
    source, image, cut = tmp_path / "data", tmp_path / "image", tmp_path / "cut"
    source.mkdir()
    environment = dict(os.environ)
    if left == "what was synced":
        compiler = shutil.which("cc") or pytest.skip("there is no C compiler to build the observer of syncs with")
        observer = tmp_path / "synced_files.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", observer, Path(__file__).with_name("synced_files.c"), "-ldl"], check=True)
        image.mkdir()
        environment |= {"LD_PRELOAD": str(observer), "SYNCED_FROM": str(source), "SYNCED_TO": str(image)}
    else:
        image = source
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(source / "ledger.db")], stdout=subprocess.PIPE, env=environment, bufsize=0
    )  # fmt: skip
    assert writer.stdout is not None
    draw, num_spooled = random.Random(20), 0
    try:
        for _ in range(100):
            for _ in range(draw.randint(1, 4)):
                final = int(writer.stdout.readline())
            time.sleep(draw.uniform(0.0, 0.01))
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
            shutil.copytree(image, cut)
            writer.send_signal(signal.SIGCONT)
            spooled = ids_spooled(cut / "ledger.db")
            num_spooled += len(spooled)
            kept = {*ids_in(cut / "ledger.db"), *spooled}
            missing = {name(i) for i in range(final)} - kept
            assert not missing
            shutil.rmtree(cut)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert num_spooled > 0, "no cut came while rows were in the spool"


def test_closing_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    assert ledger.flush()
    answers, write = threading.Event(), Ledger._write
    monkeypatch.setattr(Ledger, "_write", lambda *args: answers.wait() and write(*args))
    record(ledger, 0, 3)
    ledger.close(timeout_s=0.1)
    assert [record.message for record in caplog.records] == ["ledger could not be closed, the disk does not answer waiting=3"]
    answers.set()
    ledger.close(timeout_s=60.0)
    assert ids_in(ledger.path) == [name(i) for i in range(3)]


def test_rows_recorded_after_somebody_removed_the_database_are_in_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They went into the file that had no name any more, and `flush` said that they were there."""
    data = tmp_path / "data"
    ledger = Ledger(data / "ledger.db")
    record(ledger, 0, 10)
    assert ledger.flush()
    shutil.rmtree(data)
    record(ledger, 10, 20)
    assert ledger.flush()
    assert ids_in(ledger.path) == [name(i) for i in range(10, 20)]
    ledger.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_rows_are_spooled_while_something_else_lies_where_the_database_was(tmp_path: Path) -> None:
    """Failing to open the new file ended the writer's thread, and with it the ledger."""
    ledger = Ledger(tmp_path / "ledger.db")
    assert ledger.flush()
    ledger.path.unlink()
    ledger.path.write_bytes(b"not a database, but long enough to look at" * 100)
    record(ledger, 0, 10)
    assert not ledger.flush()
    assert ids_spooled(ledger.path) == [name(i) for i in range(10)]
    ledger.path.unlink()
    assert ledger.flush()
    assert ids_in(ledger.path) == [name(i) for i in range(10)]
    ledger.close()


def test_a_data_directory_that_cannot_be_written_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"ledger.db in the data directory can't be used: .*; --data-dir names another place") as error:
        Ledger(tmp_path / "file" / "ledger.db")
    assert str(tmp_path) not in error.value.message


def test_what_expires_while_we_run_leaves_the_index(tmp_path: Path) -> None:
    """It used to leave at the next start only."""
    now_s = 150.0
    ledger = Ledger(tmp_path / "ledger.db", sweep_every_s=0.02, now_s=lambda: now_s)
    ledger.record_cache_event(STORED)
    ledger.record_cache_event(replace(STORED, content_hash="lasting", expires_at=9e9))
    assert ledger.flush()
    time.sleep(0.1)
    assert set(index_of(ledger.path)) == {STORED.content_hash, "lasting"}
    now_s = 201.0
    end_s = time.monotonic() + 30.0
    while set(index_of(ledger.path)) != {"lasting"}:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    ledger.close()


def test_the_index_loses_an_entry_when_the_tier_that_it_names_does(tmp_path: Path) -> None:
    """Rows that left memory and had never been on disk stayed in the index for as long as there was a disk."""
    ledger = Ledger(tmp_path / "ledger.db")
    for content in "abcd":
        ledger.record_cache_event(replace(STORED, content_hash=content, storage_uri=f"memory:{content}", expires_at=9e9))
    for content in "bcd":
        ledger.record_cache_event(replace(STORED, content_hash=content, storage_uri=f"disk:{content}", expires_at=9e9))
    for content in "ab":
        ledger.record_cache_event(CacheDropped(content, f"memory:{content}"))
    ledger.record_cache_event(CacheDropped("c", "disk:c"))
    ledger.record_cache_event(CacheMoved("d", "memory:d"))
    assert ledger.flush()
    assert index_of(ledger.path) == {"b": "disk:b", "d": "memory:d"}
    ledger.record_cache_event(CacheDropped("d", "memory:d"))
    ledger.close()
    assert index_of(ledger.path) == {"b": "disk:b"}


def test_rows_wait_in_the_spool_while_something_else_stands_where_the_database_was(tmp_path: Path) -> None:
    """The error of a database that can't be opened was another than one that can't be written: it ended the writer's thread for good."""
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    assert ledger.flush()
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(b"no database at all" * 100)
    record(ledger, 0, 3)
    assert not ledger.flush()
    path.unlink()
    record(ledger, 3, 5)
    assert ledger.flush()
    ledger.close()
    assert ids_in(path) == [name(i) for i in range(5)]
    assert ledger.num_lost == 0
