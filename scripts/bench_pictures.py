"""What pictures cost at the full size of CLIP ViT-L/14-336: sixteen of them at once, the same again, then one new picture sixteen times.

    python -m scripts.bench_pictures [--requests 16] [--dtype bfloat16] [--work-dir DIR]

Writes a LLaVA-1.5 directory with random weights (the decoder behind the tower is small, so that pictures are what is measured) and starts
a server of its own over it.  Exit status 1 if something was encoded that should not have been.  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from scripts.loopback import client, image_part, png, scrape, server, text_part, user
from scripts.random_model import REAL, write_llava

ANSWER_TOKENS = 16
DECODER = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip


def picture(seed: int) -> bytes:
    """A PNG of 640 x 480 in coloured squares."""
    squares = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return png(squares.repeat(80, axis=0).repeat(80, axis=1))


async def ask(openai: AsyncOpenAI, data: bytes) -> str:
    """Where the picture's rows came from."""
    answer = await openai.chat.completions.create(
        model="small", messages=user(image_part(data), text_part("What is in the picture?")), temperature=0, max_tokens=ANSWER_TOKENS,
        extra_body={"explain": True, "ignore_eos": True},
    )  # fmt: skip
    source: str = answer.model_dump()["mmserve"]["media"][0]["source"]
    return source


async def run_pass(openai: AsyncOpenAI, url: str, pictures: Sequence[bytes]) -> dict[str, Any]:
    """All at once."""
    before = await scrape(url)
    started = time.perf_counter()
    sources = await asyncio.gather(*(ask(openai, data) for data in pictures))
    seconds = time.perf_counter() - started
    after = await scrape(url)

    def grown(name: str) -> float:
        return after.total(name, {"modality": "image"}) - before.total(name, {"modality": "image"})

    return {
        "seconds": round(seconds, 2),
        "encoded": int(grown("encoder_items_per_batch_sum")),
        "tower_seconds": round(grown("encoder_forward_seconds_sum"), 2),
        "sources": dict(Counter(sources)),
    }


async def bench(num_requests: int, dtype: str, directory: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Figures by pass."""
    with console.status("writing the model"):
        write_llava(directory / "llava", DECODER, REAL.vision, torch.device("cpu"))
    distinct = [picture(seed) for seed in range(num_requests)]
    passes = {"distinct": distinct, "again": distinct, "one_picture": [picture(num_requests)] * num_requests}
    figures = {}
    async with server(directory, "--small", str(directory / "llava"), "--dtype", dtype) as url, client(url) as openai:
        for name, pictures in passes.items():
            with console.status(name):
                figures[name] = await run_pass(openai, url, pictures)
    return figures


def broken_promises(num_requests: int, figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    expected = {"distinct": num_requests, "again": 0, "one_picture": 1}
    return [
        f"{name}: {figures[name]['encoded']} encoded, not {count}" for name, count in expected.items() if figures[name]["encoded"] != count
    ]


def _table(num_requests: int, figures: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=f"{num_requests} requests at once, {ANSWER_TOKENS} tokens each")
    for column in ("pass", "seconds", "encoded", "seconds in the tower", "rows came from"):
        table.add_column(column)
    for name, row in figures.items():
        table.add_row(name, *(str(value) for value in row.values()))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--dtype", default="auto", help="of weights and rows: bfloat16 is four times as fast on CPUs that multiply it")
    parser.add_argument("--work-dir", type=Path, help="where the model is written, 630 MB; a temporary directory by default")
    options = parser.parse_args()
    console = Console(width=120, stderr=True)
    with tempfile.TemporaryDirectory(prefix="mmserve-pictures-", dir=options.work_dir) as scratch:
        figures = asyncio.run(bench(options.requests, options.dtype, Path(scratch), console))
    console.print(_table(options.requests, figures))
    broken = broken_promises(options.requests, figures)
    for promise in broken:
        console.print(promise, style="bold red")
    print(json.dumps({"script": "bench_pictures", "requests": options.requests, "dtype": options.dtype, **figures, "not_kept": broken}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
