"""Pieces of HTTP in any order over a real socket: whatever they make, no answer is a 500, and each connection ends."""

from __future__ import annotations

import asyncio
import re

from gateway_client import serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "BREW", "")
PATHS = (
    "/", "/v1/models", "/v1/models/small", "/v1/models/%00", "/v1/chat/completions", "/v1/generate", "//health", "/health?route=\xff", "*",
    "http://localhost/health", "/%2e%2e/%2e%2e/etc/passwd", "/v1/feedback", "/openapi.json", "/" + "a" * 9000, "",
)  # fmt: skip
HEADERS = (
    "Host: localhost", "Host: evil.example", "Host:", "Content-Type: application/json", "Content-Type: multipart/form-data; boundary=XX",
    "Content-Type: \xff", "Content-Length: 2", "Content-Length: -1", "Content-Length: 2, 3", "Content-Length: 99999999999999999999",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity", "Expect: 100-continue",
    "Expect: wonders", "Upgrade: websocket", "Connection: Upgrade", "Connection: close", "Connection: keep-alive", "Content-Encoding: br",
    "Authorization: Basic \xff", "Origin: null", "Idempotency-Key: \x01", "Idempotency-Key: a", "x-request-id: \xe9", "Cookie: a=\x00",
    " folded", "no colon", "X: " + "b" * 9000, "Range: bytes=0-", "Accept-Encoding: gzip", "If-None-Match: *",
)  # fmt: skip
BODIES = ("", "{}", "[]", "\xff\xff", "2\r\n{}\r\n0\r\n\r\n", "zz\r\n", "0\r\n\r\n", "--XX--", "{" * 5000)
requests = st.builds(
    lambda method, path, version, headers, body: "\r\n".join([f"{method} {path} {version}", *headers, "", body]).encode("latin-1"),
    st.sampled_from(METHODS),
    st.sampled_from(PATHS),
    st.sampled_from(("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "")),
    st.lists(st.sampled_from(HEADERS), max_size=5),
    st.sampled_from(BODIES),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requests, min_size=1, max_size=3), st.binary(max_size=20))
def test_whatever_comes_over_the_wire_no_answer_is_a_500(sent: list[bytes], rest: bytes) -> None:
    async def talk() -> bytes:
        async with serving(body_timeout_s=0.05, idle_connection_s=0.05) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(b"".join(sent) + rest)
            try:
                async with asyncio.timeout(20):
                    return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

    answers = asyncio.run(talk())
    statuses = [int(status) for status in re.findall(rb"(?m)^HTTP/1\.[01] (\d{3}) ", answers)]
    assert all(100 <= status < 500 for status in statuses), answers
