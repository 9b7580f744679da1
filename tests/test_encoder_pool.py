"""Who asks gets the rows of just that window, whoever else asks, leaves, breaks or dies; and memory is where it was afterwards."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from mmserve.composition import Composition, DecoderSpec, PromptFormat, VisionSpec, Weights, WhisperSpec
from mmserve.composition.picture_fit import PictureFit, Stretch
from mmserve.encoders.disk_tier import DiskTier
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.encoders.encoder_pool import EncoderPool
from mmserve.encoders.local_encoder import LocalEncoder
from mmserve.errors import EncoderFailed, MmserveError, Overloaded, TooLarge, UndecodableMedia, WorkerDied, WorkerLost
from mmserve.media import AudioHeader, ImageHeader, MediaItem, MediaKind, MediaWindow, PreparedMedia
from mmserve.metrics import Metrics
from mmserve.plan import EncodePlan, EncodeResult
from mmserve.shared_buffer import BufferSlice, SharedBuffer

SIDE, NUM_ROWS, WINDOW_SAMPLES = 8, 3, 1000
HIDDEN = {"small": 4, "large": 6}
OFFSET = {"small": 0.0, "large": 1000.0}
NOWHERE = Path("nowhere")
VISION = VisionSpec("clip", Weights(NOWHERE), {}, {}, "", ("", ""), fit=Stretch(SIDE, NUM_ROWS))
AUDIO = WhisperSpec("whisper", Weights(NOWHERE), {}, {}, "", ("", ""), window_s=WINDOW_SAMPLES / 16_000, tokens_per_second=25)
COMPOSITION = Composition(
    "fake",
    {name: DecoderSpec(name, Weights(NOWHERE), {"hidden_size": hidden}, PromptFormat(NOWHERE, "")) for name, hidden in HIDDEN.items()},
    dict.fromkeys(HIDDEN, VISION),
    dict.fromkeys(HIDDEN, AUDIO),
)


def picture(value: int, decoder: str = "small", data: bytes | None = None, param: str = "here") -> PreparedMedia:
    """A picture whose every pixel is `value`; data that begin with `bad` can't be decoded."""
    data = bytes([value]) if data is None else data
    content = hashlib.sha256(data).digest()
    key = hashlib.sha256(content + decoder.encode()).digest()
    window = MediaWindow(key, MediaKind.IMAGE, NUM_ROWS)
    return PreparedMedia(MediaItem(MediaKind.IMAGE, data, param=param), content, ImageHeader("png", 9, 9), (window,))


def clip(value: int, num_windows: int) -> PreparedMedia:
    """A clip whose sample i is `value` + i / 1000: window w begins with `value` + w."""
    content = hashlib.sha256(b"clip" + bytes([value])).digest()
    windows = tuple(
        MediaWindow(
            hashlib.sha256(content + bytes([i])).digest(), MediaKind.AUDIO, NUM_ROWS, i, i * WINDOW_SAMPLES, (i + 1) * WINDOW_SAMPLES
        )
        for i in range(num_windows)
    )
    num_samples = num_windows * WINDOW_SAMPLES
    return PreparedMedia(
        MediaItem(MediaKind.AUDIO, bytes([value])), content, AudioHeader("wav", 16_000, 1, num_samples), windows, num_samples
    )


class FakeDecode:
    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_calls = 0

    async def decode_image(self, item: MediaItem, target: BufferSlice, fit: PictureFit) -> None:
        self.num_calls += 1
        await self.gate.wait()
        if item.data.startswith(b"bad"):
            raise UndecodableMedia("the image can't be decoded", param=item.param)
        self.buffer.array(target)[...] = item.data[0]

    async def decode_audio(self, item: MediaItem, target: BufferSlice, sample_rate: int) -> None:
        assert sample_rate == 16_000
        self.num_calls += 1
        await self.gate.wait()
        self.buffer.array(target)[...] = item.data[0] + np.arange(target.shape[0], dtype=np.float32) / WINDOW_SAMPLES


