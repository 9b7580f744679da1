"""The server as a user starts it: a real process, the bundled model, the OpenAI client, real kills."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from mmserve.cli import bench
from scripts import loopback
from scripts.faults.family import children, gone, workers
from scripts.loopback import audio_part, client, image_part, scrape, text_part, user

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).parent.parent / "examples"
BOATS = image_part((EXAMPLES / "boats-and-star.jpg").read_bytes(), "image/jpeg")
CAT = image_part((EXAMPLES / "cat.jpg").read_bytes(), "image/jpeg")
ROCKET = image_part((EXAMPLES / "rocket.jpg").read_bytes(), "image/jpeg")
HOW_MANY_BOATS = audio_part((EXAMPLES / "how-many-boats.wav").read_bytes())
BELL = audio_part((EXAMPLES / "bell.wav").read_bytes())
GUITAR = audio_part((EXAMPLES / "guitar.wav").read_bytes())


@dataclass(frozen=True)
class Running:
    url: str
    pid: int
    openai: AsyncOpenAI

    async def reading(self, name: str) -> float:
        return (await scrape(self.url)).total(name)

    async def until(self, name: str, value: float) -> None:
        async with asyncio.timeout(60):
            while await self.reading(name) != value:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Running]:
    async with loopback.running(directory) as server, client(server.url) as openai:
        yield Running(server.url, server.process.pid, openai)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(tmp_path_factory.mktemp("data")) as served:
        yield served


async def ask(openai: AsyncOpenAI, *parts: dict, model: str) -> str:
    answer = await openai.chat.completions.create(model=model, messages=user(*parts), temperature=0, max_tokens=40)
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("model", ["small", "large"])
@pytest.mark.parametrize(
    ("parts", "right"),
    [
        ((BOATS, text_part("How many boats are there?")), "two"),
        ((BOATS, text_part("Is there a star?")), "yes"),
        ((BOATS, text_part("Is there a dog?")), "no"),
        ((BOATS, HOW_MANY_BOATS), "two"),
        ((CAT, ROCKET, text_part("Which picture shows a rocket?")), "second"),
        ((ROCKET, CAT, text_part("Which picture shows a rocket?")), "first"),
        ((BELL, text_part("What sound is it?")), "bell"),
        ((GUITAR, text_part("What word is spoken?")), "guitar"),
    ],
)
async def test_the_bundled_model_is_right_about_the_examples(served: Running, parts: tuple[dict, ...], right: str, model: str):
    assert right in (await ask(served.openai, *parts, model=model)).lower()


async def test_the_bench_sends_media_that_the_server_takes(served: Running, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    words = "--num-prompts 8 --mix text=1,image=1,audio=1,image_audio=1 --audio-len 1 --input-len 8 --output-len 4 --ignore-eos"
    assert await asyncio.to_thread(bench.run, parser.parse_args(["--base-url", served.url, *words.split()])) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["completed"], result["without_usage"], result["total_output_tokens"]) == (8, 0, 32)
    assert len(result["by_modality"]) > 1


async def test_streams_survive_a_killed_decoder(served: Running):
    async def stream() -> str:
        text = ""
        chunks = await story(served.openai, stream=True, num_tokens=60)
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            under_way.set()
        return text

    under_way = asyncio.Event()
    alone = await stream()
    under_way.clear()
    streams = [asyncio.create_task(stream()) for _ in range(8)]
    await under_way.wait()
    os.kill(workers(served.pid)["small-decoder-0"], signal.SIGKILL)
    assert await asyncio.gather(*streams) == [alone] * 8
    assert await served.reading("stream_recoveries_total") > 0
    await served.until("kv_cache_usage_perc", 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(served: Running, stream: bool):
    leaving = asyncio.create_task(story(served.openai, stream=stream, num_tokens=4000))
    await served.until("num_requests_running", 1)
    leaving.cancel()
    (answer,) = await asyncio.gather(leaving, return_exceptions=True)
    if not isinstance(answer, BaseException):
        await answer.close()
    await served.until("kv_cache_usage_perc", 0)


async def test_a_killed_server_leaves_no_process_behind(tmp_path: Path):
    async with running(tmp_path) as served:
        family = [child.pid for child in children(served.pid)]
        assert len(family) >= 5  # four workers and a decode process
        os.kill(served.pid, signal.SIGKILL)
        assert (await gone(family, timeout_s=30))[0] == set()


async def story(openai: AsyncOpenAI, *, stream: bool, num_tokens: int) -> Any:
    return await openai.chat.completions.create(
        model="small",
        messages=user(CAT, text_part("Tell me a story.")),
        temperature=0,
        stream=stream,
        max_tokens=num_tokens,
        extra_body={"min_tokens": num_tokens},
    )
