"""From the small decoder to the large one in the middle of a request, with real workers: the client sees one answer, from one of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tiny_model
from test_engine import ask, clip, config, picture, read, settled

from mmserve import AsyncEngine
from mmserve.errors import Overloaded
from mmserve.prompt_maker import Prompt
from mmserve.request import ChatRequest, FinishReason

NEVER, ALWAYS = 1e9, -1.0  # nats: entropy is never above the one, and always above the other


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def engine_of(model: Path, data: Path, escalate_above: float, num_judged: int = 4) -> AsyncIterator[AsyncEngine]:
    router = {"weights": {"bias": -9.0}, "threshold": 0.5, "escalate_above": escalate_above, "num_judged": num_judged}
    (model / "router.json").write_text(json.dumps(router))
    async with AsyncEngine(config(model, data)) as engine:
        yield engine


def question(model: str = "auto") -> ChatRequest:
    return ask("look at ", picture(1), " and hear ", clip(1), model=model)


async def test_an_uncertain_answer_is_the_large_decoders_and_an_uncertain_one_alone(model: Path, tmp_path: Path) -> None:
    async with engine_of(model, tmp_path / "a", ALWAYS) as engine:
        expected = {name: await read(await engine.submit(question(name))) for name in ("small", "large")}
        moved = await engine.submit(question())
        assert await read(moved) == expected["large"] != expected["small"]
        assert (moved.model, moved.route_reason) == ("large", "escalated")
        assert moved.usage.completion_tokens == 12
        assert moved.cost is not None
        alone = await engine.submit(question("large"))
        await read(alone)
        assert alone.cost is not None
        assert len(engine._groups) == 2
        await settled(engine)
        asked_for = await engine.submit(question("small"))
        assert await read(asked_for) == expected["small"]
        assert asked_for.route_reason == "hint"
    async with engine_of(model, tmp_path / "b", NEVER) as engine:
        certain = await engine.submit(question())
        assert await read(certain) == expected["small"]
        assert (certain.model, certain.route_reason) == ("small", "simple")
        await settled(engine)


async def test_the_attempt_that_was_given_up_stays_on_the_bill(model: Path, tmp_path: Path) -> None:
    async with engine_of(model, tmp_path, ALWAYS) as engine:
        generation = await engine.submit(ask("a question", model="auto"))
        active = engine._active[generation.request_id]
        await read(generation)
        attempts = [(name, sequence.prefill_gpu_s > 0) for name, sequence in active.bill.sequences]
        assert attempts == [("small", True), ("large", True)]
        assert generation.cost is not None
        assert generation.cost.gpu_seconds["prefill"] == pytest.approx(sum(each.prefill_gpu_s for _, each in active.bill.sequences))


async def test_where_the_large_decoder_has_no_room_the_small_ones_answer_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(model, tmp_path, ALWAYS) as engine:
        expected = await read(await engine.submit(question("small")))
        large = engine._groups["large"]

        def refuse(*_: object, **__: object) -> int:
            raise Overloaded("the queue is full")

        monkeypatch.setattr(large, "check", refuse)
        generation = await engine.submit(question())
        assert await read(generation) == expected
        assert (generation.model, generation.route_reason) == ("small", "simple")
        await settled(engine)


async def test_a_client_that_leaves_while_it_is_moved_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    async with engine_of(model, tmp_path, ALWAYS) as engine:
        begun, go_on = asyncio.Event(), asyncio.Event()
        make = engine._escalations._make

        async def make_slowly(*args: object) -> Prompt:
            begun.set()
            await go_on.wait()
            return await make(*args)

        engine._escalations._make = make_slowly
        generation = await engine.submit(question())
        await begun.wait()
        generation.cancel()
        go_on.set()
        await asyncio.gather(*engine._escalations._tasks)
        await settled(engine)


async def test_an_answer_shorter_than_what_is_looked_at_is_told_at_its_end(model: Path, tmp_path: Path) -> None:
    async with engine_of(model, tmp_path, NEVER, num_judged=100) as engine:
        generation = await engine.submit(ask("a question", model="auto", max_tokens=3))
        batch = await generation.next_batch()
        assert [len(delta.token_ids) for delta in batch] == [1, 1, 1]


async def test_nothing_is_told_behind_a_stop_string_among_what_was_held_back(model: Path, tmp_path: Path) -> None:
    async with engine_of(model, tmp_path, NEVER, num_judged=12) as engine, asyncio.timeout(60):
        whole = [delta async for delta in await engine.submit(ask("a question", model="auto"))]
        stop = next(delta.text.strip() for delta in whole if len(delta.text.strip()) > 1)
        generation = await engine.submit(ask("a question", model="auto", stop=(stop,)))
        told = [delta async for delta in generation]
        assert told[-1].finish_reason is FinishReason.STOP
        assert [delta.finish_reason for delta in told[:-1]] == [None] * (len(told) - 1)
        assert len(told) < len(whole)
        assert stop not in "".join(delta.text for delta in told)
        await settled(engine)
