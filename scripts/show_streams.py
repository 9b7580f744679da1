"""Shows that mixed streams don't notice each other, nor the death of the decoder under them.

    python -m scripts.show_streams [--streams 64] [--kills 1]

Every request is first run alone, then all of them at once, then all at once again while every decoder is killed (SIGKILL) mid-stream.
Greedy transcripts must be equal each time, and no KV block may be held afterwards.  Starts a server of its own.  Exit status 1 if
a stream differs, fails or stalls; ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console

from scripts.loopback import client, scrape, server
from scripts.measure_tiny import messages
from scripts.tiny.score import sample_items

FIRST_SEED = 2**30 + 900_000
MIN_TOKENS = 48  # so that every stream is still running when the worker is killed
MAX_TOKENS = 64
KILL_AFTER = 4  # tokens, of the first stream to get there
SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Transcript:
    text: str
    finish_reason: str | None
    longest_pause_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[Any]
    model: str


async def read(openai: AsyncOpenAI, conversation: Conversation, started: asyncio.Event | None = None) -> Transcript:
    """One greedy stream to its end.  Sets `started` once it is well under way."""
    text, reason, pause_s, num_chunks = "", None, 0.0, 0
    stream = await openai.chat.completions.create(
        model=conversation.model,
        messages=conversation.messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"min_tokens": MIN_TOKENS},
    )
    last_s = time.monotonic()
    async for chunk in stream:
        now_s = time.monotonic()
        pause_s, last_s = max(pause_s, now_s - last_s), now_s
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
        num_chunks += 1
        if started is not None and num_chunks > KILL_AFTER:
            started.set()
    return Transcript(text, reason, pause_s)


async def read_all(openai: AsyncOpenAI, conversations: Sequence[Conversation], log: Path | None = None, kills: int = 0) -> dict[str, Any]:
    """All at once; with `kills`, the decoders that `log` names are killed so many times on the way."""
    started = asyncio.Event()
    began_s = time.monotonic()
    reading = asyncio.gather(*(read(openai, conversation, started) for conversation in conversations), return_exceptions=True)
    killed: list[int] = []
    for _ in range(kills):
        await started.wait()
        assert log is not None
        pids = decoder_pids(log)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        killed += pids.values()
        while not reading.done() and set(decoder_pids(log).values()) & set(pids.values()):
            await asyncio.sleep(0.05)
        started.clear()
    return {"transcripts": await reading, "seconds": time.monotonic() - began_s, "killed": killed}


def decoder_pids(log: Path) -> dict[str, int]:
    """The living decoder workers, as the server's log last named them."""
    found = re.findall(r"worker=((?:small|large)-decoder-\d+) pid=(\d+) ready", log.read_text(errors="replace"))
    return {role: int(pid) for role, pid in found}


def compare(alone: Sequence[Transcript], run: dict[str, Any]) -> dict[str, Any]:
    transcripts = run["transcripts"]
    whole = [t for t in transcripts if isinstance(t, Transcript)]
    return {
        "streams": len(transcripts),
        "completed": len(whole),
        "equal": sum(isinstance(t, Transcript) and t.text == a.text for t, a in zip(transcripts, alone, strict=True)),
        "longest_pause_s": round(max((t.longest_pause_s for t in whole), default=0.0), 2),
        "seconds": round(run["seconds"], 1),
        "killed": run["killed"],
        "errors": sorted({f"{type(t).__name__}: {t}" for t in transcripts if not isinstance(t, Transcript)}),
    }


async def held(url: str) -> dict[str, float]:
    """What is still held once everybody has gone: must become zero."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        reading = await scrape(url)
        left = {name: reading.total(name) for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


async def show(num_streams: int, kills: int, console: Console) -> dict[str, Any]:
    items = sample_items(num_streams, FIRST_SEED)
    conversations = [Conversation(messages(item), ("small", "large")[i % 2]) for i, item in enumerate(items)]
    report: dict[str, Any] = {"script": "show_streams", "streams": num_streams}
    with tempfile.TemporaryDirectory(prefix="mmserve-streams-") as scratch:
        async with server(Path(scratch)) as url, client(url) as openai:
            alone = [await read(openai, conversation) for conversation in conversations]
            report["together"] = compare(alone, await read_all(openai, conversations))
            report["held_after"] = await held(url)
            console.print("together", report["together"], report["held_after"])
            run = await read_all(openai, conversations, Path(scratch) / "server.log", kills)
            report["killed"] = compare(alone, run)
            report["held_after_kill"] = await held(url)
            reading = await scrape(url)
            report["stream_recoveries"] = reading.total("stream_recoveries_total")
            console.print("killed", report["killed"], report["held_after_kill"])
    report["ok"] = (
        all(report[run]["equal"] == num_streams for run in ("together", "killed"))
        and not any(report["held_after"].values())
        and not any(report["held_after_kill"].values())
        and report["stream_recoveries"] > 0
    )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--kills", type=int, default=1)
    options = parser.parse_args()
    report = asyncio.run(show(options.streams, options.kills, Console(width=120, stderr=True)))
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
