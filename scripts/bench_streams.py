"""How fast streams start and run on this machine, and how late the server's loop is while large photos arrive.  Ends in one JSON line.

    python -m scripts.bench_streams                    starts a server of its own
    python -m scripts.bench_streams --url http://127.0.0.1:8000 --clients 1 16 --rounds 3

Streams: each client asks again as soon as it has its answer, `rounds` times; one round before it is not counted.  Photos come at a
fixed rate whatever the server does (12 megapixels, never the same bytes twice), with a bound on how many may be under way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from scripts.loopback import (
    bucket_quantile,
    client,
    given_or_own_server,
    image_part,
    loopback_url,
    photo,
    png,
    quantile,
    same_photo_other_bytes,
    scrape,
    text_part,
    user,
)
from scripts.tiny.render import render
from scripts.tiny.world import KINDS, sample_scene

FIRST_SEED = 2**30 + 900_000
ANSWER_TOKENS = 64
MAX_PHOTOS_UNDER_WAY = 24
LAG = "event_loop_lag_seconds"


@dataclass(frozen=True, slots=True)
class Stream:
    ttft_s: float
    total_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(self.num_tokens - 1, 1)


async def stream(openai: AsyncOpenAI, model: str, messages: list[Any], num_tokens: int) -> Stream:
    """One greedy answer of exactly `num_tokens`."""
    started = time.perf_counter()
    first = None
    count = 0
    chunks = await openai.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=num_tokens, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    async for chunk in chunks:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter()
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
    ended = time.perf_counter()
    return Stream((first or ended) - started, ended - started, count)


def question(workload: str, seed: int) -> list[Any]:
    """Text alone, or a picture nobody has sent before."""
    rng = random.Random(seed)
    if workload == "text":
        return user(text_part(f"Tell me a story about a {rng.choice(tuple(KINDS))}."))
    return user(image_part(png(render(sample_scene(rng)).image)), text_part("Describe the picture."))


async def run_clients(openai: AsyncOpenAI, model: str, workload: str, num_clients: int, rounds: int, seed: int) -> dict[str, float | None]:
    """`num_clients` in a closed loop.  The questions are made before the clock starts."""
    asked = [[question(workload, seed + i * (rounds + 1) + r) for r in range(rounds + 1)] for i in range(num_clients)]
    await asyncio.gather(*(stream(openai, model, questions.pop(), ANSWER_TOKENS) for questions in asked))

    async def one(questions: list[list[Any]]) -> list[Stream]:
        return [await stream(openai, model, messages, ANSWER_TOKENS) for messages in questions]

    started = time.perf_counter()
    streams = [s for some in await asyncio.gather(*(one(questions) for questions in asked)) for s in some]
    seconds = time.perf_counter() - started
    ttft_s, tpot_s = [s.ttft_s for s in streams], [s.tpot_s for s in streams]
    return {
        "streams": len(streams),
        "ttft_ms_p50": _ms(quantile(ttft_s, 0.5)),
        "ttft_ms_p99": _ms(quantile(ttft_s, 0.99)),
        "tpot_ms_p50": _ms(quantile(tpot_s, 0.5)),
        "tokens_per_s": round(sum(s.num_tokens for s in streams) / seconds, 1),
    }


async def run_photos(openai: AsyncOpenAI, url: str, per_s: float, seconds: float) -> dict[str, Any]:
    """Loop lag over the time in which photos arrive, as the server's own metric saw it."""
    rng = random.Random(FIRST_SEED)
    jpeg = photo(render(sample_scene(rng)).image)
    photos = [
        user(image_part(same_photo_other_bytes(jpeg, rng), "image/jpeg"), text_part("What is this?")) for _ in range(int(per_s * seconds))
    ]
    latencies: list[float] = []
    ends: Counter[str] = Counter()

    async def send(messages: list[Any]) -> None:
        started = time.perf_counter()
        try:
            await openai.chat.completions.create(model="small", messages=messages, temperature=0, max_tokens=16)
        except Exception as error:
            ends[type(error).__name__] += 1
        else:
            ends["answered"] += 1
            latencies.append(time.perf_counter() - started)

    before = (await scrape(url)).buckets(LAG)
    started = time.perf_counter()
    under_way: set[asyncio.Task[None]] = set()
    for i, messages in enumerate(photos):
        await asyncio.sleep(max(0.0, started + i / per_s - time.perf_counter()))
        if len(under_way) >= MAX_PHOTOS_UNDER_WAY:
            ends["not sent"] += 1
            continue
        task = asyncio.create_task(send(messages))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    after = (await scrape(url)).buckets(LAG)
    return {
        "photo_megabytes": round(len(jpeg) / 1e6, 2),
        "photos_per_s": per_s,
        "ends": dict(ends),
        "latency_ms_p50": _ms(quantile(latencies, 0.5)),
        "latency_ms_p99": _ms(quantile(latencies, 0.99)),
        # Upper bounds: the buckets of the histogram are as fine as this gets.
        "loop_lag_ms_p50_at_most": _ms(bucket_quantile(before, after, 0.5)),
        "loop_lag_ms_p99_at_most": _ms(bucket_quantile(before, after, 0.99)),
        "loop_lag_ms_worst_at_most": _ms(bucket_quantile(before, after, 1.0)),
    }


async def bench(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="mmserve-bench-") as scratch:
        async with given_or_own_server(options.url, Path(scratch)) as url, client(url) as openai:
            seed = FIRST_SEED + random.randrange(10**6)  # so that a second run against the same server meets no cache either
            for workload in ("text", "image"):
                for model in ("small", "large"):
                    for num_clients in options.clients:
                        with console.status(f"{workload} {model} {num_clients}"):
                            figures = await run_clients(openai, model, workload, num_clients, options.rounds, seed)
                        seed += num_clients * (options.rounds + 1)
                        rows.append({"workload": workload, "model": model, "clients": num_clients, **figures})
            with console.status("photos"):
                photos = await run_photos(openai, url, options.photos_per_s, options.photo_seconds)
    console.print(_table(rows), photos)
    return {"script": "bench_streams", "answer_tokens": ANSWER_TOKENS, "streams": rows, "photos": photos}


def _ms(seconds: float) -> float | None:
    """None where there is no number: JSON has no word for it."""
    return round(seconds * 1000, 2) if math.isfinite(seconds) else None


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"streams of {ANSWER_TOKENS} tokens")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("workload", "model") else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", type=loopback_url, help="a running server on this machine; by default one is started")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3, help="answers that each client waits for")
    parser.add_argument("--photos-per-s", type=float, default=2.0)
    parser.add_argument("--photo-seconds", type=float, default=15.0)
    console = Console(width=120)
    report = asyncio.run(bench(parser.parse_args(), console))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
