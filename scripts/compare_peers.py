"""Streams of one text model from mmserve and from other servers, one after the other on the same cores.  Ends in one JSON line.

    pip install 'transformers[serving]'                 in any environment; `vllm` and `llama-server` likewise
    python -m scripts.compare_peers models/smollm2 --peers transformers --concurrency 1 16 64

Each server is pinned to one core with one compute thread, and the client to another.  Each client streams one answer of up to
ANSWER_TOKENS tokens to a prompt of about 300 that nobody else sends.  CPU seconds are of the server's whole process tree.
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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from scripts.loopback import client, free_port, quantile, stop, wait_ready

ANSWER_TOKENS = 64
PROMPT_WORDS = 230
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TEXT = """\
the a river old house morning light walks with quiet friend letter blue garden over stone window paper small boat north wind carries voice
under table bread salt road long winter story begins when nobody looks and every door opens slowly to another room full of books"""


@dataclass(frozen=True, slots=True)
class Peer:
    """How a server is started.  `{model}`, `{port}` and `{data}` are filled in."""

    name: str
    argv: tuple[str, ...]
    health: str
    model: str  # what requests call it
    can_ignore_eos: bool = True

    def command(self, model: Path, port: int, data: Path) -> list[str]:
        return [part.format(model=model, port=port, data=data) for part in self.argv]


def peers() -> Mapping[str, Peer]:
    ours = (sys.executable, "-m", "mmserve", "serve", "--small", "{model}", "--port", "{port}", "--data-dir", "{data}")
    return {
        "mmserve": Peer("mmserve", (*ours, "--worker-threads", "1", "--dtype", "bfloat16"), "/health/ready", "small"),
        "transformers": Peer(
            "transformers",
            ("transformers", "serve", "{model}", "--continuous-batching", "--device", "cpu", "--dtype", "bfloat16", "--port", "{port}",
             "--cb-num-blocks", "2048", "--cb-max-batch-tokens", "1024"),
            "/health", "{model}", can_ignore_eos=False,
        ),
        "vllm": Peer(
            "vllm", ("vllm", "serve", "{model}", "--port", "{port}", "--dtype", "bfloat16", "--max-model-len", "2048"),
            "/health", "{model}",
        ),
        "llama.cpp": Peer(
            "llama.cpp", ("llama-server", "-m", "{model}/model.gguf", "--port", "{port}", "-t", "1", "-np", "64", "-c", "32768"),
            "/health", "small",
        ),
    }  # fmt: skip


# --- processes ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(peer: Peer, model: Path, core: int) -> AsyncIterator[tuple[str, int]]:
    """A server that is ready, pinned to `core`; yields its URL and its session id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with tempfile.TemporaryDirectory(prefix="mmserve-peer-") as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                "taskset",
                "-c",
                str(core),
                *peer.command(model, port, Path(scratch)),
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        try:
            await wait_ready(url + peer.health, process, log)
            yield url, process.pid
        finally:
            await stop(process)


def cpu_seconds(session_id: int) -> float:
    """User and system time of every process of a session that lives (proc_pid_stat(5))."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session_id:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


# --- streams -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    ttft_s: float
    num_tokens: int


def prompt(seed: int) -> str:
    rng, words = random.Random(seed), _TEXT.split()
    return "Go on with this story for a long while: " + " ".join(rng.choice(words) for _ in range(PROMPT_WORDS))


async def stream(openai: AsyncOpenAI, model: str, text: str, *, ignore_eos: bool) -> Stream:
    started = time.perf_counter()
    first, num_chunks, counted = None, 0, None
    chunks = await openai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=ANSWER_TOKENS, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True} if ignore_eos else None,
    )  # fmt: skip
    async for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            num_chunks += 1
        if chunk.usage is not None:
            counted = chunk.usage.completion_tokens
    if first is None:
        raise RuntimeError("a stream without a word")
    return Stream(first - started, counted or num_chunks)


async def measure(peer: Peer, model: Path, concurrency: Sequence[int], core: int, seed: int) -> AsyncIterator[dict[str, Any]]:
    """One row for each number of clients, as it is known."""
    async with running(peer, model, core) as (url, session_id), client(url) as openai:
        name = peer.model.format(model=model)
        await stream(openai, name, prompt(seed), ignore_eos=peer.can_ignore_eos)  # whatever is made on the first request
        for num_clients in concurrency:
            texts = [prompt(seed + 1000 * num_clients + i) for i in range(num_clients)]
            cpu_s, started = cpu_seconds(session_id), time.perf_counter()
            streams = await asyncio.gather(*(stream(openai, name, text, ignore_eos=peer.can_ignore_eos) for text in texts))
            seconds, cpu_s = time.perf_counter() - started, cpu_seconds(session_id) - cpu_s
            num_tokens = sum(s.num_tokens for s in streams)
            yield {
                "server": peer.name,
                "clients": num_clients,
                "tokens": num_tokens,
                "tokens_per_s": round(num_tokens / seconds, 1),
                "tokens_per_cpu_s": round(num_tokens / cpu_s, 1),
                "ttft_ms_p50": round(1e3 * quantile([s.ttft_s for s in streams], 0.5)),
                "ttft_ms_p99": round(1e3 * quantile([s.ttft_s for s in streams], 0.99)),
            }


async def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    os.sched_setaffinity(0, {options.client_core})
    rows: list[dict[str, Any]] = []
    for name in ("mmserve", *options.peers):
        peer = peers()[name]
        if shutil.which(peer.argv[0]) is None:
            sys.exit(f"{peer.argv[0]} is not on the path")
        with console.status(name):
            async for row in measure(peer, options.model.resolve(), options.concurrency, options.server_core, random.randrange(10**6)):
                console.print(" ".join(f"{key}={value}" for key, value in row.items()), highlight=False)  # a later peer may fail
                rows.append(row)
    ours = {row["clients"]: row["tokens_per_s"] for row in rows if row["server"] == "mmserve"}
    table = Table(title=f"{options.model.name}: streams of {ANSWER_TOKENS} tokens, one core")
    for column in (*rows[0], "mmserve is faster by"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()), f"{ours[row['clients']] / row['tokens_per_s']:.2f}x")
    console.print(table)
    return {"script": "compare_peers", "answer_tokens": ANSWER_TOKENS, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model directory in the layout of transformers")
    parser.add_argument("--peers", nargs="*", choices=[name for name in peers() if name != "mmserve"], default=["transformers"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    report = asyncio.run(compare(parser.parse_args(), Console(width=140)))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
