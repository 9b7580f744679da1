"""`mmserve usage`: what was used and what it cost, by tenant, day and modality.  It reads the ledger in the data directory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmserve.cli.data_dir import add_data_dir, with_ledger
from mmserve.config import ConfigError
from mmserve.ledger_tables import open_ledger
from mmserve.usage import ENCODE_LIMIT, Sum, Used, read_usage, summed

LOCK_TIMEOUT_S = 10.0
_UNITS = {"h": 3600.0, "d": 24 * 3600.0, "w": 7 * 24 * 3600.0}
_BY: Mapping[str, Callable[[Used], str]] = {
    "tenant": lambda used: used.tenant,
    "day": lambda used: used.day,
    "modality": lambda used: used.modality,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_dir(parser)
    parser.add_argument("--since", default="30d", metavar="WHEN", help="24h, 7d, 4w, or a day such as 2026-11-30 (UTC); 30d by default")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    return with_ledger(args, "the ledger", lambda path: _tell(_read(path, since(args.since, time.time())), as_json=args.json))


def _tell(used: list[Used], *, as_json: bool) -> None:
    report = {name: summed(used, key) for name, key in _BY.items()}
    text = report["modality"].get("text")
    if as_json:
        print(json.dumps({name: {key: _fields(each, text) for key, each in sums.items()} for name, sums in report.items()}, indent=2))
    elif not used:
        Console(highlight=False).print("no requests")
    else:
        _show(report, text)


def since(text: str, now_s: float) -> float:
    """Seconds since the epoch.  Raises ConfigError."""
    if match := re.fullmatch(r"(\d{1,6})([hdw])", text):
        return now_s - int(match[1]) * _UNITS[match[2]]
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(f"--since takes 24h, 7d, 4w or a day such as 2026-11-30, got {text!r}", param="since") from None


def _read(path: Path, since_s: float) -> list[Used]:
    if not path.exists():  # opening would make one
        raise ConfigError(f"there is no {path.name} in {path.parent}; --data-dir names another place", param="data-dir")
    db = open_ledger(path, LOCK_TIMEOUT_S)
    try:
        return read_usage(db, since_s)
    finally:
        db.close()


def _show(report: Mapping[str, Mapping[str, Sum]], text: Sum | None) -> None:
    console = Console(highlight=False)
    for name, sums in report.items():
        table = Table(box=None, padding=(0, 1, 0, 0), title=f"by {name}", title_justify="left", title_style="bold")
        table.add_column(name, overflow="fold", min_width=10)
        for column in ("requests", "encode", "prefill", "decode", "USD", "USD/1k", "saved/1k", "encoding"):
            table.add_column(column, justify="right", no_wrap=True)
        for key, each in sums.items():
            share = each.encode_share(text)
            table.add_row(
                key,
                f"{each.num_requests:,}",
                f"{each.encode_gpu_s:.1f}",
                f"{each.prefill_gpu_s:.1f}",
                f"{each.decode_gpu_s:.1f}",
                f"{each.usd:.4f}",
                f"{each.usd_per_1000:.4f}",
                f"{1000 * each.saved_usd / each.num_requests:.4f}",
                "-" if share is None else f"{'[red]' if share > ENCODE_LIMIT else ''}{share:.0%}",
            )
        console.print(table)
        console.print()
    console.print("[dim]Encode, prefill and decode in GPU-seconds.  Saved: by caches, an estimate.")
    console.print(f"[dim]Encoding: what it adds to a request, as a share of one of text alone; the aim is {ENCODE_LIMIT:.0%} at most.")


def _fields(each: Sum, text: Sum | None) -> dict[str, Any]:
    rates = {"usd_per_1000": each.usd_per_1000, "saved_usd_per_1000": 1000 * each.saved_usd / each.num_requests}
    return dataclasses.asdict(each) | rates | {"encode_share_of_text_request": each.encode_share(text)}
