"""`Engine`: the engine for programs without an event loop.  It runs one in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from mmserve.config import Config
from mmserve.engine import AsyncEngine
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, FinishReason, MediaNotice, Message, Part, SamplingParams, Usage
from mmserve.token_stream import Delta

T = TypeVar("T")
Prompt = str | Sequence[Part]


def Image(source: str | Path | bytes) -> MediaItem:
    """A picture from a file or from its bytes: JPEG, PNG, GIF or WebP."""
    return MediaItem(MediaKind.IMAGE, _read(source))


def Audio(source: str | Path | bytes) -> MediaItem:
    """A clip from a file or from its bytes: WAV, FLAC, OGG or MP3."""
    return MediaItem(MediaKind.AUDIO, _read(source))


@dataclass(frozen=True, slots=True)
class Output:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    model: str  # small or large
    degraded: tuple[MediaNotice, ...] = ()  # media that were left out, where that was allowed


class Engine:
    """Use it as a context manager.  Every verb raises the MmserveError that an HTTP client would be shown."""

    def __init__(self, config: Config | None = None) -> None:
        self._engine = AsyncEngine(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mmserve-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._engine.start())
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._engine.close())
            self._stop_loop()

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, model: str = "auto", allow_degraded: bool = False
    ) -> Output:
        """One answer (the first of n) to a text, or to texts, pictures and a clip in order.

        With `allow_degraded` media whose encoder fails are left out; the answer says which.
        """
        return self._run(self._generate(_chat_request(prompt, sampling, model, allow_degraded)))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, *, model: str = "auto") -> Iterator[Delta]:
        """Pieces of the answer as they come.  Leaving the loop early cancels the request."""
        generation = self._run(self._engine.submit(_chat_request(prompt, sampling, model, False)))
        deltas = generation.__aiter__()
        try:
            while (delta := self._run(anext(deltas, None))) is not None:
                yield delta
        finally:
            self._loop.call_soon_threadsafe(generation.cancel)

    async def _generate(self, request: ChatRequest) -> Output:
        generation = await self._engine.submit(request)
        text: list[str] = []
        token_ids: list[int] = []
        reason = FinishReason.STOP
        try:
            async for delta in generation:
                if delta.index == 0:
                    text.append(delta.text)
                    token_ids.extend(delta.token_ids)
                    reason = delta.finish_reason or reason
        finally:
            generation.cancel()
        return Output("".join(text), tuple(token_ids), reason, generation.usage, generation.model, generation.degraded)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _chat_request(prompt: Prompt, sampling: SamplingParams | None, model: str, allow_degraded: bool) -> ChatRequest:
    parts: tuple[Part, ...] = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    return ChatRequest((Message("user", parts),), sampling or SamplingParams(), model=model, allow_degraded=allow_degraded)


def _read(source: str | Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else Path(source).read_bytes()
