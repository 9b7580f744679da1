"""The server itself is killed under a load: nothing of it may stay behind, and the next one must find on disk only what is right."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.faults.family import children, gone, shared_memory_names
from scripts.faults.kills import UNDER_WAY, Attack, Progress, Strike
from scripts.faults.outside import ledger_faults
from scripts.faults.rounds import FIRST_SEED, Plan, Round, ask_all, differences
from scripts.faults.strict_client import Answer, StrictClient
from scripts.loopback import Running, running, scrape

GONE_S = 10.0


async def play(data_dir: Path, plan: Plan, expected: Callable[[int], Sequence[Answer]], on_round: Callable[[Round], None]) -> list[Round]:
    """Lives on one data directory.  Each is asked in full what its predecessor was asked when it was killed; the last is spared."""
    rounds: list[Round] = []
    names, num_disk_hits = shared_memory_names(), 0.0
    for index in range(plan.num_rounds + 1):
        requests = plan.requests(index - 1)
        strikes: list[Strike] = []
        async with running(data_dir) as server, StrictClient(server.url) as client:
            outcomes = await ask_all(client, requests, Progress())
            off = differences(requests, outcomes, expected(index - 1))
            complete = [outcome for outcome in outcomes if isinstance(outcome, Answer) and outcome.code is None]
            off += await ledger_faults(data_dir, complete)
            num_disk_hits += (await scrape(server.url)).total("mm_cache_hits_total", {"tier": "disk"})
            if index < plan.num_rounds:
                off += await _kill(server, client, plan, index, strikes)
        off += await ledger_faults(data_dir, complete)  # what was there is there still
        if left := shared_memory_names() - names:
            off.append(f"left in /dev/shm: {', '.join(sorted(left))}")
        if index == plan.num_rounds and not num_disk_hits:
            off.append("no life found anything on disk")
        pauses_s = [answer.longest_pause_s for answer in complete]
        num_identical = len(requests) - len(differences(requests, outcomes, expected(index - 1)))
        rounds.append(Round(index, strikes, len(complete), num_identical, pauses_s, [], None, None, off))
        on_round(rounds[-1])
    return rounds


async def _kill(server: Running, client: StrictClient, plan: Plan, index: int, strikes: list[Strike]) -> list[str]:
    """While some answers to new pictures are under way, and others wait for theirs to be encoded, and rows are being written."""
    pid = server.process.pid
    attack = Attack(pid, index, random.Random(FIRST_SEED + index), plan.signal, plan.requests(index))
    asking = asyncio.create_task(ask_all(client, attack.requests, attack.progress))
    mine = [request for request in attack.requests if request.has_picture and request.body["stream"]]
    await attack.progress.until(mine, UNDER_WAY, attack.rng.randint(1, max(1, len(mine) // 2)))
    descendants = [child.pid for child in children(pid)]
    os.kill(pid, signal.SIGKILL)
    strikes.append(Strike("main", pid, time.monotonic()))
    await server.process.wait()
    left, _ = await gone(descendants, GONE_S * plan.patience)
    await asking
    return [f"{len(left)} processes outlived their server"] if left else []
