"""A hosted encoder over real sockets: its rows are used when they are right, its moods are the breaker's, and nothing of it is believed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from hosted_service import HostedService, hosted_service, rows_of
from safetensors.numpy import save

from mmserve.composition import Composition, DecoderSpec, PromptFormat, VisionSpec, Weights, WhisperSpec
from mmserve.composition.picture_fit import Stretch
from mmserve.composition.prepare import prepare_media
from mmserve.config import ConfigError, EncoderConfig
from mmserve.encoder_lanes import hosted_config
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.encoders.encoder_pool import EncoderPool
from mmserve.encoders.hosted_encoder import HostedConfig, HostedEncoder, write_rows
from mmserve.errors import EncoderFailed, EncoderUnavailable, MmserveError, TooLarge, UndecodableMedia, UnsupportedMedia
from mmserve.media import AudioHeader, ImageHeader, MediaItem, MediaKind, PreparedMedia
from mmserve.metrics import Metrics
from mmserve.shared_buffer import SharedBuffer

HIDDEN = {"small": 4, "large": 6}
NUM_ROWS = 3
NOWHERE = Weights(Path("nowhere"))
PROJECTORS = dict.fromkeys(HIDDEN, NOWHERE)
VISION = VisionSpec("clip", NOWHERE, {}, PROJECTORS, "", ("", ""), fit=Stretch(8, NUM_ROWS))
AUDIO = WhisperSpec("whisper", NOWHERE, {}, PROJECTORS, "", ("", ""), window_s=1.0, tokens_per_second=25)
COMPOSITION = Composition(
    "fake",
    {name: DecoderSpec(name, NOWHERE, {"hidden_size": hidden}, PromptFormat(Path("nowhere"), "")) for name, hidden in HIDDEN.items()},
    dict.fromkeys(HIDDEN, VISION),
    dict.fromkeys(HIDDEN, AUDIO),
)


class World:
    """A pool with a hosted encoder."""

    def __init__(self, service: HostedService, kind: MediaKind, version: str, timeout_s: float, concurrency: int) -> None:
        self.service = service
        self.kind = kind
        self.composition = COMPOSITION.hosted(kind, version)
        self.buffer = SharedBuffer(2**20)
        self.cache = EmbeddingCache(self.buffer)
        self.metrics = Metrics()
        config = HostedConfig(service.url, version, "secret", timeout_s, concurrency)
        encoder = HostedEncoder(kind, config, self.item(0), "small", self.buffer, self.composition)
        self.pool = EncoderPool(
            kind, encoder, self.cache, self.metrics,
            composition=self.composition, rows_dtype="float32", name=kind.value, on_lost=pytest.fail,
        )  # fmt: skip

    def item(self, value: int, decoder: str = "small", seconds: float = 2.5) -> PreparedMedia:
        data = b"bytes of %d" % value
        content = hashlib.sha256(data).digest()
        header = ImageHeader("webp", 9, 9) if self.kind is MediaKind.IMAGE else AudioHeader("ogg", 16_000, 1, int(16_000 * seconds))
        return prepare_media(MediaItem(self.kind, data, param=f"item {value}"), content, header, self.composition, decoder)

    async def fetch(self, media: PreparedMedia, index: int = 0, decoder: str = "small") -> np.ndarray:
        window = media.windows[index]
        await self.pool.fetch(media, window, decoder)
        where = self.cache.lookup(window.key)
        assert where is not None
        rows = self.buffer.array(where).copy()
        self.cache.unpin(window.key)
        return rows

    @property
    def state(self) -> float | None:
        return self.metrics.registry.get_sample_value("mmserve:breaker_state", {"modality": self.kind.value})

    async def until_state(self, state: float) -> None:
        async with asyncio.timeout(30):
            while self.state != state:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world(
    kind: MediaKind = MediaKind.IMAGE, *, version: str = "v1", timeout_s: float = 30.0, concurrency: int = 16
) -> AsyncIterator[World]:
    async with hosted_service(HIDDEN) as service:
        one = World(service, kind, version, timeout_s, concurrency)
        try:
            yield one
        finally:
            await one.pool.close()
            await one.cache.close()
        one.pool.check()
        one.cache.check()
        assert one.cache.num_pinned == 0
        assert len(one.buffer._held) == len(one.cache)


async def failure(world: World, value: int = 1) -> MmserveError:
    with pytest.raises(MmserveError) as caught:
        await world.fetch(world.item(value))
    return caught.value


async def test_the_items_own_bytes_go_there_with_all_that_an_encoder_must_know() -> None:
    async with world() as one:
        media = one.item(7)
        assert (await one.fetch(media) == rows_of(media.item.data, "small", (NUM_ROWS, 4))).all()
        ((headers, body),) = one.service.requests
        assert body == media.item.data
        expected = {
            "content-type": "image/webp",
            "accept": "application/vnd.safetensors",
            "authorization": "Bearer secret",
            "x-mmserve-kind": "image",
            "x-mmserve-model": "fake",
            "x-mmserve-decoder": "small",
            "x-mmserve-rows": "3",
            "x-mmserve-encoder-version": "v1",
        }
        assert expected.items() <= headers.items()
        await one.fetch(media)
        assert len(one.service.requests) == 1  # from the cache


async def test_each_decoder_gets_rows_of_its_own() -> None:
    async with world() as one:
        small, large = one.item(7), one.item(7, "large")
        assert (await one.fetch(small)).shape == (NUM_ROWS, 4)
        assert (await one.fetch(large, decoder="large")).shape == (NUM_ROWS, 6)


async def test_a_clip_is_sent_once_for_all_its_windows_and_each_gets_its_own_rows() -> None:
    async with world(MediaKind.AUDIO) as one:
        clip = one.item(7, seconds=2.5)
        windows = await asyncio.gather(*(one.fetch(clip, i) for i in range(3)))
        assert [len(rows) for rows in windows] == [25, 25, 13]
        assert (np.concatenate(windows) == rows_of(clip.item.data, "small", (63, 4))).all()
        assert [headers["content-type"] for headers, _ in one.service.requests] == ["audio/ogg"]


async def test_many_who_ask_for_one_picture_cost_one_request_and_many_pictures_no_more_than_the_limit() -> None:
    async with world(concurrency=4) as one:
        num_inside, most = 0, 0

        async def slowly(request: web.Request, body: bytes) -> web.Response:
            nonlocal num_inside, most
            num_inside += 1
            most = max(most, num_inside)
            await asyncio.sleep(0.01)
            num_inside -= 1
            return one.service.answer(request, body)

        one.service.always = slowly
        await asyncio.gather(*(one.fetch(one.item(i % 20)) for i in range(200)))
        assert len(one.service.requests) == 20
        assert most == 4


@pytest.mark.parametrize(("status", "error"), [(400, UndecodableMedia), (422, UndecodableMedia), (413, TooLarge), (415, UnsupportedMedia)])
async def test_what_is_the_items_own_fault_names_it_and_opens_nothing(status: int, error: type[MmserveError]) -> None:
    async with world() as one:
        one.service.script = [status] * 30
        for i in range(30):
            found = await failure(one, i)
            assert type(found) is error
            assert found.param == f"item {i}"
        assert one.state == 0
        await one.fetch(one.item(99))


@pytest.mark.parametrize("status", [500, 503, 429, 404, 401, 307])
async def test_a_service_that_keeps_failing_is_left_alone_and_found_well_again_without_anybody_asking(status: int) -> None:
    """A redirect is a failure, too: it isn't followed."""
    async with world() as one:
        cached = one.item(100)
        await one.fetch(cached)

        async def reply(request: web.Request, body: bytes) -> web.Response:
            return web.Response(status=status, headers={"Location": "/elsewhere"})

        one.service.always = reply
        for i in range(5):
            assert one.state == 0
            assert isinstance(await failure(one, i), EncoderUnavailable)
        assert one.state == 2
        num_requests = len(one.service.requests)
        refusal = await failure(one, 5)
        assert (refusal.status, refusal.code) == (503, "encoder_unavailable")
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s >= 1
        assert len(one.service.requests) == num_requests  # it was not asked
        assert one.service.num_elsewhere == 0
        await one.fetch(cached)
        one.service.always = None
        await one.until_state(0)
        await one.fetch(one.item(6))


