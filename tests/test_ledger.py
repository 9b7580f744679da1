"""The ledger against real SQLite files: real locks, a real size limit, a real kill."""

import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlite_utils import Database

from mmserve.config import ConfigError
from mmserve.ledger import CacheDropped, CacheEvent, Feedback, Ledger, RequestRow

REQUEST = RequestRow(
    request_id="r0",
    tenant_id="acme",
    modality_mask=7,
    text_tokens=12,
    vision_tokens=1152,
    audio_tokens=50,
    ttft_ms=81.5,
    total_latency_ms=402.0,
    model_variant="small",
    created_at=1_800_000_000.0,
)
NEVER = 9e9  # seconds since the epoch
STORED = CacheEvent("ab" * 32, "image", 576, "disk:ab", num_hits=0, at=100.0, expires_at=NEVER)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path, lock_timeout_s=0.02)
    yield ledger
    ledger.close()


def rows(path: Path, table: str) -> list[dict[str, object]]:
    db = Database(sqlite3.connect(path))
    found = list(db.table(table).rows)
    db.close()
    return found


def request_ids(path: Path) -> list[str]:
    return sorted(str(row["request_id"]) for row in rows(path, "inference_requests"))


def spool_of(path: Path) -> Path:
    return path.with_name("ledger.db.spool")


def numbered(start: int, stop: int) -> list[RequestRow]:
    return [replace(REQUEST, request_id=f"r{i:04d}") for i in range(start, stop)]


def record(ledger: Ledger, requests: list[RequestRow]) -> None:
    for row in requests:
        ledger.record_request(row)


@pytest.fixture
def lock(ledger: Ledger, path: Path) -> Iterator[sqlite3.Connection]:
    """Another program holds the database's write lock until it commits."""
    assert ledger.flush()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield other
    other.close()


# --- the tables --------------------------------------------------------------------------------------------------------------


def test_a_recorded_request_is_a_row_with_every_column(ledger: Ledger, path: Path) -> None:
    ledger.record_request(REQUEST)
    assert ledger.flush()
    assert rows(path, "inference_requests") == [
        {
            "request_id": "r0",
            "tenant_id": "acme",
            "modality_mask": 7,
            "text_tokens": 12,
            "vision_tokens": 1152,
            "audio_tokens": 50,
            "ttft_ms": 81.5,
            "total_latency_ms": 402.0,
            "model_variant": "small",
            "created_at": 1_800_000_000.0,
        }
    ]


def test_a_request_that_ended_before_its_first_token_has_no_ttft(ledger: Ledger, path: Path) -> None:
    ledger.record_request(replace(REQUEST, ttft_ms=None))
    assert ledger.flush()
    assert rows(path, "inference_requests")[0]["ttft_ms"] is None


def test_the_same_request_recorded_twice_is_one_row(ledger: Ledger, path: Path) -> None:
    record(ledger, [REQUEST, REQUEST])
    assert ledger.flush()
    assert request_ids(path) == ["r0"]
    assert ledger.num_lost == 0


@pytest.mark.parametrize("mask", [0, 8, -1])
def test_a_modality_mask_outside_1_to_7_is_refused_by_the_table_and_holds_up_no_other_row(ledger: Ledger, path: Path, mask: int) -> None:
    record(ledger, [replace(REQUEST, request_id="before"), replace(REQUEST, modality_mask=mask), replace(REQUEST, request_id="after")])
    assert ledger.flush()
    assert request_ids(path) == ["after", "before"]
    assert ledger.num_lost == 1


def test_a_row_of_a_type_sqlite_does_not_know_is_left_out_alone(ledger: Ledger, path: Path) -> None:
    record(ledger, [replace(REQUEST, request_id="big", text_tokens=2**70), REQUEST])
    assert ledger.flush()
    assert request_ids(path) == ["r0"]
    assert ledger.num_lost == 1


def test_the_indexes_that_reports_and_expiry_need_are_there(ledger: Ledger, path: Path) -> None:
    db = Database(sqlite3.connect(path))
    columns = {tuple(index.columns) for table in ("inference_requests", "media_embedding_cache") for index in db.table(table).indexes}
    db.close()
    assert {("tenant_id", "created_at"), ("created_at",), ("expires_at",)} <= columns


def test_the_database_is_in_wal_mode_so_that_readers_never_block_the_writer(ledger: Ledger, path: Path) -> None:
    reader = sqlite3.connect(path, isolation_level=None)
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM inference_requests").fetchone() == (0,)
    ledger.record_request(REQUEST)
    assert ledger.flush()
    reader.close()


