"""The real engine in virtual time, over workers made of arithmetic: everything of it but processes, sockets and the clock.

Decoding writes a name for an item's bytes into the shared buffer, encoders make rows out of what they find there, decoders fold rows and
tokens into a KV slot each, and draw from the last one.  So whatever is mixed up on the way, in whichever book, changes the tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from mmserve.composition.picture_fit import PictureFit
from mmserve.errors import WorkerDied
from mmserve.media import AudioHeader, MediaItem, MediaKind, MediaWindow, PreparedMedia
from mmserve.plan import (
    DecoderReady,
    DecoderWorkerSpec,
    EncodePlan,
    EncodeResult,
    EncoderReady,
    SampledToken,
    StepFailed,
    StepPlan,
    StepResult,
)
from mmserve.shared_buffer import BufferSlice, SharedMemory
from mmserve.worker.in_order import InOrder

RATE = 16_000
NAME_BYTES = 8
NUM_BLOCKS = 130  # of 16 tokens: three pictures and a half, so that sequences have to make room for one another
IDS = tuple(range(300, 364))  # what answers are drawn from, and now and then an end token


def name_of(*parts: bytes | int) -> bytes:
    return hashlib.blake2b(b"|".join(part if isinstance(part, bytes) else b"%d" % part for part in parts), digest_size=NAME_BYTES).digest()


def draw_token(last: bytes, seed: int, position: int, eos: int, banned: Sequence[int] = ()) -> int:
    number = int.from_bytes(name_of(last, seed, position), "little")
    if number % 40 == 0 and eos not in banned:
        return eos
    return IDS[number // 40 % len(IDS)]


def samples_of(item: MediaItem, num_samples: int) -> np.ndarray:
    """What an item's clip is decoded to: float32 [num_samples], no window like another's."""
    first = int.from_bytes(name_of(item.data)[:2], "little")
    return (np.arange(num_samples, dtype=np.float32) + first) / np.float32(2**17)


def pixels_of(item: MediaItem, shape: tuple[int, ...]) -> np.ndarray:
    pixels = np.zeros(shape, np.uint8)
    pixels.reshape(-1)[:NAME_BYTES] = np.frombuffer(name_of(item.data), np.uint8)
    return pixels


def row_names(features: np.ndarray, num_rows: int) -> list[bytes]:
    """What an encoder writes at the head of each row."""
    whole = hashlib.blake2b(features.tobytes(), digest_size=16).digest()
    return [name_of(whole, row) for row in range(num_rows)]


def expected_rows(media: PreparedMedia, window: MediaWindow) -> list[bytes]:
    """The oracle's rows of a window, from the item's bytes alone."""
    if window.kind is MediaKind.AUDIO:
        return row_names(samples_of(media.item, media.num_samples)[window.start : window.stop], window.num_rows)
    return row_names(pixels_of(media.item, (1, 336, 336, 3)), window.num_rows)


class Life:
    """One life of one worker: runs what it is sent in order, each in its time, unless it is killed before."""

    def __init__(self, run: Callable[[Any], Any], rng: random.Random, pid: int) -> None:
        self.pid = pid
        self.died = asyncio.Event()
        self.num_sent = 0
        self._run = run
        self._rng = rng
        self._calls: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._replies: list[asyncio.Future[Any]] = []
        self._task = asyncio.create_task(self._work())

    def send(self, message: Any, timeout_s: float) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.died.is_set():
            reply.set_exception(WorkerDied("killed"))
            return reply
        self.num_sent += 1
        self._replies.append(reply)
        self._calls.put_nowait((message, reply))
        return reply

    async def call(self, message: Any, timeout_s: float) -> Any:
        try:
            return await self.send(message, timeout_s)
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        self.died.set()
        self._task.cancel()
        for reply in self._replies:
            if not reply.done():
                reply.set_exception(WorkerDied("killed"))
                reply.exception()

    async def _work(self) -> None:
        while True:
            message, reply = await self._calls.get()
            await asyncio.sleep(self._rng.choice([0.001, 0.004, 0.015, 0.04]))
            self._replies.remove(reply)
            if not VirtualSupervisor.poison.isdisjoint(getattr(message, "seq_ids", ())):
                self._replies.append(reply)
                return self.kill()
            answer = self._run(message)
            if not reply.done():
                reply.set_result(answer)


class DecoderOfNames:
    """Every KV slot holds a name for all content up to its position."""

    def __init__(self, spec: DecoderWorkerSpec, memory: SharedMemory, rng: random.Random, eos: int) -> None:
        self._size = spec.block_size
        self._memory = memory
        self._rng = rng
        self._eos = eos
        self._kv = [b"?"] * (NUM_BLOCKS * spec.block_size)
        self.ready = DecoderReady(NUM_BLOCKS, spec.block_size, spec.max_model_len, vocab_size=1024, hidden_size=192)

    def run(self, plan: StepPlan) -> StepResult | StepFailed:
        size, kv = self._size, self._kv
        for copy in plan.copies:
            source, target = copy.source * size, copy.target * size
            kv[target : target + copy.num_tokens] = kv[source : source + copy.num_tokens]
        if self._rng.random() < 0.01 and len(plan.token_ids) > 1:
            for slot in plan.slot_mapping.tolist():
                kv[slot] = b"spoilt"
            return StepFailed(plan.step_id, "out_of_memory")
        parts: list[bytes] = [b"%d" % token_id for token_id in plan.token_ids.tolist()]
        for piece in plan.media:
            rows = self._memory.array(piece.rows)[piece.row_start : piece.row_start + piece.num_rows]
            parts[piece.token_start : piece.token_start + piece.num_rows] = [row.tobytes()[:NAME_BYTES] for row in rows]
        tokens: list[SampledToken | None] = []
        slots, starts = plan.slot_mapping.tolist(), plan.query_starts.tolist()
        for row, stop in enumerate(plan.context_lens.tolist()):
            first, last = starts[row], starts[row + 1]
            position = stop - (last - first)
            before = kv[plan.block_tables[row, (position - 1) // size] * size + (position - 1) % size] if position else b""
            for i in range(first, last):
                before = kv[slots[i]] = name_of(before, parts[i])
            how = plan.sampling[row]
            tokens.append(None if how is None else SampledToken(draw_token(before, how.seed, stop, self._eos, how.banned_ids)))
        return StepResult(plan.step_id, tuple(tokens), seconds=0.003)


class EncoderOfNames:
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def run(self, plan: EncodePlan) -> EncodeResult:
        for item in plan.items:
            rows = self._memory.array(item.rows)
            rows.fill(0)
            names = row_names(self._memory.array(item.features), len(rows))
            rows.view(np.uint8)[:, :NAME_BYTES] = np.frombuffer(b"".join(names), np.uint8).reshape(-1, NAME_BYTES)
        return EncodeResult(plan.plan_id, (None,) * len(plan.items), seconds=0.01)


class VirtualSupervisor:
    """Stands in for `Supervisor`: one life after the other, without processes."""

    rng: random.Random
    eos: int
    all: list[VirtualSupervisor]
    poison: set[int]  # seq_ids: a decoder that computes one of them dies
    _pids = itertools.count(1)

    def __init__(
        self,
        role: str,
        target: str,
        args_of_ranks: Callable[[], Sequence[tuple[Any, ...]]],
        serve: Callable[[Any, Any], Any],
        *,
        on_restart: Callable[[str], None],
    ) -> None:
        self.role = role
        self.broken = self.hopeless = False
        self.next_start_in_s = 0.0
        self.life: Life | None = None
        self.is_decoder = target.endswith("run_decoder")
        self._num_sent = 0  # to earlier lives
        self._args_of_ranks = args_of_ranks
        self._serve = serve
        self._on_restart = on_restart
        self._ready = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"supervise-{role}")
        self.all.append(self)

    @property
    def pid(self) -> int | None:
        return None if self.life is None else self.life.pid

    @property
    def num_sent(self) -> int:
        """Messages to all lives."""
        return self._num_sent + (0 if self.life is None else self.life.num_sent)

    async def first_ready(self) -> None:
        await self._ready.wait()

    async def close(self, grace_s: float = 2.0) -> None:
        if self.life is not None:
            self.life.kill()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            (args,) = self._args_of_ranks()
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
            ready: DecoderReady | EncoderReady
            if self.is_decoder:
                decoder = DecoderOfNames(args[0], args[1], self.rng, self.eos)
                run, ready = InOrder(decoder.run), decoder.ready
            else:
                run, ready = EncoderOfNames(args[1]).run, EncoderReady(0.0)  # type: ignore[assignment]
            self.life = Life(run, self.rng, next(self._pids))
            self._ready.set()
            try:
                await self._serve(self.life, ready)
            except WorkerDied:
                self._on_restart(self.role)
            self._num_sent += self.life.num_sent
            self.life = None
            await asyncio.sleep(0.1)


class VirtualDecode:
    """Stands in for `DecodeProcesses`.  The length of a clip, in milliseconds, is the last word of its bytes."""

    rng: random.Random

    def __init__(self, memory: SharedMemory, limits: object, count: int) -> None:
        self._memory = memory

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def probe_audio(self, item: MediaItem) -> AudioHeader:
        await asyncio.sleep(self.rng.uniform(0.001, 0.01))
        is_ours = item.data.startswith(b"clip")
        return AudioHeader("wav", RATE, 1, RATE * int(item.data.split()[-1]) // 1000 if is_ours else RATE // 10)

    async def decode_image(self, item: MediaItem, target: BufferSlice, fit: PictureFit) -> None:
        await asyncio.sleep(self.rng.uniform(0.001, 0.03))
        self._memory.array(target)[:] = pixels_of(item, target.shape)

    async def decode_audio(self, item: MediaItem, target: BufferSlice, sample_rate: int = RATE) -> None:
        await asyncio.sleep(self.rng.uniform(0.001, 0.03))
        self._memory.array(target)[:] = samples_of(item, target.shape[0])


async def _inline(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextmanager
def virtual_world(seed: int, eos: int) -> Iterator[list[VirtualSupervisor]]:
    """Engines that are started inside live in it.  To be entered in a virtual-time loop; yields the supervisors, as they are made."""
    VirtualSupervisor.rng = VirtualDecode.rng = random.Random(seed)
    VirtualSupervisor.eos = eos
    VirtualSupervisor.all = []
    VirtualSupervisor.poison = set()
    with (
        mock.patch("mmserve.decoder_group.Supervisor", VirtualSupervisor),
        mock.patch("mmserve.encoder_lanes.Supervisor", VirtualSupervisor),
        mock.patch("mmserve.media_service.DecodeProcesses", VirtualDecode),
        mock.patch.object(asyncio, "to_thread", _inline),
        mock.patch.object(time, "monotonic", asyncio.get_running_loop().time),
    ):
        yield VirtualSupervisor.all
