"""Crowds that idle, dribble, flood or don't read, and what a well-behaved client notices of them.

    python -m scripts.rude_clients                      all of them, on a server of its own with simulated cards
    python -m scripts.rude_clients idle slowloris       only these

Prints a row for each and ends in one JSON line.  Exit status 1 if a limit was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console

from scripts.loopback import Running, bucket_quantile, quantile, running, scrape

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY_LIMIT = 32 * 2**20
NUM_CANARIES = 300
FLAGS = ("--device", "sim:a100", "--max-num-seqs", "512", "--max-num-queued-reqs", "1000", "--max-queue-wait-s", "1000")

Result = dict[str, float]
Check = Callable[[Running], Awaitable[tuple[Result, bool]]]


async def idle(server: Running) -> tuple[Result, bool]:
    """10,000 connections that say nothing: a canary asks beside them, and on a busy machine alone as well, to compare."""
    alone = await canary_p99_ms(server)
    async with crowd(server, 10_000) as sockets:
        beside = await canary_p99_ms(server)
        num_open = (await scrape(server.url)).total("connections")
        began_s = time.monotonic()
        await asyncio.gather(*(ended(each) for each in sockets))
        closed_s = time.monotonic() - began_s
    result = {"open": num_open, "canary_p99_ms_alone": alone, "canary_p99_ms": beside, "closed_within_s": closed_s}
    return result, beside < max(50, 1.5 * alone) and num_open >= 9_000 and closed_s < 17


async def slowloris(server: Running) -> tuple[Result, bool]:
    """1,000 connections that send a request's head at a byte a second."""
    async with crowd(server, 1_000) as sockets:
        began_s = time.monotonic()
        dripping = asyncio.create_task(drip(sockets, b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 1000))
        await asyncio.gather(*(ended(each) for each in sockets))
        closed_s = time.monotonic() - began_s
        dripping.cancel()
    return {"closed_within_s": closed_s}, closed_s < 17


async def chunks(server: Running) -> tuple[Result, bool]:
    """Three bodies of a million chunks of one byte each, one after the other."""
    before = (await scrape(server.url)).buckets("event_loop_lag_seconds")
    async with crowd(server, 3) as sockets:
        statuses = [await flood(each, b"1\r\n \r\n" * 1_000_000) for each in sockets]
    lag_s = bucket_quantile(before, (await scrape(server.url)).buckets("event_loop_lag_seconds"), 1.0)
    return {"refused": float(statuses.count(413)), "worst_lag_ms_at_most": lag_s * 1e3}, statuses == [413] * 3 and lag_s <= 0.1


async def endless(server: Running) -> tuple[Result, bool]:
    """One chunked body that never ends."""
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    watching = asyncio.create_task(peak_rss(process))
    async with crowd(server, 1) as (sock,):
        status = await flood(sock, b"100000\r\n" + b" " * 2**20 + b"\r\n", times=1000)
    watching.cancel()
    grown = await watching - before
    return {"status": float(status), "grown_mib": grown / 2**20}, status == 413 and grown < 2 * BODY_LIMIT


async def stalled(server: Running) -> tuple[Result, bool]:
    """64 streams that nobody reads, with a receive buffer of 4 KB, beside one that is read; and before, 64 that are read."""
    process = psutil.Process(server.process.pid)
    loop, result = asyncio.get_running_loop(), {}
    before = process.memory_info().rss
    for name in ("read", "stalled"):
        async with crowd(server, 64, receive_bytes=4096) as sockets:
            for each in sockets:
                await loop.sock_sendall(each, request("Tell me a story.", stream=True, max_tokens=1500, ignore_eos=True))
            reading = [asyncio.create_task(ended(each)) for each in sockets if name == "read"]
            await asyncio.sleep(1)
            gaps = await gaps_ms(server)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            result |= {f"gap_p50_ms_beside_{name}": quantile(gaps, 0.5), f"gap_p99_ms_beside_{name}": quantile(gaps, 0.99)}
    result["grown_mib"] = (process.memory_info().rss - before) / 2**20
    return result, result["grown_mib"] < 64 and result["gap_p50_ms_beside_stalled"] < 1.1 * result["gap_p50_ms_beside_read"]


