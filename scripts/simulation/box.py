"""A box in virtual time: the real replicas, scheduler, KV books, caches, encoder pools, placement and admission over modelled cards.

Not modelled: what the main process itself takes for a step, a token or a byte of a request.  `mmserve bench` against `--device sim:a100`
measures that.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from array import array
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np

from mmserve.composition import Composition, load_composition
from mmserve.composition.picture_fit import PictureFit
from mmserve.config import SchedulerConfig
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.encoders.encoder_pool import EncoderPool
from mmserve.encoders.local_encoder import LocalEncoder
from mmserve.errors import MmserveError
from mmserve.media import AudioHeader, ImageHeader, MediaItem, MediaKind, MediaSpan, MediaWindow, PreparedMedia
from mmserve.metrics import Metrics
from mmserve.plan import DecoderReady, EncodePlan, EncodeResult, StepPlan, StepResult
from mmserve.replica import Replica
from mmserve.replica_set import ReplicaSet
from mmserve.request import SamplingParams
from mmserve.roofline.hardware import LLAMA_8B, LLAMA_70B, Card, DecoderShape
from mmserve.roofline.timing import encode_s, kv_tokens, step_s
from mmserve.scheduler.admission import QueueLimits
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import ITEM_SIZE, BufferSlice, SharedBuffer
from mmserve.sim.timing import amount_of, work_of
from mmserve.sim.workers import draw
from mmserve.token_fuser import FusedPrompt, fuse
from mmserve.worker.in_order import InOrder
from scripts.simulation.traffic import Request

BLOCK_SIZE = 256  # flash-attn's
VOCAB_SIZE = 32_000
SYSTEM_PROMPT_TOKENS = 48  # at the head of every request of a tenant
CACHED_PICTURES = 4_000  # whose rows fit the shared buffer: 18 GiB for an 8B decoder
NUM_DECODE_PROCESSES = 16
DECODE_S_PER_PIXEL = 12e-9  # JPEG to resized RGB, one core
DECODE_S_PER_CLIP_S = 1.5e-3  # to mono at 16 kHz, one core
SAMPLE_INTERVAL_S = 0.25
ROWS_DTYPE = "bfloat16"
ANSWER_IDS = tuple(range(1_000, 1_256))


@dataclass(frozen=True, slots=True)
class Group:
    """Replicas of one decoder."""

    name: str  # small or large
    shape: DecoderShape
    num_replicas: int
    num_ranks: int  # cards of each


@dataclass(frozen=True, slots=True)
class Topology:
    groups: tuple[Group, ...]
    num_encoders: int  # cards, each for pictures and clips in turn


TOPOLOGIES = {
    "7small+1enc": Topology((Group("small", LLAMA_8B, 7, 1),), 1),
    "3small+70b-tp4+1enc": Topology((Group("small", LLAMA_8B, 3, 1), Group("large", LLAMA_70B, 1, 4)), 1),
}


@dataclass(slots=True)
class Outcome:
    """What became of a request.  Written by the box."""

    request: Request
    decoder: str
    refusal: str = ""  # code, when it was refused or failed
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    finished: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_token_s - self.first_token_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """The box at one moment."""

    now_s: float
    num_waiting: int
    num_running: int
    kv_usage: float  # mean over replicas
    num_arrived: int  # since the start
    num_refused: int


class CardWorker:
    """What a replica sends steps to: cards that answer when the time of a step is over."""

    def __init__(self, group: Group, card: Card) -> None:
        self.died = asyncio.Event()
        self.pid = 0
        self._group = group
        self._card = card
        self._answer = InOrder(self._compute)
        self._free_s = 0.0  # when all steps sent so far are over

    def send(self, plan: StepPlan, timeout_s: float) -> asyncio.Future[StepResult]:
        loop = asyncio.get_running_loop()
        answer = self._answer(plan)
        assert isinstance(answer, StepResult)
        reply: asyncio.Future[StepResult] = loop.create_future()
        self._free_s = max(self._free_s, loop.time()) + answer.seconds
        loop.call_at(self._free_s, reply.set_result, answer)
        return reply

    def _compute(self, plan: StepPlan) -> StepResult:
        seconds = step_s(work_of(plan), self._group.shape, self._card, self._group.num_ranks)
        return StepResult(plan.step_id, draw(plan, ANSWER_IDS), seconds=seconds)


class CardEncoder:
    """What an encoder pool calls: one card's turn for pictures or for clips."""

    def __init__(self, kind: MediaKind, card: Card, turn: asyncio.Lock) -> None:
        self._kind = kind
        self._card = card
        self._turn = turn  # of the card, which others share

    async def wait_ready(self) -> None:
        return

    async def encode(self, plan: EncodePlan) -> EncodeResult:
        async with self._turn:
            seconds = encode_s(self._kind, amount_of(self._kind, plan.items), self._card)
            await asyncio.sleep(seconds)
        return EncodeResult(plan.plan_id, (None,) * len(plan.items), seconds)


