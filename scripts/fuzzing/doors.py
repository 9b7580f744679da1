"""The four doors, each with its inputs and with what must hold: a value or an error of the client's, never anything else, and in time.

`json` and `uri` are called as the gateway calls them and compared with a slow oracle.  `image` and `audio` meet the header check and then
a real decode process under its real limits, as in the engine.  `Wire` sends the same inputs through a server's socket.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self
from urllib.parse import unquote_to_bytes

import aiohttp

from mmserve.composition.picture_fit import AnyRes, PictureFit, SmartResize, Stretch
from mmserve.encoders.decode_process import DecodeProcesses
from mmserve.encoders.image_header import read_header
from mmserve.errors import MmserveError
from mmserve.gateway.call import Bounds, Caller
from mmserve.gateway.chat_api import parse_chat
from mmserve.gateway.completions_api import parse_completion
from mmserve.gateway.data_uri import parse_data_uri
from mmserve.gateway.feedback_api import parse_feedback
from mmserve.gateway.generate_api import parse_generate
from mmserve.gateway.json_body import parse_object
from mmserve.media import MediaItem, MediaKind, MediaLimits
from mmserve.shared_buffer import SharedBuffer
from scripts.fuzzing import corpus, texts
from scripts.fuzzing.containers import damaged

DOORS = ("json", "uri", "image", "audio")
MAX_PARSE_S = 1.0  # CPU time of one input in this process
MAX_MESSAGE = 300  # characters of an error's text
BUFFER_BYTES = 64 * 2**20
SAMPLE_RATE = 16_000
_PATH_OR_ADDRESS = re.compile(r"0x[0-9a-f]{11,}|/(?:usr|home|tmp|proc|dev|etc)/|psm_|site-packages|Traceback", re.IGNORECASE)
_QUOTED = re.compile(r"'[^']*'")  # the client's own words
_ERROR_FIELDS = {"message", "type", "param", "code"}
_FITS: tuple[PictureFit, ...] = (
    Stretch(56, 16), Stretch(336, 576), SmartResize(28, 4 * 28 * 28, 256 * 28 * 28), AnyRes(56, 4, ((112, 112), (56, 168), (168, 56))),
)  # fmt: skip
BOUNDS = Bounds(vocab_size=1000, limits=MediaLimits())
CALLER = Caller("id")


class Finding(Exception):
    """What must not be.  Its text is the same for the same cause, so that a thousand inputs make one finding."""


class Door(Protocol):
    async def try_one(self, data: bytes, rng: random.Random) -> str:
        """What became of it: a status, or a word.  Raises Finding, or whatever else came out, which is one too."""


def make_input(door: str, seed: int, index: int) -> tuple[bytes, random.Random]:
    """The bytes of this input, and the generator for what is still to be drawn for it.  The same in every run."""
    rng = random.Random(f"{door} {seed} {index}")
    match door:
        case "json":
            return (texts.form if index % 5 == 4 else texts.json_bytes)(rng), rng
        case "uri":
            return texts.uri(rng).encode("utf-8", "surrogatepass"), rng
    files = corpus.pictures() if door == "image" else corpus.clips()
    return damaged(rng, rng.choice(files if rng.random() < 0.97 else corpus.strangers()), files), rng


class JsonDoor:
    """Every route's parser, and the strict JSON beneath them beside the standard library's."""

    async def try_one(self, data: bytes, rng: random.Random) -> str:
        if data.startswith(b"\r\n--"):
            return _parsed(lambda: parse_generate(data, texts.BOUNDARY, BOUNDS, CALLER))
        outcome = _parsed(lambda: _agrees(data))
        routes = (
            _parsed(lambda: parse_chat(data, BOUNDS, CALLER)),
            _parsed(lambda: parse_completion(data, BOUNDS, CALLER)),
            _parsed(lambda: parse_feedback(data, tenant="default", now_s=0.0)),
        )
        return min(routes) if outcome == "200" else outcome


class UriDoor:
    async def try_one(self, data: bytes, rng: random.Random) -> str:
        text = data.decode("utf-8", "surrogatepass")
        result: list[bytes] = []
        outcome = _parsed(lambda: result.append(parse_data_uri(text, "here")[1]))
        if result and result[0] != _decoded_by_the_book(text.partition(",")[2]):
            raise Finding("another value than the oracle's")
        return outcome


class MediaDoor:
    """One decode process and a buffer for what comes out of it."""

    def __init__(self, kind: MediaKind, decode: DecodeProcesses, buffer: SharedBuffer) -> None:
        self.num_contained = 0  # children that died of an input, or left after it
        self._kind = kind
        self._decode = decode
        self._buffer = buffer
        self._limits = MediaLimits()

    @classmethod
    @asynccontextmanager
    async def open(cls, kind: MediaKind) -> AsyncIterator[Self]:
        buffer = SharedBuffer(BUFFER_BYTES)
        decode = DecodeProcesses(buffer.memory, MediaLimits())
        await decode.start()
        try:
            yield cls(kind, decode, buffer)
        finally:
            await decode.close()

    async def try_one(self, data: bytes, rng: random.Random) -> str:
        item, deaths = MediaItem(self._kind, data, param="here"), self._decode.num_deaths
        started_s = time.monotonic()
        try:
            await (self._picture(item, rng) if self._kind is MediaKind.IMAGE else self._clip(item))
            outcome = "200"
        except MmserveError as error:
            outcome = _refusal(error)
            if error.message in ("the media can't be decoded", "the media can't be decoded: it needs too much memory"):
                outcome = f"{outcome} contained: {error.message}"
        if self._decode.num_deaths > deaths:
            outcome += " contained: the child died"
        if time.monotonic() - started_s > 3 * self._limits.decode_wall_s:
            raise Finding("took longer than its limits allow")
        return outcome

    async def _picture(self, item: MediaItem, rng: random.Random) -> None:
        started_s = time.thread_time()
        header = read_header(item.data, self._limits, item.param)
        _check_time(started_s)
        fit = _FITS[0] if rng.random() < 0.7 else rng.choice(_FITS)
        target = self._buffer.allocate(fit.feature_shape(*header.upright_size), "uint8")
        try:
            await self._decode.decode_image(item, target, fit)
        finally:
            self._buffer.release(target)

    async def _clip(self, item: MediaItem) -> None:
        header = await self._decode.probe_audio(item)
        if not 0 < header.duration_s <= self._limits.max_audio_s:
            raise Finding("a length beyond the limit")
        target = self._buffer.allocate((math.ceil(header.num_frames * SAMPLE_RATE / header.sample_rate),), "float32")
        try:
            await self._decode.decode_audio(item, target, SAMPLE_RATE)
            samples = self._buffer.array(target)
            if not (abs(samples) <= 1.0).all():  # NaN isn't either
                raise Finding("samples that are no sound")
        finally:
            self._buffer.release(target)


class Wire:
    """The same inputs over HTTP.  A server that answers 5xx, or not at all, is a finding."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def send(self, door: str, data: bytes, rng: random.Random) -> str:
        path, body, content_type = _request(door, data, rng)
        try:
            async with self._http.post(self._url + path, data=body, headers={"Content-Type": content_type}) as answer:
                text = await answer.text()
        except TimeoutError:
            return "wire left"  # a long answer was asked for, and the client has gone
        except aiohttp.ClientError as error:
            raise Finding(f"no answer from {path}: {type(error).__name__}") from None
        if answer.status >= 500:
            raise Finding(f"{answer.status} from {path}: {text[:200]}")
        if answer.status >= 400 and (_PATH_OR_ADDRESS.search(text) or set(json.loads(text)["error"]) != _ERROR_FIELDS):
            raise Finding(f"{answer.status} from {path} says too much or too little: {text[:200]}")
        return f"wire {answer.status}"


