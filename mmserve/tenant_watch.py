"""Keeps the roll of tenants as the ledger's database has it, whoever changes that.  A thread of its own reads; nobody waits for it."""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path
from typing import Self

from mmserve.ledger_tables import file_id, open_ledger
from mmserve.tenants import TIERS, Row, Tenants, read_rows, tenants_of

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
CLOSE_S = 5.0


class TenantWatch(Tenants):
    """A context manager.  Raises ConfigError, and only here, at the start: later the last roll that was read stays in force."""

    def __init__(self, path: Path, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__()
        self._db = open_ledger(path, lock_timeout_s=interval_s)
        self._path, self._file = path, file_id(path)
        self._version = -1  # of the database, as this connection sees it
        self._rows: list[Row] = []
        self._is_blind = False
        self._closing = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, args=(interval_s,), name="tenants", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent.  On a disk that hangs it waits no longer than `CLOSE_S`."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._db.close()

    def _run(self, interval_s: float) -> None:
        while not self._closing.wait(interval_s):
            try:
                self._look()
            except (sqlite3.DatabaseError, OSError) as error:
                if not self._is_blind:
                    log.warning("tenants can't be read, those of before stay in force: %s", error)
                self._is_blind = True
            else:
                self._is_blind = False

    def _look(self) -> None:
        """Read the tenants if anybody has written anything since: they, or the server its own rows."""
        if file_id(self._path) != self._file:
            raise OSError("the database was removed or replaced; start the server again to have it read")
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return
        rows = read_rows(self._db)
        self._version = version  # of before the reading: what was written meanwhile is seen the next time
        if rows == self._rows:
            return
        self._rows = rows
        tenants = tenants_of(rows)
        roll = self.roll.next(tenants)
        for tenant in tenants:
            if tenant.tier not in TIERS:
                log.warning("tenant=%s tier=%s is unknown and goes last", tenant.tenant_id, tenant.tier)
        log.info("tenants=%d", len(roll.by_key))
        self.roll = roll  # one reference is put in place of another: no reader sees anything between
