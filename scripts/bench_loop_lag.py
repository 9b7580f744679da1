"""How late the main process is for everything else while photos of 12 megapixels arrive.

    python -m scripts.bench_loop_lag [--per-s 20] [--seconds 20] [--route chat] [--route generate]

Starts a server of its own, over the bundled model, and sends it photos of several megabytes, each with bytes of its own, so that none is in
a cache: as base64 in JSON, then as they are in a form.  Few machines decode twenty of them in a second: those that are too many are refused
or wait, which is as it should be.  What is measured is the loop: `event_loop_lag_seconds`, by the server's own probe.

With more processes than cores the kernel's share of that is the larger one: how long the main process waited for a core is said, too, and
`--realtime` takes it out (as root: the main process is given a core whenever it wants one).  Exit status 1 if the 99th percentile is over
20 ms.  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console

from scripts.loopback import bucket_quantile, photo, scrape, server
from scripts.tiny.render import render
from scripts.tiny.world import sample_scene

LAG = "event_loop_lag_seconds"
PROMISE_S = 0.020
SEED = 2**30 + 900_000
SHARES = (0.5, 0.9, 0.99, 0.999, 1)
MAX_UNDER_WAY = 64
BOUNDARY = "photo"
COMMENT_BYTES = 17  # with its head 21, a multiple of three: base64 of what follows stays as it is
Body = tuple[str, dict[str, str], bytes]  # path, headers, body


class Photos:
    """One photo, over and over, with another comment each time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.jpeg = photo(render(sample_scene(self._rng)).image, quality=95)
        self._encoded = base64.b64encode(self.jpeg)

    def chat(self) -> Body:
        head = base64.b64encode(self._head() + self.jpeg[2:3])
        before = b'{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, '
        before += b'{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,'
        after = b'"}}]}]}'
        body = b"".join((before, head, memoryview(self._encoded)[4:], after))
        return "/v1/chat/completions", {"Content-Type": "application/json"}, body

    def generate(self) -> Body:
        part = '--photo\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
        texts = part.format("prompt") + "What is this?\r\n" + part.format("options") + '{"max_tokens": 1}\r\n' + part.format("image")
        body = b"".join((texts.encode(), self._head(), memoryview(self.jpeg)[2:], b"\r\n--photo--\r\n"))
        return "/v1/generate", {"Content-Type": "multipart/form-data; boundary=photo"}, body

    def _head(self) -> bytes:
        """The first two bytes and a comment."""
        return self.jpeg[:2] + b"\xff\xfe" + (COMMENT_BYTES + 2).to_bytes(2, "big") + self._rng.randbytes(COMMENT_BYTES)


async def run(url: str, make: Callable[[], Body], per_s: float, seconds: float) -> dict[str, Any]:
    ends: Counter[str] = Counter()
    under_way: set[asyncio.Task[None]] = set()

    async def send(http: aiohttp.ClientSession, body: Body) -> None:
        path, headers, data = body
        try:
            async with http.post(url + path, data=data, headers=headers) as answer:
                await answer.read()
                ends[str(answer.status)] += 1
        except aiohttp.ClientError as error:
            ends[type(error).__name__] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await send(http, make())  # warm
        before = (await scrape(url)).buckets(LAG)
        started = time.perf_counter()
        for i in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, started + i / per_s - time.perf_counter()))
            if len(under_way) >= MAX_UNDER_WAY:
                ends["not sent"] += 1
                continue
            task = asyncio.create_task(send(http, make()))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        after = (await scrape(url)).buckets(LAG)
        sent_s = time.perf_counter() - started
        await asyncio.gather(*under_way)
    return {
        "ends": dict(ends),
        "seconds": round(sent_s, 1),
        "probes": int(max(after.values()) - max(before.values())),
        # Upper bounds: the buckets of the histogram are as fine as this gets.
        **{
            f"lag_ms_p{share * 100:g}_at_most": round(1e3 * bucket_quantile(before, after, share), 2)
            for share in (0.5, 0.9, 0.99, 0.999, 1)
        },
    }


async def bench(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    with console.status("a photo"):
        photos = Photos(SEED)
    figures: dict[str, Any] = {"photo_megabytes": round(len(photos.jpeg) / 1e6, 2), "per_s": options.per_s}
    with tempfile.TemporaryDirectory(prefix="mmserve-lag-") as scratch:
        async with server(Path(scratch), "--max-num-queued-reqs", str(options.queue)) as url, asyncio.TaskGroup() as tasks:
            main_process = next(child for child in psutil.Process().children() if "serve" in child.cmdline())
            urging = tasks.create_task(_urge(main_process)) if options.realtime else None
            for route in options.route:
                waited_s = _waited_s(main_process)
                with console.status(route):
                    figures[route] = await run(url, getattr(photos, route), options.per_s, options.seconds)
                figures[route]["waited_for_a_core_s"] = round(_waited_s(main_process) - waited_s, 2)
                console.print(route, figures[route])
            if urging is not None:
                urging.cancel()
    return figures


def _waited_s(process: psutil.Process) -> float:
    """Of the thread that runs the loop: ready to run, and no core for it (proc(5), schedstat)."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9


async def _urge(process: psutil.Process) -> None:
    """Threads come one by one, and children that are born shall be like everybody else."""
    while True:
        for thread in process.threads():
            os.sched_setscheduler(thread.id, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        await asyncio.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-s", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--queue", type=int, default=16, help="requests that may wait, as `--max-num-queued-reqs`")
    parser.add_argument("--realtime", action="store_true", help="without what the kernel gives to others")
    parser.add_argument("--route", choices=("chat", "generate"), action="append", default=None)
    options = parser.parse_args()
    options.route = options.route or ["chat", "generate"]
    figures = asyncio.run(bench(options, Console(width=120, stderr=True)))
    late = [route for route in options.route if figures[route]["lag_ms_p99_at_most"] > 1e3 * PROMISE_S]
    print(json.dumps({"script": "bench_loop_lag", **figures, "not_kept": late}))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
