"""The tenants' records: in a real database, changed by the command line, while a server's own ledger is at work on the same file."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_ledger import REQUEST, numbered, record

from mmserve.__main__ import main
from mmserve.config import ConfigError
from mmserve.ledger import Ledger
from mmserve.ledger_tables import SCHEMA_VERSION, open_ledger, writing
from mmserve.quota import Quota
from mmserve.tenant_watch import TenantWatch
from mmserve.tenants import Tenant, TenantRecords, Tenants, key_hash

Command = Callable[..., tuple[int, str, str]]
VERSION_1 = """
    CREATE TABLE inference_requests (request_id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL,
        modality_mask INTEGER NOT NULL CHECK (modality_mask BETWEEN 1 AND 7),
        text_tokens INTEGER NOT NULL, vision_tokens INTEGER NOT NULL, audio_tokens INTEGER NOT NULL,
        ttft_ms REAL, total_latency_ms REAL NOT NULL, model_variant TEXT NOT NULL, created_at REAL NOT NULL);
    CREATE TABLE tenant_quota (tenant_id TEXT PRIMARY KEY,
        tokens_per_minute INTEGER NOT NULL CHECK (tokens_per_minute >= 0),
        concurrent_requests INTEGER NOT NULL CHECK (concurrent_requests >= 0), tier TEXT NOT NULL);
    INSERT INTO inference_requests VALUES ('old', 'acme', 1, 3, 0, 0, 1.0, 2.0, 'small', 1.0);
    INSERT INTO tenant_quota VALUES ('acme', 60000, 8, 'gold');
    PRAGMA user_version = 1;
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.db"


