"""Clients that send too slowly, too much or nothing, come in crowds, or don't read: on real sockets, and who behaves notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_engine import FakeEngine, say_first_word, say_nothing
from gateway_client import PNG, Server, chat, serving

from mmserve.gateway import body
from mmserve.gateway.body_room import BodyRoom
from mmserve.request import FinishReason
from mmserve.token_stream import Delta

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Client:
    """A connection by hand.  `receive_bytes` is all that its kernel takes for it when it doesn't read."""

    def __init__(self, server: Server, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        self.socket.setblocking(False)
        self._loop = asyncio.get_running_loop()

    async def send(self, data: str | bytes) -> None:
        await self._loop.sock_sendall(self.socket, data.encode() if isinstance(data, str) else data)

    async def ask(self, **fields: object) -> None:
        data = json.dumps(chat(**fields)).encode()
        await self.send(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def read(self, num_bytes: int = 65536) -> bytes:
        """b"" at the end, however it comes."""
        try:
            return await self._loop.sock_recv(self.socket, num_bytes)
        except ConnectionResetError:
            return b""

    async def read_until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            piece = await self.read()
            assert piece, f"the connection ended after {data[-200:]!r}"
            data += piece
        return data

    async def ended(self) -> bytes:
        """Everything up to the end."""
        data = b""
        while piece := await self.read():
            data += piece
        return data


@asynccontextmanager
async def clients(server: Server, number: int = 1, receive_bytes: int | None = None) -> AsyncIterator[list[Client]]:
    opened: list[Client] = []
    try:
        for _ in range(number):
            opened.append(Client(server, receive_bytes))
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            yield opened
    finally:
        for client in opened:
            client.socket.close()


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PACE_WINDOW_S", 0.3)


async def drip(client: Client, data: bytes, wait_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in data:
            await client.send(bytes([byte]))
            await asyncio.sleep(wait_s)


# --- bodies ------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize("sent", [b"", b"{ab", b"{" + b" " * 20_000])
async def test_a_body_that_stops_coming_is_a_408_long_before_its_deadline(sent: bytes) -> None:
    """A burst gives no credit beyond the window: 20,000 bytes at once would else buy 20 s of silence."""
    async with serving() as server, clients(server) as (client,):
        await client.send(f"{HEAD}Content-Length: 30000\r\n\r\n".encode() + sent)
        answer = await client.ended()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"less than 1024 bytes a second" in answer


@pytest.mark.usefixtures("short_window")
async def test_a_body_that_trickles_is_a_408_chunked_or_not() -> None:
    async with serving() as server, clients(server, 2) as (plain, chunked):
        await plain.send(f"{HEAD}Content-Length: 100000\r\n\r\n")
        await chunked.send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n")
        drips = [asyncio.create_task(drip(plain, b" " * 5000, 0.01)), asyncio.create_task(drip(chunked, b"1\r\n \r\n" * 900, 0.01))]
        answers = [await plain.ended(), await chunked.ended()]
        for task in drips:
            task.cancel()
    assert [answer[:13] for answer in answers] == [b"HTTP/1.1 408 "] * 2


@pytest.mark.usefixtures("short_window")
async def test_a_body_that_comes_slowly_enough_for_a_modem_is_taken() -> None:
    data = json.dumps(chat("x" * 4000)).encode()
    async with serving(min_body_rate=100) as server, clients(server) as (client,):
        await client.send(f"{HEAD}Content-Length: {len(data)}\r\n\r\n")
        for start in range(0, len(data), 200):  # twenty pieces, two windows
            await client.send(data[start : start + 200])
            await asyncio.sleep(0.03)
        assert (await client.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_in_chunks_of_one_byte_is_refused_when_their_framing_outweighs_it() -> None:
    """A million of them are a megabyte of body, six of framing, and seconds of the only loop there is."""
    async with serving() as server, clients(server) as (client,):
        await client.send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.create_task(client.send(b"1\r\n \r\n" * 1_000_000))
        answer = await client.ended()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"chunks are too small" in answer
        many = json.dumps(chat("x" * 60_000)).encode()  # small ones are all right
        async with server.http.post(
            server.url + "/v1/chat/completions", data=pieces(many, 16), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 200


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_bodies_over_the_room_for_all_are_refused_before_they_are_read() -> None:
    async with serving(max_bodies_bytes=100_000) as server, clients(server, 4) as (first, second, third, chunked):
        await first.send(f"{HEAD}Content-Length: 60000\r\n\r\n{{")
        await second.send(f"{HEAD}Content-Length: 40001\r\n\r\n")
        refusal = await second.read()
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in refusal
        assert b'"code":"bodies_full"' in refusal
        await chunked.send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\nC350\r\n" + " " * 50_000 + "\r\n")
        assert (await chunked.read()).startswith(b"HTTP/1.1 503 ")
        await third.ask()  # a small one finds room
        assert (await third.read()).startswith(b"HTTP/1.1 200 ")
        await first.send(" " * 59_999)
        assert (await first.read()).startswith(b"HTTP/1.1 400 ")
        assert server.gateway._state.bodies.num_held == 0


async def test_a_request_counts_for_its_media_until_its_answer_has_ended() -> None:
    engine = FakeEngine(say_first_word)
    picture = {"type": "image_url", "image_url": {"url": PNG[:-1] + "A" * 4001}}
    content = [{"role": "user", "content": [picture, {"type": "text", "text": "x" * 100}]}]
    async with serving(engine) as server:
        room: BodyRoom = server.gateway._state.bodies
        async with server.http.post(server.url + "/v1/chat/completions", json={"messages": content, "stream": True}) as response:
            await response.content.readuntil(b'"It"')
            assert room.num_held == 3009 + 100
            engine.generations[0].push(Delta(0, finish_reason=FinishReason.STOP))
            await response.read()
        assert room.num_held == 0


@pytest.mark.usefixtures("short_window")
async def test_room_comes_back_from_bodies_that_never_came_and_from_clients_that_left() -> None:
    async with serving(max_bodies_bytes=100_000) as server, clients(server, 2) as (slow, gone):
        await slow.send(f"{HEAD}Content-Length: 50000\r\n\r\n{{")
        await gone.send(f"{HEAD}Content-Length: 50000\r\n\r\n{{")
        while server.gateway._state.bodies.num_held < 100_000:
            await asyncio.sleep(0.01)
        gone.socket.close()
        assert (await slow.ended()).startswith(b"HTTP/1.1 408 ")
        while server.gateway._state.bodies.num_held:
            await asyncio.sleep(0.01)


# --- connections -------------------------------------------------------------------------------------------------------------


async def test_a_connection_that_brings_no_whole_request_is_closed_however_busy_it_looks() -> None:
    """One that says nothing, fifty that send a header a byte at a time, and one that has had an answer."""
    async with serving(idle_connection_s=0.5) as server, clients(server, 52) as (silent, served, *lorises):
        await served.ask()
        assert (await served.read()).startswith(b"HTTP/1.1 200 ")
        drips = [asyncio.create_task(drip(loris, b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 4000, 0.05)) for loris in lorises]
        for client in (silent, served, *lorises):
            assert await client.ended() == b""
        for task in drips:
            task.cancel()
        while len(server.gateway.connections):
            await asyncio.sleep(0.01)


async def test_an_answer_that_takes_longer_than_an_idle_connection_may_is_not_cut() -> None:
    engine = FakeEngine(say_nothing)
    async with serving(engine, idle_connection_s=0.1) as server, clients(server) as (client,):
        await client.ask()
        await engine.wait_until(lambda: len(engine.generations) == 1)
        await asyncio.sleep(0.4)
        engine.generations[0].push(Delta(0, "Done.", finish_reason=FinishReason.STOP))
        assert b'"Done."' in await client.read()


async def test_a_connection_too_many_is_told_so_and_closed_and_there_is_room_again_when_one_leaves() -> None:
    async with serving(max_connections=3) as server:
        async with clients(server, 3) as first:
            for client in first:
                await client.ask()
                assert (await client.read()).startswith(b"HTTP/1.1 200 ")
            async with clients(server) as (fourth,):
                await fourth.ask()
                answer = await fourth.ended()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1\r\n" in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
            await first[0].ask()  # those who are in are served as before
            assert (await first[0].read()).startswith(b"HTTP/1.1 200 ")
        while len(server.gateway.connections):
            await asyncio.sleep(0.01)
        assert (await server.post("/v1/chat/completions", chat()))[0] == 200
        async with server.http.get(server.url + "/metrics") as response:
            metrics = await response.text()
    assert 'connections_closed_total{reason="too_many"} 1.0' in metrics


# --- readers -----------------------------------------------------------------------------------------------------------------


def unread(server: Server) -> list[int]:
    """What each connection holds for its reader, in the process and in the kernel."""
    return [connection._count_unread() for connection in server.gateway.connections._open]


async def test_stalled_readers_hold_little_are_cut_off_and_harm_nobody() -> None:
    """64 of them asked for streams that never end; before, each had megabytes of kernel memory to fill."""
    engine = FakeEngine(say_first_word)
    async with (
        serving(engine, slow_client_s=1.0, max_backlog_bytes=2**30) as server,
        clients(server, 64, receive_bytes=4096) as stalled,
        clients(server) as (healthy,),
    ):
        for client in stalled:
            await client.ask(stream=True)
        await engine.wait_until(lambda: len(engine.generations) == 64)
        await healthy.ask(stream=True)
        await engine.wait_until(lambda: len(engine.generations) == 65)
        *flooded, last = engine.generations
        for _ in range(400):
            for generation in flooded:
                generation.push(Delta(0, "word " * 100))
            await asyncio.sleep(0)
            assert max(unread(server)) <= 96 * 1024
        await engine.wait_until(lambda: len(engine.cancelled) == 64)
        last.push(Delta(0, " still here", finish_reason=FinishReason.STOP))
        assert b" still here" in await healthy.read_until(b"[DONE]")
        assert sorted(engine.cancelled) == sorted(generation.request_id for generation in flooded)
        async with server.http.get(server.url + "/metrics") as response:
            assert 'connections_closed_total{reason="slow_client"} 64.0' in await response.text()


async def test_a_reader_that_is_slow_but_reads_gets_all_of_it() -> None:
    """The socket is writable again only when a third of its buffer is free: by that alone a slow reader looks like a dead one."""
    engine = FakeEngine(say_nothing)
    async with serving(engine, slow_client_s=0.6) as server, clients(server, 1, receive_bytes=4096) as (client,):
        await client.ask(stream=True)
        await engine.wait_until(lambda: len(engine.generations) == 1)
        (generation,) = engine.generations
        for number in range(150):
            generation.push(Delta(0, f"word {number} " + "x" * 500))
            await asyncio.sleep(0)
        generation.push(Delta(0, finish_reason=FinishReason.STOP))
        data = b""
        while b"[DONE]" not in data:
            piece = await client.read(1000)
            assert piece
            data += piece
            await asyncio.sleep(0.05)
    assert [int(number) for number in re.findall(rb"word (\d+)", data)] == list(range(150))


async def test_a_client_whose_process_stands_still_is_cut_off_though_its_kernel_still_answers() -> None:
    """Its machine takes what comes until its buffers are full, and then acknowledges that they are."""
    connect = "import socket, sys; here = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    code = f"{connect}\nhere.sendall(sys.argv[2].encode())\nwhile here.recv(999): pass"
    data = json.dumps(chat(stream=True))
    engine = FakeEngine(say_first_word)
    async with serving(engine, slow_client_s=1.0, max_backlog_bytes=2**30) as server:
        port, sent = server.url.rpartition(":")[2], f"{HEAD}Content-Length: {len(data)}\r\n\r\n{data}"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, port, sent)
        try:
            await engine.wait_until(lambda: len(engine.generations) == 1)
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(60):
                while not engine.cancelled:
                    engine.generations[0].push(Delta(0, "word " * 1000))
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
            await process.wait()


async def test_a_reader_far_behind_is_cut_off_when_more_waits_for_it_than_may() -> None:
    engine = FakeEngine(say_first_word)
    async with serving(engine, max_backlog_bytes=10_000, slow_client_s=3600) as server, clients(server, 1, receive_bytes=4096) as (client,):
        await client.ask(stream=True)
        await engine.wait_until(lambda: len(engine.generations) == 1)
        (generation,) = engine.generations
        while not engine.cancelled:
            generation.push(Delta(0, "word " * 20))
            await asyncio.sleep(0)


async def test_who_pipelines_without_reading_is_answered_no_faster_than_it_reads() -> None:
    """aiohttp ends an answer when its reader has room for it: else thousands of requests for a page would fill the memory with pages."""
    async with serving() as server, clients(server, 1, receive_bytes=4096) as (client,):
        await client.send(b"GET /playground/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
        for _ in range(100):
            await asyncio.sleep(0.005)
            assert max(unread(server), default=0) <= 128 * 1024
        assert server.gateway._runner is not None
        assert server.gateway._runner.server is not None
        assert 0 < server.gateway._runner.server.requests_count < 10


# --- methods -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "TRACE", "PROPFIND", "BREW", "get", "G\x00T", "X" * 9000])
async def test_any_method_gets_one_of_our_answers(method: str) -> None:
    async with serving() as server, clients(server) as (client,):
        await client.send(f"{method} /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, answer = (await client.ended()).partition(b"\r\n\r\n")
        assert server.engine.requests == []
    assert head[9:12] in (b"405", b"400")
    assert b"x-request-id: " in head
    assert (answer == b"") if method == "HEAD" else set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}


async def test_head_is_get_without_a_body() -> None:
    async with serving() as server, clients(server) as (client,):
        await client.send("HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, body = (await client.ended()).partition(b"\r\n\r\n")
    assert (head[9:12], body) == (b"200", b"")
