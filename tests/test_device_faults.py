"""What goes wrong in a decoder's process: real workers that crash, run out of memory, give NaN, or never come up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import faulty_decoder
import pytest
import pytest_asyncio
import tiny_model
from faulty_decoder import MARK
from test_engine import ask, config, counter, picture, read, settled, tokens

from mmserve import AsyncEngine, ChatRequest
from mmserve.errors import ContentQuarantined, NumericalError, Overloaded, WorkerLost
from mmserve.request import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


class Flag:
    """What workers look at before they fail."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "flag"
        self.starts = directory / "starts"

    @property
    def is_set(self) -> bool:
        return self.path.exists()

    @property
    def num_starts(self) -> int:
        return len(self.starts.read_text().splitlines())

    def set(self, what: str) -> None:
        self.path.write_text(what)

    def clear(self) -> None:
        self.path.unlink()


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Flag:
    return Flag(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module", autouse=True)
def faulty(flag: Flag) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faulty_decoder.FLAG, str(flag.path))
        patch.setenv(faulty_decoder.STARTS, str(flag.starts))
        patch.setattr("mmserve.decoder_group.worker_module", lambda device: "faulty_decoder")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(config(model, tmp_path_factory.mktemp("data"))) as engine:
        yield engine


def crowd(count: int = 6, max_tokens: int = 40) -> list[ChatRequest]:
    kinds = [("tell me", " more"), (picture(1), "what is it?"), (picture(2), picture(3), "which?")]
    return [ask(f"{i} ", *kinds[i % 3], max_tokens=max_tokens, seed=i) for i in range(count)]


def marked(fault: float, *parts: object, **fields: object) -> ChatRequest:
    return ask(*parts, logit_bias={MARK: fault}, **fields)  # type: ignore[arg-type]


