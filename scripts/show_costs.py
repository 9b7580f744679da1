"""Shows that what requests cost is what their GPUs cost: the sum over a mixed load against all that the workers measured.

    python -m scripts.show_costs --items 300

Starts a server of its own with the bundled model, and a router that escalates readily.  A third of the questions come twice, so that caches
have something to save; one in five comes from two clients at once, so that one encode has two payers; one client in twelve leaves in the
middle of its answer, and one in twelve before it, wherever its request is by then.  Needs `espeak-ng` and the Noto Color Emoji font.  Ends
in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import Progress

from mmserve.__main__ import main as mmserve
from mmserve.composition import BUNDLED
from mmserve.config import CostConfig
from mmserve.route_classifier import FILE
from scripts.loopback import Scrape, client, running, scrape
from scripts.measure_tiny import MAX_TOKENS, messages
from scripts.tiny.score import Item, sample_items

FIRST_SEED = 2**30 + 7_000_000
LIMIT = 0.02  # by which the two sums may differ
MODELS = ("small", "large", "auto")
ESCALATE_ABOVE = 0.02  # nats: four in ten of small's answers begin less certainly
NUM_JUDGED = 4
PATIENCE_S = 0.15  # of those who leave before their answer


@dataclass(frozen=True, slots=True)
class Told:
    """What one client heard: nothing of the cost, if it left."""

    usd: float = 0.0
    is_escalated: bool = False
    has_left: bool = False

    @classmethod
    def of(cls, explained: Mapping[str, Any]) -> Told:
        return cls(float(explained["cost"]["usd"]), explained["route"]["reason"] == "escalated")


async def ask(openai: AsyncOpenAI, index: int, conversation: list[Any]) -> Told:
    fields: dict[str, Any] = {"model": MODELS[index % len(MODELS)], "messages": conversation, "temperature": 0, "max_tokens": MAX_TOKENS}
    if index % 2:
        try:
            async with asyncio.timeout(PATIENCE_S if index % 12 == 7 else None):
                answer = await openai.chat.completions.create(**fields, extra_body={"explain": True})
        except TimeoutError:
            return Told(has_left=True)
        return Told.of((answer.model_extra or {})["mmserve"])
    explained: dict[str, Any] = {}
    stream = await openai.chat.completions.create(**fields, stream=True, extra_body={"explain": True})
    async with stream:
        async for chunk in stream:
            if index % 12 == 0 and chunk.choices and chunk.choices[0].delta.content:
                return Told(has_left=True)  # leaving closes the connection
            explained |= (chunk.model_extra or {}).get("mmserve", {})
    return Told.of(explained)


async def load(url: str, items: Sequence[Item], concurrency: int, console: Console) -> list[Told]:
    gate, rng = asyncio.Semaphore(concurrency), random.Random(1)
    with Progress(console=console) as progress:
        task = progress.add_task("questions", total=len(items))

        async def one(openai: AsyncOpenAI, index: int) -> list[Told]:
            async with gate:
                item = items[rng.randrange(index)] if index and rng.random() < 1 / 3 else items[index]
                num_clients = 2 if index % 5 == 0 else 1
                told = await asyncio.gather(*(ask(openai, index, messages(item)) for _ in range(num_clients)))
                progress.advance(task)
                return told

        async with client(url) as openai:
            return list(chain.from_iterable(await asyncio.gather(*(one(openai, index) for index in range(len(items))))))


async def settled(url: str) -> Scrape:
    """A reading after which nothing is charged any more, not even an encode for which nobody waits."""
    async with asyncio.timeout(120):
        now = await scrape(url)
        while True:
            before, _, now = now, await asyncio.sleep(1), await scrape(url)
            is_idle = now.total("num_requests_running") == now.total("num_requests_waiting") == 0
            if is_idle and growth(before, now, "gpu_seconds") == 0:
                return now


def kept(ledger: Path) -> tuple[int, float]:
    """Requests and USD in the ledger of a server that has ended."""
    with contextlib.closing(sqlite3.connect(ledger)) as db:
        count, usd = db.execute("SELECT count(*), coalesce(sum(usd), 0) FROM request_costs").fetchone()
    return count, usd


def growth(before: Scrape, after: Scrape, name: str) -> float:
    return after.total(f"{name}_total") - before.total(f"{name}_total")


async def show(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    items = sample_items(options.items, FIRST_SEED)
    usd_per_s = CostConfig().price_per_gpu_hour / 3600
    with tempfile.TemporaryDirectory(prefix="mmserve-costs-") as scratch:
        router = Path(scratch) / "router.json"
        bundled = json.loads((BUNDLED / FILE).read_text())
        router.write_text(json.dumps(bundled | {"escalate_above": ESCALATE_ABOVE, "num_judged": NUM_JUDGED}))
        async with running(Path(scratch), "--router", str(router), *options.flags) as server:
            before = await scrape(server.url)
            told = await load(server.url, items, options.concurrency, console)
            after = await settled(server.url)
        count, kept_usd = kept(server.data_dir / "ledger.db")
        mmserve(["usage", "--data-dir", scratch])
    workers_s = growth(before, after, "gpu_seconds")
    known, overhead = (reading.by_label("gpu_overhead_seconds_total", "reason") for reading in (before, after))
    overhead_s = {reason: seconds - known.get(reason, 0.0) for reason, seconds in overhead.items()}
    return {
        "script": "show_costs",
        "requests": count,
        "escalated": sum(each.is_escalated for each in told),
        "left": sum(each.has_left for each in told),
        "joined_encodes": int(growth(before, after, "single_flight_joins")),
        "worker_gpu_seconds": round(workers_s, 3),
        "workers_usd": round(workers_s * usd_per_s, 6),
        "requests_usd": round(kept_usd, 6),
        "told_usd": round(sum(each.usd for each in told), 6),
        "overhead_gpu_seconds": {reason: round(seconds, 3) for reason, seconds in overhead_s.items() if seconds},
        "difference": round(kept_usd / (workers_s * usd_per_s) - 1, 5),
        "unaccounted": round(1 - (kept_usd / usd_per_s + sum(overhead_s.values())) / workers_s, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("flags", nargs="*", help="for the server, after --")
    report = asyncio.run(show(parser.parse_args(), Console(width=140)))
    print(json.dumps(report))
    if abs(report["difference"]) > LIMIT:
        raise SystemExit(f"requests and workers differ by {report['difference']:.1%}, more than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
