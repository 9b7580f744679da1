"""Shows that what requests cost is what their GPUs cost: the sum over a mixed load against all that the workers measured.

    python -m scripts.show_costs --items 300

Starts a server of its own with the bundled model.  A third of the questions come twice, so that caches have something to save; one in
twelve clients leaves in the middle of its answer.  Needs `espeak-ng` and the Noto Color Emoji font.  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import Progress

from mmserve.__main__ import main as mmserve
from mmserve.config import CostConfig
from scripts.loopback import Scrape, client, running, scrape
from scripts.measure_tiny import MAX_TOKENS, messages
from scripts.tiny.score import Item, sample_items

FIRST_SEED = 2**30 + 7_000_000
LIMIT = 0.02  # by which the two sums may differ
MODELS = ("small", "large", "auto")


async def ask(openai: AsyncOpenAI, index: int, conversation: list[Any]) -> float:
    """USD, as the answer says; 0 for one that was left."""
    fields: dict[str, Any] = {"model": MODELS[index % len(MODELS)], "messages": conversation, "temperature": 0, "max_tokens": MAX_TOKENS}
    usd = 0.0
    if index % 2:
        answer = await openai.chat.completions.create(**fields, extra_body={"explain": True})
        return float((answer.model_extra or {})["mmserve"]["cost"]["usd"])
    stream = await openai.chat.completions.create(**fields, stream=True, extra_body={"explain": True})
    async with stream:
        async for chunk in stream:
            if index % 12 == 0 and chunk.choices and chunk.choices[0].delta.content:
                return 0.0  # leaving closes the connection
            usd = (chunk.model_extra or {}).get("mmserve", {}).get("cost", {}).get("usd", usd)
    return usd


async def load(url: str, items: Sequence[Item], concurrency: int, console: Console) -> float:
    gate, rng = asyncio.Semaphore(concurrency), random.Random(1)
    with Progress(console=console) as progress:
        task = progress.add_task("questions", total=len(items))

        async def one(openai: AsyncOpenAI, index: int) -> float:
            async with gate:
                item = items[rng.randrange(index)] if index and rng.random() < 1 / 3 else items[index]
                usd = await ask(openai, index, messages(item))
                progress.advance(task)
                return usd

        async with client(url) as openai:
            return sum(await asyncio.gather(*(one(openai, index) for index in range(len(items)))))


async def wait_kept(ledger: Path, num_requests: int) -> tuple[int, float]:
    """Requests and USD in the ledger, once all are there."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.closing(sqlite3.connect(ledger)) as db:
                count, usd = db.execute("SELECT count(*), coalesce(sum(usd), 0) FROM request_costs").fetchone()
            if count >= num_requests:
                return count, usd
            await asyncio.sleep(0.2)


def growth(before: Scrape, after: Scrape, name: str) -> float:
    return after.total(f"{name}_total") - before.total(f"{name}_total")


async def show(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    items = sample_items(options.items, FIRST_SEED)
    usd_per_s = CostConfig().price_per_gpu_hour / 3600
    with tempfile.TemporaryDirectory(prefix="mmserve-costs-") as scratch:
        async with running(Path(scratch), *options.flags) as server:
            before = await scrape(server.url)
            told_usd = await load(server.url, items, options.concurrency, console)
            count, kept_usd = await wait_kept(server.data_dir / "ledger.db", len(items))
            after = await scrape(server.url)
        mmserve(["usage", "--data-dir", scratch])
    workers_s, overhead_s = growth(before, after, "gpu_seconds"), growth(before, after, "gpu_overhead_seconds")
    return {
        "script": "show_costs",
        "requests": count,
        "worker_gpu_seconds": round(workers_s, 3),
        "workers_usd": round(workers_s * usd_per_s, 6),
        "requests_usd": round(kept_usd, 6),
        "told_usd": round(told_usd, 6),
        "overhead_gpu_seconds": round(overhead_s, 3),
        "difference": round(kept_usd / (workers_s * usd_per_s) - 1, 5),
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
