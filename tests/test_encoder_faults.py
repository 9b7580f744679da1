"""Encoder workers that die, hang, run out of memory or give nonsense, in real processes under the real engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from encoder_world import (
    IMAGE,
    Naughty,
    ask,
    breaker_state,
    build_model,
    config,
    counter,
    encoder_pid,
    grey,
    lane,
    naughty_engine,
    picture,
    read,
    settled,
    tokens,
    until,
)  # fmt: skip
from naughty_encoder import NEVER_FITS, NOT_FINITE, POISON

from mmserve import AsyncEngine, ChatRequest
from mmserve.encoders import encode_time
from mmserve.errors import ContentQuarantined, EncoderFailed, EncoderUnavailable, MmserveError, TooLarge, UndecodableMedia, WorkerLost
from mmserve.media import MediaItem

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[AsyncEngine, Naughty]]:
    directory = tmp_path_factory.mktemp("encoders")
    model = build_model(directory / "model")
    async with naughty_engine(config(model, directory / "data", micro_batch_window_ms=300.0), directory / "told") as world:
        yield world


async def all_of(engine: AsyncEngine, requests: list[ChatRequest]) -> list[tuple[int, ...] | BaseException]:
    return await asyncio.gather(*(tokens(engine, request) for request in requests), return_exceptions=True)


async def test_a_full_batch_whose_worker_is_killed_is_encoded_once_more(world: tuple[AsyncEngine, Naughty]) -> None:
    """F-02.  The worker is stopped with 48 pictures aboard, so that it is killed in the middle of them."""
    engine, _ = world
    requests = [ask(picture(seed), "what is it?") for seed in range(100, 148)]
    forwards, items = counter(engine, "encoder_items_per_batch_count"), counter(engine, "encoder_items_per_batch_sum")
    pid = encoder_pid(engine)
    os.kill(pid, signal.SIGSTOP)
    reading = [asyncio.create_task(tokens(engine, request)) for request in requests]
    worker = lane(engine).clients[0]._worker
    assert worker is not None
    await until(lambda: worker._calls)
    text = await tokens(engine, ask("text goes on meanwhile"))
    assert len(text) == 8
    os.kill(pid, signal.SIGKILL)
    killed = await asyncio.gather(*reading)
    assert counter(engine, "encoder_items_per_batch_sum") - items == 48
    assert counter(engine, "encoder_items_per_batch_count") - forwards <= 3
    assert breaker_state(engine) == 0
    assert list(killed) == [await tokens(engine, request) for request in requests]
    await settled(engine)


async def test_rows_that_are_not_finite_fail_their_request_only_and_the_same_picture_is_fine_later(
    world: tuple[AsyncEngine, Naughty],
) -> None:
    """F-07."""
    engine, naughty = world
    num_cached = len(engine._media.cache)
    naughty.tell("nan")
    with pytest.raises(EncoderFailed) as caught:
        await tokens(engine, ask(picture(200), "?"))
    assert caught.value.code == "encoder_nan"
    assert len(engine._media.cache) == num_cached
    naughty.stop("nan")
    assert len(await tokens(engine, ask(picture(200), "?"))) == 8
    *good, bad = await all_of(engine, [*(ask(picture(seed), "?") for seed in range(201, 206)), ask(grey(NOT_FINITE), "?")])
    assert isinstance(bad, EncoderFailed)
    assert all(isinstance(each, tuple) for each in good)
    await settled(engine)


async def test_a_batch_that_does_not_fit_is_cut_and_only_what_never_fits_is_refused(world: tuple[AsyncEngine, Naughty]) -> None:
    """F-09."""
    engine, naughty = world
    naughty.tell("small")
    requests = [*(ask(picture(seed), "?") for seed in range(300, 347)), ask(grey(NEVER_FITS), "?")]
    *good, bad = await all_of(engine, requests)
    naughty.stop("small")
    assert isinstance(bad, TooLarge)
    assert all(isinstance(each, tuple) for each in good)
    assert breaker_state(engine) == 0  # too much for the memory is no fault of the encoder
    await settled(engine)


async def test_one_bad_picture_in_a_batch_of_48_fails_alone(world: tuple[AsyncEngine, Naughty]) -> None:
    """F-45."""
    engine, _ = world
    broken = MediaItem(IMAGE, picture(499).data[:-40], param="messages[0].content[0]")
    requests = [*(ask(picture(seed), "?") for seed in range(400, 447)), ask(broken, "?")]
    *good, bad = await all_of(engine, requests)
    assert isinstance(bad, UndecodableMedia)
    assert bad.param == "messages[0].content[0]"
    assert [len(each) for each in good if isinstance(each, tuple)] == [8] * 47
    await settled(engine)


async def test_two_hundred_with_one_new_picture_cost_one_encode_though_the_first_of_them_leaves(world: tuple[AsyncEngine, Naughty]) -> None:
    """F-43."""
    engine, _ = world
    items, forwards = counter(engine, "encoder_items_per_batch_sum"), counter(engine, "encoder_items_per_batch_count")
    requests = [ask(f"question {i} ", picture(500), max_tokens=2) for i in range(200)]
    leader = await engine.submit(requests[0])
    await until(lambda: engine._fetches)
    followers = [asyncio.create_task(tokens(engine, request)) for request in requests[1:]]
    await until(lambda: len(engine._active) > 50)
    leader.cancel()
    answers = await asyncio.gather(*followers)
    assert [len(answer) for answer in answers] == [2] * 199
    assert counter(engine, "encoder_items_per_batch_sum") - items == 1
    assert counter(engine, "encoder_items_per_batch_count") - forwards == 1
    await settled(engine)


async def test_a_picture_that_kills_is_found_out_and_refused_and_its_neighbours_are_answered(
    world: tuple[AsyncEngine, Naughty],
) -> None:
    engine, _ = world
    requests = [*(ask(picture(seed), "?") for seed in range(600, 603)), ask(grey(POISON), "?")]
    *good, bad = await all_of(engine, requests)
    assert isinstance(bad, WorkerLost)
    assert [len(each) for each in good if isinstance(each, tuple)] == [8] * 3
    assert breaker_state(engine) == 0
    with pytest.raises(ContentQuarantined):
        await engine.submit(ask("another question about ", grey(POISON)))
    await settled(engine)


async def test_an_encoder_that_hangs_is_found_within_seconds_and_its_pictures_are_answered(
    world: tuple[AsyncEngine, Naughty], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once took two minutes.  A batch of this size has been seen, so it's known how long it may take.

    And its pictures were given up: what had not quite died was asked again, and so seemed to have died three times.
    """
    engine, naughty = world
    monkeypatch.setattr(encode_time, "HUNG_S", 1.0)
    await tokens(engine, ask(picture(700), "?"))
    pid = encoder_pid(engine)
    naughty.tell("hang")
    reading = asyncio.create_task(tokens(engine, ask(picture(701), "?")))
    began_s = time.monotonic()
    await until(lambda: lane(engine).supervisors[0].pid != pid or not lane(engine).works, timeout_s=encode_time.GUESS_TIMEOUT_S / 2)
    assert time.monotonic() - began_s < encode_time.GUESS_TIMEOUT_S / 2
    naughty.stop("hang")
    assert len(await reading) == 8
    await settled(engine)