async def test_it_stays_away_for_as_long_as_it_is_told_and_tells_the_client() -> None:
    async with world() as one:
        one.service.script = [web.Response(status=429, headers={"Retry-After": "37"})]
        assert (await failure(one)).retry_after_s == 37.0
        assert one.state == 2
        refusal = await failure(one, 2)
        assert refusal.retry_after_s is not None
        assert 30 < refusal.retry_after_s <= 37
        assert len(one.service.requests) == 1


async def test_a_service_that_does_not_answer_in_time_is_unavailable() -> None:
    async with world(timeout_s=0.2) as one:

        async def never(request: web.Request, body: bytes) -> web.Response:
            await asyncio.sleep(3600)
            raise AssertionError

        one.service.always = never
        for i in range(5):
            assert isinstance(await failure(one, i), EncoderUnavailable)
        assert one.state == 2


async def test_a_connection_that_closes_just_then_is_no_fault() -> None:
    async with world() as one:

        async def hang_up(request: web.Request, body: bytes) -> web.Response:
            assert request.transport is not None
            request.transport.close()
            return web.Response()

        media = one.item(1)
        one.service.script = [hang_up]
        assert (await one.fetch(media) == rows_of(media.item.data, "small", (NUM_ROWS, 4))).all()
        assert len(one.service.requests) == 2
        one.service.always = hang_up
        assert isinstance(await failure(one, 2), EncoderUnavailable)


async def test_a_service_that_is_not_there_is_unavailable() -> None:
    async with world() as one:
        one.pool._encoder._config = HostedConfig("http://127.0.0.1:9/encode", "v1")  # type: ignore[attr-defined]
        assert isinstance(await failure(one), EncoderUnavailable)


def _nan(shape: tuple[int, int] = (NUM_ROWS, 4)) -> np.ndarray:
    rows = np.zeros(shape, np.float32)
    rows[1, 2] = np.nan
    return rows


