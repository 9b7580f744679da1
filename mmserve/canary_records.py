"""What is kept of canaries in the ledger's database: every decision, and the counts behind it, by the digest of the canary's weights.

The server's own rows are written by the ledger.  Operators write here, also under a running server, which takes notice within a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from mmserve.config import ConfigError
from mmserve.ledger import CanaryDecision
from mmserve.ledger_tables import open_ledger, writing

STARTED, BREACHED, ROLLED_BACK, PASSED, ABORTED, RESET = "started", "breached", "rolled_back", "passed", "aborted", "reset"
LOCK_TIMEOUT_S = 10.0
_ENDS = (BREACHED, ROLLED_BACK, ABORTED)
_COLUMNS = tuple(field.name for field in fields(CanaryDecision))


@dataclass(frozen=True, slots=True)
class CanaryRecord:
    """All that is known of one set of weights in one place."""

    canary: str  # small-canary
    fingerprint: str  # hex SHA-256
    decisions: tuple[CanaryDecision, ...]  # oldest first
    counts: Mapping[tuple[str, str, bool], tuple[int, int]]  # (slice, metric, of the canary?) -> (hits, trials)

    @property
    def end(self) -> CanaryDecision | None:
        """Why it must not be tried again; None if it may."""
        for decision in reversed(self.decisions):
            if decision.decision == RESET:
                return None
            if decision.decision in _ENDS:
                return decision
        return None

    @property
    def has_passed(self) -> bool:
        return any(decision.decision == PASSED for decision in self.decisions[self._num_forgotten :])

    @property
    def state(self) -> str:
        """rolled_back, passed, started, or reset: a word for tables."""
        if self.end is not None:
            return self.end.decision
        return PASSED if self.has_passed else self.decisions[-1].decision

    @property
    def _num_forgotten(self) -> int:
        """Decisions up to the last reset."""
        return max((i + 1 for i, each in enumerate(self.decisions) if each.decision == RESET), default=0)


class CanaryRecords:
    """A context manager.  Raises ConfigError for what can't be done, and sqlite3.DatabaseError if the file can't be read or written."""

    def __init__(self, path: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._db = open_ledger(path, lock_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def read(self, canary: str, fingerprint: str) -> CanaryRecord:
        """Empty for one that was never tried."""
        query = f"SELECT {', '.join(_COLUMNS)} FROM canary_decisions WHERE canary = ? AND fingerprint = ? ORDER BY rowid"
        decisions = tuple(CanaryDecision(*row) for row in self._db.execute(query, [canary, fingerprint]))
        query = "SELECT slice, metric, is_canary, hits, trials FROM canary_counts WHERE canary = ? AND fingerprint = ?"
        counts = {(row[0], row[1], bool(row[2])): (row[3], row[4]) for row in self._db.execute(query, [canary, fingerprint])}
        return CanaryRecord(canary, fingerprint, decisions, counts)

    def all(self) -> list[CanaryRecord]:
        """The one with the latest decision last."""
        query = "SELECT canary, fingerprint FROM canary_decisions GROUP BY canary, fingerprint ORDER BY max(rowid)"
        return [self.read(canary, fingerprint) for canary, fingerprint in self._db.execute(query).fetchall()]

    def abort(self, canary: str, reason: str) -> CanaryRecord:
        """The latest of that name ends, if it runs."""
        with writing(self._db):
            record = self._latest(canary)
            if record.end is not None or record.decisions[-1].decision == RESET:
                raise ConfigError(f"{canary} {record.fingerprint[:12]} does not run: {record.state}")
            self._add(record, ABORTED, reason)
        return record

    def reset(self, canary: str) -> CanaryRecord:
        """Forget what was counted of the latest of that name, so that the next start tries it afresh.  The decisions stay."""
        with writing(self._db):
            record = self._latest(canary)
            if record.end is None:
                raise ConfigError(f"{canary} {record.fingerprint[:12]} has not ended ({record.state}); abort ends it")
            self._db.execute("DELETE FROM canary_counts WHERE canary = ? AND fingerprint = ?", [canary, record.fingerprint])
            self._add(record, RESET, "by the operator")
        return record

    def _latest(self, canary: str) -> CanaryRecord:
        found = [record for record in self.all() if record.canary == canary]
        if not found:
            raise ConfigError(f"no {canary} was ever tried here")
        return found[-1]

    def _add(self, record: CanaryRecord, decision: str, reason: str) -> None:
        row = CanaryDecision(record.canary, record.fingerprint, decision, reason, time.time())
        self._db.execute(row.sql, asdict(row))
