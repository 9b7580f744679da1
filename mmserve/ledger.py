"""What happened, in SQLite: requests, the cache's index, feedback.  One writer thread; nobody who records ever waits for it.

Rows land exactly once.  While the database is locked, full or broken they go to spool files beside it (whole files, moved into place).
Those are taken in, in order, as soon as it can be written again; each file's name is recorded in the transaction that takes it in.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from mmserve.clock import steady_epoch
from mmserve.config import ConfigError
from mmserve.ledger_tables import file_id, open_ledger
from mmserve.spool import Spool

log = logging.getLogger(__name__)

RETRY_S = 1.0  # between attempts while the database can't be written
SWEEP_EVERY_S = 60.0  # the cache's index is rid of what has expired


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One accepted request that has ended, however it ended."""

    request_id: str  # the server's own, never the client's
    tenant_id: str
    modality_mask: int  # 1 text, 2 image, 4 audio
    text_tokens: int
    vision_tokens: int
    audio_tokens: int
    ttft_ms: float | None  # None: it ended before its first token
    total_latency_ms: float
    model_variant: str  # small or large, or a canary of one of them
    created_at: float  # seconds since the epoch

    sql = """INSERT INTO inference_requests VALUES (:request_id, :tenant_id, :modality_mask, :text_tokens, :vision_tokens, :audio_tokens,
        :ttft_ms, :total_latency_ms, :model_variant, :created_at) ON CONFLICT (request_id) DO NOTHING"""


@dataclass(frozen=True, slots=True)
class CostRow:
    """What one of those requests cost.  It comes a little later: a step that ran when the request ended may have been for it."""

    request_id: str
    image_encode_gpu_s: float
    audio_encode_gpu_s: float
    prefill_gpu_s: float
    decode_gpu_s: float
    usd: float
    saved_usd: float  # an estimate: what it would have cost more if no cache had held any of it

    sql = """INSERT INTO request_costs VALUES (:request_id, :image_encode_gpu_s, :audio_encode_gpu_s, :prefill_gpu_s, :decode_gpu_s,
        :usd, :saved_usd) ON CONFLICT (request_id) DO NOTHING"""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Rows of a media window were stored in a tier (`num_hits` 0) or found there (1).  The index names the more lasting of two tiers."""

    content_hash: str  # hex SHA-256 of everything that shapes the rows
    media_kind: str  # image or audio
    token_count: int
    storage_uri: str  # memory: or disk:, and what the tier finds it by
    num_hits: int
    at: float  # seconds since the epoch
    expires_at: float

    sql = """INSERT INTO media_embedding_cache VALUES (:content_hash, :media_kind, :token_count, :storage_uri, :num_hits,
        CASE WHEN :num_hits > 0 THEN :at END, :expires_at)
        ON CONFLICT (content_hash) DO UPDATE SET
        storage_uri = CASE WHEN storage_uri LIKE 'disk:%' THEN storage_uri ELSE excluded.storage_uri END,
        hit_count = hit_count + excluded.hit_count, expires_at = excluded.expires_at,
        last_hit_at = coalesce(excluded.last_hit_at, last_hit_at)"""


@dataclass(frozen=True, slots=True)
class CacheDropped:
    """The rows have left a tier.  The index loses them if it was this one that it named."""

    content_hash: str
    storage_uri: str

    sql = "DELETE FROM media_embedding_cache WHERE content_hash = :content_hash AND storage_uri = :storage_uri"


@dataclass(frozen=True, slots=True)
class CacheMoved:
    """The rows are only in this tier from now on."""

    content_hash: str
    storage_uri: str

    sql = "UPDATE media_embedding_cache SET storage_uri = :storage_uri WHERE content_hash = :content_hash"


@dataclass(frozen=True, slots=True)
class CacheExpired:
    """Time has passed."""

    now_s: float  # seconds since the epoch

    sql = "DELETE FROM media_embedding_cache WHERE expires_at <= :now_s"


@dataclass(frozen=True, slots=True)
class CacheReopened:
    """A process has started: what was in memory is gone, and so is what has expired meanwhile."""

    now_s: float  # seconds since the epoch

    sql = "DELETE FROM media_embedding_cache WHERE storage_uri LIKE 'memory:%' OR expires_at <= :now_s"


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a client thought of an answer.  The last word counts; once regenerated, always regenerated."""

    request_id: str
    tenant_id: str
    rating: str  # up or down
    regenerated: bool
    created_at: float  # seconds since the epoch

    sql = """INSERT INTO feedback VALUES (:request_id, :tenant_id, :rating, :regenerated, :created_at)
        ON CONFLICT (request_id, tenant_id) DO UPDATE SET rating = excluded.rating,
        regenerated = max(regenerated, excluded.regenerated), created_at = excluded.created_at"""