class FakeEncoder:
    """Rows are the first value of the features, told apart by decoder.  `script` says what happens to the next plans."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        self.ready = asyncio.Event()
        self.ready.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.plans: list[EncodePlan] = []
        self.script: list[Callable[[EncodePlan], tuple[str | None, ...]]] = []
        self.lost = False

    @property
    def batch_sizes(self) -> list[int]:
        return [len(plan.items) for plan in self.plans]

    async def wait_ready(self) -> None:
        await self.ready.wait()
        if self.lost:
            raise WorkerDied("gone for good")

    async def encode(self, plan: EncodePlan) -> EncodeResult:
        self.plans.append(plan)
        await self.gate.wait()
        errors = self.script.pop(0)(plan) if self.script else (None,) * len(plan.items)
        for item, error in zip(plan.items, errors, strict=True):
            if error is None:
                self.buffer.array(item.rows)[...] = self.buffer.array(item.features).flat[0] + OFFSET[plan.decoder]
        return EncodeResult(plan.plan_id, errors, 0.001)


def die(plan: EncodePlan) -> tuple[str | None, ...]:
    raise WorkerDied("killed")


class Pool:
    def __init__(
        self, kind: MediaKind, *, num_clients: int, window_s: float, max_batch: int, buffer_bytes: int, disk: DiskTier | None
    ) -> None:
        self.buffer = SharedBuffer(buffer_bytes)
        self.decode = FakeDecode(self.buffer)
        self.encoders = [FakeEncoder(self.buffer) for _ in range(num_clients)]
        self.cache = EmbeddingCache(self.buffer, disk)
        self.metrics = Metrics()
        encoder = LocalEncoder(
            kind, self.encoders, self.decode, self.cache, self.metrics,
            composition=COMPOSITION, rows_dtype="float32", window_s=window_s, max_batch=max_batch,
        )  # fmt: skip
        self.lost: list[bytes] = []
        self.pool = EncoderPool(
            kind, encoder, self.cache, self.metrics,
            composition=COMPOSITION, rows_dtype="float32", name=kind.value, on_lost=self.lost.append,
        )  # fmt: skip

    async def fetch(self, media: PreparedMedia, index: int = 0, decoder: str = "small") -> tuple[str, float]:
        """Where the rows came from and what is in them; checked and unpinned."""
        window = media.windows[index]
        source = await self.pool.fetch(media, window, decoder)
        where = self.cache.lookup(window.key)
        assert where is not None
        rows = self.buffer.array(where)
        assert rows.shape == (NUM_ROWS, HIDDEN[decoder])
        assert (rows == rows.flat[0]).all()
        value = float(rows.flat[0])
        self.cache.unpin(window.key)
        return source, value

    def start(self, media: PreparedMedia, index: int = 0, decoder: str = "small") -> asyncio.Task[tuple[str, float]]:
        return asyncio.create_task(self.fetch(media, index, decoder))

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"mmserve:{name}", labels) or 0.0


@asynccontextmanager
async def running(
    kind: MediaKind = MediaKind.IMAGE,
    *,
    num_clients: int = 1,
    window_s: float = 0.0,
    max_batch: int = 48,
    buffer_bytes: int = 2**20,
    disk: DiskTier | None = None,
) -> AsyncIterator[Pool]:
    """A pool; at the end nothing is under way, nothing is pinned, and only cached rows hold memory."""
    pool = Pool(kind, num_clients=num_clients, window_s=window_s, max_batch=max_batch, buffer_bytes=buffer_bytes, disk=disk)
    try:
        yield pool
    finally:
        await pool.pool.close()
        await pool.cache.close()
    await settle()
    pool.pool.check()
    pool.cache.check()
    assert pool.cache.num_pinned == 0
    assert len(pool.buffer._held) == len(pool.cache)


async def settle() -> None:
    """Let everything that can run without news run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_rows_are_encoded_once_and_then_found_in_memory() -> None:
    async with running() as pool:
        assert await pool.fetch(picture(7)) == ("encoded", 7.0)
        assert await pool.fetch(picture(7)) == ("memory", 7.0)
        assert pool.encoders[0].batch_sizes == [1]
        assert pool.metric("mm_cache_queries_total", modality="image") == 2
        assert pool.metric("mm_cache_hits_total", modality="image", tier="memory") == 1