async def storm(server: Running) -> tuple[Result, bool]:
    """500 streams under way, and all of their clients gone in the same moment."""
    async with crowd(server, 500) as sockets:
        loop = asyncio.get_running_loop()
        for each in sockets:
            await loop.sock_sendall(each, request("Tell me a story.", stream=True, max_tokens=3000, ignore_eos=True))
        while (await scrape(server.url)).total("num_requests_running") < 400:
            await asyncio.sleep(0.05)
        before = await scrape(server.url)
        began_s = time.monotonic()
    while (await scrape(server.url)).total("kv_cache_usage_perc") > 0:
        await asyncio.sleep(0.01)
    after = await scrape(server.url)
    given_back_s = time.monotonic() - began_s
    lag_s = bucket_quantile(before.buckets("event_loop_lag_seconds"), after.buckets("event_loop_lag_seconds"), 1.0)
    cancelled = after.total("request_success_total", {"finished_reason": "cancelled"})
    result = {"cancelled": cancelled, "given_back_within_s": given_back_s, "worst_lag_ms_at_most": lag_s * 1e3}
    return result, cancelled >= 500 and lag_s <= 0.2


CHECKS: dict[str, Check] = {"idle": idle, "slowloris": slowloris, "chunks": chunks, "endless": endless, "stalled": stalled, "storm": storm}


# --- clients -----------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def crowd(server: Running, number: int, receive_bytes: int | None = None) -> AsyncIterator[list[socket.socket]]:
    port = int(server.url.rpartition(":")[2])
    loop, sockets = asyncio.get_running_loop(), []
    try:
        for _ in range(number):
            sock = socket.socket()
            sock.setblocking(False)
            if receive_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            sockets.append(sock)
            await loop.sock_connect(sock, ("127.0.0.1", port))
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


async def ended(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(sock, 65536):
            pass


async def drip(sockets: list[socket.socket], data: bytes) -> None:
    for byte in data:
        for sock in sockets:
            with contextlib.suppress(OSError):  # closed by the server, which is the point
                sock.send(bytes([byte]))
        await asyncio.sleep(1)


async def flood(sock: socket.socket, data: bytes, times: int = 1) -> int:
    """Send a chunked body until it is refused; returns the status."""
    loop = asyncio.get_running_loop()

    async def send() -> None:
        await loop.sock_sendall(sock, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(times):
            await loop.sock_sendall(sock, data)

    sending = asyncio.create_task(send())
    answer = await loop.sock_recv(sock, 65536)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return int(answer.split(b" ", 2)[1])


def request(text: str, **fields: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def canary_p99_ms(server: Running) -> float:
    """Of an answer of one token, each on a connection of its own."""
    times_ms = []
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for _ in range(NUM_CANARIES):
        began_s = time.monotonic()
        async with (
            aiohttp.ClientSession(raise_for_status=True) as http,
            http.post(server.url + "/v1/chat/completions", json=body) as answer,
        ):
            await answer.read()
        times_ms.append((time.monotonic() - began_s) * 1e3)
    return quantile(times_ms, 0.99)


async def gaps_ms(server: Running) -> list[float]:
    """Between the pieces of a stream that is read."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 300, "ignore_eos": True}
    async with aiohttp.ClientSession() as http, http.post(server.url + "/v1/chat/completions", json=body) as answer:
        times_s = [time.monotonic() async for _ in answer.content.iter_any()]
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times_s)]


async def peak_rss(process: psutil.Process) -> int:
    most = 0
    try:
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        return most


async def run(names: list[str], console: Console) -> bool:
    results: dict[str, Result] = {}
    all_right = True
    with tempfile.TemporaryDirectory() as scratch:
        async with running(Path(scratch), *FLAGS) as server:
            for name in names:
                results[name], is_right = await CHECKS[name](server)
                all_right &= is_right
                shown = "  ".join(f"{key}={value:.4g}" for key, value in results[name].items())
                console.print(f"{'[green]held' if is_right else '[red]BROKE'}[/] {name}: {shown}")
    print(json.dumps(results | {"all_right": all_right}))
    return all_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", choices=[*CHECKS, []], metavar="CHECK", help=", ".join(CHECKS))
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 0 if asyncio.run(run(args.checks or list(CHECKS), Console(stderr=True, highlight=False))) else 1


if __name__ == "__main__":
    sys.exit(main())