async def beside_a_crowd(engine: AsyncEngine, request: ChatRequest) -> tuple[object, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """How the request ended, what the others said, and what they say alone."""
    others = crowd()
    alone = [await tokens(engine, other) for other in others]
    generations = [await engine.submit(other) for other in others]
    reading = [asyncio.create_task(read(generation)) for generation in generations]
    (ended,) = await asyncio.gather(tokens(engine, request), return_exceptions=True)
    together = [ids for (ids,) in await asyncio.gather(*reading)]
    await settled(engine)
    return ended, together, alone


async def test_a_row_that_is_not_a_number_fails_alone_and_is_never_shared(engine: AsyncEngine):
    """F-06."""
    words = "a prompt that is long enough to fill some blocks of the cache, and then a few more of them"
    ended, together, alone = await beside_a_crowd(engine, marked(faulty_decoder.NAN, words))
    assert isinstance(ended, NumericalError)
    assert together == alone
    again = ask(words)
    salted = ChatRequest(again.messages, again.sampling, model="small", cache_salt="shares nothing")
    assert await tokens(engine, again) == await tokens(engine, salted)


async def test_a_step_for_which_there_is_no_memory_is_made_smaller_and_nothing_is_dropped(engine: AsyncEngine):
    """F-08, when all of it fits in smaller steps."""
    words = "a prompt that has more tokens than fit in memory at once, so that it must be cut and cut again until it fits"
    right = await tokens(engine, ask(words, logit_bias={MARK: 0.001}))
    before = counter(engine, "worker_restarts_total")
    ended, together, alone = await beside_a_crowd(engine, marked(faulty_decoder.NO_MEMORY_FOR_MANY, words))
    assert len(ended) == len(right)  # type: ignore[arg-type]
    assert together == alone
    assert counter(engine, "worker_restarts_total") == before


async def test_what_never_fits_is_overloaded_and_nobody_else_is(engine: AsyncEngine):
    """F-08, when not even a step of one token fits."""
    ended, together, alone = await beside_a_crowd(engine, marked(faulty_decoder.NO_MEMORY, "never"))
    assert isinstance(ended, Overloaded)
    assert together == alone


async def test_a_device_error_that_stays_restarts_the_process_and_costs_no_stream(engine: AsyncEngine, flag: Flag):
    """F-10."""
    request = marked(faulty_decoder.ILLEGAL_ONCE, "one moment", max_tokens=30)
    right = await tokens(engine, request)
    before = counter(engine, "worker_restarts_total")
    flag.set("illegal")
    ended, together, alone = await beside_a_crowd(engine, request)
    assert not flag.is_set
    assert ended == right
    assert together == alone
    assert counter(engine, "worker_restarts_total") == before + 1


async def test_who_ends_every_worker_is_tried_alone_then_lost_and_then_refused(engine: AsyncEngine):
    before = counter(engine, "worker_restarts_total")
    ended, together, alone = await beside_a_crowd(engine, marked(faulty_decoder.CRASH, "deadly words"))
    assert isinstance(ended, WorkerLost)
    assert together == alone
    assert counter(engine, "worker_restarts_total") == before + 3
    with pytest.raises(ContentQuarantined):
        await engine.submit(ask("deadly words"))
    await tokens(engine, ask("other words"))
    await settled(engine)


async def test_all_choices_of_a_request_outlive_two_workers(engine: AsyncEngine):
    """F-01 with n > 1 and a second kill."""
    request = ask("several answers", picture(4), max_tokens=200, n=3)
    right = await read(await engine.submit(request))
    generation = await engine.submit(request)
    reading = asyncio.create_task(read(generation))
    (supervisor,) = engine._groups["small"].supervisors
    for _ in range(2):
        active = engine._active[generation.request_id]
        done = active.generated_tokens
        while active.generated_tokens < done + 6:
            await asyncio.sleep(0)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
    assert await reading == right
    assert {choice.sequence.num_worker_deaths for choice in active.choices} == {2}
    await settled(engine)


async def test_a_stop_string_of_which_half_was_said_before_the_worker_died_is_still_found(engine: AsyncEngine, flag: Flag):
    base = marked(faulty_decoder.CRASH_ONCE_AT, "say something", max_tokens=40)
    generation = await engine.submit(base)
    pieces = [delta async for delta in generation]
    text = "".join(delta.text for delta in pieces)
    start = next(i for i in range(8, len(text) - 4) if text.find(text[i : i + 4]) == i)
    stop = text[start : start + 4]
    num_tokens = next(n for n in range(1, 41) if len(engine.tokenizers["small"].decode(ids_of(pieces)[:n])) > start + 1)
    flag.set(f"{generation.usage.prompt_tokens + num_tokens}")
    request = marked(faulty_decoder.CRASH_ONCE_AT, "say something", max_tokens=40, stop=(stop,))
    deltas = [delta async for delta in await engine.submit(request)]
    assert not flag.is_set
    assert "".join(delta.text for delta in deltas) == text[:start]
    assert deltas[-1].finish_reason is FinishReason.STOP
    await settled(engine)


def ids_of(deltas: list) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_a_slow_prefill_is_not_taken_for_a_hung_worker(model: Path, tmp_path: Path):
    """F-03, second half: nothing of its size was ever measured, so nobody knows how long it may take.

    By an engine of its own: the crowds of the others had, on a slower machine, met in one step of half its size.
    """
    words = " ".join(f"word number {i}" for i in range(150))
    async with AsyncEngine(config(model, tmp_path)) as engine:
        before = counter(engine, "worker_restarts_total")
        assert len(await tokens(engine, marked(faulty_decoder.SLOW, words, max_tokens=3))) == 3
        assert counter(engine, "worker_restarts_total") == before


async def test_a_worker_that_never_comes_up_again_opens_the_circuit_until_it_does(engine: AsyncEngine, flag: Flag):
    """F-05."""
    request = ask("wait for me", max_tokens=200)
    right = await tokens(engine, request)
    reading = asyncio.create_task(tokens(engine, request))
    while not engine._active:
        await asyncio.sleep(0)
    group = engine._groups["small"]
    flag.set(faulty_decoder.DIE_AT_START)
    num_starts = flag.num_starts
    assert group.supervisors[0].pid is not None
    os.kill(group.supervisors[0].pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while not group.broken:
            await asyncio.sleep(0.01)
    assert flag.num_starts == num_starts + 3
    assert not engine.ready("text")
    with pytest.raises(Overloaded) as refused:
        await engine.submit(ask("hello"))
    assert refused.value.code == "decoder_unavailable"
    assert refused.value.retry_after_s is not None
    automatic = await engine.submit(ask("hello", model="auto"))
    assert (automatic.model, automatic.route_reason) == ("large", "only-capable")
    await read(automatic)
    flag.clear()
    assert await reading == right
    assert await tokens(engine, request) == right
    assert engine.ready("text")
    await settled(engine)
