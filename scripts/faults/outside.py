"""What must hold, as far as it shows from outside: readiness, the ledger, and what the processes hold once it is quiet."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil

from scripts.faults.family import Footprint, children, descriptors, footprint
from scripts.faults.strict_client import Answer

POLL_S = 0.05
QUIET_S = 5.0  # after which everything is at its baseline
MEMORY_SLACK_BYTES = 50 * 2**20
FD_SLACK = 2  # a connection of ours, a file just being written
THREAD_SLACK = 6  # of the pool behind asyncio.to_thread, which grows with use up to its limit


class Readiness:
    """Every change of `/health/ready` since it began to be watched."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, bool]] = []  # monotonic seconds, ready
        self._changed = asyncio.Event()

    def note(self, is_ready: bool, at_s: float) -> None:
        if not self._changes or self._changes[-1][1] != is_ready:
            self._changes.append((at_s, is_ready))
            self._changed.set()

    def since(self, at_s: float, is_ready: bool) -> float | None:
        """Seconds from `at_s` to the first change to `is_ready`."""
        return next((changed_s - at_s for changed_s, state in self._changes if changed_s >= at_s and state is is_ready), None)

    @property
    def is_ready(self) -> bool:
        return bool(self._changes) and self._changes[-1][1]

    async def until_ready(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_ready:
                    self._changed.clear()
                    await self._changed.wait()
        return self.is_ready


@asynccontextmanager
async def watched_readiness(url: str) -> AsyncIterator[Readiness]:
    readiness = Readiness()
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=5.0)) as session:

        async def watch() -> None:
            while True:
                try:
                    async with session.get(f"{url}/health/ready") as response:
                        readiness.note(response.status == 200, time.monotonic())
                except (aiohttp.ClientError, TimeoutError):
                    readiness.note(False, time.monotonic())
                await asyncio.sleep(POLL_S)

        task = asyncio.create_task(watch())
        try:
            yield readiness
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def ledger_rows(data_dir: Path) -> dict[str, int]:
    """Request id -> tokens of its prompt."""
    with contextlib.closing(sqlite3.connect(f"file:{data_dir / 'ledger.db'}?mode=ro", uri=True, timeout=30.0)) as ledger:
        return dict(ledger.execute("SELECT request_id, text_tokens + vision_tokens + audio_tokens FROM inference_requests"))


async def ledger_faults(data_dir: Path, answers: Iterable[Answer], timeout_s: float = QUIET_S) -> list[str]:
    """What the ledger has wrong about these answers, once its writer has had the time to catch up."""
    wanted = {answer.request_id: answer.prompt_tokens for answer in answers if answer.request_id}
    deadline_s = time.monotonic() + timeout_s
    while True:
        rows = await asyncio.to_thread(ledger_rows, data_dir)
        missing = wanted.keys() - rows.keys()
        if not missing or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(POLL_S)
    wrong = [key for key, tokens in wanted.items() if key in rows and rows[key] != tokens]
    found = [f"{len(missing)} answers without a ledger row"] if missing else []
    return [*found, *([f"{len(wrong)} ledger rows with other tokens than the client saw"] if wrong else [])]


class Baseline:
    """What the server's processes hold when nobody asks anything."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._family = _names(pid)
        self._main = footprint(pid)
        self._descriptors = descriptors(pid)

    async def faults(self, timeout_s: float = QUIET_S) -> list[str]:
        """What is above it still, after `timeout_s` of quiet at most."""
        deadline_s = time.monotonic() + timeout_s
        while (found := self._compare()) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        return found

    def _compare(self) -> list[str]:
        family, main = _names(self._pid), footprint(self._pid)
        found = [] if family == self._family else [f"children {family}, were {self._family}"]
        for what, now, then, slack in _pairs(main, self._main):
            if now > then + slack:
                found.append(f"{what} {now}, were {then}")
                if what == "descriptors":
                    found[-1] += f": {dict(descriptors(self._pid) - self._descriptors)} more"
        return found


def _pairs(now: Footprint, then: Footprint) -> list[tuple[str, int, int, int]]:
    return [
        ("descriptors", now.num_fds, then.num_fds, FD_SLACK),
        ("threads", now.num_threads, then.num_threads, THREAD_SLACK),
        ("bytes of memory", now.anonymous_bytes, then.anonymous_bytes, MEMORY_SLACK_BYTES),
    ]


def _names(pid: int) -> list[str]:
    names = []
    for child in children(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(child.name())
    return sorted(names)