async def test_an_encoder_that_keeps_failing_is_asked_no_more_and_recovers_without_anybody_asking(
    world: tuple[AsyncEngine, Naughty],
) -> None:
    engine, naughty = world
    known = ask(picture(800), "a picture that is known")
    answer = await tokens(engine, known)
    naughty.tell("nan")
    for seed in range(801, 806):
        assert engine.ready("image")
        with pytest.raises(EncoderFailed):
            await tokens(engine, ask(picture(seed), "?"))
    assert breaker_state(engine) in (1, 2)
    assert (engine.ready("image"), engine.ready("text"), engine.ready("audio")) == (False, True, True)
    num_forwards = counter(engine, "encoder_items_per_batch_count")
    began_s = time.monotonic()
    with pytest.raises(EncoderUnavailable) as refused:
        await engine.submit(ask(picture(806), "?"))
    assert time.monotonic() - began_s < 5
    assert (refused.value.status, refused.value.code, refused.value.param) == (503, "encoder_unavailable", "picture-806")
    assert refused.value.retry_after_s is not None
    assert counter(engine, "encoder_items_per_batch_count") - num_forwards <= 2  # probes, at most
    assert await tokens(engine, known) == answer  # its rows are there
    assert len(await tokens(engine, ask("text goes on"))) == 8
    naughty.stop("nan")
    await until(lambda: engine.ready("image"))
    assert breaker_state(engine) == 0
    assert len(await tokens(engine, ask(picture(806), "?"))) == 8
    await settled(engine)


