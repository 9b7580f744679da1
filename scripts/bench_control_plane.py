"""What the one process in front of the workers can carry: thousands of tokens a second over SSE, from simulated cards.

    python -m scripts.bench_control_plane --rate 250 --answer-tokens 250      62,500 tokens a second
    python -m scripts.bench_control_plane --rate 100 --profile                needs py-spy; where the time of that process goes

The server's own process has `--server-core` for itself; its workers, which only sleep, and the clients are elsewhere.  Clients are
sockets that count events, one connection for each request.  Ends in one JSON line; "cpu_us_per_token" is the server process's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from scripts.loopback import free_port, quantile, stop, wait_ready

WORDS = ["one", "endpoint", "takes", "text", "pictures", "and", "a", "clip", "in", "any", "mix", "and", "streams", "back", "an", "answer"]
PROMPT_WORDS = 100
EVENT = b"data: {"
LAST = b"data: [DONE]\n\n"
STAGES = {  # the innermost function of ours, or a library's, that a sample is in -> what it is for
    "mmserve/replica.py": "replica: plan, send, land",
    "mmserve/scheduler": "scheduler",
    "mmserve/paged_kv": "KV books",
    "mmserve/transport.py": "to and from workers",
    "mmserve/supervisor.py": "to and from workers",
    "mmserve/plan.py": "to and from workers",
    "mmserve/tokenizer.py": "tokens to text",
    "mmserve/active_request.py": "tokens to deltas",
    "mmserve/token_stream.py": "tokens to deltas",
    "mmserve/engine.py": "engine",
    "mmserve/gateway/answer.py": "deltas to events",
    "mmserve/gateway/sse.py": "events to sockets",
    "mmserve/gateway/deliver.py": "events to sockets",
    "mmserve/gateway": "requests",
    "prometheus_client": "metrics",
    "aiohttp": "aiohttp",
}


class Client(asyncio.Protocol):
    """One request and its stream."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self.num_events = 0
        self.first_s = self.last_s = 0.0
        self.status = b""
        self._request = request
        self._ended = ended
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if not self.status:
            self.status = data[9:12]
        data = self._tail + data
        self.num_events += data.count(EVENT)
        self._tail = data[-len(LAST) - 16 :] if LAST in data else data[-(len(EVENT) - 1) :]
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        if LAST in data or self.status != b"200":
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def is_whole(self) -> bool:
        return self.status == b"200" and LAST in self._tail


