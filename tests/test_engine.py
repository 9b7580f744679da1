"""The real engine over real worker processes, with a small random model: whatever is mixed up changes the tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import os
import signal
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import tiny_model
from PIL import Image

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.config import EncoderConfig, ModelConfig, SchedulerConfig, StorageConfig
from mmserve.encoders.encoder_pool import Pay
from mmserve.errors import BadRequest, ContextLengthExceeded, MmserveError, ModelNotFound, UndecodableMedia
from mmserve.media import MediaItem, MediaKind, MediaWindow, PreparedMedia
from mmserve.request import FinishReason
from mmserve.token_stream import Generation

pytestmark = pytest.mark.asyncio(loop_scope="module")


def picture(seed: int) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(file, "PNG")
    return MediaItem(MediaKind.IMAGE, file.getvalue(), param=f"picture-{seed}")


def clip(seed: int, seconds: float = 2.3) -> MediaItem:
    samples = np.random.default_rng(seed).integers(-20_000, 20_000, int(16_000 * seconds), np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(samples.tobytes())
    return MediaItem(MediaKind.AUDIO, file.getvalue(), param=f"clip-{seed}")


def ask(*parts: str | MediaItem, max_tokens: int = 12, model: str = "small", **fields: object) -> ChatRequest:
    """Seeded sampling by default: greedy answers of random weights fall into loops, in which a mix-up could hide."""
    sampling = SamplingParams(**({"max_tokens": max_tokens, "seed": 11, "ignore_eos": True} | fields))  # type: ignore[arg-type]
    return ChatRequest((Message("user", parts),), sampling, model=model)


async def read(generation: Generation) -> list[tuple[int, ...]]:
    """Token ids of every choice."""
    ids: dict[int, list[int]] = {}
    async for delta in generation:
        ids.setdefault(delta.index, []).extend(delta.token_ids)
    return [tuple(ids[index]) for index in sorted(ids)]


async def tokens(engine: AsyncEngine, request: ChatRequest) -> tuple[int, ...]:
    (ids,) = await read(await engine.submit(request))
    return ids


def config(model: Path, data: Path, **scheduler: object) -> Config:
    return Config(
        model=ModelConfig(model=model, worker_threads=1),
        scheduler=SchedulerConfig(**({"kv_cache_memory_bytes": 8 * 2**20} | scheduler)),  # type: ignore[arg-type]
        encoder=EncoderConfig(shared_buffer_bytes=64 * 2**20),
        storage=StorageConfig(data_dir=data),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(config(model, tmp_path_factory.mktemp("data"))) as engine:
        yield engine


def check_idle(engine: AsyncEngine) -> None:
    """Nothing is held by anybody: blocks, rows, room, requests."""
    assert not engine._active
    assert not engine._active_of
    assert not engine._fetches
    assert engine._media.room._free == engine._media.room.num_bytes
    assert engine._media.cache.num_pinned == 0
    engine._media.cache.check()
    for group in engine._groups.values():
        for replica in group._replicas:
            replica.scheduler.check()
            assert replica.kv.usage == 0
            assert (replica.scheduler.num_running, replica.scheduler.num_waiting) == (0, 0)


async def settled(engine: AsyncEngine) -> None:
    """After the step in flight has landed, cancelled fetches have let go of their rows, and the disk writes are through.

    What is never let go of is a timeout here.
    """
    await engine._media.cache.flush()
    replicas = [replica for group in engine._groups.values() for replica in group._replicas]
    async with asyncio.timeout(60):
        while engine._media.cache.num_pinned or any(replica.scheduler.num_in_flight or replica.kv.usage for replica in replicas):
            await asyncio.sleep(0.01)
    check_idle(engine)


def counter(engine: AsyncEngine, name: str) -> float:
    return sum(
        sample.value for metric in engine.metrics.registry.collect() for sample in metric.samples if sample.name == f"mmserve:{name}"
    )


async def test_a_request_of_every_kind_is_answered_and_counted(engine: AsyncEngine):
    generation = await engine.submit(ask("compare ", picture(1), " with ", clip(1)))
    (ids,) = await read(generation)
    assert len(ids) == 12
    usage = generation.usage
    assert (usage.image_tokens, usage.audio_tokens, usage.completion_tokens) == (16, 58, 12)
    assert usage.prompt_tokens == usage.text_tokens + 16 + 58
    assert [item.source for item in usage.media] == ["encoded", "encoded"]
    await settled(engine)


async def test_swapped_pictures_give_another_answer(engine: AsyncEngine):
    first = await tokens(engine, ask(picture(2), "and", picture(3)))
    assert await tokens(engine, ask(picture(3), "and", picture(2))) != first
    assert await tokens(engine, ask(picture(2), "and", picture(3))) == first


async def test_encodings_that_finish_in_any_order_give_the_same_tokens(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch):
    """The same picture twice among them.  A salt of its own makes every order start with empty caches."""
    items = [picture(20), clip(20, 0.5), picture(21), dataclasses.replace(picture(20), param="picture-20-again")]
    fetch = engine._media.fetch
    answers = set()
    for order in itertools.permutations(range(4)):
        gates = {item.param: asyncio.Event() for item in items}

        async def fetch_in_turn(media: PreparedMedia, window: MediaWindow, decoder: str, pay: Pay, gates: dict = gates) -> str:
            await gates[media.item.param].wait()
            return await fetch(media, window, decoder, pay)

        monkeypatch.setattr(engine._media, "fetch", fetch_in_turn)
        request = dataclasses.replace(ask("first ", *items[:2], " then ", *items[2:]), cache_salt=str(order))
        generation = await engine.submit(request)
        active = engine._active[generation.request_id]
        reading = asyncio.create_task(read(generation))
        for index in order:
            gates[items[index].param].set()
            wanted = {key for key, (media, _) in active.windows.items() if media.item.param == items[index].param}
            while not wanted <= active.sources.keys():
                await asyncio.sleep(0.001)
        answers.add((await reading)[0])
    assert len(answers) == 1
    await settled(engine)


async def test_equal_questions_about_different_pictures_share_no_answer(engine: AsyncEngine):
    answers = {await tokens(engine, ask("x" * 48, picture(seed), "?", max_tokens=60)) for seed in range(4, 8)}
    assert len(answers) == 4


async def test_mixed_streams_side_by_side_equal_their_runs_alone(engine: AsyncEngine):
    requests = mixed(24)
    alone = [await tokens(engine, request) for request in requests]
    await forget(engine)
    together = await asyncio.gather(*(tokens(engine, request) for request in requests))
    assert list(together) == alone
    await settled(engine)


async def test_a_killed_decoder_costs_no_stream(engine: AsyncEngine):
    requests = mixed(16, model="small", max_tokens=120)
    alone = [await tokens(engine, request) for request in requests]
    generations = [await engine.submit(request) for request in requests]
    reading = [asyncio.create_task(read(generation)) for generation in generations]
    await first_token(engine, generations[0])
    recovered = counter(engine, "stream_recoveries_total")
    os.kill(engine._groups["small"].supervisors[0].pid, signal.SIGKILL)
    together = [ids for (ids,) in await asyncio.gather(*reading)]
    assert together == alone
    assert counter(engine, "stream_recoveries_total") > recovered
    await settled(engine)


async def test_a_killed_encoder_costs_no_request(engine: AsyncEngine):
    requests = [ask(picture(seed), "what is it?") for seed in range(100, 112)]
    reading = [asyncio.create_task(tokens(engine, request)) for request in requests]
    while not engine._fetches:
        await asyncio.sleep(0)
    (encoder,) = [supervisor for supervisor in engine._media.supervisors if supervisor.role == "image-encoder-0"]
    os.kill(encoder.pid, signal.SIGKILL)
    killed = await asyncio.gather(*reading)
    assert list(killed) == [await tokens(engine, request) for request in requests]
    await settled(engine)


async def test_many_clients_with_the_same_new_picture_cost_one_encode(engine: AsyncEngine):
    before = counter(engine, "encoder_items_per_batch_sum")
    answers = await asyncio.gather(*(tokens(engine, ask("hello" * n, picture(200))) for n in range(40)))
    assert len(set(answers)) > 1
    assert counter(engine, "encoder_items_per_batch_sum") - before == 1
    await settled(engine)


async def test_a_picture_behind_the_same_words_is_not_encoded_again(engine: AsyncEngine):
    first = await engine.submit(ask("look closely at this: ", picture(201), " it is a picture of something; what is it?"))
    await read(first)
    again = await engine.submit(ask("look closely at this: ", picture(201), " it is a picture of something; how many?"))
    await read(again)
    assert again.usage.cached_tokens > 16
    assert again.usage.media[0].source == "kv"
    elsewhere = await engine.submit(ask(picture(201), "without the words before it"))
    await read(elsewhere)
    assert (elsewhere.usage.cached_tokens, elsewhere.usage.media[0].source) == (0, "memory")


async def test_choices_of_one_request_share_its_prompt(engine: AsyncEngine):
    hits = counter(engine, "prefix_cache_hits_total")
    generation = await engine.submit(ask("a longer prompt than one stride of tokens, " * 3, picture(202), n=3))
    choices = await read(generation)
    assert len(choices) == 3
    assert len(set(choices)) == 3
    assert counter(engine, "prefix_cache_hits_total") - hits >= 2 * 48
    assert generation.usage.completion_tokens == 36


async def test_a_seed_repeats_a_draw(engine: AsyncEngine):
    draws = [await tokens(engine, ask("once", seed=seed)) for seed in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]


async def test_a_broken_picture_fails_alone(engine: AsyncEngine):
    broken = MediaItem(MediaKind.IMAGE, picture(203).data[:-40], param="messages[0].content[0]")
    good = [asyncio.create_task(tokens(engine, ask(picture(seed), "?"))) for seed in range(204, 208)]
    with pytest.raises(UndecodableMedia) as error:
        await tokens(engine, ask(broken, "?"))
    assert error.value.param == "messages[0].content[0]"
    await asyncio.gather(*good)
    await settled(engine)


async def test_a_mistake_of_ours_on_the_way_to_the_rows_is_an_error_and_no_hang(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch):
    """Whatever was no MmserveError ended the task that fetched, and the request waited for ever."""

    async def fetch(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(engine._media, "fetch", fetch)
    async with asyncio.timeout(60):
        with pytest.raises(MmserveError, match="internal error"):
            await tokens(engine, ask(picture(990), "what is it?"))
    await settled(engine)


async def test_a_client_that_leaves_gives_everything_back(engine: AsyncEngine):
    generations = [await engine.submit(ask(picture(seed), clip(seed), "tell me", max_tokens=1500)) for seed in range(300, 306)]
    await first_token(engine, generations[0])
    for generation in generations:
        generation.cancel()
        generation.cancel()
    await settled(engine)


async def test_a_stop_string_ends_the_answer_before_it(engine: AsyncEngine):
    generation = await engine.submit(ask("go on", max_tokens=40))
    text = "".join([delta.text async for delta in generation])
    stop = text[len(text) // 2 :][:3]
    stopped = await engine.submit(ask("go on", max_tokens=40, stop=(stop,)))
    deltas = [delta async for delta in stopped]
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    await settled(engine)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ask("word " * 3000), ContextLengthExceeded),
        (ask("hi", max_tokens=5000), ContextLengthExceeded),
        (ask("hi", model="gpt-4o"), ModelNotFound),
        (ask(*[picture(1)] * 9), BadRequest),
    ],
)
async def test_what_can_not_be_served_is_refused_at_once(engine: AsyncEngine, request_: ChatRequest, error: type[Exception]):
    with pytest.raises(error):
        await engine.submit(request_)
    check_idle(engine)


async def test_block_size_changes_no_token(engine: AsyncEngine, model: Path, tmp_path: Path):
    requests = mixed(8)
    small_blocks = [await tokens(engine, request) for request in requests]
    async with AsyncEngine(config(model, tmp_path, block_size=256)) as other:
        assert [await tokens(other, request) for request in requests] == small_blocks
        assert list(await asyncio.gather(*(tokens(other, request) for request in requests))) == small_blocks


async def test_rows_are_found_on_disk_after_a_restart_and_streams_survive_too_little_memory(model: Path, tmp_path: Path):
    """A KV cache of a few sequences: preempted ones resume, and their clients notice nothing."""
    requests = [ask(picture(seed), "tell me", max_tokens=60) for seed in range(400, 412)]
    async with AsyncEngine(config(model, tmp_path)) as first:
        alone = [await tokens(first, request) for request in requests]
        await first._media.cache.flush()
    tight = config(model, tmp_path, kv_cache_memory_bytes=kv_bytes(model, 300))
    async with AsyncEngine(tight) as second:
        generations = [await second.submit(request) for request in requests]
        together = [ids for (ids,) in await asyncio.gather(*map(read, generations))]
        assert together == alone
        assert counter(second, "num_preemptions_total") > 0
        assert {generation.usage.media[0].source for generation in generations} == {"disk"}
        await settled(second)


def mixed(count: int, **fields: object) -> list[ChatRequest]:
    """Text, a picture, two pictures, a clip, both: prompts that collide in everything but their media."""
    kinds = [
        lambda seed: ("describe ", "nothing"),
        lambda seed: ("describe ", picture(seed)),
        lambda seed: ("describe ", picture(seed), picture(seed + 1)),
        lambda seed: ("describe ", clip(seed)),
        lambda seed: ("describe ", picture(seed), " or ", clip(seed, 0.4)),
        lambda seed: (picture(seed + 1), picture(seed), "describe "),
    ]
    models = ("small", "large", "auto")
    return [
        ask(*kinds[i % 6](1000 + i // 6), **({"model": models[i % 3], "max_tokens": 16 + i % 5} | fields))  # type: ignore[arg-type]
        for i in range(count)
    ]


def kv_bytes(model: Path, num_tokens: int) -> int:
    """Bytes of a KV cache of float32 for so many tokens of the larger decoder."""
    import json

    shapes = [json.loads((model / name / "config.json").read_text()) for name in ("small", "large")]
    return max(8 * s["num_hidden_layers"] * s["num_key_value_heads"] * s["head_dim"] for s in shapes) * num_tokens


async def first_token(engine: AsyncEngine, generation: Generation) -> None:
    while generation.request_id in engine._active and engine._active[generation.request_id].first_token_s is None:
        await asyncio.sleep(0.001)


async def forget(engine: AsyncEngine) -> None:
    """Empty prefix caches: the next run computes everything."""
    for group in engine._groups.values():
        for supervisor in group.supervisors:
            os.kill(supervisor.pid, signal.SIGKILL)
        while group.alive:
            await asyncio.sleep(0.01)
