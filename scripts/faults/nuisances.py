"""What can be done to a server, one function each: to its processes and its disk, by its clients and their input.

Each says what was done, and undoes it.  What the server owes to whoever causes it is checked here; what it owes to everybody else shows in
their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import psutil

from scripts.faults.family import DECODE_PROCESS, ROLES, workers
from scripts.faults.mixed_load import Request
from scripts.faults.outside import Readiness
from scripts.faults.steady_load import SteadyLoad, Tally
from scripts.faults.strict_client import Answer, BrokenProtocol, StrictClient
from scripts.loopback import Running, audio_part, image_part, text_part, user
from tests import media_corpus as corpus

LOCKED_S = 10.0
FULL_S = 10.0
LARGEST_FILE_BYTES = 64 * 1024  # while the disk is "full": smaller than the rows of one picture
SLOW_READER_S = 20.0
HEADERS_CLOSED_S = 15.0 + 5.0
BODY_CLOSED_S = 30.0 + 5.0
BURST = 24
STORM = 40
Part = dict[str, Any]  # of a message
HEALTHY_S = 60.0  # so long is waited for a whole server before another worker is hit


@dataclass(slots=True)
class World:
    """All that a nuisance may touch."""

    server: Running
    api_key: str
    client: StrictClient
    load: SteadyLoad
    tally: Tally
    readiness: Readiness
    known: Sequence[tuple[Request, Answer]]
    rng: random.Random
    patience: float
    num_decode_strikes: int = 0
    striking: asyncio.Lock = field(default_factory=asyncio.Lock)  # one worker at a time

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.server.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def some(self, count: int) -> list[Request]:
        return [self.rng.choice(self.known)[0] for _ in range(count)]


# --- its processes


async def kill_worker(world: World) -> str:
    return await _strike(world, signal.SIGKILL)


async def stop_worker(world: World) -> str:
    return await _strike(world, signal.SIGSTOP)


async def _strike(world: World, number: signal.Signals) -> str:
    async with world.striking:
        if not await world.readiness.until_ready(HEALTHY_S * world.patience):
            world.tally.off(f"not ready after {HEALTHY_S * world.patience:.0f} s")
        role = world.rng.choice(ROLES)
        pid = workers(world.server.process.pid).get(role)
        if pid is None:
            return f"{role} is not there just now"
        if role == DECODE_PROCESS:
            world.num_decode_strikes += 1
        os.kill(pid, number)
        return f"{number.name} {role} {pid}"


# --- its disk


async def lock_ledger(world: World) -> str:
    return await _lock(world.server.data_dir / "ledger.db")


async def lock_cache_index(world: World) -> str:
    return await _lock(world.server.data_dir / "embeddings" / "cache.db")


async def _lock(path: Path) -> str:
    """What keeps other writers out.  Readers of a database in WAL mode are not kept out by anything."""
    with contextlib.closing(sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)) as database:
        await asyncio.to_thread(database.execute, "BEGIN EXCLUSIVE")
        await asyncio.sleep(LOCKED_S)
        database.execute("ROLLBACK")
    return f"{path.name} locked for {LOCKED_S:g} s"


async def damage_cache(world: World) -> str:
    """A few entries: a flipped bit, a lost end, nothing left at all."""
    files = sorted((world.server.data_dir / "embeddings").glob("??/??/*.val"))
    world.rng.shuffle(files)
    hit = 0
    for file, damage in zip(files, (_flip, _truncate, _empty), strict=False):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            damage(file, world.rng)
            hit += 1
    return f"{hit} entries damaged"


def _flip(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as entry:
        at = rng.randrange(max(file.stat().st_size, 1))
        entry.seek(at)
        byte = entry.read(1)
        entry.seek(at)
        entry.write(bytes([(byte or b"\0")[0] ^ 1 << rng.randrange(8)]))


def _truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(max(file.stat().st_size, 1)))


def _empty(file: Path, rng: random.Random) -> None:
    os.truncate(file, 0)


async def fill_disk(world: World) -> str:
    """No file of the server's may grow beyond a few KB: what a full disk does to it, and to nobody else on this machine."""
    process = psutil.Process(world.server.process.pid)
    _, hard = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, hard))
    try:
        await asyncio.sleep(FULL_S)
    finally:
        process.rlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return f"no room for {FULL_S:g} s"