async def test_a_hundred_who_ask_for_one_new_picture_share_one_encode() -> None:
    async with running() as pool:
        results = await asyncio.gather(*(pool.fetch(picture(7)) for _ in range(100)))
        assert sorted(results) == [("encoded", 7.0)] + [("joined", 7.0)] * 99
        assert (pool.decode.num_calls, pool.encoders[0].batch_sizes) == (1, [1])
        assert pool.metric("single_flight_joins_total", modality="image") == 99


async def test_pictures_of_different_requests_share_a_forward_pass_and_keep_their_own_rows() -> None:
    async with running(window_s=60.0, max_batch=20) as pool:
        results = await asyncio.gather(*(pool.fetch(picture(value)) for value in range(40)))
        assert results == [("encoded", float(value)) for value in range(40)]
        assert pool.encoders[0].batch_sizes == [20, 20]


async def test_one_picture_for_two_decoders_is_decoded_once_and_projected_twice() -> None:
    async with running() as pool:
        small, large = await asyncio.gather(pool.fetch(picture(7)), pool.fetch(picture(7, "large"), decoder="large"))
        assert (small, large) == (("encoded", 7.0), ("encoded", 1007.0))
        assert pool.decode.num_calls == 1
        assert sorted(plan.decoder for plan in pool.encoders[0].plans) == ["large", "small"]


async def test_a_clip_is_decoded_once_for_all_its_windows() -> None:
    async with running(MediaKind.AUDIO) as pool:
        media = clip(10, 5)
        results = await asyncio.gather(*(pool.fetch(media, i) for i in range(5)))
        assert results == [("encoded", 10.0 + i) for i in range(5)]
        assert pool.decode.num_calls == 1


async def test_two_workers_take_batches_side_by_side() -> None:
    async with running(num_clients=2, max_batch=1) as pool:
        for encoder in pool.encoders:
            encoder.gate.clear()
        tasks = [pool.start(picture(value)) for value in range(2)]
        await settle()
        assert [encoder.batch_sizes for encoder in pool.encoders] == [[1], [1]]
        for encoder in pool.encoders:
            encoder.gate.set()
        assert [value for _, value in await asyncio.gather(*tasks)] == [0.0, 1.0]


async def test_one_bad_picture_among_48_fails_alone() -> None:
    async with running(window_s=60.0, max_batch=47) as pool:
        good = [pool.fetch(picture(value)) for value in range(47)]
        *results, bad = await asyncio.gather(*good, pool.fetch(picture(0, data=b"bad")), return_exceptions=True)
        assert results == [("encoded", float(value)) for value in range(47)]
        assert isinstance(bad, UndecodableMedia)


