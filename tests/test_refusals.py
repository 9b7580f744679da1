"""A server that is full, or is asked for what it can't hold: told at once, over real sockets, and the others notice nothing."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_client import event_of, serving
from PIL import Image
from test_engine import check_idle, clip, picture

from mmserve import AsyncEngine, Config
from mmserve.config import ModelConfig, SchedulerConfig, StorageConfig
from mmserve.media import MediaItem, MediaKind, MediaLimits
from mmserve.roofline.hardware import A100, LLAMA_8B
from mmserve.roofline.timing import ACTIVATION_BYTES
from scripts.loopback import audio_part, image_part, scrape, server, text_part, user

MAX_MODEL_LEN = 800
KV_BLOCK, NUM_KV_BLOCKS = 256, 3  # a picture's 576 rows fit in, and less than the context length


@dataclass(frozen=True)
class Answer:
    status: int
    retry_after: str | None
    error: dict[str, Any] | None  # as OpenAI shapes it
    num_tokens: int = 0
    is_whole: bool = False  # it has a finish reason, and [DONE] came last


@dataclass(frozen=True)
class Door:
    url: str
    http: aiohttp.ClientSession

    async def ask(self, *parts: dict[str, Any], max_tokens: int = 20) -> Answer:
        """The small decoder's streamed answer to a text and `parts`."""
        messages = user(text_part("go on"), *parts)
        fields = {"stream": True, "stream_options": {"include_usage": True}, "model": "small", "max_tokens": max_tokens}
        body = io.BytesIO(json.dumps({"messages": messages, **fields}).encode())
        headers = {"Content-Type": "application/json"}
        async with self.http.post(f"{self.url}/v1/chat/completions", data=body, headers=headers) as response:
            if response.status != 200:
                return Answer(response.status, response.headers.get("Retry-After"), (await response.json())["error"])
            events = [event_of(block) for block in (await response.text()).split("\n\n") if block and not block.startswith(":")]
        *chunks, usage, done = events
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        return Answer(200, None, None, usage["usage"]["completion_tokens"], done == "[DONE]" and reasons == ["length"])

    def start(self, *parts: dict[str, Any], max_tokens: int = 20) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.ask(*parts, max_tokens=max_tokens))

    async def until(self, name: str, value: float) -> None:
        async with asyncio.timeout(60):
            while (await scrape(self.url)).total(name) != value:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def simulated(directory: Path, *flags: str) -> AsyncIterator[Door]:
    async with server(directory, "--device", "sim:a100", *flags) as url, aiohttp.ClientSession() as http:
        yield Door(url, http)


def part(item: MediaItem) -> dict[str, Any]:
    return image_part(item.data) if item.kind is MediaKind.IMAGE else audio_part(item.data)


def check_refused(answer: Answer, message: str) -> None:
    assert answer.error is not None
    assert (answer.status, answer.error["type"], answer.error["code"]) == (503, "overloaded", "overloaded")
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert re.fullmatch(message, answer.error["message"])
    assert re.fullmatch(r"[1-9][0-9]*", answer.retry_after or "")


async def test_beyond_a_full_queue_all_are_told_when_to_come_back_and_the_others_are_answered_whole(tmp_path: Path) -> None:
    kinds = [(), (part(picture(1)),), (part(clip(1)),), (part(picture(2)), part(clip(2)))]
    async with simulated(tmp_path, "--max-num-seqs", "2", "--max-num-queued-reqs", "4", "--max-queue-wait-s", "3600") as door:
        inside = [door.start(max_tokens=400) for _ in range(2)]
        await door.until("num_requests_running", 2)
        inside += [door.start(*parts) for parts in kinds]
        await door.until("num_requests_waiting", 4)
        for answer in await asyncio.gather(*(door.ask(*kinds[i % 4]) for i in range(20))):
            check_refused(answer, "4 of at most 4 sequences are waiting|too many requests are waiting")
        assert [(answer.num_tokens, answer.is_whole) for answer in await asyncio.gather(*inside)] == [(400, True)] * 2 + [(20, True)] * 4

        burst = await asyncio.gather(*(door.ask(*kinds[i % 4]) for i in range(40)))
        assert {answer.status for answer in burst} == {200, 503}
        for answer in burst:
            if answer.status == 503:
                check_refused(answer, r"\d of at most 4 sequences are waiting|too many requests are waiting")
            else:
                assert (answer.num_tokens, answer.is_whole) == (20, True)

        assert (await door.ask(*kinds[3])).is_whole
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            await door.until(gauge, 0)


