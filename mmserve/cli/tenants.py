"""`mmserve tenants`: who may use a server, and how much.  It changes the records in the data directory; a server there follows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mmserve.cli.data_dir import add_data_dir, with_ledger
from mmserve.quota import Quota
from mmserve.tenants import TIERS, Tenant, TenantRecords

_PURPOSES = {
    "add": "let somebody in; prints the key, once",
    "list": "show all tenants",
    "set": "change a tenant's limits; what isn't given stays",
    "rotate": "give a tenant a new key in place of the old one; prints it, once",
    "remove": "let a tenant in no more; requests that run may finish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, purpose in _PURPOSES.items():
        verb = verbs.add_parser(name, help=purpose, description=purpose)
        add_data_dir(verb)
        if name == "list":
            verb.add_argument("--json", action="store_true", help="for programs")
            continue
        verb.add_argument("name", help="letters, digits, dots, dashes and underscores")
        if name in ("add", "set"):
            _add_limits(verb)


def _add_limits(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--tokens-per-minute", type=_count, metavar="INT", help="fused tokens, prompt and answer, in any minute; 0: no limit")
    verb.add_argument("--concurrent-requests", type=_count, metavar="INT", help="requests at a time; 0: no limit")
    verb.add_argument("--tier", choices=list(TIERS), help="whose requests go first: premium before standard before batch")
    verb.add_argument(
        "--private-cache", action=argparse.BooleanOptionalAction, help="share no cached picture, clip or prompt with other tenants"
    )


def run(args: argparse.Namespace) -> int:
    return with_ledger(args, "the tenants' records", lambda path: _do(path, args))


def _do(path: Path, args: argparse.Namespace) -> None:
    with TenantRecords(path) as records:
        _VERBS[args.verb](records, args, Console(stderr=True, highlight=False))


def _add(records: TenantRecords, args: argparse.Namespace, console: Console) -> None:
    key = records.add(args.name, Quota(**_limits(args)), args.tier or "standard", has_private_cache=bool(args.private_cache))
    _show_key(key, args.name, console)


def _list(records: TenantRecords, args: argparse.Namespace, console: Console) -> None:
    tenants = records.all()
    if args.json:
        print(json.dumps([_fields(tenant) for tenant in tenants], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column, justify in zip(("tenant", "tier", "tokens/min", "concurrent", "cache", "key of"), "llrrll", strict=True):
        table.add_column(column, justify="right" if justify == "r" else "left", overflow="fold")
    for tenant in tenants:
        table.add_row(
            tenant.tenant_id,
            tenant.tier,
            _limit(tenant.quota.tokens_per_minute),
            _limit(tenant.quota.concurrent_requests),
            "private" if tenant.cache_salt else "shared",
            time.strftime("%Y-%m-%d", time.localtime(tenant.key_created_at)) if tenant.key_hash else "none",
        )
    Console(highlight=False).print(table if tenants else "no tenants")


def _set(records: TenantRecords, args: argparse.Namespace, console: Console) -> None:
    records.set(args.name, _limits(args), args.tier, has_private_cache=args.private_cache)


def _rotate(records: TenantRecords, args: argparse.Namespace, console: Console) -> None:
    _show_key(records.rotate(args.name), args.name, console)


def _remove(records: TenantRecords, args: argparse.Namespace, console: Console) -> None:
    records.remove(args.name)


_VERBS: dict[str, Callable[[TenantRecords, argparse.Namespace, Console], None]] = {
    "add": _add, "list": _list, "set": _set, "rotate": _rotate, "remove": _remove,
}  # fmt: skip


def _show_key(key: str, name: str, console: Console) -> None:
    """The key alone goes to the output, so that a script can take it."""
    print(key)
    if sys.stdout.isatty():
        console.print(f"[dim]The key of {name}.  Keep it: only its hash is stored, and it can't be shown again.[/]", soft_wrap=True)


def _fields(tenant: Tenant) -> dict[str, object]:
    return {
        "tenant_id": tenant.tenant_id,
        "tier": tenant.tier,
        **dataclasses.asdict(tenant.quota),
        "private_cache": bool(tenant.cache_salt),
        "key_created_at": tenant.key_created_at if tenant.key_hash else None,
    }


def _limits(args: argparse.Namespace) -> dict[str, int]:
    """Those that were given."""
    names = (field.name for field in dataclasses.fields(Quota))
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _limit(value: int) -> str:
    return f"{value:,}" if value else "any"


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError("must be 0 or more, and fit in 64 bits")
    return value
