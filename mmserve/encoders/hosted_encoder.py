"""Rows from somebody else's service: the item's own bytes go there, rows come back, and nothing of them is believed before it is checked.

The wire is docs/hosted_encoder.md.  Nothing is decoded here, so no decode process is needed; headers and limits were checked at the door.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import aiohttp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from mmserve.composition import Composition
from mmserve.encoders.encode_order import EncodeOrder
from mmserve.encoders.encoder_health import EncoderHealth
from mmserve.encoders.shared_work import SharedWork
from mmserve.errors import EncoderFailed, EncoderUnavailable, MmserveError, TooLarge, UndecodableMedia, UnsupportedMedia
from mmserve.media import MediaItem, MediaKind, PreparedMedia
from mmserve.shared_buffer import SharedBuffer

CONTENT_TYPES = {
    "jpeg": "image/jpeg", "png": "image/png", "gif": "image/gif", "webp": "image/webp",
    "wav": "audio/wav", "flac": "audio/flac", "ogg": "audio/ogg", "mp3": "audio/mpeg",
}  # fmt: skip
ACCEPT = "application/vnd.safetensors"
HEADER_BYTES = 64 * 1024  # what safetensors may say around the rows
LONGEST_RETRY_AFTER_S = 600.0  # who sends us away for longer is asked again sooner
ITEM_ERRORS: Mapping[int, tuple[type[MmserveError], str]] = {
    400: (UndecodableMedia, "the media can't be decoded"),
    413: (TooLarge, "the media are too large for their encoder"),
    415: (UnsupportedMedia, "the encoder does not take media of this kind"),
    422: (UndecodableMedia, "the media can't be decoded"),
}  # by status: the item's own fault


@dataclass(frozen=True, slots=True)
class HostedConfig:
    """`url` is the operator's.  Nothing that a request says is ever one."""

    url: str
    version: str  # what the service calls its weights: part of every key, and of every answer
    key: str | None = None  # bearer token
    timeout_s: float = 10.0
    max_concurrency: int = 16