async def test_once_the_queue_was_seen_to_drain_slowly_who_would_wait_too_long_is_told_so(tmp_path: Path) -> None:
    async with simulated(tmp_path, "--max-num-seqs", "1", "--max-queue-wait-s", "0.2") as door:
        first = await asyncio.gather(*(door.ask(max_tokens=60) for _ in range(4)))  # nothing is known yet: all are taken
        assert [answer.is_whole for answer in first] == [True] * 4
        inside = [door.start(max_tokens=300)]
        await door.until("num_requests_running", 1)
        inside.append(door.start())
        await door.until("num_requests_waiting", 1)
        for answer in await asyncio.gather(*(door.ask() for _ in range(5))):
            check_refused(answer, r"it would take \d+\.\d s to begin, with 1 before it in the queue; 0\.2 s are the limit")
        assert all(answer.is_whole for answer in await asyncio.gather(*inside))
        assert (await door.ask()).is_whole  # nobody waits any more


# --- large pictures


@pytest.fixture(scope="module")
def large_picture() -> dict[str, Any]:
    """20 megapixels of noise, 3 MB."""
    file = io.BytesIO()
    Image.effect_noise((5000, 4000), 12).save(file, "JPEG", quality=40)
    return image_part(file.getvalue(), "image/jpeg")


@asynccontextmanager
async def tight(directory: Path, **scheduler: int) -> AsyncIterator[tuple[AsyncEngine, Door]]:
    """A door on an engine that can be looked into.  Its KV cache holds a little less than its context is long."""
    kv_bytes = (NUM_KV_BLOCKS + 0.5) * KV_BLOCK * LLAMA_8B.kv_bytes_per_token
    share = (LLAMA_8B.weight_bytes + ACTIVATION_BYTES + kv_bytes) / A100.memory_bytes
    config = Config(
        model=ModelConfig(device="sim:a100"),
        scheduler=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, block_size=KV_BLOCK, gpu_memory_utilization=share, max_queue_wait_s=3600, **scheduler
        ),
        limits=MediaLimits(max_image_pixels=20_000_000),
        storage=StorageConfig(data_dir=directory),
    )
    async with AsyncEngine(config) as engine, serving(engine) as served:
        yield engine, Door(served.url, served.http)


def decode_ticks(engine: AsyncEngine) -> int:
    """CPU time of the decode processes so far, user's and system's, in the kernel's ticks."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in engine._media.decode.pids]
    assert len(fields) == 1
    return sum(int(user_ticks) + int(system_ticks) for *_, user_ticks, system_ticks in (each[:13] for each in fields))


async def test_what_does_not_fit_is_refused_with_both_numbers_and_the_field_and_nothing_is_decoded(
    tmp_path: Path, large_picture: dict[str, Any]
) -> None:
    async with tight(tmp_path) as (engine, door):
        before = decode_ticks(engine)
        for parts, max_tokens, status, param, limit in [
            ([large_picture] * 2, 8, 400, "messages", f"the context length is {MAX_MODEL_LEN} tokens"),
            ([large_picture], 230, 400, "max_tokens", f"the context length is {MAX_MODEL_LEN} tokens"),
            ([large_picture], 190, 413, "max_tokens", f"the KV cache holds {NUM_KV_BLOCKS * KV_BLOCK} tokens"),
            ([large_picture, text_part(" yes" * 97)], 1, 413, "messages", f"the KV cache holds {NUM_KV_BLOCKS * KV_BLOCK} tokens"),
        ]:
            answer = await door.ask(*parts, max_tokens=max_tokens)
            assert answer.error is not None
            assert (answer.status, answer.error["param"], answer.retry_after) == (status, param, None)
            told = re.fullmatch(
                rf"{limit}, but (\d+) were requested \((\d+) in the prompt, (\d+) for the answer\)", answer.error["message"]
            )
            assert told is not None
            num_tokens, num_prompt, num_answer = map(int, told.groups())
            assert num_tokens == num_prompt + num_answer
            assert num_answer == max_tokens
            assert num_prompt > 576 * len([each for each in parts if each is large_picture])
        assert decode_ticks(engine) == before
        check_idle(engine)
        assert (await door.ask(large_picture)).is_whole
        assert decode_ticks(engine) > before


async def test_a_large_picture_before_a_full_queue_is_not_decoded(tmp_path: Path, large_picture: dict[str, Any]) -> None:
    async with tight(tmp_path, max_num_seqs=1, max_num_queued_reqs=1) as (engine, door):
        inside = [door.start(max_tokens=300)]
        await door.until("num_requests_running", 1)
        inside.append(door.start())
        await door.until("num_requests_waiting", 1)
        before = decode_ticks(engine)
        for _ in range(3):
            check_refused(await door.ask(large_picture), "1 of at most 1 sequences are waiting")
        assert decode_ticks(engine) == before
        assert all(answer.is_whole for answer in await asyncio.gather(*inside))
        check_idle(engine)
        assert (await door.ask(large_picture)).is_whole
        assert decode_ticks(engine) > before