def test_cache_hits_add_up_and_the_last_one_sets_the_time(ledger: Ledger, path: Path) -> None:
    for event in (STORED, replace(STORED, num_hits=1, at=110.0), replace(STORED, num_hits=1, at=120.0, expires_at=NEVER + 1)):
        ledger.record_cache_event(event)
    assert ledger.flush()
    assert rows(path, "media_embedding_cache") == [
        {
            "content_hash": "ab" * 32,
            "media_kind": "image",
            "token_count": 576,
            "storage_uri": "disk:ab",
            "hit_count": 2,
            "last_hit_at": 120.0,
            "expires_at": NEVER + 1,
        }
    ]


def test_an_entry_never_found_again_was_never_hit(ledger: Ledger, path: Path) -> None:
    ledger.record_cache_event(STORED)
    assert ledger.flush()
    assert [(row["hit_count"], row["last_hit_at"]) for row in rows(path, "media_embedding_cache")] == [(0, None)]


def test_a_dropped_entry_leaves_the_index(ledger: Ledger, path: Path) -> None:
    for event in (STORED, replace(STORED, content_hash="dropped"), CacheDropped("dropped", "disk:ab")):
        ledger.record_cache_event(event)
    assert ledger.flush()
    assert [row["content_hash"] for row in rows(path, "media_embedding_cache")] == ["ab" * 32]


def test_the_index_names_the_disk_once_the_rows_are_there_too(ledger: Ledger, path: Path) -> None:
    in_memory = replace(STORED, storage_uri="memory:ab")
    for event in (in_memory, STORED, replace(in_memory, num_hits=1), in_memory):
        ledger.record_cache_event(event)
    assert ledger.flush()
    assert [row["storage_uri"] for row in rows(path, "media_embedding_cache")] == ["disk:ab"]


def test_after_a_restart_the_index_knows_what_outlived_it(path: Path) -> None:
    first = Ledger(path)
    for name, uri, expires_at in (("m", "memory:m", NEVER), ("old", "disk:old", 200.0), ("d", "disk:d", NEVER)):
        first.record_cache_event(replace(STORED, content_hash=name, storage_uri=uri, expires_at=expires_at))
    first.close()
    second = Ledger(path)
    assert second.flush()
    second.close()
    assert [row["content_hash"] for row in rows(path, "media_embedding_cache")] == ["d"]


def test_the_last_rating_counts_and_a_regeneration_is_remembered(ledger: Ledger, path: Path) -> None:
    ledger.record_feedback(Feedback("r0", "acme", "down", regenerated=True, created_at=1.0))
    ledger.record_feedback(Feedback("r0", "acme", "up", regenerated=False, created_at=2.0))
    ledger.record_feedback(Feedback("r0", "other", "down", regenerated=False, created_at=3.0))
    assert ledger.flush()
    assert [(row["tenant_id"], row["rating"], row["regenerated"]) for row in rows(path, "feedback")] == [
        ("acme", "up", 1),
        ("other", "down", 0),
    ]


# --- when the database can't be written --------------------------------------------------------------------------------------


def test_rows_recorded_while_the_database_is_locked_land_once_after_it(ledger: Ledger, path: Path, lock: sqlite3.Connection) -> None:
    record(ledger, numbered(0, 100))
    assert not ledger.flush()
    record(ledger, numbered(100, 130))
    assert not ledger.flush()
    assert request_ids(path) == []
    assert ledger.num_spooled == 130
    lock.execute("COMMIT")
    assert ledger.flush()
    assert request_ids(path) == [f"r{i:04d}" for i in range(130)]
    assert list(spool_of(path).iterdir()) == []
    assert ledger.num_lost == 0


def test_spooled_rows_come_before_newer_ones_so_that_the_last_word_counts(ledger: Ledger, path: Path, lock: sqlite3.Connection) -> None:
    ledger.record_feedback(Feedback("r0", "acme", "down", regenerated=False, created_at=1.0))
    assert not ledger.flush()
    ledger.record_feedback(Feedback("r0", "acme", "up", regenerated=False, created_at=2.0))
    lock.execute("COMMIT")
    assert ledger.flush()
    assert [row["rating"] for row in rows(path, "feedback")] == ["up"]


def test_rows_spooled_before_a_restart_land_after_it(path: Path) -> None:
    ledger = Ledger(path, lock_timeout_s=0.02)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    record(ledger, numbered(0, 10))
    ledger.close()
    other.close()
    second = Ledger(path)
    assert second.flush()
    assert request_ids(path) == [f"r{i:04d}" for i in range(10)]
    second.close()


