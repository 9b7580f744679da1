"""Canaries that should go and one that should stay: after how many answers, in which slice, and what the clients saw of it.

    python -m scripts.show_canary                                  starts servers of its own
    python -m scripts.show_canary --canaries identical adapter     only these
    python -m scripts.show_canary --modes shadow --items 600

adapter: noise in the vision projectors of a copy of the bundled model, as wide as their weights spread; half: half as wide.  decoder:
noise in the matrices of the small decoder.  identical: a copy.  Golden questions are asked of the small decoder in a fixed order, and
again with other words before them when all have been asked, until the canary is rolled back or `--items` answers are in.  Exit status 1
if a client got no answer, an identical canary went, or one stayed that must be seen (MUST_GO).  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mmserve.canary_records import BREACHED, ROLLED_BACK, CanaryRecord, CanaryRecords
from mmserve.composition import BUNDLED
from mmserve.evals import golden
from mmserve.evals.endpoint import Endpoint, RequestFailed, user_message
from mmserve.evals.golden import GoldenSet, Item, load_golden_set
from mmserve.evals.scoring import score
from scripts.loopback import Running, running, scrape
from scripts.routing.weaken import weaken
from scripts.show_gate import damage_adapter

NAME = "small-canary"
POLL_S = 0.2
START_S = 300.0
# Wrong answers that name nothing that isn't there show in shadows alone; half the noise does less harm than the margin.
MUST_GO = {("adapter", "traffic"), ("adapter", "shadow"), ("decoder", "shadow")}
DECODER_NOISE = 0.45  # of scripts.routing: a third of the answers are wrong


def identical(directory: Path) -> Path:
    return shutil.copytree(BUNDLED, directory / "identical")


def weakened(directory: Path) -> Path:
    weaken(directory / "weakened", DECODER_NOISE)
    return directory / "weakened"


CANARIES: dict[str, Callable[[Path], Path]] = {
    "adapter": lambda directory: damage_adapter(directory, 1.0),
    "half": lambda directory: damage_adapter(directory, 0.5),
    "decoder": weakened,
    "identical": identical,
}


def questions(items: GoldenSet, slices: list[str], seed: int) -> Iterator[tuple[Item, str]]:
    """Without end: items in an order of their own, with words before them that make each round's a new conversation."""
    chosen = [item for item in items.items if item.slice_name in slices]
    random.Random(seed).shuffle(chosen)
    for round_number in range(10**6):
        for item in chosen:
            yield item, "" if round_number == 0 else f"Question {round_number + 1}."


class Clients:
    """What they asked, and what came back."""

    def __init__(self, endpoint: Endpoint, items: GoldenSet) -> None:
        self._endpoint = endpoint
        self._vocabulary = items.vocabulary
        self.num_right: Counter[str] = Counter()  # by the decoder that answered
        self.num_answers: Counter[str] = Counter()
        self.failures: list[str] = []

    async def ask(self, item: Item, before: str) -> None:
        message = [{"role": "system", "content": before}] if before else []
        try:
            reply = await self._endpoint.chat([*message, await asyncio.to_thread(user_message, item.parts)], max_tokens=64, explain=True)
        except RequestFailed as problem:
            self.failures.append(str(problem))
            return
        model = reply.body["mmserve"]["route"]["model"]
        self.num_answers[model] += 1
        self.num_right[model] += bool(score(item, item.id, reply.text, self._vocabulary).is_right)

    @property
    def total(self) -> int:
        return self.num_answers.total() + len(self.failures)


async def wait_live(server: Running) -> None:
    async with asyncio.timeout(START_S):
        while not (await scrape(server.url)).total("canary_live", {"model_name": NAME}):
            await asyncio.sleep(POLL_S)


def record_of(data_dir: Path) -> CanaryRecord:
    with CanaryRecords(data_dir / "ledger.db") as records:
        return records.all()[-1]


async def show(name: str, directory: Path, mode: str, options: argparse.Namespace, items: GoldenSet) -> dict[str, Any]:
    scratch = directory / f"{name}-{mode}"
    scratch.mkdir()
    canary = CANARIES[name](scratch)
    data_dir = scratch / "data"
    data_dir.mkdir()
    flags = ("--canary-small", str(canary), "--canary-share", str(options.share), "--canary-mode", mode)
    async with running(data_dir, *flags) as server:
        await wait_live(server)
        async with Endpoint(server.url, model="small") as endpoint:
            clients = Clients(endpoint, items)
            await _ask_until_ended(clients, server, questions(items, options.slices, options.seed), options)
        shadows = await scrape(server.url)
        outcomes = ("equal", "different", "answered", "busy", "refused", "failed")
        shadowed = {key: int(shadows.total("canary_shadows_total", {"outcome": key})) for key in outcomes}
    record = record_of(data_dir)
    breaches = [asdict(decision) for decision in record.decisions if decision.decision == BREACHED]
    return {
        "state": record.state,
        "answers": clients.total,
        "by_canary": clients.num_answers[NAME],
        "right": {model: f"{clients.num_right[model]}/{count}" for model, count in sorted(clients.num_answers.items())},
        "failures": clients.failures,
        "breach": breaches[0] if breaches else None,
        "shadows": {key: count for key, count in shadowed.items() if count},
        "requests_in_ledger": _count(data_dir, "SELECT count(*) FROM inference_requests"),
    }


def _count(data_dir: Path, query: str) -> int:
    with sqlite3.connect(data_dir / "ledger.db") as db:
        number: int = db.execute(query).fetchone()[0]
        return number


async def _ask_until_ended(clients: Clients, server: Running, asked: Iterator[tuple[Item, str]], options: argparse.Namespace) -> None:
    """So many at once; whoever has been answered asks the next."""

    async def client() -> None:
        while clients.total < options.items and (await scrape(server.url)).total("canary_live", {"model_name": NAME}):
            await clients.ask(*next(asked))

    await asyncio.gather(*(client() for _ in range(options.concurrency)))


async def show_all(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    items = load_golden_set(golden.BUNDLED)
    results: dict[str, Any] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mmserve-canary-") as scratch:
        for name in options.canaries:
            for mode in options.modes:
                found = results[f"{name} {mode}"] = await show(name, Path(scratch), mode, options, items)
                console.print(f"[bold]{name}, {mode}[/]: {found['state']} after {found['answers']} answers; right {found['right']}")
                if breach := found["breach"]:
                    console.print(f"  slice {breach['slice']}: {breach['reason']}", highlight=False)
                if found["shadows"]:
                    console.print(f"  shadows: {found['shadows']}", highlight=False)
                went = found["state"] in (BREACHED, ROLLED_BACK)
                if found["failures"]:
                    problems.append(f"{name} {mode}: {len(found['failures'])} clients got no answer: {found['failures'][0]}")
                if (went and name == "identical") or (not went and (name, mode) in MUST_GO):
                    problems.append(f"{name} {mode}: {'went' if went else 'stayed'}")
    return results, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canaries", nargs="+", choices=list(CANARIES), default=list(CANARIES))
    parser.add_argument("--modes", nargs="+", choices=("traffic", "shadow"), default=["traffic", "shadow"])
    parser.add_argument(
        "--slices", nargs="+", default=["image", "images", "image+audio"], help="of the golden set; text never sees an adapter"
    )
    parser.add_argument("--items", type=int, default=1500, help="answers after which a canary may stay")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console(width=160, stderr=True)
    results, problems = asyncio.run(show_all(options, console))
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    print(json.dumps({"script": "show_canary", "share": options.share, "results": results}))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