async def test_everybody_who_joined_a_bad_picture_hears_of_his_own_place() -> None:
    async with running() as pool:
        calls = [pool.fetch(picture(0, data=b"bad", param=f"messages[{i}]")) for i in range(3)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [error.param for error in errors if isinstance(error, MmserveError)] == ["messages[0]", "messages[1]", "messages[2]"]


async def test_rows_that_are_not_finite_are_never_cached_and_the_picture_may_come_again() -> None:
    async with running() as pool:
        pool.encoders[0].script = [lambda plan: ("encoder_nan",)]
        with pytest.raises(EncoderFailed) as caught:
            await pool.fetch(picture(7))
        assert caught.value.code == "encoder_nan"
        assert len(pool.cache) == 0
        assert await pool.fetch(picture(7)) == ("encoded", 7.0)


async def test_a_neighbour_of_rows_that_are_not_finite_is_unharmed() -> None:
    async with running(window_s=60.0, max_batch=2) as pool:
        pool.encoders[0].script = [lambda plan: ("encoder_nan", None)]
        bad, good = await asyncio.gather(pool.fetch(picture(1)), pool.fetch(picture(2)), return_exceptions=True)
        assert isinstance(bad, EncoderFailed)
        assert good == ("encoded", 2.0)


# --- callers who leave


async def test_a_caller_who_leaves_does_not_take_the_others_rows_away() -> None:
    async with running() as pool:
        pool.encoders[0].gate.clear()
        leader, follower = pool.start(picture(7)), pool.start(picture(7))
        await settle()
        leader.cancel()
        await settle()
        pool.encoders[0].gate.set()
        assert await follower == ("joined", 7.0)
        assert pool.encoders[0].batch_sizes == [1]


async def test_a_caller_who_leaves_in_a_batch_does_not_hurt_its_neighbours() -> None:
    """Setting a result on a future that was cancelled must not end the loop that serves everybody."""
    async with running(window_s=60.0, max_batch=3) as pool:
        pool.encoders[0].gate.clear()
        tasks = [pool.start(picture(value)) for value in range(3)]
        await settle()
        tasks[1].cancel()
        await settle()
        pool.encoders[0].gate.set()
        assert [await tasks[0], await tasks[2]] == [("encoded", 0.0), ("encoded", 2.0)]
        await settle()
        assert await pool.fetch(picture(1)) == ("memory", 1.0)  # what was under way may as well be kept


async def test_a_picture_nobody_waits_for_any_more_never_reaches_the_encoder() -> None:
    async with running() as pool:
        pool.decode.gate.clear()
        task = pool.start(picture(7))
        await settle()
        task.cancel()
        await settle()
        pool.pool.check()
        pool.decode.gate.set()
        await settle()
        assert pool.encoders[0].plans == []
        assert await pool.fetch(picture(7)) == ("encoded", 7.0)


async def test_a_picture_queued_for_a_busy_encoder_is_withdrawn_when_its_caller_leaves() -> None:
    async with running(max_batch=1) as pool:
        pool.encoders[0].gate.clear()
        first, second = pool.start(picture(1)), pool.start(picture(2))
        await settle()
        second.cancel()
        await settle()
        pool.encoders[0].gate.set()
        assert await first == ("encoded", 1.0)
        await settle()
        assert pool.encoders[0].batch_sizes == [1]


async def test_a_caller_cancelled_in_the_moment_of_landing_leaves_no_pin() -> None:
    async with running() as pool:
        pool.encoders[0].gate.clear()
        task = pool.start(picture(7))
        await settle()
        pool.encoders[0].gate.set()
        while not pool.cache.num_pinned:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.cache.num_pinned == 0


async def test_five_hundred_who_leave_at_once_leave_nothing_behind() -> None:
    async with running() as pool:
        tasks = [pool.start(picture(i % 50)) for i in range(500)]
        for steps in range(0, 500, 7):
            tasks[steps].cancel()
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- workers who die, run out of memory, or never come


async def test_a_full_batch_whose_worker_dies_is_encoded_once_more() -> None:
    async with running(window_s=60.0) as pool:
        pool.encoders[0].script = [die]
        results = await asyncio.gather(*(pool.fetch(picture(value)) for value in range(48)))
        assert results == [("encoded", float(value)) for value in range(48)]
        assert pool.encoders[0].batch_sizes == [48, 48]


async def test_another_worker_takes_over_while_the_dead_one_restarts() -> None:
    async with running(num_clients=2, max_batch=1) as pool:
        first, second = pool.encoders

        def die_and_stay_away(plan: EncodePlan) -> tuple[str | None, ...]:
            first.ready.clear()
            return die(plan)

        first.script = [die_and_stay_away]
        assert await pool.fetch(picture(7)) == ("encoded", 7.0)
        assert (first.batch_sizes, second.batch_sizes) == ([1], [1])


async def test_a_picture_that_kills_is_found_out_and_its_neighbours_live() -> None:
    async with running(window_s=60.0, max_batch=4) as pool:
        encoder = pool.encoders[0]

        def die_of_66(plan: EncodePlan) -> tuple[str | None, ...]:
            if any(pool.buffer.array(item.features).flat[0] == 66 for item in plan.items):
                return die(plan)
            return (None,) * len(plan.items)

        encoder.script = [die_of_66] * 6
        *good, bad = await asyncio.gather(*(pool.fetch(picture(value)) for value in (1, 2, 3, 66)), return_exceptions=True)
        assert good == [("encoded", 1.0), ("encoded", 2.0), ("encoded", 3.0)]
        assert isinstance(bad, WorkerLost)
        assert pool.lost == [picture(66).content]
        assert encoder.batch_sizes == [4, 4, 1, 1, 1, 1]


async def test_a_batch_too_large_for_memory_is_halved_until_only_what_never_fits_fails() -> None:
    async with running(window_s=60.0, max_batch=8) as pool:
        encoder = pool.encoders[0]

        def room_for_two_but_not_for_66(plan: EncodePlan) -> tuple[str | None, ...]:
            if len(plan.items) > 2 or any(pool.buffer.array(item.features).flat[0] == 66 for item in plan.items):
                return ("out_of_memory",) * len(plan.items)
            return (None,) * len(plan.items)

        encoder.script = [room_for_two_but_not_for_66] * 20
        values = (1, 2, 3, 4, 66, 6, 7, 8)
        results = await asyncio.gather(*(pool.fetch(picture(value)) for value in values), return_exceptions=True)
        assert isinstance(results.pop(4), TooLarge)
        assert results == [("encoded", float(value)) for value in values if value != 66]
        assert encoder.batch_sizes == [8, 4, 2, 2, 4, 2, 1, 1, 2]


async def test_nothing_is_sent_to_a_worker_that_is_not_warm() -> None:
    async with running() as pool:
        pool.encoders[0].ready.clear()
        task = pool.start(picture(7))
        await settle()
        assert pool.encoders[0].plans == []
        pool.encoders[0].ready.set()
        assert await task == ("encoded", 7.0)


async def test_when_the_last_worker_is_gone_for_good_callers_are_refused_at_once() -> None:
    async with running() as pool:
        encoder = pool.encoders[0]

        def die_for_good(plan: EncodePlan) -> tuple[str | None, ...]:
            encoder.lost = True
            return die(plan)

        encoder.script = [die_for_good]
        with pytest.raises(Overloaded, match="no image encoder"):
            await pool.fetch(picture(7))
        with pytest.raises(Overloaded):
            await pool.fetch(picture(8))


async def test_closing_tells_everybody_who_waits() -> None:
    async with running(max_batch=1) as pool:
        pool.encoders[0].gate.clear()
        tasks = [pool.start(picture(value)) for value in range(3)]
        await settle()
        await pool.pool.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded] * 3


