"""One OpenAI-compatible server, asked politely: greedy, patient with 429 and 503, and frank about what failed."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import soundfile

from mmserve.evals.golden import Media, Part
from mmserve.media import MediaKind

_AUDIO_FORMATS = {"audio/wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac", "audio/ogg": "ogg"}
_BUSY = (429, 502, 503, 504)
_LONGEST_WAIT_S = 30.0


class EndpointError(Exception):
    """The server isn't there, or doesn't speak the protocol: there is nothing to measure."""


class RequestFailed(Exception):
    """One request got no answer, after all attempts."""


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    body: dict[str, Any] = field(default_factory=dict)  # the whole completion


class Endpoint:
    """An async context manager.  `url` may or may not end in /v1."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        attempts: int = 4,
        wav_only: bool = False,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._wav_only = wav_only  # servers of other makes may take no other clips
        self._attempts = attempts
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def __aenter__(self) -> Endpoint:
        if self.model is None:
            try:
                self.model = await self._first_model()
            except BaseException:
                await self._session.close()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, parts: Sequence[Part], **fields: Any) -> Reply:
        """One user's turn.  Raises RequestFailed."""
        return await self.chat([await asyncio.to_thread(user_message, parts, wav_only=self._wav_only)], **fields)

    async def chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> Reply:
        """Raises RequestFailed, saying what the server or the connection said last."""
        body = {"model": self.model, "messages": messages, "temperature": 0, **fields}
        for attempt in range(1, self._attempts + 1):
            wait_s = min(2.0**attempt / 4, _LONGEST_WAIT_S)
            try:
                async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                    if response.status == 200:
                        return _reply(await response.json(content_type=None))
                    problem = f"{response.status}: {(await response.text())[:300]}"
                    if response.status not in _BUSY:
                        break
                    wait_s = _retry_after_s(response) or wait_s
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise RequestFailed(f"not a chat completion: {error!r}") from None
            if attempt < self._attempts:
                await asyncio.sleep(wait_s)
        raise RequestFailed(problem)

    async def _first_model(self) -> str:
        url = f"{self.url}/v1/models"
        try:
            async with self._session.get(url) as response:
                response.raise_for_status()
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EndpointError(f"{url} does not answer: {error}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise EndpointError(f"{url} lists no model; name one with --model") from None


def user_message(parts: Sequence[Part], *, wav_only: bool = False) -> dict[str, Any]:
    """Texts and media in order, as OpenAI's schema has them.  Reads the files."""
    return {"role": "user", "content": [_content(part, wav_only) for part in parts]}


def data_uri(media: Media) -> str:
    return f"data:{media.mime};base64,{base64.b64encode(media.path.read_bytes()).decode()}"


def as_wav(data: bytes) -> bytes:
    """Any clip that soundfile reads, as 16-bit WAV."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _content(part: Part, wav_only: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.kind is MediaKind.IMAGE:
        return {"type": "image_url", "image_url": {"url": data_uri(part)}}
    data, name = part.path.read_bytes(), _AUDIO_FORMATS[part.mime]
    if wav_only:
        data, name = as_wav(data), "wav"
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": name}}


def _reply(body: dict[str, Any]) -> Reply:
    return Reply(body["choices"][0]["message"]["content"] or "", body)


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    try:
        return min(float(response.headers["Retry-After"]), _LONGEST_WAIT_S)
    except (KeyError, ValueError):  # not there, or a date
        return None
