"""What a soak looks at: a sample of everything that might grow every few seconds, and in quiet moments whether all is where it was."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

import aiohttp
import psutil

from scripts.faults.family import footprint, workers
from scripts.faults.journal import Journal
from scripts.faults.nuisances import World
from scripts.faults.outside import QUIET_S, Baseline, ledger_faults, ledger_rows
from scripts.faults.rounds import held
from scripts.loopback import quantile, scrape

SAMPLE_EVERY_S = 10.0
LEDGER_LATE_S = 15.0  # a locked or full database keeps rows out for as long as that lasts, and a second
SETTLED_AFTER_S = 30.0  # before an answer's row is asked for
READY_S = 60.0
COUNTERS = (
    "worker_restarts_total",
    "stream_recoveries_total",
    "cache_corrupt_total",
    "admission_rejections_total",
    "num_preemptions_total",
)


class Watch:
    """Of one life of a server."""

    def __init__(self, world: World, journal: Journal, baseline: Baseline, num_rows_before: int) -> None:
        self._world = world
        self._journal = journal
        self._baseline = baseline
        self._num_rows_before = num_rows_before  # in the ledger, when this life began
        self._num_tracebacks = _tracebacks(world)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            await self._sample()
            await self._check_ledger(time.monotonic() - SETTLED_AFTER_S)

    async def quiet(self) -> None:
        """Nobody asks, nothing is broken on purpose: all must come back to where it was."""
        world, patience = self._world, self._world.patience
        found = [] if await world.readiness.until_ready(READY_S * patience) else [f"not ready after {READY_S * patience:.0f} s of quiet"]
        found += await self._baseline.faults(QUIET_S * patience)
        found += await held(world.server.url, world.api_key, QUIET_S * patience)
        found += await self._count_rows()
        await self._check_ledger(time.monotonic())
        if world.tally.num_media_lost > world.num_decode_strikes:
            found.append(f"{world.tally.num_media_lost} sound media were refused for {world.num_decode_strikes} lost decode processes")
        for line in found:
            world.tally.off(f"in a quiet moment: {line}")
        await self._sample()
        self._journal.note("quiet", off=found)

    async def _sample(self) -> None:
        world, pid = self._world, self._world.server.process.pid
        processes = {}
        for role, each in {"main": pid, **workers(pid)}.items():
            try:
                processes[role] = {"pid": each, **asdict(footprint(each))}
            except psutil.NoSuchProcess:
                continue  # it was killed, which is what we are here for
        reading = await scrape(world.server.url, world.api_key)
        latencies_s, world.tally.latencies_s = world.tally.latencies_s, []
        self._journal.note(
            "sample",
            processes=processes,
            counters={name: reading.total(name) for name in COUNTERS}
            | {"disk_hits": reading.total("mm_cache_hits_total", {"tier": "disk"})},
            ends=dict(world.tally.ends),
            latency_s={"p50": _rounded(quantile(latencies_s, 0.5)), "p99": _rounded(quantile(latencies_s, 0.99))},
            ready=world.readiness.is_ready,
        )
        await self._check_live()
        self._check_log()

    async def _check_live(self) -> None:
        try:
            async with self._world.client.session.get(f"{self._world.server.url}/health/live") as response:
                if response.status != 200:
                    self._world.tally.off(f"not live: {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._world.tally.off(f"not live: {type(error).__name__}")

    def _check_log(self) -> None:
        now = _tracebacks(self._world)
        if now > self._num_tracebacks:
            self._world.tally.off(f"{now - self._num_tracebacks} tracebacks in the server's log")
            self._num_tracebacks = now

    async def _check_ledger(self, before_s: float) -> None:
        """Every answer that came before then has its row, with the tokens that its client was told."""
        tally = self._world.tally
        settled = [answer for at_s, answer in tally.landed if at_s <= before_s]
        tally.landed = [(at_s, answer) for at_s, answer in tally.landed if at_s > before_s]
        for line in await ledger_faults(self._world.server.data_dir, settled, LEDGER_LATE_S * self._world.patience):
            tally.off(line)

    async def _count_rows(self) -> list[str]:
        """One row for each request that the server has accepted, however it ended."""
        ended = (await scrape(self._world.server.url, self._world.api_key)).total("request_success_total")
        deadline_s = time.monotonic() + LEDGER_LATE_S * self._world.patience
        while (rows := len(ledger_rows(self._world.server.data_dir)) - self._num_rows_before) != ended and time.monotonic() < deadline_s:
            await asyncio.sleep(0.2)
        return [] if rows == ended else [f"{rows} ledger rows for {ended:g} requests"]


def _tracebacks(world: World) -> int:
    return world.server.log.read_text(errors="replace").count("Traceback (most recent call last)")


def _rounded(seconds: float) -> float | None:
    return round(seconds, 4) if seconds == seconds else None
