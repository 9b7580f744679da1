"""Shows what it gains to compute a prompt while its media still encode: time to first token of a 30 s clip, and of a picture with it.

    python -m scripts.show_overlap [--model large] [--rounds 7]

Each round asks about new media, once as the server does and once by an engine that waits until all windows of a request have landed.
Both must draw the same tokens.  Ends in one JSON line; exit status 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mmserve import AsyncEngine, ChatRequest, Config, Message, SamplingParams
from mmserve.config import ModelConfig, StorageConfig
from mmserve.encoders.embedding_cache import EmbeddingCache
from mmserve.media import MediaItem, MediaKind
from mmserve.shared_buffer import BufferSlice
from scripts.loopback import png, quantile
from scripts.tiny.sounds import make_sound

SAMPLE_RATE = 16_000
SOUNDS = ("bell", "siren", "whistle", "drum", "rain", "buzzer")
ANSWER_TOKENS = 16


class Patience:
    """While it is on, rows of a request's media are there when those of all its media are."""

    def __init__(self) -> None:
        self.keys: frozenset[bytes] = frozenset()
        self._lookup: Callable[[EmbeddingCache, bytes], BufferSlice | None] = EmbeddingCache.lookup

    def install(self) -> None:
        """For engines that are started from here on."""

        def lookup(cache: EmbeddingCache, key: bytes) -> BufferSlice | None:
            if key in self.keys and any(self._lookup(cache, each) is None for each in self.keys):
                return None
            return self._lookup(cache, key)

        EmbeddingCache.lookup = lookup  # type: ignore[method-assign]


def clip(seed: int, seconds: float) -> MediaItem:
    """Different sounds, one after the other, until it is long enough."""
    rng = np.random.default_rng(seed)
    parts = [make_sound(SOUNDS[i % len(SOUNDS)], rng) for i in range(60)]
    samples = np.concatenate(parts)[: int(seconds * SAMPLE_RATE)]
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return MediaItem(MediaKind.AUDIO, file.getvalue())


def picture(seed: int) -> MediaItem:
    return MediaItem(MediaKind.IMAGE, png(np.random.default_rng(seed).integers(0, 256, (336, 336, 3), np.uint8)))


async def ask(engine: AsyncEngine, model: str, media: tuple[MediaItem, ...], salt: str, patience: Patience, *, patient: bool) -> Any:
    """Seconds to the first token, and all token ids.  Requests of different salts find nothing of one another's in any cache."""
    items = [await engine._media.prepare(item, model, salt.encode()) for item in media]
    patience.keys = frozenset(window.key for item in items for window in item.windows) if patient else frozenset()
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    request = ChatRequest((Message("user", (*media, "what is it?")),), sampling, model=model, cache_salt=salt)
    began_s, first_s, ids = time.perf_counter(), 0.0, []
    async for delta in await engine.submit(request):
        first_s = first_s or time.perf_counter() - began_s
        ids += delta.token_ids
    return first_s, ids


async def show(options: argparse.Namespace, data_dir: Path) -> dict[str, Any]:
    patience = Patience()
    patience.install()
    times: defaultdict[str, list[float]] = defaultdict(list)
    num_different = 0
    config = Config(model=ModelConfig(worker_threads=1), storage=StorageConfig(data_dir=data_dir, embedding_disk_bytes=0))
    async with AsyncEngine(config) as engine:
        for i in track(range(options.rounds + 1), "rounds", disable=not sys.stderr.isatty()):
            sound, sight = clip(i, options.seconds), picture(i)
            asked = {"clip": (sound,), "picture": (sight,), "picture and clip": (sight, sound)}
            for name, media in asked.items():
                answers = []
                for patient in (False, True):
                    first_s, ids = await ask(engine, options.model, media, f"{i} {name} {patient}", patience, patient=patient)
                    answers.append(ids)
                    if i:  # the first round warms up
                        times[f"{name}, all encoded first" if patient else name].append(first_s)
                num_different += answers[0] != answers[1]
    median = {name: quantile(values, 0.5) for name, values in times.items()}
    return {
        "script": "show_overlap",
        "model": options.model,
        "clip_s": options.seconds,
        "rounds": options.rounds,
        "ttft_ms": {name: round(1e3 * seconds, 1) for name, seconds in median.items()},
        "clip_ratio": round(median["clip"] / median["clip, all encoded first"], 3),
        "both_over_longer": round(median["picture and clip"] / max(median["clip"], median["picture"]), 3),
        "different_answers": num_different,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("small", "large"), default="large")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the clip")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mmserve-overlap-") as scratch:
        report = asyncio.run(show(options, Path(scratch)))
    table = Table("media", "TTFT, ms")
    for name, ms in report["ttft_ms"].items():
        table.add_row(name, f"{ms:.1f}")
    Console().print(table)
    print(json.dumps(report))
    sys.exit(1 if report["different_answers"] else 0)


if __name__ == "__main__":
    main()
