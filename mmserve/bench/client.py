"""Sends each request when it is due, whatever became of those before it, and reads the streams with a stopwatch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import aiohttp
import orjson

from mmserve.bench.traffic import Modality, PlannedRequest


class EndpointError(Exception):
    """The server can't be measured: it isn't there, or doesn't speak the protocol."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went.  Of one that failed only the first four fields and `latency_s` mean anything."""

    modality: Modality
    failure: str | None  # the HTTP status, or `stream`, `disconnected`, `timeout`; None: it was answered to the end
    error: str  # what the server or the connection said; empty if nothing failed
    start_s: float  # when it was sent, after the start of the run
    queue_s: float  # how long after it was due: the wait for max_concurrency, or a client that is too slow
    ttft_s: float = 0.0
    itl_s: tuple[float, ...] = ()  # between the pieces of text
    latency_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0  # as the server counts; the pieces of text where it sends no usage
    has_usage: bool = False

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is no second."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Stopwatch:
    """What a stream has shown so far.  Raises StreamFailed for an error event."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._piece_times: list[float] = []
        self._last = start
        self._usage: dict[str, Any] | None = None
        self.done = False

    def feed(self, line: bytes, now: float) -> None:
        """One line of the event stream that came at `now`."""
        if not line.startswith(b"data:"):  # a comment, or the blank line between two events
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            raise StreamFailed(_message(event))
        self._last = now
        self._usage = event.get("usage") or self._usage
        if any(_has_text(choice["delta"]) for choice in event.get("choices", ())):
            self._piece_times.append(now)

    def measured(self) -> dict[str, Any]:
        """The fields of Outcome.  An answer without any text has its first token at its end."""
        times = self._piece_times or [self._last]
        usage = self._usage or {}
        return {
            "ttft_s": times[0] - self._start,
            "itl_s": tuple(after - before for before, after in pairwise(times)),
            "latency_s": self._last - self._start,
            "input_tokens": usage.get("prompt_tokens", 0),
            "output_tokens": usage.get("completion_tokens", len(self._piece_times)),
            "has_usage": self._usage is not None,
        }


class StreamFailed(Exception):
    """An answer that began well and ended in an error."""


class LoadClient:
    """One server under load.  An async context manager."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """The id of the first model the server lists.  Raises EndpointError."""
        url = f"{self._url}/v1/models"
        try:
            async with self._session.get(url) as response:
                response.raise_for_status()
                return str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EndpointError(f"{url} does not answer: {error}") from None
        except (KeyError, IndexError, TypeError, ValueError):
            raise EndpointError(f"{url} lists no model; name one with --model") from None

    async def run(
        self,
        planned: Sequence[PlannedRequest],
        bodies: Sequence[bytes],
        *,
        max_concurrency: int | None = None,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ) -> tuple[list[Outcome], float]:
        """Outcomes in order of arrival, and the seconds from the start to the last of them."""
        gate = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        start = perf_counter()

        async def send(request: PlannedRequest, body: bytes) -> Outcome:
            await asyncio.sleep(start + request.arrival_s - perf_counter())
            async with gate:
                outcome = await self._send(request, body, start)
            on_outcome(outcome)
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(request, body)) for request, body in zip(planned, bodies, strict=True)]
        return [task.result() for task in tasks], perf_counter() - start

    async def _send(self, request: PlannedRequest, body: bytes, run_start: float) -> Outcome:
        start = perf_counter()
        failure, error = None, ""
        stopwatch = Stopwatch(start)
        try:
            async with self._session.post(f"{self._url}/v1/chat/completions", data=body) as response:
                if response.status == 200:
                    async for line in response.content:
                        stopwatch.feed(line, perf_counter())
                    if not stopwatch.done:
                        failure, error = "disconnected", "the stream ended without [DONE]"
                else:
                    failure, error = str(response.status), (await response.text())[:500]
        except StreamFailed as problem:
            failure, error = "stream", str(problem)
        except TimeoutError:
            failure, error = "timeout", "no end in time"
        except (aiohttp.ClientError, OSError) as problem:
            failure, error = "disconnected", str(problem) or type(problem).__name__
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            failure, error = "stream", f"an event is not what the protocol says: {problem!r}"
        measured = stopwatch.measured() if failure is None else {"latency_s": perf_counter() - start}
        queue_s = start - run_start - request.arrival_s
        return Outcome(request.modality, failure, error, start_s=start - run_start, queue_s=max(0.0, queue_s), **measured)


def _has_text(delta: dict[str, Any]) -> bool:
    """Reasoning counts: it is what the reader waits for, too."""
    return any(delta.get(field) for field in ("content", "reasoning_content", "reasoning"))


def _message(event: dict[str, Any]) -> str:
    error = event["error"]
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
