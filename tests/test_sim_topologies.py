"""Boxes of simulated cards as they are really cut up: seven small replicas, and a large decoder on four cards beside small ones."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from test_engine import ask, clip, counter, picture, read, settled, tokens

from mmserve import AsyncEngine, ChatRequest, Config
from mmserve.config import ModelConfig, SchedulerConfig, StorageConfig
from mmserve.decoder_group import DecoderGroup


def box(directory: Path, **model: object) -> Config:
    """The towers' card is the last one.  Nobody is refused: what counts is who answers."""
    return Config(
        model=ModelConfig(device="sim:a100", vision_devices="7", audio_devices="7", **model),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_queue_wait_s=3600),
        storage=StorageConfig(data_dir=directory),
    )


def mixed(count: int, model: str, max_tokens: int) -> list[ChatRequest]:
    """By turns a text, a picture, a clip, and both.  Each has a seed of its own, and so an answer that no other has."""
    parts = [("a story",), ("what is this? ", picture(5)), ("and this? ", clip(6)), (picture(6), " and this? ", clip(7))]
    return [ask(*parts[i % 4], model=model, max_tokens=max_tokens, seed=100 + i) for i in range(count)]


async def run_alone(engine: AsyncEngine, requests: list[ChatRequest]) -> list[tuple[int, ...]]:
    answers = [await tokens(engine, request) for request in requests]
    assert len(set(answers)) == len(requests)
    return answers


async def all_busy(num_replicas: dict[DecoderGroup, int]) -> None:
    """Until every replica there should be has sequences in the middle of their answers, all of them at once."""

    def are_busy(group: DecoderGroup) -> bool:
        return [replica.scheduler.num_running > 0 for replica in group._replicas] == [True] * num_replicas[group]

    async with asyncio.timeout(30):
        while not all(map(are_busy, num_replicas)):
            await asyncio.sleep(0.01)


async def whole_again(group: DecoderGroup, num_replicas: int) -> None:
    async with asyncio.timeout(30):
        while len(group._replicas) < num_replicas:
            await asyncio.sleep(0.05)


async def test_seven_replicas_share_a_crowd_and_one_of_them_killed_changes_no_answer(tmp_path: Path) -> None:
    requests = mixed(6, "small", max_tokens=50)
    async with AsyncEngine(box(tmp_path, small_devices="0-6")) as engine:
        group = engine._groups["small"]
        alone = await run_alone(engine, requests)
        crowd = asyncio.gather(*map(read, [await engine.submit(request) for request in requests * 6]))
        await all_busy({group: 7})
        victim = group.supervisors[3]
        held = [seq_id for seq_id, home in group._home.items() if home._worker.pid == victim.pid]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        assert [ids for (ids,) in await crowd] == alone * 6
        assert 1 <= counter(engine, "stream_recoveries_total") <= len(held)
        await whole_again(group, 7)
        assert await asyncio.gather(*(tokens(engine, request) for request in requests)) == alone
        await settled(engine)


async def test_a_large_decoder_on_four_cards_answers_beside_small_ones_and_survives_the_death_of_a_rank(tmp_path: Path) -> None:
    cards = {"large_devices": "1-4", "tensor_parallel_size": 4, "sim_large": "llama-70b", "small_devices": "0,5,6"}
    async with AsyncEngine(box(tmp_path, **cards)) as engine:
        small, large = engine._groups["small"], engine._groups["large"]
        (four,) = large.supervisors
        assert (len(set(four.pids)), len(small.supervisors)) == (4, 3)
        requests = mixed(4, "large", max_tokens=16) + mixed(4, "small", max_tokens=40)
        alone = await run_alone(engine, requests)

        generations = [await engine.submit(request) for request in requests * 3]
        assert [generation.model for generation in generations] == (["large"] * 4 + ["small"] * 4) * 3
        crowd = asyncio.gather(*map(read, generations))
        await all_busy({large: 1, small: 3})
        before = four.pids
        os.kill(before[2], signal.SIGKILL)
        assert [ids for (ids,) in await crowd] == alone * 3
        assert not set(before) & set(four.pids)  # the others of its group were of no use any more
        assert 1 <= counter(engine, "stream_recoveries_total") <= 12
        await settled(engine)