class CoreDecode:
    """Decode processes: so many cores, each with one item at a time."""

    def __init__(self) -> None:
        self._cores = asyncio.Semaphore(NUM_DECODE_PROCESSES)

    async def decode_image(self, item: MediaItem, target: BufferSlice, fit: PictureFit) -> None:
        width, height = map(int, item.data.split()[1].split(b"x"))
        async with self._cores:
            await asyncio.sleep(width * height * DECODE_S_PER_PIXEL)

    async def decode_audio(self, item: MediaItem, target: BufferSlice, sample_rate: int) -> None:
        async with self._cores:
            await asyncio.sleep(target.shape[0] / sample_rate * DECODE_S_PER_CLIP_S)


@dataclass(slots=True)
class _Aboard:
    """A request in the box."""

    outcome: Outcome
    windows: dict[bytes, tuple[PreparedMedia, MediaWindow]]
    pinned: list[bytes] = field(default_factory=list)
    fetches: dict[bytes, asyncio.Task[None]] = field(default_factory=dict)
    replica: Replica | None = None


def _replicas(box: Box, group: Group, limits: SchedulerLimits, queue: QueueLimits) -> ReplicaSet:
    """All replicas of one decoder, which live for ever."""
    num_blocks = kv_tokens(group.shape, box.card, SchedulerConfig().gpu_memory_utilization, group.num_ranks) // BLOCK_SIZE
    ready = DecoderReady(num_blocks, BLOCK_SIZE, limits.max_model_len, VOCAB_SIZE, group.shape.hidden_size)
    replicas = ReplicaSet(limits.max_model_len, queue, box.now_s)
    for _ in range(group.num_replicas):
        replica = Replica(
            group.name,
            CardWorker(group, box.card),
            ready,
            limits,
            box.cache,
            box.metrics,
            replicas.records,
            enable_prefix_caching=True,
            deliver=box.deliver,
            want=box.want,
            now_s=box.now_s,
        )
        replicas.add(replica, ready)
    return replicas