@dataclass(frozen=True, slots=True)
class GroundingRow:
    """What the vision side saw of the objects that an answer names."""

    request_id: str
    mode: str  # flag, regenerate or sample
    outcome: str  # supported, regenerated, unsupported, unchecked or unavailable
    grounding_score: float | None  # share of the mentions that are supported; None: nothing was checked
    num_mentions: int  # that could be checked
    num_unsupported: int
    num_draws: int
    created_at: float  # seconds since the epoch

    sql = """INSERT INTO grounding VALUES (:request_id, :mode, :outcome, :grounding_score, :num_mentions, :num_unsupported, :num_draws,
        :created_at) ON CONFLICT (request_id) DO NOTHING"""


@dataclass(frozen=True, slots=True)
class CanaryDecision:
    """What became of a canary, and why.  Its figures are those of the comparison that decided, if one did."""

    canary: str  # its name, small-canary
    fingerprint: str  # hex SHA-256 of its weights
    decision: str  # started, breached, rolled_back, passed, aborted or reset
    reason: str
    created_at: float  # seconds since the epoch
    slice: str | None = None
    metric: str | None = None
    canary_hits: int | None = None
    canary_trials: int | None = None
    stable_hits: int | None = None
    stable_trials: int | None = None

    sql = """INSERT INTO canary_decisions VALUES (:canary, :fingerprint, :decision, :slice, :metric, :canary_hits, :canary_trials,
        :stable_hits, :stable_trials, :reason, :created_at)"""


@dataclass(frozen=True, slots=True)
class CanaryOutcome:
    """One more answer that a canary is judged by: its own, or one of the decoder beside it."""

    canary: str
    fingerprint: str
    slice: str
    metric: str
    is_canary: bool
    is_hit: bool

    sql = """INSERT INTO canary_counts VALUES (:canary, :fingerprint, :slice, :metric, :is_canary, :is_hit, 1)
        ON CONFLICT (canary, fingerprint, slice, metric, is_canary) DO UPDATE SET hits = hits + excluded.hits, trials = trials + 1"""


Event = (
    RequestRow | CostRow | CacheEvent | CacheDropped | CacheMoved | CacheExpired | CacheReopened | Feedback | GroundingRow
    | CanaryDecision | CanaryOutcome
)  # fmt: skip
_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
# A row at fault, not the database: a constraint, or a value of no type that SQLite has.
_REFUSED = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError)