async def test_without_its_picture_a_request_that_allows_it_is_answered_and_says_so(world: tuple[AsyncEngine, Naughty]) -> None:
    engine, naughty = world
    known = picture(900)
    await tokens(engine, ask(known, "known"))
    naughty.tell("nan")
    generation = await engine.submit(ask("first ", known, " then ", picture(901), "?", allow_degraded=True))
    assert len(await read(generation)) == 8  # closed still: found out while it waited
    assert [(one.kind, one.index, one.reason) for one in generation.degraded] == [("image", 1, "encoder_nan")]
    assert generation.usage.image_tokens == 16
    assert generation.usage.prompt_tokens == generation.usage.text_tokens + 16
    assert [item.source for item in generation.usage.media] in (["memory"], ["kv"])
    for seed in range(902, 907):
        with pytest.raises(MmserveError):
            await tokens(engine, ask(picture(seed), "?"))
    assert not engine.ready("image")
    count = counter(engine, "degraded_media_total")
    generation = await engine.submit(ask(picture(908), " and ", known, " and ", picture(909), allow_degraded=True))
    assert len(await read(generation)) == 8
    assert [(one.index, one.reason) for one in generation.degraded] == [(0, "encoder_unavailable"), (2, "encoder_unavailable")]
    assert generation.usage.image_tokens == 16
    assert counter(engine, "degraded_media_total") - count == 2
    naughty.stop("nan")
    await until(lambda: engine.ready("image"))
    await settled(engine)


async def test_who_waits_when_the_breaker_opens_is_answered_without_or_refused_at_once(world: tuple[AsyncEngine, Naughty]) -> None:
    engine, naughty = world
    os.kill(encoder_pid(engine), signal.SIGSTOP)
    allowed = [await engine.submit(ask(picture(seed), "?", allow_degraded=True)) for seed in range(1000, 1004)]
    refused = [await engine.submit(ask(picture(seed), "?")) for seed in range(1004, 1008)]
    reading = [asyncio.create_task(read(generation)) for generation in [*allowed, *refused]]
    await until(lambda: len(engine._fetches) == 8)
    naughty.tell("crash")
    os.kill(encoder_pid(engine), signal.SIGKILL)
    async with asyncio.timeout(120):
        results = await asyncio.gather(*reading, return_exceptions=True)
    assert [len(each) for each in results[:4] if isinstance(each, tuple)] == [8] * 4
    assert [generation.degraded[0].reason for generation in allowed] == ["encoder_unavailable"] * 4
    assert [type(each) for each in results[4:]] == [EncoderUnavailable] * 4
    assert lane(engine).supervisors[0].broken
    assert breaker_state(engine) == 2  # a crash loop
    assert not engine.ready("image")
    assert engine.ready("text")
    naughty.stop("crash")
    await until(lambda: engine.ready("image"), timeout_s=120)
    assert len(await tokens(engine, ask(picture(1008), "?"))) == 8
    await settled(engine)


async def test_the_fallback_takes_over_with_rows_of_its_own_and_the_answer_says_so(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model", fallback=True)
    async with naughty_engine(config(model, tmp_path / "data"), tmp_path / "told") as (engine, naughty):
        request, both = ask(picture(1), "what is it?"), ask(picture(2), picture(3), "?")
        right = await tokens(engine, request)
        naughty.tell("nan")
        for seed in range(10, 15):
            with pytest.raises(EncoderFailed):
                await tokens(engine, ask(picture(seed), "?"))
        assert breaker_state(engine) in (1, 2)
        assert breaker_state(engine, "image-fallback") == 0
        assert engine.ready("image")
        generation = await engine.submit(both)
        from_fallback = await read(generation)
        assert [(one.kind, one.index) for one in generation.fallback] == [("image", 0), ("image", 1)]
        assert generation.degraded == ()
        assert all(item.is_fallback for item in generation.usage.media)
        assert generation.usage.image_tokens == 32
        assert counter(engine, "fallback_media_total") == 2
        known = await engine.submit(request)
        assert await read(known) == right  # the first encoder's rows are there: no need for others
        assert known.fallback == ()
        with pytest.raises(EncoderUnavailable):
            await engine.submit(ask(picture(1), "?", model="large"))  # which has no fallback
        naughty.stop("nan")
        await until(lambda: breaker_state(engine) == 0)
        generation = await engine.submit(both)
        assert await read(generation) != from_fallback
        assert generation.fallback == ()


async def test_who_waits_when_the_breaker_opens_goes_on_with_the_fallback(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model", fallback=True)
    async with naughty_engine(config(model, tmp_path / "data"), tmp_path / "told") as (engine, naughty):
        os.kill(encoder_pid(engine), signal.SIGSTOP)
        generations = [await engine.submit(ask(picture(seed), picture(seed + 1), "?")) for seed in range(4)]
        reading = [asyncio.create_task(read(generation)) for generation in generations]
        await until(lambda: len(engine._fetches) >= 4)
        naughty.tell("crash")
        os.kill(encoder_pid(engine), signal.SIGKILL)
        assert [len(answer) for answer in await asyncio.gather(*reading)] == [8] * 4
        assert [len(generation.fallback) for generation in generations] == [2] * 4
        naughty.stop("crash")