BAD_REPLIES = {
    "not safetensors": b"rows, trust me",
    "nothing": b"",
    "cut short": save({"rows": np.zeros((NUM_ROWS, 4), np.float32)})[:-5],
    "too few rows": save({"rows": np.zeros((NUM_ROWS - 1, 4), np.float32)}),
    "transposed": save({"rows": np.zeros((4, NUM_ROWS), np.float32)}),
    "another name": save({"embeddings": np.zeros((NUM_ROWS, 4), np.float32)}),
    "one tensor more": save({"rows": np.zeros((NUM_ROWS, 4), np.float32), "x": np.zeros(1, np.float32)}),
    "integers": save({"rows": np.zeros((NUM_ROWS, 4), np.int32)}),
    "double": save({"rows": np.zeros((NUM_ROWS, 4), np.float64)}),
    "not finite": save({"rows": _nan()}),
    "too long": save({"rows": np.zeros((NUM_ROWS, 40_000), np.float32)}),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
async def test_an_answer_that_is_not_what_was_asked_for_is_never_cached(name: str) -> None:
    async with world() as one:
        reply = web.Response(body=BAD_REPLIES[name], headers={"x-mmserve-encoder-version": "v1"})
        one.service.script = [reply]
        error = await failure(one)
        assert isinstance(error, EncoderFailed)
        assert error.code == ("encoder_nan" if name == "not finite" else "encoder_failed")
        assert len(one.cache) == 0
        media = one.item(1)
        assert (await one.fetch(media) == rows_of(media.item.data, "small", (NUM_ROWS, 4))).all()


async def test_an_answer_that_never_ends_is_cut_off() -> None:
    async with world() as one:

        async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
            response = web.StreamResponse(headers={"x-mmserve-encoder-version": "v1"})
            await response.prepare(request)
            while True:
                await response.write(bytes(2**16))

        one.service.script = [endless]
        assert isinstance(await failure(one), EncoderFailed)


async def test_rows_of_another_version_than_configured_are_refused() -> None:
    """A service that was updated under us would fill the old version's keys with new rows."""
    async with world() as one:
        one.service.version = "v2"
        assert isinstance(await failure(one), EncoderUnavailable)
        assert len(one.cache) == 0


async def test_versions_models_and_local_weights_never_share_a_key() -> None:
    async with world() as one:
        data = one.item(1)

    def key(composition: Composition) -> bytes:
        return prepare_media(data.item, data.content, data.header, composition, "small").windows[0].key

    other_model = Composition("other", COMPOSITION.decoders, COMPOSITION.vision)
    compositions = [
        COMPOSITION.hosted(MediaKind.IMAGE, "v1"),
        COMPOSITION.hosted(MediaKind.IMAGE, "v2"),
        other_model.hosted(MediaKind.IMAGE, "v1"),
    ]
    assert len({key(composition) for composition in compositions}) == 3
    assert key(compositions[0]) == data.windows[0].key


async def test_half_precision_rows_are_taken() -> None:
    async with world() as one:
        rows = np.arange(12, dtype=np.float16).reshape(NUM_ROWS, 4)
        one.service.script = [one.service.reply({"rows": rows})]
        assert (await one.fetch(one.item(1)) == rows).all()


async def test_a_caller_who_leaves_takes_his_request_with_him_and_nobody_elses() -> None:
    async with world() as one:
        gate = asyncio.Event()

        async def wait(request: web.Request, body: bytes) -> web.Response:
            await gate.wait()
            return one.service.answer(request, body)

        one.service.always = wait
        leaving, staying = asyncio.create_task(one.fetch(one.item(1))), asyncio.create_task(one.fetch(one.item(2)))
        while len(one.service.requests) < 2:
            await asyncio.sleep(0.001)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        gate.set()
        assert (await staying).shape == (NUM_ROWS, 4)


def test_numbers_are_rounded_to_the_rows_dtype_and_what_overflows_is_refused() -> None:
    rows = np.array([[1.5, -2.0, 1 / 3, 3.0e38]], np.float32)
    target = np.zeros((1, 4), np.uint16)
    write_rows(rows, target, "bfloat16")
    assert target.tolist() == [[0x3FC0, 0xC000, 0x3EAB, 0x7F62]]
    with pytest.raises(EncoderFailed):
        write_rows(np.array([[3.4e38]], np.float32), np.zeros((1, 1), np.uint16), "bfloat16")
    with pytest.raises(EncoderFailed):
        write_rows(np.array([[1e6]], np.float32), np.zeros((1, 1), np.float16), "float16")


@pytest.mark.parametrize(
    "settings",
    [
        {"vision_url": "ftp://encoder"},
        {"vision_url": "http://encoder"},
        {"vision_url": "http://encoder", "vision_version": "a\nb"},
        {"vision_url": "http://encoder", "vision_version": "v1", "hosted_encoder_concurrency": 0},
    ],
)
def test_a_hosted_encoder_that_could_not_work_is_a_wrong_setting(settings: dict) -> None:
    with pytest.raises(ConfigError):
        hosted_config(EncoderConfig(**settings), MediaKind.IMAGE)