class Box:
    """Made inside a virtual-time loop; `run` it once."""

    def __init__(self, topology: Topology, card: Card, limits: SchedulerLimits, queue: QueueLimits, *, large_share: float) -> None:
        self.card = card
        self.metrics = Metrics()
        self.outcomes: list[Outcome] = []
        self.samples: list[Sample] = []
        self.now_s = asyncio.get_running_loop().time
        self._composition: Composition = load_composition()
        self._large_share = large_share if any(group.name == "large" for group in topology.groups) else 0.0
        row_bytes = max(decoder.hidden_size for decoder in self._composition.decoders.values()) * ITEM_SIZE[ROWS_DTYPE]
        features_bytes = 2 * 2**30  # pixels and samples on their way; never written, so never real memory
        self._buffer = SharedBuffer(CACHED_PICTURES * 576 * row_bytes + features_bytes)
        self.cache = EmbeddingCache(self._buffer, now_s=self.now_s)
        self._decode = CoreDecode()
        turns = [asyncio.Lock() for _ in range(topology.num_encoders)]
        self._pools = {kind: self._make_pool(kind, turns) for kind in MediaKind}
        self._decoders = {group.name: _replicas(self, group, limits, queue) for group in topology.groups}
        self._aboard: dict[int, _Aboard] = {}
        self._seq_ids = itertools.count(1)
        self._emptied = asyncio.Event()

    @property
    def replicas(self) -> list[Replica]:
        return [replica for replicas in self._decoders.values() for replica in replicas]

    async def run(self, requests: Rows[Request]) -> None:
        """Offer the requests when they come, and wait until the last one is answered."""
        running = [asyncio.create_task(replica.run()) for replica in self.replicas]
        sampler = asyncio.create_task(self._sample())
        for request in requests:
            await asyncio.sleep(request.arrival_s - self.now_s())
            self._offer(request)
        while self._aboard:
            self._emptied.clear()
            await self._emptied.wait()
        for task in (sampler, *running):
            task.cancel()
        await asyncio.gather(sampler, *running, return_exceptions=True)
        for pool in self._pools.values():
            await pool.close()
        self._check()

    def deliver(self, updates: list[TokenUpdate]) -> None:
        now_s = self.now_s()
        for update in updates:
            aboard = self._aboard.get(update.sequence.seq_id)
            if aboard is None:
                continue
            outcome = aboard.outcome
            if update.token is not None:
                outcome.first_token_s = outcome.first_token_s or now_s
                outcome.last_token_s = now_s
                outcome.num_tokens += 1
            if update.finish_reason is not None:
                outcome.finished = update.error is None
                outcome.refusal = update.error or ""
                self._leave(update.sequence.seq_id)

    def want(self, sequence: Sequence, span: MediaSpan) -> None:
        aboard = self._aboard.get(sequence.seq_id)
        if aboard is not None and span.key not in aboard.fetches:
            aboard.fetches[span.key] = asyncio.create_task(self._fetch(aboard, sequence.seq_id, span.key))

    async def _fetch(self, aboard: _Aboard, seq_id: int, key: bytes) -> None:
        media, window = aboard.windows[key]
        try:
            await self._pools[window.kind].fetch(media, window, aboard.outcome.decoder)
        except MmserveError as error:
            aboard.outcome.refusal = error.code
            if aboard.replica is not None:
                aboard.replica.abort(seq_id)
            self._leave(seq_id)
            return
        aboard.pinned.append(key)
        if aboard.replica is not None:
            aboard.replica.wake()

    def _offer(self, request: Request) -> None:
        name = "large" if request.subject % 100 < 100 * self._large_share else "small"
        outcome = Outcome(request, name)
        self.outcomes.append(outcome)
        prepared = [self._prepare(item, name) for item in _items(request)]
        fused = _fuse(request, prepared)
        decoder = self._decoders[name]
        try:
            max_total_tokens = decoder.check(len(fused.token_ids), request.num_answer, 1, request.tenant, has_media=bool(fused.spans))
        except MmserveError as refusal:
            outcome.refusal = refusal.code
            return
        sequence = Sequence(
            seq_id=next(self._seq_ids),
            token_ids=fused.token_ids,
            spans=fused.spans,
            sampling=SamplingParams(max_tokens=request.num_answer, ignore_eos=True),
            seed=request.subject,
            max_total_tokens=max_total_tokens,
            arrival_s=request.arrival_s,
            tenant=request.tenant,
        )
        windows = {window.key: (media, window) for media in prepared for window in media.windows}
        aboard = self._aboard[sequence.seq_id] = _Aboard(outcome, windows)
        aboard.pinned += [key for key, (_, window) in windows.items() if self._pools[window.kind].acquire(window)]
        aboard.replica = decoder.place(sequence)
        aboard.replica.add(sequence)

    def _prepare(self, item: MediaItem, decoder: str) -> PreparedMedia:
        content = hashlib.sha256(item.data).digest()
        if item.kind is MediaKind.IMAGE:
            width, height = map(int, item.data.split()[1].split(b"x"))
            header = ImageHeader("jpeg", width, height)
            return PreparedMedia(item, content, header, self._composition.vision[decoder].windows(content, decoder, header))
        spec = self._composition.audio[decoder]
        num_samples = int(float(item.data.split()[1]) * spec.sample_rate)
        clip = AudioHeader("wav", spec.sample_rate, 1, num_samples)
        return PreparedMedia(item, content, clip, spec.windows(content, decoder, num_samples), num_samples)

    def _leave(self, seq_id: int) -> None:
        aboard = self._aboard.pop(seq_id)
        for task in aboard.fetches.values():
            if task is not asyncio.current_task():
                task.cancel()
        for key in aboard.pinned:
            self.cache.unpin(key)
        self._emptied.set()

    async def _sample(self) -> None:
        while True:
            replicas = self.replicas
            self.samples.append(
                Sample(
                    now_s=self.now_s(),
                    num_waiting=sum(replica.scheduler.num_waiting for replica in replicas),
                    num_running=sum(replica.scheduler.num_running for replica in replicas),
                    kv_usage=float(np.mean([replica.scheduler.kv.usage for replica in replicas])),
                    num_arrived=len(self.outcomes),
                    num_refused=sum(outcome.refusal != "" for outcome in self.outcomes),
                )
            )
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def _make_pool(self, kind: MediaKind, turns: Rows[asyncio.Lock]) -> EncoderPool:
        clients = [CardEncoder(kind, self.card, turn) for turn in turns]
        composition, dtype = self._composition, ROWS_DTYPE
        encoder = LocalEncoder(kind, clients, self._decode, self.cache, self.metrics, composition=composition, rows_dtype=dtype)
        return EncoderPool(
            kind, encoder, self.cache, self.metrics,
            composition=composition, rows_dtype=dtype, name=kind.value, on_lost=_nobody_dies,
        )  # fmt: skip

    def _check(self) -> None:
        """Nothing is held by anybody."""
        assert self.cache.num_pinned == 0
        self.cache.check()
        for replica in self.replicas:
            replica.scheduler.check()
            assert replica.kv.usage == 0


