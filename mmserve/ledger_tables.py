"""The tables of the ledger's database, and how a file of an older version becomes one of this.

The file is shared: by the server's writer, by whoever looks after the tenants, and by any SQLite client that reads.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlite_utils import Database

from mmserve.config import ConfigError

SCHEMA_VERSION = 5  # 2 added tenant_key, 3 grounding, 4 request_costs, 5 canary_decisions and canary_counts
_TABLES = (
    """CREATE TABLE IF NOT EXISTS inference_requests (
        request_id TEXT PRIMARY KEY,
        tenant_id TEXT NOT NULL,
        modality_mask INTEGER NOT NULL CHECK (modality_mask BETWEEN 1 AND 7),
        text_tokens INTEGER NOT NULL CHECK (text_tokens >= 0),
        vision_tokens INTEGER NOT NULL CHECK (vision_tokens >= 0),
        audio_tokens INTEGER NOT NULL CHECK (audio_tokens >= 0),
        ttft_ms REAL,
        total_latency_ms REAL NOT NULL,
        model_variant TEXT NOT NULL,
        created_at REAL NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS media_embedding_cache (
        content_hash TEXT PRIMARY KEY,
        media_kind TEXT NOT NULL CHECK (media_kind IN ('image', 'audio')),
        token_count INTEGER NOT NULL CHECK (token_count > 0),
        storage_uri TEXT NOT NULL,
        hit_count INTEGER NOT NULL DEFAULT 0,
        last_hit_at REAL,
        expires_at REAL NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS tenant_quota (
        tenant_id TEXT PRIMARY KEY,
        tokens_per_minute INTEGER NOT NULL CHECK (tokens_per_minute >= 0),
        concurrent_requests INTEGER NOT NULL CHECK (concurrent_requests >= 0),
        tier TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS tenant_key (
        tenant_id TEXT PRIMARY KEY,
        key_hash TEXT NOT NULL UNIQUE,
        cache_salt TEXT NOT NULL,
        created_at REAL NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS feedback (
        request_id TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        rating TEXT NOT NULL CHECK (rating IN ('up', 'down')),
        regenerated INTEGER NOT NULL CHECK (regenerated IN (0, 1)),
        created_at REAL NOT NULL,
        PRIMARY KEY (request_id, tenant_id)
    )""",
    """CREATE TABLE IF NOT EXISTS grounding (
        request_id TEXT PRIMARY KEY,
        mode TEXT NOT NULL CHECK (mode IN ('flag', 'regenerate', 'sample')),
        outcome TEXT NOT NULL CHECK (outcome IN ('supported', 'regenerated', 'unsupported', 'unchecked', 'unavailable')),
        grounding_score REAL CHECK (grounding_score BETWEEN 0 AND 1),
        num_mentions INTEGER NOT NULL CHECK (num_mentions >= 0),
        num_unsupported INTEGER NOT NULL CHECK (num_unsupported BETWEEN 0 AND num_mentions),
        num_draws INTEGER NOT NULL CHECK (num_draws BETWEEN 1 AND 2),
        created_at REAL NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS request_costs (
        request_id TEXT PRIMARY KEY,
        image_encode_gpu_s REAL NOT NULL,
        audio_encode_gpu_s REAL NOT NULL,
        prefill_gpu_s REAL NOT NULL,
        decode_gpu_s REAL NOT NULL,
        usd REAL NOT NULL,
        saved_usd REAL NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS canary_decisions (
        canary TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        decision TEXT NOT NULL CHECK (decision IN ('started', 'breached', 'rolled_back', 'passed', 'aborted', 'reset')),
        slice TEXT,
        metric TEXT,
        canary_hits INTEGER,
        canary_trials INTEGER,
        stable_hits INTEGER,
        stable_trials INTEGER,
        reason TEXT NOT NULL,
        created_at REAL NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS canary_counts (
        canary TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        slice TEXT NOT NULL,
        metric TEXT NOT NULL,
        is_canary INTEGER NOT NULL CHECK (is_canary IN (0, 1)),
        hits INTEGER NOT NULL CHECK (hits BETWEEN 0 AND trials),
        trials INTEGER NOT NULL,
        PRIMARY KEY (canary, fingerprint, slice, metric, is_canary)
    )""",
    "CREATE TABLE IF NOT EXISTS spool_imported (name TEXT PRIMARY KEY)",
)
_INDEXES = (
    ("inference_requests", ("tenant_id", "created_at")),
    ("inference_requests", ("created_at",)),
    ("media_embedding_cache", ("expires_at",)),
    ("grounding", ("created_at",)),
    ("canary_decisions", ("canary", "fingerprint")),
)


def open_ledger(path: Path, lock_timeout_s: float) -> Database:
    """For one thread at a time, not only for the one that opens it.  Whatever is missing is made: the folder, the file, its tables.

    Raises ConfigError for a file that can't be opened, is something else, or is newer: it is for the operator to mend.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _open(path, lock_timeout_s)
    except (sqlite3.DatabaseError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path.name} in the data directory can't be used: {reason}; --data-dir names another place") from error


def _open(path: Path, lock_timeout_s: float) -> Database:
    connection = sqlite3.connect(path, timeout=lock_timeout_s, check_same_thread=False)
    db = Database(connection, execute_plugins=False)
    db.enable_wal()
    db.execute("PRAGMA synchronous = FULL")  # what was committed must be on the disk: spool files go, and keys are given out
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"it was written by a newer mmserve (schema {version}, this one knows {SCHEMA_VERSION})")
    if version < SCHEMA_VERSION:  # else nothing is written, so that a locked database can be opened
        with writing(db):
            for statement in _TABLES:
                db.execute(statement)
            for table, columns in _INDEXES:
                db.table(table).create_index(columns, if_not_exists=True)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return db


@contextmanager
def writing(db: Database) -> Iterator[None]:
    """One transaction, with the write lock from its beginning: what it reads stays so until it writes."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.conn.commit()
    except BaseException:
        db.rollback()
        raise


def file_id(path: Path) -> tuple[int, int] | None:
    """Device and number of the file that is there now; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