@pytest.fixture
def command(path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """`mmserve tenants` with these words: exit status, output, errors."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["tenants", *words, "--data-dir", str(path.parent)])
        said = capsys.readouterr()
        return status, said.out.strip(), said.err.strip()

    return run


@pytest.fixture
def watch(path: Path) -> Iterator[TenantWatch]:
    with TenantWatch(path, interval_s=0.02) as watch:
        yield watch


def stored(path: Path) -> list[Tenant]:
    with TenantRecords(path) as records:
        return records.all()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# --- the command line --------------------------------------------------------------------------------------------------------


def test_a_key_is_printed_once_and_only_its_hash_is_kept(command: Command, path: Path) -> None:
    status, key, _ = command("add", "acme", "--tokens-per-minute", "60000", "--concurrent-requests", "10", "--tier", "premium")
    assert status == 0
    assert key.startswith("mm-")
    assert len(key) == 3 + 43  # 256 bits in base64
    assert command("add", "other")[1] != key
    acme, other = stored(path)
    assert (acme.tenant_id, acme.quota, acme.tier, acme.cache_salt) == ("acme", Quota(60_000, 10), "premium", "")
    assert acme.key_hash == key_hash(key)
    assert other.quota == Quota()
    for file in path.parent.iterdir():
        assert key.removeprefix("mm-").encode() not in file.read_bytes()


def test_set_changes_what_is_given_and_keeps_the_rest(command: Command, path: Path) -> None:
    command("add", "acme", "--tokens-per-minute", "100", "--concurrent-requests", "3", "--private-cache")
    (before,) = stored(path)
    assert len(before.cache_salt) == 32
    for words, quota, tier in (
        (["--tokens-per-minute", "200"], Quota(200, 3), "standard"),
        (["--tier", "batch"], Quota(200, 3), "batch"),
        (["--concurrent-requests", "0"], Quota(200, 0), "batch"),
        (["--private-cache"], Quota(200, 0), "batch"),
    ):
        assert command("set", "acme", *words)[0] == 0
        (after,) = stored(path)
        assert (after.quota, after.tier, after.cache_salt, after.key_hash) == (quota, tier, before.cache_salt, before.key_hash)
    command("set", "acme", "--no-private-cache")
    assert stored(path)[0].cache_salt == ""


def test_rotating_replaces_the_key_and_nothing_else(command: Command, path: Path) -> None:
    _, first, _ = command("add", "acme", "--tokens-per-minute", "100", "--private-cache")
    (before,) = stored(path)
    _, second, _ = command("rotate", "acme")
    (after,) = stored(path)
    assert first != second
    assert after.key_hash == key_hash(second)
    assert (after.quota, after.cache_salt) == (before.quota, before.cache_salt)


def test_list_shows_limits_and_neither_keys_nor_salts(command: Command, path: Path) -> None:
    assert command("list") == (0, "no tenants", "")
    _, key, _ = command("add", "acme", "--tokens-per-minute", "60000", "--private-cache")
    command("add", "zenith", "--concurrent-requests", "4")
    _, shown, _ = command("list")
    for words in ("acme", "60,000", "private", "zenith", "4", "shared", "standard"):
        assert words in shown
    _, listed, _ = command("list", "--json")
    first, second = json.loads(listed)
    assert (first["tenant_id"], first["tokens_per_minute"], first["concurrent_requests"], first["private_cache"]) == (
        "acme",
        60_000,
        0,
        True,
    )
    assert (second["tenant_id"], second["private_cache"]) == ("zenith", False)
    salt = stored(path)[0].cache_salt
    assert not {key, key_hash(key), salt} & set(f"{shown} {listed}".replace('"', " ").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "acme"], "there is a tenant acme already"),
        (["add", "default"], "not default or readiness"),
        (["add", "readiness"], "not default or readiness"),
        (["add", "../x"], "got '../x'"),
        (["add", "a" * 65], "1 to 64 letters"),
        (["set", "nobody", "--tier", "batch"], "there is no tenant nobody"),
        (["rotate", "nobody"], "there is no tenant nobody"),
        (["remove", "nobody"], "there is no tenant nobody"),
    ],
)
def test_what_cannot_be_done_says_why_and_changes_nothing(command: Command, path: Path, words: list[str], message: str) -> None:
    command("add", "acme")
    before = stored(path)
    status, said, error = command(*words)
    assert (status, said) == (2, "")
    assert message in error
    assert stored(path) == before


@pytest.mark.parametrize("words", [["--tokens-per-minute", "-1"], ["--concurrent-requests", "x"], ["--tier", "gold"]])
def test_limits_are_checked_before_anything_is_opened(command: Command, path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        command("add", "acme", *words)
    assert not path.exists()


def test_the_data_directory_can_come_from_the_servers_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "server.toml"
    settings.write_text(f'data-dir = "{tmp_path / "elsewhere"}"\nport = 1\n')
    assert main(["tenants", "add", "acme", "--config", str(settings)]) == 0
    assert [tenant.tenant_id for tenant in stored(tmp_path / "elsewhere" / "ledger.db")] == ["acme"]


def test_a_file_that_is_no_database_is_said_so(path: Path, command: Command) -> None:
    path.parent.mkdir()
    path.write_bytes(b"garbage" * 1000)
    status, said, error = command("add", "acme")
    assert (status, said) == (2, "")
    assert "not a database" in error


def test_a_command_waits_for_another_to_finish_what_it_has_read(path: Path) -> None:
    """Each reads the old row and writes the whole of it: without the lock from the beginning, one would undo the other, or fail."""
    with TenantRecords(path) as first, TenantRecords(path) as second:
        first.add("acme", Quota(), "standard", has_private_cache=False)
        thread = threading.Thread(target=second.set, args=("acme", {"tokens_per_minute": 100}))
        with writing(first._db):
            tenant = first._get("acme")
            thread.start()
            thread.join(timeout=0.5)
            first._save(replace(tenant, quota=Quota(concurrent_requests=10)))
        thread.join()
    assert stored(path)[0].quota == Quota(100, 10)


# --- the database ------------------------------------------------------------------------------------------------------------


def test_a_database_of_version_1_keeps_its_rows_and_its_quotas_wait_for_a_key(path: Path) -> None:
    path.parent.mkdir()
    old = sqlite3.connect(path)
    old.executescript(VERSION_1)
    old.close()
    with TenantRecords(path) as records:
        assert records.all() == [Tenant("acme", Quota(60_000, 8), "gold")]
        assert not Tenants(*records.all()).roll.by_key
        key = records.rotate("acme")
        records.set("acme", {"concurrent_requests": 9})
        (acme,) = records.all()
        assert (acme.quota, acme.key_hash) == (Quota(60_000, 9), key_hash(key))
        assert acme.priority == 100  # nobody knows a tier of that name
    db = open_ledger(path, lock_timeout_s=1)
    assert db.execute("SELECT request_id, tenant_id FROM inference_requests").fetchall() == [("old", "acme")]
    assert db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    db.close()
    ledger = Ledger(path)
    ledger.record_request(REQUEST)
    assert ledger.flush()
    ledger.close()


def test_a_tenant_without_a_key_has_no_cache_of_its_own_to_set(path: Path) -> None:
    with TenantRecords(path) as records:
        records._db.execute("INSERT INTO tenant_quota VALUES ('acme', 1, 1, 'standard')")
        records._db.conn.commit()
        with pytest.raises(ConfigError, match="rotate"):
            records.set("acme", {}, has_private_cache=True)


# --- the watch ---------------------------------------------------------------------------------------------------------------


def test_a_running_server_sees_every_change(watch: TenantWatch, path: Path, command: Command) -> None:
    assert not watch.roll.needs_key
    _, key, _ = command("add", "acme", "--tokens-per-minute", "100")
    until(lambda: key_hash(key) in watch.roll.by_key)
    assert watch.quota("acme") == Quota(100, 0)
    command("set", "acme", "--concurrent-requests", "2")
    until(lambda: watch.quota("acme") == Quota(100, 2))
    other = sqlite3.connect(path)  # by hand
    other.execute("UPDATE tenant_quota SET tokens_per_minute = 7")
    other.commit()
    other.close()
    until(lambda: watch.quota("acme") == Quota(7, 2))
    _, second, _ = command("rotate", "acme")
    until(lambda: watch.roll.by_key.keys() == {key_hash(second)})
    command("remove", "acme")
    until(lambda: not watch.roll.by_key)
    assert watch.roll.needs_key
    assert watch.quota("acme") == Quota(7, 2)  # for a request of its that is still coming in


def test_changes_are_seen_and_rows_land_while_both_are_written(watch: TenantWatch, path: Path) -> None:
    """The command line's lock, the ledger's writer and the reader of the tenants, all on one file."""
    ledger = Ledger(path, lock_timeout_s=0.02)
    with TenantRecords(path) as records:
        for i in range(30):
            record(ledger, numbered(10 * i, 10 * i + 10))
            key = records.add(f"tenant-{i}", Quota(1 + i), "standard", has_private_cache=False)
        until(lambda: key_hash(key) in watch.roll.by_key)
    until(ledger.flush)
    ledger.close()
    assert len(watch.roll.by_key) == 30
    db = open_ledger(path, lock_timeout_s=1)
    assert db.execute("SELECT count(*) FROM inference_requests").fetchone() == (300,)
    assert ledger.num_lost == 0
    db.close()


def test_a_lock_held_by_somebody_hides_no_tenant_and_makes_nobody_wait(watch: TenantWatch, path: Path) -> None:
    with TenantRecords(path) as records:
        key = records.add("acme", Quota(5), "standard", has_private_cache=False)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    until(lambda: key_hash(key) in watch.roll.by_key)
    other.execute("UPDATE tenant_quota SET tokens_per_minute = 6")
    assert watch.quota("acme") == Quota(5)  # not committed
    other.execute("COMMIT")
    other.close()
    until(lambda: watch.quota("acme") == Quota(6))


def test_tenants_stay_when_somebody_puts_another_database_in_the_place_of_theirs(
    watch: TenantWatch, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies there now may be the ledger's new start, without anybody: nobody is locked out by that."""
    with TenantRecords(path) as records:
        key = records.add("acme", Quota(5), "standard", has_private_cache=False)
        until(lambda: key_hash(key) in watch.roll.by_key)
    path.unlink()
    with TenantRecords(path) as records:
        records.add("other", Quota(5), "standard", has_private_cache=False)
    until(lambda: watch._is_blind)
    assert watch.quota("acme") == Quota(5)
    assert watch.roll.by_key.keys() == {key_hash(key)}
    assert ["removed or replaced" in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]


def test_tenants_that_cannot_be_read_for_a_while_stay_as_they_were(watch: TenantWatch, path: Path) -> None:
    """Somebody drops a table: whoever is inside keeps working, and a mended file is read again."""
    with TenantRecords(path) as records:
        key = records.add("acme", Quota(5), "standard", has_private_cache=False)
        until(lambda: key_hash(key) in watch.roll.by_key)
        records._db.conn.executescript("ALTER TABLE tenant_key RENAME TO gone")
        until(lambda: watch._is_blind)
        assert watch.quota("acme") == Quota(5)
        assert key_hash(key) in watch.roll.by_key
        records._db.conn.executescript("ALTER TABLE gone RENAME TO tenant_key; UPDATE tenant_quota SET tokens_per_minute = 6")
        until(lambda: watch.quota("acme") == Quota(6))
