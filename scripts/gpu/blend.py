"""Requests of every kind at once, through `mmserve.Engine` and its processes, on a model directory with random weights."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image as Picture

from mmserve import Audio, Config, Engine, Image, SamplingParams
from mmserve.config import ModelConfig, SchedulerConfig, StorageConfig
from mmserve.request import Part

KINDS = ("text", "text", "text", "text", "image", "image", "audio", "image and audio")


@dataclass(frozen=True)
class Blend:
    num_requests: int
    num_clients: int
    text_tokens: int  # of every prompt, beside its media; a byte is a token here
    answer_tokens: int
    picture_side: int  # pixels
    clip_s: float
    gpu_memory_utilization: float = 0.7  # the encoders share the GPU


@dataclass(frozen=True, slots=True)
class Timed:
    kind: str
    ttft_s: float
    num_tokens: int


def run(directory: Path, data_dir: Path, device: str, blend: Blend) -> dict[str, object]:
    """A closed loop of clients; every answer has `answer_tokens` tokens.  No picture and no clip comes twice."""
    config = Config(
        model=ModelConfig(model=directory, device=device, dtype="bfloat16" if device == "cuda" else "float32"),
        scheduler=SchedulerConfig(max_num_seqs=max(blend.num_clients, 8), gpu_memory_utilization=blend.gpu_memory_utilization),
        storage=StorageConfig(data_dir=data_dir, embedding_disk_bytes=0),
    )
    prompts = [(KINDS[i % len(KINDS)], _parts(KINDS[i % len(KINDS)], i, blend)) for i in range(blend.num_requests)]
    started = time.perf_counter()
    with Engine(config) as engine, ThreadPoolExecutor(blend.num_clients) as clients:
        start_s = time.perf_counter() - started
        started = time.perf_counter()
        timed = list(clients.map(lambda prompt: _ask(engine, prompt[0], prompt[1], blend), prompts))
        total_s = time.perf_counter() - started
    return {
        "start_s": start_s,
        "requests_per_s": blend.num_requests / total_s,
        "tokens_per_s": sum(each.num_tokens for each in timed) / total_s,
        "ttft_ms_p50": {
            kind: 1e3 * float(np.median([each.ttft_s for each in timed if each.kind == kind])) for kind in dict.fromkeys(KINDS)
        },
    }


def _ask(engine: Engine, kind: str, parts: Sequence[Part], blend: Blend) -> Timed:
    sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=blend.answer_tokens, ignore_eos=True)
    started = time.perf_counter()
    first_s, count = 0.0, 0
    for delta in engine.stream(parts, sampling):
        if delta.token_ids and not count:
            first_s = time.perf_counter() - started
        count += len(delta.token_ids)
    if count != blend.answer_tokens:
        raise RuntimeError(f"an answer of {count} tokens, {blend.answer_tokens} were asked for")
    return Timed(kind, first_s, count)


def _parts(kind: str, seed: int, blend: Blend) -> list[Part]:
    rng = np.random.default_rng(seed)
    parts: list[Part] = ["".join(random.Random(seed).choices("abcdefghij ", k=blend.text_tokens))]
    if "image" in kind:
        pixels = rng.integers(0, 256, (blend.picture_side, blend.picture_side, 3), np.uint8)
        data = io.BytesIO()
        Picture.fromarray(pixels).save(data, "JPEG")
        parts.append(Image(data.getvalue()))
    if "audio" in kind:
        data = io.BytesIO()
        soundfile.write(data, 0.1 * rng.standard_normal(int(16_000 * blend.clip_s)), 16_000, format="WAV")
        parts.append(Audio(data.getvalue()))
    return parts
