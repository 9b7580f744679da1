"""What the requests say: words, pictures and clips that are different, decodable and the same for the same seed."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import soundfile
from PIL import Image

from mmserve.bench.traffic import Modality, PlannedRequest

SAMPLE_RATE = 16_000  # Hz
LEAD_LEN = 16  # words
_SUBJECT, _LEAD = 0, 1  # independent random streams
_MODALITIES = tuple(Modality)
_WORDS = (
    "a", "and", "are", "at", "bell", "bird", "blue", "boat", "car", "cat", "corner", "dog", "does", "every", "for", "fish",
    "from", "green", "has", "here", "house", "how", "in", "is", "it", "left", "less", "many", "more", "near", "no", "not", "of",
    "on", "one", "or", "red", "right", "rocket", "sound", "star", "that", "the", "there", "this", "to", "tree", "two", "under",
    "was", "what", "where", "which", "why", "with", "word", "yellow",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Content:
    """How much each request carries and asks for.  Lengths in words: what they come to in tokens, the server's usage says."""

    input_len: int  # words
    output_len: int  # tokens at most
    image_sizes: Mapping[tuple[int, int], float]  # (width, height) in pixels -> share of the pictures
    audio_len_s: float
    ignore_eos: bool
    temperature: float
    seed: int


def request_bodies(planned: tuple[PlannedRequest, ...], content: Content, model: str) -> list[bytes]:
    """One JSON body of `/v1/chat/completions` a request."""
    parts_of: dict[tuple[Modality, int], list[dict[str, Any]]] = {}
    bodies = []
    for request in planned:
        key = (request.modality, request.subject)
        if key not in parts_of:
            parts_of[key] = _parts(request, content)
        bodies.append(_body([*_lead(request, content), *parts_of[key]], content, model))
    return bodies


def random_words(random: np.random.Generator, count: int) -> str:
    return " ".join(random.choice(_WORDS, size=count))


def random_picture(random: np.random.Generator, size: tuple[int, int]) -> bytes:
    """A JPEG of soft colours with about the bytes of a photograph; size is (width, height) in pixels."""
    coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return file.getvalue()


def random_clip(random: np.random.Generator, length_s: float) -> bytes:
    """A WAV of quiet noise, mono, 16 bits, SAMPLE_RATE."""
    file = io.BytesIO()
    noise = random.normal(0, 0.1, max(1, round(length_s * SAMPLE_RATE))).clip(-1, 1)
    soundfile.write(file, noise, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _parts(request: PlannedRequest, content: Content) -> list[dict[str, Any]]:
    """Media first, then the question: so a repeat shares its whole prompt."""
    random = np.random.default_rng([content.seed, _SUBJECT, _MODALITIES.index(request.modality), request.subject])
    parts = []
    if request.modality.has_image:
        sizes = list(content.image_sizes)
        size = sizes[random.choice(len(sizes), p=list(content.image_sizes.values()))]
        url = "data:image/jpeg;base64," + base64.b64encode(random_picture(random, size)).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    if request.modality.has_audio:
        data = base64.b64encode(random_clip(random, content.audio_len_s)).decode()
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return [*parts, _text_part(random_words(random, content.input_len))]


def _lead(request: PlannedRequest, content: Content) -> list[dict[str, Any]]:
    if request.lead is None:
        return []
    return [_text_part(random_words(np.random.default_rng([content.seed, _LEAD, request.lead]), LEAD_LEN))]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _body(parts: list[dict[str, Any]], content: Content, model: str) -> bytes:
    # Words alone go as a string: servers of text models needn't know parts.
    only_text = all(part["type"] == "text" for part in parts)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "\n".join(part["text"] for part in parts) if only_text else parts}],
        "max_tokens": content.output_len,
        "temperature": content.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return orjson.dumps(body | ({"ignore_eos": True} if content.ignore_eos else {}))