# --- memory and disk


async def test_many_pictures_pass_through_a_small_buffer() -> None:
    async with running(buffer_bytes=4096) as pool:
        for value in range(60):
            assert await pool.fetch(picture(value)) == ("encoded", float(value))
        assert len(pool.cache) < 60


async def test_rows_saved_by_one_life_are_loaded_by_the_next_and_sources_say_so(tmp_path: Path) -> None:
    for life in range(2):
        disk = DiskTier(tmp_path, 2**24)
        await disk.open()
        async with running(disk=disk) as pool:
            results = await asyncio.gather(pool.fetch(picture(7)), pool.fetch(picture(7)))
            assert results == [("disk" if life else "encoded", 7.0), ("joined", 7.0)]
            assert pool.decode.num_calls == (0 if life else 1)
            assert pool.metric("mm_cache_hits_total", modality="image", tier="disk") == life
            await pool.cache.flush()


async def test_the_cache_holds_its_own_rows_not_the_workers() -> None:
    """The next picture in the same feature memory must not show through."""
    async with running(buffer_bytes=8192) as pool:
        await pool.fetch(picture(1))
        await pool.fetch(picture(2))
        assert [await pool.fetch(picture(1)), await pool.fetch(picture(2))] == [("memory", 1.0), ("memory", 2.0)]