class HostedEncoder:
    """Owned by the event loop.  A clip is sent once, for all its windows."""

    def __init__(
        self, kind: MediaKind, config: HostedConfig, blank: PreparedMedia, decoder: str, buffer: SharedBuffer, composition: Composition
    ) -> None:
        """`blank` is what probes send, for `decoder`."""
        self._kind = kind
        self._config = config
        self._blank = (blank, decoder)
        self._buffer = buffer
        self._composition = composition
        self._health: EncoderHealth | None = None
        self._turns = asyncio.Semaphore(config.max_concurrency)
        self._answers = SharedWork[tuple[bytes, str], np.ndarray]()  # by content and decoder
        headers = {"Accept": ACCEPT, "x-mmserve-model": composition.name, "x-mmserve-encoder-version": config.version}
        if config.key is not None:
            headers["Authorization"] = f"Bearer {config.key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=config.timeout_s),
            connector=aiohttp.TCPConnector(limit=config.max_concurrency),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small answer that is a large one inside would get past the limit
        )

    def report_to(self, health: EncoderHealth) -> None:
        self._health = health

    async def make(self, order: EncodeOrder) -> None:
        window, media, target = order.window, order.media, self._buffer.array(order.rows)
        async with self._answers.result((media.content, order.decoder), lambda: self._ask(media, order.decoder)) as rows:
            start = sum(each.num_rows for each in media.windows[: window.index])
            write_rows(rows[start : start + window.num_rows], target, order.rows.dtype)

    async def wait_ready(self) -> None:
        """Nobody says when it is."""

    async def probe(self) -> None:
        await self._ask(*self._blank)

    def fail_waiting(self, error: MmserveError) -> None:
        """Whoever waits has been sent already, or finds the breaker open."""

    async def close(self) -> None:
        await self._answers.close()
        await self._session.close()

    def check(self) -> None:
        assert not len(self._answers)

    async def _ask(self, media: PreparedMedia, decoder: str) -> np.ndarray:
        """[rows of all windows, hidden], finite."""
        shape = (media.num_rows, self._composition.decoders[decoder].hidden_size)
        headers = {
            "Content-Type": CONTENT_TYPES[media.header.format],
            "x-mmserve-kind": self._kind.value,
            "x-mmserve-decoder": decoder,
            "x-mmserve-rows": str(shape[0]),
        }
        max_bytes = 4 * shape[0] * shape[1] + HEADER_BYTES
        async with self._turns:
            try:
                try:
                    data = await self._post(media.item, headers, max_bytes)
                except (
                    aiohttp.ServerDisconnectedError
                ):  # a kept connection that was closed just then: no fault, and rows may be asked twice
                    data = await self._post(media.item, headers, max_bytes)
            except TimeoutError:
                self._refuse("timeout")
            except aiohttp.ClientError:
                self._refuse("unreachable")
        return await asyncio.to_thread(read_rows, data, shape)

    async def _post(self, item: MediaItem, headers: Mapping[str, str], max_bytes: int) -> bytes:
        async with self._session.post(self._config.url, data=item.data, headers=headers, allow_redirects=False) as response:
            if response.status in ITEM_ERRORS:
                kind, message = ITEM_ERRORS[response.status]
                raise kind(message, param=item.param)
            if response.status != 200:
                self._refuse(f"status_{response.status}", _retry_after_s(response))
            if response.headers.get("x-mmserve-encoder-version") != self._config.version:
                self._refuse("other_version")  # its rows under our key would be mixed up with the right ones
            data = bytearray()
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > max_bytes:
                    raise EncoderFailed("the encoder sent more than the rows that were asked for")
            return bytes(data)

    def _refuse(self, reason: str, retry_after_s: float | None = None) -> NoReturn:
        assert self._health is not None, "it has no pool yet"
        self._health.failed(reason, retry_after_s)
        raise EncoderUnavailable(f"the {self._kind.value} encoder can't be reached or refuses", retry_after_s=retry_after_s or 1.0)


def read_rows(data: bytes, shape: tuple[int, int]) -> np.ndarray:
    """float32 of `shape`, finite, from a safetensors file that has `rows` in float32 or float16.  Raises EncoderFailed."""
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError):
        raise EncoderFailed("the encoder sent no safetensors") from None
    rows = tensors.get("rows")
    if rows is None or len(tensors) != 1 or rows.dtype not in (np.float32, np.float16):
        raise EncoderFailed("the encoder sent something else than rows in float32 or float16")
    if rows.shape != shape:
        raise EncoderFailed(f"the encoder sent rows of shape {list(rows.shape)}, expected {list(shape)}")
    if not np.isfinite(rows).all():
        raise EncoderFailed("the encoder gave rows that must not be used", code="encoder_nan")
    return rows.astype(np.float32)


def write_rows(rows: np.ndarray, target: np.ndarray, dtype: str) -> None:
    """In the dtype of their place; bfloat16 is uint16 to numpy.  Raises EncoderFailed when a number is too large for it."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # to nearest, ties to even; finite numbers don't wrap
        converted = rounded.astype(np.uint16)
        is_finite = bool(((converted & 0x7F80) != 0x7F80).all())
    else:
        with np.errstate(over="ignore"):
            converted = rows.astype(target.dtype)
        is_finite = bool(np.isfinite(converted).all())
    if not is_finite:
        raise EncoderFailed("the encoder gave rows that must not be used", code="encoder_nan")
    target[...] = converted


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """The seconds it says.  A date is as good as nothing: clocks differ."""
    with contextlib.suppress(ValueError):
        seconds = float(response.headers.get("Retry-After", ""))
        if seconds >= 0:
            return min(seconds, LONGEST_RETRY_AFTER_S)
    return None
