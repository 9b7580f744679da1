"""Pieces of HTTP in any order over a real socket: whatever they make, no answer is a 500, and each connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Sequence

import pytest
from gateway_client import serving

PATHS = (
    "/", "/v1/models", "/v1/models/small", "/v1/models/%00", "/v1/chat/completions", "/v1/generate", "//health", "/health?route=\xff", "*",
    "http://localhost/health", "/%2e%2e/%2e%2e/etc/passwd", "/v1/feedback", "/openapi.json", "/health?route=text", "/metrics",
)  # fmt: skip
SOUND = (
    "Content-Type: application/json", "Content-Type: multipart/form-data; boundary=XX", "Content-Length: 2", "Transfer-Encoding: chunked",
    "Expect: 100-continue", "Expect: wonders", "Upgrade: websocket", "Connection: Upgrade", "Connection: close", "Connection: keep-alive",
    "Content-Encoding: br", "Authorization: Basic \xff", "Origin: null", "Idempotency-Key: a", "x-request-id: \xe9", "Range: bytes=0-",
    "Accept-Encoding: gzip", "If-None-Match: *", "Content-Type: \xff",
)  # fmt: skip
UNSOUND = (
    "Host: evil.example", "Host:", "Content-Length: -1", "Content-Length: 2, 3", "Content-Length: 99999999999999999999",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity", "Idempotency-Key: \x01", "Cookie: a=\x00", " folded", "no colon",
    "X: " + "b" * 9000,
)  # fmt: skip
BODIES = ("", "{}", "[]", "\xff\xff", "2\r\n{}\r\n0\r\n\r\n", "zz\r\n", "0\r\n\r\n", "--XX--", "{" * 5000)
FITTING = {"Content-Length: 2": "{}", "Transfer-Encoding: chunked": "2\r\n{}\r\n0\r\n\r\n"}


def mostly(rng: random.Random, usual: Sequence[str], now_and_then: Sequence[str]) -> str:
    return rng.choice(usual if rng.random() < 0.93 else now_and_then)


def request(rng: random.Random) -> bytes:
    method = mostly(rng, ("GET", "POST", "POST", "HEAD", "OPTIONS", "DELETE"), ("BREW", "", "get"))
    path = mostly(rng, PATHS, ("", "/" + "a" * 9000, "?", "//"))
    version = mostly(rng, ("HTTP/1.1",), ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", ""))
    headers = {mostly(rng, SOUND, UNSOUND) for _ in range(rng.randrange(5))}
    fitting = next((body for header, body in FITTING.items() if header in headers), "")
    lines = [f"{method} {path} {version}", "Host: localhost", *sorted(headers), "", mostly(rng, (fitting,), BODIES)]
    return "\r\n".join(lines).encode("latin-1")


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_over_the_wire_no_answer_is_a_500(seed: int) -> None:
    rng, statuses = random.Random(seed), set()
    async with serving(body_timeout_s=0.05, idle_connection_s=0.05) as server:
        for _ in range(200):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            sent = b"".join(request(rng) for _ in range(rng.randrange(1, 4))) + rng.choice([b"", b"\x16\x03\x01", b"\r\n\r\n"])
            writer.write(sent)
            answers = b""
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(20):
                    answers = await reader.read()
            writer.close()
            found = {int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answers)}
            assert all(100 <= status < 500 for status in found), (sent, answers)
            statuses |= found
    assert {200, 400, 404, 405} <= statuses
