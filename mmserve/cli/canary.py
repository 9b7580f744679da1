"""`mmserve canary`: what became of canaries, and ending one by hand.  It reads and writes the data directory; a server there follows."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mmserve.canary import Comparison, Metric, Pair, difference
from mmserve.canary_records import CanaryRecord, CanaryRecords
from mmserve.cli.data_dir import add_data_dir, with_ledger

_PURPOSES = {
    "status": "show what was decided of each canary, and the counts behind it",
    "abort": "end a canary that runs: its requests go on at the decoder beside it",
    "reset": "forget why a canary has ended, so that the next start of the server tries it afresh",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, purpose in _PURPOSES.items():
        verb = verbs.add_parser(name, help=purpose, description=purpose)
        add_data_dir(verb)
        if name == "status":
            verb.add_argument("--json", action="store_true", help="for programs")
        else:
            verb.add_argument("name", choices=("small-canary", "large-canary"))
        if name == "abort":
            verb.add_argument("--reason", default="by the operator", help="for the records")


def run(args: argparse.Namespace) -> int:
    return with_ledger(args, "the records of canaries", lambda path: _do(path, args))


def _do(path: Path, args: argparse.Namespace) -> None:
    with CanaryRecords(path) as records:
        if args.verb == "status":
            _show(records.all(), as_json=args.json)
            return
        record = records.abort(args.name, args.reason) if args.verb == "abort" else records.reset(args.name)
    done = "aborted" if args.verb == "abort" else "reset"
    Console(stderr=True, highlight=False).print(f"{record.canary} {record.fingerprint[:12]}: {done}")


def _show(records: list[CanaryRecord], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_fields(record) for record in records], indent=2))
        return
    console = Console(highlight=False)
    if not records:
        console.print("no canary was ever tried here")
    for record in records:
        console.print(f"[bold]{record.canary}[/] {record.fingerprint[:12]}: {record.state}")
        for decision in record.decisions:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.created_at))
            console.print(f"  {at}  {decision.decision:<12} {decision.reason}", soft_wrap=True, markup=False)
        if record.counts:
            console.print(_table(record))


def _table(record: CanaryRecord) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in ("slice", "wrong", "canary", "stable", "difference"):
        table.add_column(column, justify="left" if column in ("slice", "wrong") else "right")
    for (slice_name, metric), pair in sorted(_pairs(record).items()):
        low, high = difference(pair.canary, pair.stable)
        known = f"{low:+.3f} to {high:+.3f}" if pair.stable.trials else ""
        table.add_row(slice_name, metric, str(pair.canary), str(pair.stable) if pair.stable.trials else "", known)
    return table


def _fields(record: CanaryRecord) -> dict[str, object]:
    counts = [
        {"slice": slice_name, "metric": metric, **asdict(pair), "difference": difference(pair.canary, pair.stable)}
        for (slice_name, metric), pair in sorted(_pairs(record).items())
    ]
    return {
        "canary": record.canary,
        "fingerprint": record.fingerprint,
        "state": record.state,
        "decisions": [asdict(decision) for decision in record.decisions],
        "counts": counts,
    }


def _pairs(record: CanaryRecord) -> dict[tuple[str, Metric], Pair]:
    return Comparison(0.0, record.counts).pairs