def _nobody_dies(content: bytes) -> None:
    raise AssertionError(f"an item was lost with its worker: {content.hex()}")


def _items(request: Request) -> list[MediaItem]:
    """Stand-ins: bytes that name the content and its size."""
    pictures = [b"picture %dx%d of %d.%d" % (*size, request.subject, i) for i, size in enumerate(request.picture_sizes)]
    clips = [b"clip %.2f of %d" % (request.clip_s, request.subject)] if request.clip_s else []
    return [MediaItem(MediaKind.IMAGE, data) for data in pictures] + [MediaItem(MediaKind.AUDIO, data) for data in clips]


def _fuse(request: Request, prepared: Rows[PreparedMedia]) -> FusedPrompt:
    """System prompt of the tenant; own words, if any; media; the subject's words."""
    pieces: list[list[int] | MediaItem] = [_words(f"system {request.tenant}", SYSTEM_PROMPT_TOKENS)]
    if request.lead is not None:
        pieces.append(_words(f"lead {request.lead}", 16))
    pieces += [media.item for media in prepared]
    pieces.append(_words(f"subject {request.subject}", request.num_text))
    return fuse(pieces, {id(media.item): media for media in prepared})


def _words(name: str, count: int) -> list[int]:
    """`count` token ids that the name decides."""
    bits = hashlib.shake_128(name.encode()).digest(2 * count)
    return [2_000 + each % (VOCAB_SIZE - 2_000) for each in array("H", bits)]
