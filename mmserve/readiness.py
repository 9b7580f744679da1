"""The requests that must go through before the server calls itself ready: one with everything a model takes, for each decoder."""

from __future__ import annotations

import io
import secrets
import wave
from collections.abc import Collection

from PIL import Image

from mmserve.composition import Composition
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Message, Part, SamplingParams

BLANK_SIDE = 32  # pixels
BLANK_RATE, BLANK_FRAMES = 16_000, 1_600  # a tenth of a second


def proof_requests(composition: Composition, working: Collection[MediaKind]) -> list[ChatRequest]:
    """With media whose encoders are `working`.  Salted, so that no cache of an earlier life can answer in a worker's place."""
    salt = secrets.token_hex(8)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    requests = []
    for name, decoder in composition.decoders.items():
        parts: list[Part] = ["hello"]
        if name in composition.vision and MediaKind.IMAGE in working:
            parts.append(MediaItem(MediaKind.IMAGE, blank_picture()))
        if name in composition.audio and MediaKind.AUDIO in working:
            parts.append(MediaItem(MediaKind.AUDIO, blank_clip()))
        message = Message("user", tuple(parts))
        raw = decoder.prompt.chat_template is None
        requests.append(ChatRequest((message,), sampling, model=name, cache_salt=salt, tenant="readiness", raw_prompt=raw))
    return requests


def blank_picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), (90, 120, 200)).save(file, "PNG")
    return file.getvalue()


def blank_clip() -> bytes:
    """A tenth of a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(BLANK_RATE)
        writer.writeframes(bytes(2 * BLANK_FRAMES))
    return file.getvalue()