@dataclass(frozen=True, slots=True)
class Load:
    port: int
    rate: float
    seconds: float
    answer_tokens: int

    def request(self, index: int) -> bytes:
        words = random.Random(index).choices(WORDS, k=PROMPT_WORDS)
        body = json.dumps(
            {
                "model": "small",
                "messages": [{"role": "user", "content": f"{index} " + " ".join(words)}],
                "max_tokens": self.answer_tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        return head.encode() + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body

    async def run(self) -> list[Client]:
        """Poisson arrivals; returns when the last stream has ended."""
        loop, draw = asyncio.get_running_loop(), random.Random(1)
        clients: list[Client] = []
        ends: list[asyncio.Future[None]] = []
        due_s = loop.time()
        for index in range(round(self.rate * self.seconds)):
            due_s += draw.expovariate(self.rate)
            await asyncio.sleep(due_s - loop.time())
            ends.append(loop.create_future())
            clients.append(Client(self.request(index), ends[-1]))
            await loop.create_connection(lambda client=clients[-1]: client, "127.0.0.1", self.port)  # type: ignore[misc]
        await asyncio.gather(*ends)
        return clients


async def measure(options: argparse.Namespace, data_dir: Path, console: Console) -> dict[str, Any]:
    port = free_port()
    flags = ("--device", options.device, "--small-devices", f"0-{options.replicas - 1}", "--large-devices", str(options.replicas))
    command = (sys.executable, "-m", "mmserve", "serve", "--port", str(port), "--data-dir", str(data_dir), *flags, *options.flags)
    log = data_dir / "server.log"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(*command, stdout=sink, stderr=sink)
    try:
        await wait_ready(f"http://127.0.0.1:{port}/health/ready", process, log)
        server = psutil.Process(process.pid)
        others = sorted(set(range(os.cpu_count() or 1)) - {options.server_core}) or [0]
        for worker in server.children(recursive=True):
            worker.cpu_affinity(others)
        os.sched_setaffinity(0, others)
        for thread in server.threads():
            os.sched_setaffinity(thread.id, {options.server_core})
        await Load(port, options.rate, 2.0, 16).run()
        load = Load(port, options.rate, options.seconds, options.answer_tokens)
        profile = await start_profile(process.pid, options.seconds, data_dir) if options.profile else None
        cpu_s, began_s = sum(server.cpu_times()[:2]), time.perf_counter()
        clients = await load.run()
        seconds, cpu_s = time.perf_counter() - began_s, sum(server.cpu_times()[:2]) - cpu_s
        if profile is not None:
            await profile.wait()
            show_stages(data_dir / "stacks.txt", cpu_s, sum(client.num_events for client in clients), console)
        return report(options, clients, seconds, cpu_s)
    finally:
        await stop(process)


def report(options: argparse.Namespace, clients: list[Client], seconds: float, cpu_s: float) -> dict[str, Any]:
    whole = [client for client in clients if client.is_whole]
    num_tokens = sum(client.num_events for client in whole)
    return {
        "script": "bench_control_plane",
        "offered_rps": options.rate,
        "answered": len(whole),
        "statuses": {status.decode(): count for status, count in Counter(client.status for client in clients).items()},
        "tokens_per_s": num_tokens / seconds,
        "events_per_answer": num_tokens / max(1, len(whole)),
        "ttft_ms_p50": 1e3 * quantile([client.first_s - client.sent_s for client in whole], 0.5),
        "ttft_ms_p99": 1e3 * quantile([client.first_s - client.sent_s for client in whole], 0.99),
        "tpot_ms_p50": 1e3 * quantile([(client.last_s - client.first_s) / max(1, options.answer_tokens - 1) for client in whole], 0.5),
        "cpu_us_per_token": 1e6 * cpu_s / max(1, num_tokens),
        "server_core_busy": cpu_s / seconds,
    }


async def start_profile(pid: int, seconds: float, data_dir: Path) -> asyncio.subprocess.Process:
    if shutil.which("py-spy") is None:
        sys.exit("--profile needs py-spy on the path")
    command = ("py-spy", "record", "--pid", str(pid), "--duration", str(int(seconds)), "--rate", "200", "--format", "raw",
               "--output", str(data_dir / "stacks.txt"), "--full-filenames", "--function", "--nonblocking")  # fmt: skip
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL)


def show_stages(stacks: Path, cpu_s: float, num_tokens: int, console: Console) -> None:
    counts: Counter[str] = Counter()
    for frames, count in _stacks(stacks):
        stage = next((stage for frame in reversed(frames) for part, stage in STAGES.items() if part in frame), "event loop, sockets")
        counts[stage] += count
    total = sum(counts.values())
    table = Table("stage", "share", "CPU us a token")
    for stage, count in counts.most_common():
        table.add_row(stage, f"{count / total:.0%}", f"{1e6 * cpu_s * count / total / num_tokens:.2f}")
    console.print(table)


def _stacks(stacks: Path) -> Iterator[tuple[list[str], int]]:
    """Of the main thread, outermost frame first."""
    for line in stacks.read_text().splitlines():
        names, _, count = line.rpartition(" ")
        frames = names.split(";")
        if any("mmserve/cli/serve.py" in frame for frame in frames):
            yield frames, int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=250.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--answer-tokens", type=int, default=250)
    parser.add_argument("--device", default="sim:h200")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="mmserve-control-") as scratch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(options, Path(scratch), console))))


if __name__ == "__main__":
    main()