# --- its clients


async def burst(world: World) -> str:
    await world.load.burst(BURST)
    return f"{BURST} at once"


async def leave(world: World) -> str:
    """A few clients, each at a moment of its own."""
    delays_s = [world.rng.uniform(0.0, 3.0) for _ in range(5)]
    await asyncio.gather(*(_ask_and_leave(world, request, delay_s) for request, delay_s in zip(world.some(5), delays_s, strict=True)))
    return "5 left on the way"


async def cancel_storm(world: World) -> str:
    """All in the same instant."""
    delay_s = world.rng.uniform(0.1, 2.0)
    await asyncio.gather(*(_ask_and_leave(world, request, delay_s) for request in world.some(STORM)))
    return f"{STORM} left at once"


async def _ask_and_leave(world: World, request: Request, delay_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            try:
                answer = await world.client.ask(request.body)
            except (BrokenProtocol, aiohttp.ClientError) as error:
                world.tally.off(f"{request.name}: {type(error).__name__} {error}")
            else:
                world.tally.take(request.name, answer, None)


async def slow_readers(world: World) -> str:
    """They take a few bytes at a time, and leave without a word."""
    await asyncio.gather(*(_read_slowly(world, request) for request in world.some(4)))
    return f"4 read slowly for {SLOW_READER_S:g} s"


async def _read_slowly(world: World, request: Request) -> None:
    body = orjson.dumps(request.body | {"max_tokens": 400, "min_tokens": 400})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        deadline_s = time.monotonic() + SLOW_READER_S
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(SLOW_READER_S):
                await loop.sock_connect(connection, world.address)
                await loop.sock_sendall(connection, _head(world, len(body)) + body)
                while time.monotonic() < deadline_s and await loop.sock_recv(connection, 64):
                    await asyncio.sleep(0.2)


async def slow_headers(world: World) -> str:
    """A byte a second."""
    closed = await asyncio.gather(*(_trickle(world, b"GET /health HTTP/1.1\r\nX-Slow: ", HEADERS_CLOSED_S) for _ in range(20)))
    if not all(closed):
        world.tally.off(f"{closed.count(False)} connections without headers were open after {HEADERS_CLOSED_S:g} s")
    return "20 sent headers slowly"


async def slow_body(world: World) -> str:
    closed = await asyncio.gather(*(_trickle(world, _head(world, 1000) + b'{"m', BODY_CLOSED_S) for _ in range(5)))
    if not all(closed):
        world.tally.off(f"{closed.count(False)} connections without a body were open after {BODY_CLOSED_S:g} s")
    return "5 sent a body slowly"


async def _trickle(world: World, beginning: bytes, limit_s: float) -> bool:
    """Whether the server has had enough in time."""
    reader, writer = await asyncio.open_connection(*world.address)
    try:
        writer.write(beginning)
        deadline_s = time.monotonic() + limit_s * world.patience
        while time.monotonic() < deadline_s:
            with contextlib.suppress(TimeoutError):
                if not await asyncio.wait_for(reader.read(4096), 1.0):
                    return True
            writer.write(b"a")
        return False
    except ConnectionError:
        return True
    finally:
        writer.close()


def _head(world: World, content_length: int) -> bytes:
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {world.api_key}",
        "Content-Type: application/json",
        f"Content-Length: {content_length}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


async def wrong_keys(world: World) -> str:
    for key in ("", "wrong", world.api_key + "x", world.api_key[:-1]):
        async with StrictClient(world.server.url, key) as stranger:
            answer = await stranger.ask(world.known[0][0].body)
        if answer.status != 401:
            world.tally.off(f"a wrong key got {answer.status}")
    return "4 wrong keys"


# --- its input

_GARBAGE = (
    b"", b"{", b"null", b"[]", b'"' * 1000, b"\xff\xfe{}", b"[" * 100_000, b'{"messages": 7}', b'{"messages": []}', b"\0" * 4096,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}]}',
)  # fmt: skip


