"""The server's greedy answers beside those of the plain transformers pipeline, which runs in a process of its own: torch stays out of here.

Only for directories that transformers can run by itself.  A model composed of parts, as the bundled one is, has no such pipeline.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from mmserve.evals.endpoint import Endpoint, RequestFailed
from mmserve.evals.golden import GoldenSet, Item, Media
from mmserve.media import MediaKind

NUM_TOKENS = 64  # the first greedy tokens, which must be equal
_REFERENCE = "mmserve.models.reference"


class FidelityError(Exception):
    """There is no reference to compare with; the message says why."""


async def compare_with_reference(
    endpoint: Endpoint, golden: GoldenSet, directory: Path, num_items: int, on_done: Callable[[], None]
) -> dict[str, Any]:
    """Over the first items of text and pictures.  Raises FidelityError."""
    if (directory / "composition.toml").exists():
        raise FidelityError(f"{directory} is a composition of parts: transformers has no pipeline for it to be compared with")
    items = [item for item in golden.items if all(media.kind is MediaKind.IMAGE for media in item.media)]
    items = items[:: max(1, len(items) // num_items)][:num_items]
    oracle = await _reference_answers(directory, items)
    differing = []
    for item, theirs in zip(items, oracle, strict=True):
        try:
            ours = (await endpoint.ask(item.parts, max_tokens=NUM_TOKENS)).text
        except RequestFailed as problem:
            ours = f"({problem})"
        if ours != theirs:
            differing.append({"id": item.id, "server": ours, "reference": theirs})
        on_done()
    return {"reference": directory.name, "items": len(items), "equal": len(items) - len(differing), "differing": differing}


async def _reference_answers(directory: Path, items: list[Item]) -> list[str]:
    prompts = [[{"image": str(p.path)} if isinstance(p, Media) else p for p in item.parts] for item in items]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", _REFERENCE, str(directory), str(NUM_TOKENS),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate(orjson.dumps(prompts))
    if process.returncode != 0:
        raise FidelityError(f"transformers can't run {directory}: {errors.decode(errors='replace').strip()[-500:]}")
    answers: list[str] = orjson.loads(output)
    return answers
