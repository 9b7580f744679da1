"""A server's processes as the kernel shows them: who they are, what they hold.  Knows nothing of what they do.

Workers are found by their names among the children of one server, so that nobody else's process is ever hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

DECODERS = {"small": "small-decoder-0", "large": "large-decoder-0"}
ENCODERS = {"image": "image-encoder-0", "audio": "audio-encoder-0"}
DECODE_PROCESS = "mmserve-decode"
ROLES = (*DECODERS.values(), *ENCODERS.values(), DECODE_PROCESS)
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    num_fds: int
    num_threads: int
    rss_bytes: int
    pss_bytes: int  # what it shares is counted by the share
    anonymous_bytes: int  # its own alone: neither files nor the shared buffer


def children(pid: int) -> list[psutil.Process]:
    """Everything alive below `pid`, the dead that wait to be reaped aside."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found


def workers(pid: int) -> dict[str, int]:
    """Role -> pid of the workers that server `pid` has now.  One that has only just been forked has no name yet."""
    found = {}
    for child in children(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.name()] = child.pid
    return {role: found[role] for role in ROLES if role in found}


async def worker(pid: int, role: str, *, other_than: int | None = None, timeout_s: float = 60.0) -> int:
    """The pid of that worker, as soon as there is one.  Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while (found := workers(pid).get(role)) in (None, other_than):
            await asyncio.sleep(POLL_S)
    assert found is not None
    return found


async def gone(pids: Iterable[int], timeout_s: float) -> tuple[set[int], float]:
    """Those that still run after `timeout_s`, and how long it took."""
    began_s, left = time.monotonic(), set(pids)
    while left := {pid for pid in left if is_running(pid)}:
        if time.monotonic() - began_s > timeout_s:
            break
        await asyncio.sleep(POLL_S)
    return left, time.monotonic() - began_s


def is_running(pid: int) -> bool:
    """Not gone, and not merely waiting to be reaped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def footprint(pid: int) -> Footprint:
    """Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    with process.oneshot():
        num_fds, num_threads = process.num_fds(), process.num_threads()
    return Footprint(num_fds, num_threads, *_memory(pid))


def descriptors(pid: int) -> Counter[str]:
    """How many of each kind are open: `socket`, `pipe`, or a file's name.  Raises psutil.NoSuchProcess."""
    kinds: Counter[str] = Counter()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                kinds[Path(os.readlink(link).partition(":[")[0]).name] += 1
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return kinds


def _memory(pid: int) -> tuple[int, int, int]:
    """Rss, Pss and Anonymous of proc_pid_smaps(5), bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    kb = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if "Rss" not in kb:  # it has just died, and has no memory any more
        raise psutil.NoSuchProcess(pid)
    return kb["Rss"] * 1024, kb["Pss"] * 1024, kb["Anonymous"] * 1024


def shared_memory_names() -> set[str]:
    """What has a name in /dev/shm: nobody's death may leave any of ours."""
    directory = Path("/dev/shm")
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()
