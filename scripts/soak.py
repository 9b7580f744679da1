"""Hours of a steady load with all kinds of faults at random: every answer must be right, and nothing may grow.

    python -m scripts.soak --minutes 60 --faults-per-minute 5
    python -m scripts.soak --minutes 600 --resume soak-1700000000       goes on with it, until there are 600 minutes altogether
    python -m scripts.soak --minutes 5 --only "fill disk" "lock ledger"

Starts a server of its own with the bundled model, in a directory where `journal.jsonl` tells what happens while it does.  Exit status 1 if
an answer was wrong, missing or came twice, if the ledger doesn't agree, if something is left over in a quiet moment, or if the memory of
the server surely grows by more than 1 MB an hour.  Ends in a table, a plot (where there is matplotlib) and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.faults.filling import fill
from scripts.faults.journal import Journal
from scripts.faults.kills import Progress
from scripts.faults.mixed_load import Request, mixed_requests
from scripts.faults.nuisances import NUISANCES, World
from scripts.faults.outside import Baseline, ledger_rows, watched_readiness
from scripts.faults.rounds import FIRST_SEED, ask_all, undisturbed
from scripts.faults.soak_report import JUDGED_AFTER_S, plot, summary, table
from scripts.faults.soak_watch import Watch
from scripts.faults.steady_load import NUM_KNOWN, SteadyLoad, Tally
from scripts.faults.strict_client import Answer, StrictClient
from scripts.loopback import Running, running

QUIET_EVERY_S = 600.0
NUM_WORST = 3
WEIGHTS = {"kill worker": 4, "stop worker": 2}  # the others weigh 1
# Small enough that blocks are evicted, and media leave memory for the disk, and the disk for good; and a log that still fits when the disk
# is full.
FLAGS = (
    *("--kv-cache-memory-bytes", str(48 * 2**20), "--shared-buffer-bytes", str(12 * 2**20), "--embedding-disk-bytes", str(32 * 2**20)),
    *("--log-level", "warning"),
)


class Soak:
    """One life of one server, as part of a soak that may have had others."""

    def __init__(self, options: argparse.Namespace, journal: Journal, console: Console) -> None:
        self._options = options
        self._journal = journal
        self._console = console
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, server: Running, api_key: str, known: Sequence[tuple[Request, Answer]]) -> None:
        options, journal, seed = self._options, self._journal, f"{self._options.seed} {len(self._journal.entries)}"
        tally = Tally(self._off)
        async with StrictClient(server.url, api_key) as client, watched_readiness(server.url) as readiness:
            num_rows_before = len(ledger_rows(server.data_dir))
            await ask_all(client, [request for request, _ in known], Progress())  # pools and buffers have the size that they need
            if is_judged := options.minutes * 60 > JUDGED_AFTER_S:
                with self._console.status("filling every table that has a bound"):
                    await fill(client, len(journal.entries))
            load = SteadyLoad(client, known, tally, options.clients, seed)
            world = World(server, api_key, client, load, tally, readiness, known, random.Random(seed), options.patience)
            watch = Watch(world, journal, Baseline(server.process.pid), num_rows_before)
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(load.run()), group.create_task(watch.run())]
                if is_judged:
                    await self._worst(world)
                while journal.now_s < options.minutes * 60:
                    await self._trouble(group, world, min(journal.now_s + QUIET_EVERY_S, options.minutes * 60))
                    await load.pause()
                    await watch.quiet()
                    load.go_on()
                for task in background:
                    task.cancel()

    async def _worst(self, world: World) -> None:
        """All kinds of faults at once, and again: what memory a peak leaves behind is there before anybody looks."""
        for _ in range(NUM_WORST):
            await asyncio.gather(*(self._cause(name, world) for name in self._options.only))

    async def _trouble(self, group: asyncio.TaskGroup, world: World, until_s: float) -> None:
        """Faults as they come, until then; returns when the last of them is over."""
        rate = self._options.faults_per_minute / 60
        weights = [WEIGHTS.get(name, 1) for name in self._options.only]
        while rate and (next_s := self._journal.now_s + world.rng.expovariate(rate)) < until_s:
            await asyncio.sleep(next_s - self._journal.now_s)
            (name,) = world.rng.choices(self._options.only, weights)
            task = group.create_task(self._cause(name, world))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        await asyncio.sleep(max(0.0, until_s - self._journal.now_s))
        await asyncio.gather(*self._under_way)

    async def _cause(self, name: str, world: World) -> None:
        began_s = self._journal.now_s
        details = await NUISANCES[name](world)
        self._journal.note("fault", name=name, details=details, began_s=round(began_s, 3))
        self._console.print(f"{self._journal.now_s:7.1f} s  {name}: {details}", highlight=False)

    def _off(self, what: str) -> None:
        self._journal.note("off", details=what)
        self._console.print(f"{self._journal.now_s:7.1f} s  {what}", style="bold red", highlight=False)


async def known_answers(console: Console) -> list[tuple[Request, Answer]]:
    """Some requests, and what a server in peace answers to each."""
    requests = mixed_requests(NUM_KNOWN, FIRST_SEED)
    with tempfile.TemporaryDirectory(prefix="mmserve-soak-") as scratch:
        async with running(Path(scratch)) as server, StrictClient(server.url) as client:
            with console.status("what an undisturbed server answers"):
                return list(zip(requests, await undisturbed(client, requests), strict=True))


async def soak(options: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    data_dir, api_key = directory / "data", secrets.token_urlsafe()
    data_dir.mkdir(parents=True, exist_ok=True)
    known = await known_answers(console)
    with Journal(directory) as journal:
        async with running(data_dir, f"--api-key={api_key}", *FLAGS) as server:
            journal.note("life", pid=server.process.pid)
            await Soak(options, journal, console).run(server, api_key, known)
            if server.process.returncode is not None:
                journal.note("off", details=f"the server ended by itself with {server.process.returncode}")
        report = summary(journal.entries)
        console.print(table(report))
        plot(journal.entries, directory / "soak.png")
    return {"script": "soak", "directory": str(directory), "faults_per_minute": options.faults_per_minute, **report}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="altogether, those before an interruption included")
    parser.add_argument("--faults-per-minute", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=3, help="that never stop asking")
    parser.add_argument("--only", nargs="+", choices=NUISANCES, default=list(NUISANCES), help="kinds of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=2.0, help="times which all limits of time may take longer, on a slow or busy machine"
    )
    parser.add_argument("--resume", type=Path, help="the directory of a soak that was interrupted")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the servers go with us
    directory = options.resume or Path(f"soak-{time.time():.0f}")
    report = asyncio.run(soak(options, directory, Console(width=160, stderr=True)))
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
