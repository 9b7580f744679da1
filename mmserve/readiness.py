"""The requests that must go through before the server calls itself ready: one with everything a model takes, for each decoder."""

from __future__ import annotations

import io
import secrets
import wave

from PIL import Image

from mmserve.composition import Composition
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Message, Part, SamplingParams


def proof_requests(composition: Composition) -> list[ChatRequest]:
    """Salted, so that no cache of an earlier life can answer in a worker's place."""
    salt = secrets.token_hex(8)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    requests = []
    for name, decoder in composition.decoders.items():
        parts: list[Part] = ["hello"]
        if name in composition.vision:
            parts.append(MediaItem(MediaKind.IMAGE, _picture()))
        if name in composition.audio:
            parts.append(MediaItem(MediaKind.AUDIO, _clip()))
        message = Message("user", tuple(parts))
        raw = decoder.prompt.chat_template is None
        requests.append(ChatRequest((message,), sampling, model=name, cache_salt=salt, tenant="readiness", raw_prompt=raw))
    return requests


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (90, 120, 200)).save(file, "PNG")
    return file.getvalue()


def _clip() -> bytes:
    """A tenth of a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(bytes(2 * 1_600))
    return file.getvalue()