class Ledger:
    """Record from any thread, at once and without an error; read with any SQLite client.  `close` flushes.

    Raises ConfigError, and only here, at the start: a file that can't be opened is for the operator to mend.
    `max_pending` rows wait in memory when neither database nor spool can be written; further ones are counted in `num_lost`.
    `now_s` gives seconds since the epoch; expiry goes by it, and what is recorded to expire should too.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_pending: int = 10_000,
        lock_timeout_s: float = 1.0,
        sweep_every_s: float = SWEEP_EVERY_S,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self.path = path
        self.now_s = now_s or steady_epoch()
        self._lock_timeout_s = lock_timeout_s
        self._sweep_every_s = sweep_every_s
        self._swept_s = time.monotonic()
        self._spool = Spool(path.with_name(path.name + ".spool"))
        self.num_spooled = 0  # rows that went to the spool
        self.num_lost = 0  # rows refused by the schema, or recorded when nothing could take them
        self._db = open_ledger(path, lock_timeout_s)
        self._file = file_id(path)
        self._max_pending = max_pending
        self._pending: deque[Event] = deque()
        self._is_behind = bool(self._spool.files())  # the last attempt did not bring everything into the database
        self._flushes_asked = self._flushes_done = 0
        self._closing = self._has_stopped = False
        self._changed = threading.Condition()  # guards everything between _pending and here
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._record(CacheReopened(self.now_s()))
        self._thread.start()

    # --- recording -----------------------------------------------------------------------------------------------------------

    def record_request(self, row: RequestRow) -> None:
        self._record(row)

    def record_cost(self, row: CostRow) -> None:
        self._record(row)

    def record_cache_event(self, event: CacheEvent | CacheDropped | CacheMoved) -> None:
        self._record(event)

    def record_feedback(self, feedback: Feedback) -> None:
        self._record(feedback)

    def record_grounding(self, row: GroundingRow) -> None:
        self._record(row)

    def record_canary(self, row: CanaryDecision | CanaryOutcome) -> None:
        self._record(row)

    def flush(self) -> bool:
        """Wait until all that was recorded has been tried; True if everything is in the database, spooled rows included.  Blocks.

        What is in the database then is on the disk too, and outlives a power cut.
        """
        with self._changed:
            self._flushes_asked += 1
            mine = self._flushes_asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushes_done >= mine or self._has_stopped)
            return not self._is_behind

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, to the spool if need be, and stop.  Blocks, on a disk that hangs for `timeout_s`; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("ledger could not be closed, the disk does not answer waiting=%d", len(self._pending))
            return
        self._db.close()

    def _record(self, event: Event) -> None:
        with self._changed:
            if self._closing or len(self._pending) >= self._max_pending:
                self.num_lost += 1
                if self.num_lost.bit_count() == 1:  # 1, 2, 4, ...: a flood of losses must not become a flood of lines
                    log.error("ledger lost a row kind=%s lost=%d", type(event).__name__, self.num_lost)
                return
            self._pending.append(event)
            self._changed.notify_all()

    # --- the writer's thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._has_stopped:
                self._settle_pending()
        finally:
            with self._changed:
                self._has_stopped = True
                self._changed.notify_all()

    def _settle_pending(self) -> None:
        """Wait for something to do, then bring what is pending into the database or else the spool; it stays pending if neither works."""
        with self._changed:
            self._changed.wait_for(self._has_work, RETRY_S if self._is_behind else self._sweep_in_s())
            batch, asked, closing = tuple(self._pending), self._flushes_asked, self._closing
        landed = self._land(batch)
        settled = landed or self._keep(batch)
        with self._changed:
            for _ in batch if settled else ():
                self._pending.popleft()
            self._is_behind = not landed
            self._flushes_done = asked
            if closing:
                self._has_stopped = True
                self.num_lost += len(self._pending)
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._closing or self._flushes_asked > self._flushes_done or (bool(self._pending) and not self._is_behind)

    def _land(self, batch: Sequence[Event]) -> bool:
        """Older rows first: the spool, then the batch.  False if the database could not take them."""
        try:
            self._require_file()
            for file in self._spool.files():
                self._import(file)
            if batch:
                self._apply(batch)
            if self._sweep_in_s() <= 0:
                self._swept_s = time.monotonic()
                self._apply([CacheExpired(self.now_s())])
        except (sqlite3.DatabaseError, OSError, ConfigError) as error:
            if not self._is_behind:
                log.warning("ledger database can't be written, rows are spooled: %s", error)
            return False
        if self._is_behind:
            log.info("ledger database caught up")
        return True

    def _require_file(self) -> None:
        """Start a new one when somebody has removed ours: SQLite would go on writing into what has no name any more."""
        if file_id(self.path) == self._file:
            return
        self._db.close()
        for suffix in ("-wal", "-shm"):  # the removed file's: SQLite would apply them to what is there now
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self._db = open_ledger(self.path, self._lock_timeout_s)
        self._file = file_id(self.path)
        log.error("ledger database was removed or replaced, going on in what is there now")

    def _sweep_in_s(self) -> float:
        return self._swept_s + self._sweep_every_s - time.monotonic()

    def _apply(self, batch: Sequence[Event], spool_file: str | None = None) -> None:
        """One transaction.  A row that the schema refuses is left out and counted; it must not hold up the others."""
        try:
            self._write(batch, spool_file)
        except _REFUSED:
            good = [event for event in batch if self._is_accepted(event)]
            self.num_lost += len(batch) - len(good)
            log.error("ledger rows refused by the schema rows=%d", len(batch) - len(good))
            self._write(good, spool_file)

    def _write(self, batch: Sequence[Event], spool_file: str | None) -> None:
        with self._db.atomic():
            if spool_file is not None:
                self._db.execute("INSERT INTO spool_imported VALUES (?)", [spool_file])
            for event in batch:
                self._db.execute(event.sql, asdict(event))

    def _is_accepted(self, event: Event) -> bool:
        self._db.execute("BEGIN")
        try:
            self._db.execute(event.sql, asdict(event))
        except _REFUSED:
            return False
        finally:
            self._db.rollback()
        return True

    # --- the spool -----------------------------------------------------------------------------------------------------------

    def _keep(self, batch: Sequence[Event]) -> bool:
        """Into the spool, all or none of it.  False when even that fails."""
        if not batch:
            return True
        try:
            self._spool.write(json.dumps([type(event).__name__, asdict(event)]) for event in batch)
        except (OSError, TypeError) as error:
            log.error("ledger spool can't be written waiting=%d: %s", len(batch), error)
            return False
        self.num_spooled += len(batch)
        return True

    def _import(self, file: Path) -> None:
        if self._db.execute("SELECT 1 FROM spool_imported WHERE name = ?", [file.name]).fetchone() is None:
            try:
                batch = [_parse(line) for line in file.read_text().splitlines()]
            except (ValueError, KeyError, TypeError) as error:
                log.error("ledger spool file is damaged and set aside file=%s: %s", file.name, error)
                self._spool.set_aside(file)
                return
            self._apply(batch, file.name)
        self._spool.remove(file)


def _parse(line: str) -> Event:
    name, fields = json.loads(line)
    kind: Any = _EVENTS[name]
    event: Event = kind(**fields)
    return event