def test_a_server_starts_while_the_database_is_locked(path: Path) -> None:
    Ledger(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ledger = Ledger(path, lock_timeout_s=0.02)
    ledger.record_request(REQUEST)
    assert not ledger.flush()
    other.execute("COMMIT")
    assert ledger.flush()
    assert request_ids(path) == ["r0"]
    ledger.close()
    other.close()


def test_a_spool_file_whose_rows_landed_before_a_crash_is_not_counted_again(path: Path) -> None:
    """Between the commit and the removal of the file there is a moment to be killed in; hits would count twice."""
    ledger = Ledger(path, lock_timeout_s=0.02)
    assert ledger.flush()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ledger.record_cache_event(replace(STORED, num_hits=1))
    assert not ledger.flush()
    (segment,) = spool_of(path).iterdir()
    content = segment.read_text()
    other.execute("COMMIT")
    assert ledger.flush()
    ledger.close()
    other.close()
    segment.write_text(content)  # as if the crash had come before the removal
    second = Ledger(path)
    assert second.flush()
    second.close()
    assert [row["hit_count"] for row in rows(path, "media_embedding_cache")] == [1]
    assert not segment.exists()


def test_a_damaged_spool_file_is_set_aside_and_holds_up_nothing(path: Path) -> None:
    spool = spool_of(path)
    spool.mkdir(parents=True)
    (spool / "0-damaged.jsonl").write_text('["RequestRow", {"request_id"')
    ledger = Ledger(path)
    ledger.record_request(REQUEST)
    assert ledger.flush()
    ledger.close()
    assert request_ids(path) == ["r0"]
    assert [file.name for file in spool.iterdir()] == ["0-damaged.damaged"]


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """No file of this process may grow beyond 128 KiB: what a full disk is to a database."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 * 1024, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_rows_that_find_the_database_full_are_in_the_database_or_the_spool_and_land_when_there_is_room(
    ledger: Ledger, path: Path, request: pytest.FixtureRequest
) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.getfixturevalue("file_size_limit")
    for start in range(0, 2000, 200):
        record(ledger, numbered(start, start + 200))
        ledger.flush()
    assert ledger.num_spooled > 0
    assert ledger.num_lost == 0
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert ledger.flush()
    assert request_ids(path) == [f"r{i:04d}" for i in range(2000)]


def test_with_neither_database_nor_spool_rows_wait_in_memory_up_to_a_limit_and_the_rest_is_counted(path: Path) -> None:
    ledger = Ledger(path, max_pending=5, lock_timeout_s=0.02)
    assert ledger.flush()
    spool_of(path).write_text("a file where the directory should be")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    record(ledger, numbered(0, 8))
    assert not ledger.flush()
    assert ledger.num_lost == 3
    other.execute("COMMIT")
    assert ledger.flush()
    assert request_ids(path) == ["r0000", "r0001", "r0002", "r0003", "r0004"]
    ledger.close()
    other.close()


# --- threads, the end, and a kill --------------------------------------------------------------------------------------------


def test_many_threads_may_record_at_once(ledger: Ledger, path: Path) -> None:
    threads = [threading.Thread(target=record, args=(ledger, numbered(i * 50, (i + 1) * 50))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.flush()
    assert request_ids(path) == [f"r{i:04d}" for i in range(400)]


def test_close_writes_what_is_left_and_may_be_called_twice(path: Path) -> None:
    ledger = Ledger(path)
    record(ledger, numbered(0, 300))
    ledger.close()
    ledger.close()
    assert len(request_ids(path)) == 300
    ledger.record_request(replace(REQUEST, request_id="late"))
    assert ledger.num_lost == 1


def test_what_was_flushed_survives_a_killed_server_and_what_was_not_does_no_harm(path: Path) -> None:
    script = """
import sys
from dataclasses import replace
from pathlib import Path
from mmserve.config import ConfigError
from mmserve.ledger import Ledger, RequestRow
ledger = Ledger(Path(sys.argv[1]))
for i in range(1_000_000):
    ledger.record_request(RequestRow(f"r{i:07d}", "acme", 1, 3, 0, 0, None, 1.0, "small", 0.0))
    if i % 50 == 49:
        ledger.flush()
        print(i + 1, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    flushed = [int(child.stdout.readline()) for _ in range(10)][-1]
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    ledger = Ledger(path)
    ledger.record_request(replace(REQUEST, request_id="after"))
    assert ledger.flush()
    ledger.close()
    found = request_ids(path)
    assert found[:1] == ["after"]
    assert len(found) - 1 >= flushed
    assert found[1:] == [f"r{i:07d}" for i in range(len(found) - 1)]


def test_a_ledger_written_by_a_newer_version_is_not_touched(path: Path) -> None:
    Ledger(path).close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(ConfigError, match="newer mmserve"):
        Ledger(path)


def test_a_file_that_is_no_database_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Ledger(path)
