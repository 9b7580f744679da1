"""Seeds of the engine's life in virtual time: shared media, cancelled clients, steps that fail, workers that die, in every order.

Of every seed: each request ends exactly once (N1), nothing is held afterwards (N2), and every answer is, or begins like, the one that an
oracle gives to that prompt and those media alone (N3).
"""

from __future__ import annotations

import asyncio
import io
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image
from test_engine import settled
from virtual_engine import VirtualSupervisor, draw_token, expected_rows, name_of, virtual_world

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.config import EncoderConfig, ModelConfig, SchedulerConfig, StorageConfig
from mmserve.errors import ContentQuarantined, WorkerLost
from mmserve.media import MediaItem, MediaKind
from mmserve.request import FinishReason
from mmserve.sim.virtual_time import run_in_virtual_time
from mmserve.token_stream import Generation

NUM_REQUESTS = 24
WORDS = ("what is it?", "and this?", "how many are there", "hello")


def picture(number: int) -> MediaItem:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (number, 20, 30)).save(file, "PNG")
    return MediaItem(MediaKind.IMAGE, file.getvalue())


def clip(number: int, milliseconds: int) -> MediaItem:
    return MediaItem(MediaKind.AUDIO, b"clip %d of %d" % (number, milliseconds))


PICTURES = [picture(number) for number in range(4)]
CLIPS = [clip(1, 900), clip(2, 4_000), clip(3, 11_000)]


@dataclass
class Asked:
    request: ChatRequest
    generation: Generation
    expected: list[list[int]]  # tokens of each choice
    said: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)


class Village:
    """One engine, its clients and its misfortunes, all driven by one random number generator."""

    def __init__(self, engine: AsyncEngine, supervisors: list[VirtualSupervisor], rng: random.Random) -> None:
        self.engine = engine
        self.supervisors = supervisors
        self.rng = rng
        self.has_poison = rng.random() < 0.3  # some requests end whoever computes them
        self.num_kills = 0
        self.num_tokens = 0

    async def live(self) -> None:
        life = asyncio.create_task(self.events())
        await asyncio.wait((life, *(supervisor.task for supervisor in self.supervisors)), return_when=asyncio.FIRST_COMPLETED)
        for supervisor in self.supervisors:
            if supervisor.task.done():
                supervisor.task.result()  # it never ends but by an error in the books
        await life
        await settled(self.engine)

    async def events(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_REQUESTS):
                group.create_task(self.visit(self.rng.uniform(0.0, 1.5)))
            group.create_task(self.kill())

    def draw_request(self) -> ChatRequest:
        rng = self.rng
        parts: list[str | MediaItem] = [rng.choice(WORDS)]
        if rng.random() < 0.6:
            parts += rng.choices(PICTURES, k=rng.choice([1, 1, 2]))
        if rng.random() < 0.35:
            parts.append(rng.choice(CLIPS))
        rng.shuffle(parts)
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 5, 40]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**32),
            n=rng.choice([1, 1, 1, 2]),
            min_tokens=rng.choice([0, 0, 3]),
        )
        return ChatRequest(
            (Message("user", tuple(parts)),),
            sampling,
            model=rng.choice(["small", "large"]),
            cache_salt=rng.choice(["", "", "salt"]),
            priority=rng.choice([0, 0, 1]),
            tenant=rng.choice(["a", "b"]),
        )

    async def visit(self, arrival_s: float) -> None:
        request = self.draw_request()
        patience_s = self.rng.uniform(0.0, 1.0) if self.rng.random() < 0.25 else None
        await asyncio.sleep(arrival_s)
        try:
            generation = await self.engine.submit(request)
        except ContentQuarantined:
            assert self.has_poison
            return
        asked = Asked(request, generation, self.answers(generation))
        is_poison = self.has_poison and self.rng.random() < 0.1
        if is_poison:
            active = self.engine._active[generation.request_id]
            VirtualSupervisor.poison.add(self.rng.choice(active.choices).sequence.seq_id)
        try:
            async with asyncio.timeout(patience_s):
                async for delta in generation:
                    assert delta.index not in asked.reasons, "something was said after the end"
                    asked.said[delta.index] += delta.token_ids
                    if delta.finish_reason is not None:
                        asked.reasons[delta.index] = delta.finish_reason
        except TimeoutError:
            generation.cancel()
        except WorkerLost:
            assert is_poison, "an innocent request was lost"
        self.judge(asked, may_be_cut=is_poison or patience_s is not None)

    def answers(self, generation: Generation) -> list[list[int]]:
        """What each choice must say, from the prompt's ids and the items' bytes alone."""
        active = self.engine._active[generation.request_id]
        rows = {key: expected_rows(item, window) for key, (item, window) in active.windows.items()}
        answers = []
        for choice in active.choices:
            sequence = choice.sequence
            parts = [b"%d" % token_id for token_id in sequence.token_ids]
            for span in sequence.spans:
                parts[span.start : span.stop] = rows[span.key]
            last = b""
            for part in parts:
                last = name_of(last, part)
            answer: list[int] = []
            (eos,) = sequence.eos_token_ids
            while not answer or (answer[-1] != eos and len(answer) < sequence.sampling.max_tokens):
                banned = (eos,) if len(answer) < sequence.sampling.min_tokens else ()
                answer.append(draw_token(last, sequence.seed, len(parts) + len(answer), eos, banned))
                last = name_of(last, b"%d" % answer[-1])
            answers.append(answer)
        return answers

    def judge(self, asked: Asked, *, may_be_cut: bool) -> None:
        for index, expected in enumerate(asked.expected):
            said = asked.said[index]
            self.num_tokens += len(said)
            assert said == expected[: len(said)], f"choice {index} says what another should"
            assert index not in asked.reasons or said == expected
            assert may_be_cut or index in asked.reasons, "a stream ended without saying so"

    async def kill(self) -> None:
        """Nobody is aboard more dying workers than are taken for chance, and no suspect dies by chance."""
        rng = self.rng
        victims = [each for each in self.supervisors if not (each.is_decoder and self.has_poison)]
        for supervisor in rng.sample(victims, k=min(len(victims), rng.choice([0, 1, 2, 3]))):
            for _ in range(rng.choice([1, 2])):
                await asyncio.sleep(rng.uniform(0.0, 0.7))
                if supervisor.life is not None and not supervisor.life.died.is_set():
                    supervisor.life.kill()
                    self.num_kills += 1


