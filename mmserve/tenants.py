"""Who may use the server, and how much of it: the tenants' records in the ledger's database, and the roll that is made of them.

Keys are random, shown once and kept as SHA-256: 256 random bits can't be guessed from a digest, so nothing slower is needed.
It doesn't know what tenants have used; that is `quota`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from sqlite_utils import Database

from mmserve.config import ConfigError
from mmserve.ledger_tables import open_ledger, writing
from mmserve.quota import Quota

DEFAULT_TENANT = "default"  # who has the operator's key, or needs none
TIERS: Mapping[str, int] = MappingProxyType({"premium": -100, "standard": 0, "batch": 100})  # priority; lower runs first
KEY_PREFIX = "mm-"  # for programs that look for leaked secrets
LOCK_TIMEOUT_S = 10.0
Row = tuple[str, int, int, str, str, str, float]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = (DEFAULT_TENANT, "readiness", "canary")
_SELECT = """SELECT tenant_id, tokens_per_minute, concurrent_requests, tier,
    coalesce(cache_salt, ''), coalesce(key_hash, ''), coalesce(created_at, 0.0)
    FROM tenant_quota LEFT JOIN tenant_key USING (tenant_id) ORDER BY tenant_id"""


@dataclass(frozen=True, slots=True)
class Tenant:
    tenant_id: str
    quota: Quota = Quota()
    tier: str = "standard"
    cache_salt: str = ""  # random and secret; with one, nothing cached is shared with other tenants
    key_hash: str = ""  # hex SHA-256; none: nobody can come in as this tenant
    key_created_at: float = 0.0  # seconds since the epoch

    @property
    def priority(self) -> int:
        """The best that its requests may have."""
        return TIERS.get(self.tier, max(TIERS.values()))  # a tier that somebody wrote by hand and nobody knows goes last


ANYBODY = Tenant(DEFAULT_TENANT)


@dataclass(frozen=True, slots=True)
class Roll:
    """Everybody who may come in, as of one moment."""

    by_key: Mapping[str, Tenant] = field(default_factory=lambda: MappingProxyType({}))  # hash of the key -> tenant
    quota_of: Mapping[str, Quota] = field(default_factory=lambda: MappingProxyType({}))  # also of who was on an earlier roll
    tier_of: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def needs_key(self) -> bool:
        """There is a tenant, or was one: a server doesn't fall open when its last tenant goes."""
        return bool(self.quota_of)

    def next(self, tenants: Iterable[Tenant]) -> Roll:
        """The roll after this one.  A request whose tenant was removed while it came in keeps to the quota that was."""
        by_key = {tenant.key_hash: tenant for tenant in tenants if tenant.key_hash}
        quota_of = {**self.quota_of, **{tenant.tenant_id: tenant.quota for tenant in by_key.values()}}
        return Roll(by_key, quota_of, {tenant.tenant_id: tenant.tier for tenant in by_key.values()})


class Tenants:
    """Where the roll of now stands.  Written by whoever watches the records; read by the door and by the engine."""

    def __init__(self, *tenants: Tenant) -> None:
        self.roll = Roll().next(tenants)

    def quota(self, tenant_id: str) -> Quota | None:
        return self.roll.quota_of.get(tenant_id)

    def tier(self, tenant_id: str) -> str:
        return self.roll.tier_of.get(tenant_id, ANYBODY.tier)


class TenantRecords:
    """The records, for the command line.  They may change under a running server, which takes notice within a second.

    A context manager.  Raises ConfigError for what can't be done, and sqlite3.DatabaseError if the file can't be read or written after all.
    """

    def __init__(self, path: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._db = open_ledger(path, lock_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def all(self) -> list[Tenant]:
        return tenants_of(read_rows(self._db))

    def add(self, tenant_id: str, quota: Quota, tier: str, *, has_private_cache: bool) -> str:
        """The key of the new tenant: nobody can ever read it again."""
        if not _NAME.fullmatch(tenant_id) or tenant_id in _RESERVED:
            raise ConfigError(
                f"a tenant's name is 1 to 64 letters, digits, dots, dashes and underscores, and not {' or '.join(_RESERVED)}; "
                f"got {tenant_id!r}"
            )
        key = _new_key()
        with writing(self._db):
            if self._find(tenant_id) is not None:
                raise ConfigError(f"there is a tenant {tenant_id} already")
            self._save(Tenant(tenant_id, quota, tier, _new_salt() if has_private_cache else "", key_hash(key), time.time()))
        return key

    def set(self, tenant_id: str, quota: Mapping[str, int], tier: str | None = None, *, has_private_cache: bool | None = None) -> Tenant:
        """Change what is given, and keep the rest.  `quota` has new values by the names of its fields."""
        with writing(self._db):
            tenant = self._get(tenant_id)
            salt = tenant.cache_salt
            if has_private_cache and not tenant.key_hash:
                raise ConfigError(f"{tenant_id} has no key yet; rotate gives it one")
            if has_private_cache is not None:
                salt = (salt or _new_salt()) if has_private_cache else ""
            tenant = replace(tenant, quota=replace(tenant.quota, **quota), tier=tier or tenant.tier, cache_salt=salt)
            self._save(tenant)
        return tenant

    def rotate(self, tenant_id: str) -> str:
        """The tenant's new key.  The old one is worth nothing from now on."""
        key = _new_key()
        with writing(self._db):
            self._save(replace(self._get(tenant_id), key_hash=key_hash(key), key_created_at=time.time()))
        return key

    def remove(self, tenant_id: str) -> None:
        """What the tenant has asked for before stays in the ledger."""
        with writing(self._db):
            self._get(tenant_id)
            for table in ("tenant_quota", "tenant_key"):
                self._db.execute(f"DELETE FROM {table} WHERE tenant_id = ?", [tenant_id])

    def _find(self, tenant_id: str) -> Tenant | None:
        return next((tenant for tenant in self.all() if tenant.tenant_id == tenant_id), None)

    def _get(self, tenant_id: str) -> Tenant:
        tenant = self._find(tenant_id)
        if tenant is None:
            raise ConfigError(f"there is no tenant {tenant_id}")
        return tenant

    def _save(self, tenant: Tenant) -> None:
        quota = tenant.quota
        self._db.execute(
            "INSERT OR REPLACE INTO tenant_quota VALUES (?, ?, ?, ?)",
            [tenant.tenant_id, quota.tokens_per_minute, quota.concurrent_requests, tenant.tier],
        )
        if tenant.key_hash:
            self._db.execute(
                "INSERT OR REPLACE INTO tenant_key VALUES (?, ?, ?, ?)",
                [tenant.tenant_id, tenant.key_hash, tenant.cache_salt, tenant.key_created_at],
            )


def read_rows(db: Database) -> list[Row]:
    """By name.  Making tenants of them takes ten times as long, so look first whether they have changed."""
    rows: list[Row] = db.execute(_SELECT).fetchall()
    return rows


def tenants_of(rows: Iterable[Row]) -> list[Tenant]:
    """A row of `tenant_quota` that somebody wrote by hand is a tenant without a key."""
    return [
        Tenant(tenant_id, Quota(tokens, requests), tier, salt, hashed, created_at)
        for tenant_id, tokens, requests, tier, salt, hashed, created_at in rows
    ]


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _new_salt() -> str:
    return secrets.token_hex(16)