async def garbage(world: World) -> str:
    for body in _GARBAGE:
        async with world.client.session.post(
            f"{world.server.url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            if not 400 <= response.status < 500 and response.status != 503:
                world.tally.off(f"{body[:40]!r} got {response.status}")
    return f"{len(_GARBAGE)} bodies of garbage"


async def hostile_media(world: World) -> str:
    """Bombs, lies and what is not on the list: refused, each by a 4xx."""
    pictures, clips = _hostile()
    for name, part in (*pictures, *clips):
        await _expect(world, name, part, refused=True)
    return f"{len(pictures) + len(clips)} hostile media"


async def odd_media(world: World) -> str:
    """What looks odd and is sound."""
    names = world.rng.sample(sorted(corpus.odd_pictures()), 4)
    clips = world.rng.sample(sorted(corpus.odd_clips()), 4)
    for name in names:
        await _expect(world, name, image_part(corpus.odd_pictures()[name], "application/octet-stream"), refused=False)
    for name in clips:
        await _expect(world, name, audio_part(corpus.odd_clips()[name][0]), refused=False)
    return f"{len(names) + len(clips)} odd media"


def _hostile() -> tuple[list[tuple[str, Part]], list[tuple[str, Part]]]:
    jpeg = corpus.save(corpus.scene(), "JPEG")
    pictures = {
        "png bomb": corpus.png_bomb(),
        "webp canvas": corpus.webp_canvas_bomb(),
        "scan bomb": corpus.scan_bomb(1000),
        "gif beyond its screen": corpus.gif_with_frame_beyond_screen(),
        "half a jpeg": jpeg[: len(jpeg) // 2],
        "a size that lies": corpus.with_size(jpeg, 60_000, 60_000),
        **{name: head for head, name in corpus.OTHER_PICTURES.items()},
    }
    clips = {
        "silence": corpus.silence_bomb(),
        "frames that lie": corpus.flac_with_claimed_frames(2**35),
        "not a number": corpus.wav_of_floats([float("nan")] * 1600),
        **{name: head for head, name in corpus.OTHER_CLIPS.items()},
    }
    return (
        [(name, image_part(data, "application/octet-stream")) for name, data in pictures.items()],
        [(name, audio_part(data)) for name, data in clips.items()],
    )


async def _expect(world: World, name: str, part: Part, *, refused: bool) -> None:
    body = {"messages": user(part, text_part("What is this?")), "max_tokens": 4, "temperature": 0}
    try:
        answer = await world.client.ask(body)
    except (BrokenProtocol, aiohttp.ClientError, TimeoutError) as error:
        world.tally.off(f"{name}: {type(error).__name__} {error}")
        return
    if refused and not 400 <= answer.status < 500 and answer.status != 503:
        world.tally.off(f"{name}: hostile, and got {answer.status}")
    if not refused:
        world.tally.take(name, answer, None)


NUISANCES: Mapping[str, Callable[[World], Awaitable[str]]] = {
    "kill worker": kill_worker,
    "stop worker": stop_worker,
    "lock ledger": lock_ledger,
    "lock cache index": lock_cache_index,
    "damage cache": damage_cache,
    "fill disk": fill_disk,
    "burst": burst,
    "leave": leave,
    "cancel storm": cancel_storm,
    "slow readers": slow_readers,
    "slow headers": slow_headers,
    "slow body": slow_body,
    "wrong keys": wrong_keys,
    "garbage": garbage,
    "hostile media": hostile_media,
    "odd media": odd_media,
}