class Story(NamedTuple):
    num_steps: int  # sent to decoders
    num_deaths: int
    num_tokens: int  # said


def live(seed: int, data_dir: Path) -> Story:
    """One seed."""

    async def main() -> Story:
        rng = random.Random(seed)
        config = Config(
            model=ModelConfig(device="cpu", worker_threads=1),
            scheduler=SchedulerConfig(
                max_model_len=2000,
                max_num_seqs=rng.choice([3, 8]),
                max_num_batched_tokens=rng.choice([64, 256, 1024]),
                enable_prefix_caching=rng.random() < 0.9,
            ),
            encoder=EncoderConfig(shared_buffer_bytes=rng.choice([6, 24]) * 2**20, max_encoder_batch=rng.choice([1, 4])),
            storage=StorageConfig(data_dir=data_dir, embedding_disk_bytes=0),
        )
        with virtual_world(seed, eos=1) as supervisors:
            engine = AsyncEngine(config)
            VirtualSupervisor.eos = engine.composition.decoders["small"].eos_token_ids[0]
            async with engine:
                village = Village(engine, supervisors, rng)
                await village.live()
                num_steps = sum(supervisor.num_sent for supervisor in supervisors if supervisor.is_decoder)
                return Story(num_steps, village.num_kills, village.num_tokens)

    return run_in_virtual_time(main(), seed=seed, jitter_s=0.002)


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_its_own_whatever_happens(seed: int, tmp_path: Path) -> None:
    live(seed, tmp_path)


def test_a_seed_is_the_same_life_twice(tmp_path: Path) -> None:
    assert live(3, tmp_path / "a") == live(3, tmp_path / "b")
