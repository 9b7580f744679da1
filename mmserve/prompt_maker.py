"""From a request to what is computed: media prepared, text tokenized, both laid end to end.

Media that can't be encoded are left out where the client allows it, and the prompt says so in plain text where they stood.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmserve.errors import EncoderUnavailable
from mmserve.media import MediaItem, MediaKind, PreparedMedia
from mmserve.media_service import MediaService
from mmserve.request import ChatRequest, MediaNotice, Part
from mmserve.token_fuser import FusedPrompt, fuse
from mmserve.tokenizer import Tokenizer

LONG_TEXT = 20_000  # characters; tokenizing more than this leaves the event loop
INSTEAD = {
    MediaKind.IMAGE: "[There was a picture here. It could not be processed and is not known.]",
    MediaKind.AUDIO: "[There was an audio clip here. It could not be processed and is not known.]",
}
"""What the model reads in the place of an item that was left out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request is computed from, on one decoder."""

    media: tuple[PreparedMedia, ...]  # those that are in it
    fused: FusedPrompt
    degraded: tuple[MediaNotice, ...]  # those that aren't
    fallback: tuple[MediaNotice, ...]  # those in it that a fallback encodes


class PromptMaker:
    def __init__(self, media: MediaService, tokenizers: Mapping[str, Tokenizer]) -> None:
        self._media = media
        self._tokenizers = tokenizers

    async def make(self, request: ChatRequest, model: str, left_out: Mapping[int, str]) -> Prompt:
        """`left_out` gives reasons by `id(item)`; of a request that allows it, what has no encoder now is left out, too.

        Raises the error of whatever limit the request breaks, and EncoderUnavailable.
        """
        salt = request.cache_salt.encode()
        items = [item for item in request.media if id(item) not in left_out]
        tasks = [asyncio.create_task(self._prepare(item, model, salt, request.allow_degraded)) for item in items]
        try:
            prepared = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # the others of a request of which one was refused
        media = tuple(each for each in prepared if isinstance(each, PreparedMedia))
        self._media.check_pixels(media)
        unavailable = {id(item): each for item, each in zip(items, prepared, strict=True) if isinstance(each, str)}
        reasons = {**left_out, **unavailable}
        pieces = await self._pieces(leave_out(request, reasons) if reasons else request, model)
        return Prompt(
            media,
            fuse(pieces, {id(each.item): each for each in media}),
            notices(request, reasons),
            notices(request, {id(each.item): EncoderUnavailable.code for each in media if each.is_fallback}),
        )

    async def _prepare(self, item: MediaItem, model: str, salt: bytes, allow_degraded: bool) -> PreparedMedia | str:
        """Or why it is to be left out."""
        try:
            return await self._media.prepare(item, model, salt)
        except EncoderUnavailable as error:
            if not allow_degraded:
                raise
            return error.code

    async def _pieces(self, request: ChatRequest, model: str) -> list[list[int] | MediaItem]:
        tokenizer = self._tokenizers[model]
        if request.num_characters > LONG_TEXT:
            return await asyncio.to_thread(tokenizer.pieces, request)
        return tokenizer.pieces(request)


def leave_out(request: ChatRequest, reasons: Mapping[int, str]) -> ChatRequest:
    """The same with text in the place of the items whose `id` is in `reasons`."""

    def part_instead(part: Part) -> Part:
        return INSTEAD[part.kind] if isinstance(part, MediaItem) and id(part) in reasons else part

    messages = (replace(message, parts=tuple(map(part_instead, message.parts))) for message in request.messages)
    return replace(request, messages=tuple(messages))


def notices(request: ChatRequest, reasons: Mapping[int, str]) -> tuple[MediaNotice, ...]:
    """Of the items whose `id` is in `reasons`: each by its kind and its number among that kind, in the client's order."""
    found, counts = [], dict.fromkeys(MediaKind, 0)
    for item in request.media:
        if id(item) in reasons:
            found.append(MediaNotice(item.kind.value, counts[item.kind], reasons[id(item)]))
        counts[item.kind] += 1
    return tuple(found)