def _request(door: str, data: bytes, rng: random.Random) -> tuple[str, bytes, str]:
    """Route, body and content type."""
    if door == "json":
        if data.startswith(b"\r\n--"):
            return "/v1/generate", data, f"multipart/form-data; boundary={texts.BOUNDARY.decode()}"
        return rng.choice(("/v1/chat/completions", "/v1/chat/completions", "/v1/completions", "/v1/feedback")), data, "application/json"
    kind = "audio_url" if door == "audio" or (door == "uri" and rng.random() < 0.3) else "image_url"
    if door in ("image", "audio") and rng.random() < 0.5:
        head = b'--XX\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
        parts = (("prompt", b"Hi"), ("options", b'{"max_tokens": 1}'), (door, data))
        form = b"\r\n".join(head % name.encode() + part for name, part in parts) + b"\r\n--XX--"
        return "/v1/generate", form, "multipart/form-data; boundary=XX"
    url = data.decode("utf-8", "surrogatepass") if door == "uri" else f"data:;base64,{base64.b64encode(data).decode()}"
    content: list[Any] = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "stream": rng.random() < 0.3}
    return "/v1/chat/completions", json.dumps(body).encode(), "application/json"


def _parsed(parse: Callable[[], object]) -> str:
    started_s = time.thread_time()
    try:
        parse()
        outcome = "200"
    except MmserveError as error:
        outcome = _refusal(error)
    _check_time(started_s)
    return outcome


def _check_time(started_s: float) -> None:
    if time.thread_time() - started_s > MAX_PARSE_S:
        raise Finding("a parser that takes too long")


def _refusal(error: MmserveError) -> str:
    """Its status.  Raises Finding if it is not the client's, or if its text tells what it shouldn't."""
    json.dumps(error.body()).encode()
    if not 400 <= error.status < 500:
        raise Finding(f"{error.status}: {error.message}")
    if len(error.message) > MAX_MESSAGE or _PATH_OR_ADDRESS.search(_QUOTED.sub("", error.message)):
        raise Finding(f"an error's text is too long or says too much: {error.message[:80]}")
    return str(error.status)


def _agrees(data: bytes) -> None:
    """What is taken is what the standard library makes of it."""
    value = parse_object(data)
    if value != json.loads(data):
        raise Finding("another value than the standard library's")


def _decoded_by_the_book(text: str) -> bytes | None:
    """One step after the other, on copies; None where it is not base64."""
    data = re.sub(rb"[\r\n\t ]", b"", unquote_to_bytes(text)).replace(b"-", b"+").replace(b"_", b"/")
    try:
        return base64.b64decode(data.rstrip(b"=") + b"=" * (-len(data.rstrip(b"=")) % 4), validate=True)
    except binascii.Error:
        return None


async def gather_sent(wire: Wire, sent: list[tuple[str, bytes, random.Random]]) -> list[str | BaseException]:
    """Side by side, as clients do."""
    return await asyncio.gather(*(wire.send(*one) for one in sent), return_exceptions=True)
