"""A machine that has no files, threads or memory left: 503 while it lasts, and everything as before when it is over."""

from __future__ import annotations

import asyncio
import errno
import resource
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine
from gateway_client import chat, serving

from scripts.loopback import Running, free_port, running

SIMULATED = ("--device", "sim:a100")
BODY = chat(max_tokens=2)


async def ask(http: aiohttp.ClientSession, server: Running, timeout_s: float = 30) -> int:
    async with http.post(server.url + "/v1/chat/completions", json=BODY, timeout=aiohttp.ClientTimeout(timeout_s)) as answer:
        await answer.read()
        return answer.status


async def test_without_a_free_descriptor_those_inside_are_served_and_then_everybody_again(tmp_path: Path) -> None:
    async with running(tmp_path, *SIMULATED) as server, aiohttp.ClientSession() as inside:
        pid = server.process.pid
        assert await ask(inside, server) == 200
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, limits[1]))  # the first eight are taken for good
        async with aiohttp.ClientSession() as newcomer:
            with pytest.raises((aiohttp.ClientError, TimeoutError)):
                await ask(newcomer, server, timeout_s=1)
        assert await ask(inside, server) == 200
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        async with aiohttp.ClientSession() as newcomer:
            assert await ask(newcomer, server) == 200


async def test_a_server_that_may_open_few_files_keeps_some_for_itself(tmp_path: Path) -> None:
    """260 leave room for 60 connections.  A crowd is refused, and the log knows of no error."""
    here = resource.prlimit(0, resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(0, resource.RLIMIT_NOFILE, (260, here[1]))
        async with running(tmp_path, "--max-connections", "60", *SIMULATED) as server:
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (260, 260))
            resource.prlimit(0, resource.RLIMIT_NOFILE, here)

            async def come() -> int:
                """0: closed without a word, when dozens of others are being told already."""
                async with aiohttp.ClientSession() as http:
                    try:
                        return await ask(http, server)
                    except aiohttp.ClientError:
                        return 0

            statuses = await asyncio.gather(*(come() for _ in range(300)))
            assert {200, 503} <= set(statuses) <= {200, 503, 0}
            assert statuses.count(200) >= 60
            assert await come() == 200
        log = (tmp_path / "server.log").read_text()
        assert "Too many open files" not in log
        assert "Traceback" not in log
    finally:
        resource.prlimit(0, resource.RLIMIT_NOFILE, here)


async def test_a_server_that_may_open_next_to_no_files_says_so_at_the_start(tmp_path: Path) -> None:
    serve = f"ulimit -n 64; exec {sys.executable} -m mmserve serve --port {free_port()} --data-dir {tmp_path} --device sim:a100"
    process = await asyncio.create_subprocess_exec("bash", "-c", serve, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"this process may open 64 files" in b" ".join(said.split())
    assert b"Traceback" not in said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        BlockingIOError(errno.EAGAIN, "fork"),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
)
async def test_what_the_machine_has_none_of_is_a_503_and_not_a_bug_of_ours(error: Exception, stream: bool) -> None:
    def fail(generation: Any, request: Any) -> None:
        raise error

    async with (
        serving(FakeEngine(fail)) as server,
        server.http.post(server.url + "/v1/chat/completions", json=chat(stream=stream)) as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert (await answer.json())["error"]["code"] == "machine_used_up"
