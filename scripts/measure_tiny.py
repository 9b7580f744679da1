"""Asks the bundled model held-out questions through a running server, and prints how often each decoder is right, by slice and task.

    python -m scripts.measure_tiny                     starts a server of its own
    python -m scripts.measure_tiny --url http://127.0.0.1:8000 --items 1500 --concurrency 16

Needs `espeak-ng` and the Noto Color Emoji font, as training does.  GA: share of right answers.  HOR: objects named that aren't there, of
all objects named.  COV: objects named of all that are there, where the question asks for all.  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mmserve.evals.intervals import wilson
from scripts.loopback import audio_part, client, given_or_own_server, image_part, loopback_url, png, text_part, user
from scripts.tiny.clips import make_clip
from scripts.tiny.questions import affirmed_kinds
from scripts.tiny.render import render
from scripts.tiny.score import Item, Verdict, sample_items
from scripts.tiny.world import SAMPLE_RATE, Scene, Utterance

FIRST_SEED = 2**30 + 1_300_000  # held out from training, and apart from the items other scores use
MAX_TOKENS = 80
MEDIA_SLICES = ("image", "images", "audio", "image+audio")
ASKS_FOR_ALL = ("name", "describe", "name both", "spoken name")


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over the verdicts of one group."""

    items: int
    right: int
    mentions: int  # objects named as being there
    false_mentions: int
    found: int  # of `present`, those named
    present: int  # objects there, over the items that ask for all of them

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Tally:
        named = [(affirmed_kinds(v.reply), v) for v in verdicts if v.item.slice_name in MEDIA_SLICES]
        asked = [(kinds, v.item.kinds if v.item.question.nth is None else _kinds_of_nth(v.item)) for kinds, v in named if _asks_for_all(v)]
        return cls(
            items=len(verdicts),
            right=sum(v.is_right for v in verdicts),
            mentions=sum(len(kinds) for kinds, _ in named),
            false_mentions=sum(len(kinds - v.item.kinds) for kinds, v in named),
            found=sum(len(kinds & there) for kinds, there in asked),
            present=sum(len(there) for _, there in asked),
        )

    def figures(self) -> dict[str, float | None]:
        return {
            "items": self.items,
            "accuracy": _share(self.right, self.items),
            "accuracy_lower_95": bound(self.right, self.items, -1),
            "hallucinated_object_rate": _share(self.false_mentions, self.mentions),
            "hallucinated_object_rate_upper_95": bound(self.false_mentions, self.mentions, +1),
            "object_mentions": self.mentions,
            "coverage": _share(self.found, self.present),
        }


def bound(count: int, total: int, side: int) -> float:
    return round(wilson(count / total if total else 0.0, total, side), 4)


def _share(count: int, total: int) -> float | None:
    return round(count / total, 4) if total else None


def _asks_for_all(verdict: Verdict) -> bool:
    return verdict.item.question.task in ASKS_FOR_ALL


def _kinds_of_nth(item: Item) -> frozenset[str]:
    scenes = [part for part in item.parts if isinstance(part, Scene)]
    assert item.question.nth is not None
    return frozenset(scenes[item.question.nth].kinds)


# --- asking ------------------------------------------------------------------------------------------------------------------


def messages(item: Item) -> list[Any]:
    """The conversation as the OpenAI client sends it.  CPU-bound: draws, speaks and compresses."""
    parts = []
    for index, part in enumerate(item.parts):
        if isinstance(part, Scene):
            worn = random.Random(item.seed + index).random() < 0.4  # light, blur, JPEG, another size
            parts.append(image_part(png(render(part, augment=worn).image)))
        elif isinstance(part, Utterance):
            parts.append(audio_part(wav(make_clip(part, random.Random(item.seed), held_out=True).waveform)))
        elif part:
            parts.append(text_part(part))
    return user(*parts)


def wav(waveform: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.clip(waveform, -1, 1), SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


async def ask_all(
    openai: AsyncOpenAI, model: str, items: Sequence[Item], concurrency: int, on_answer: Callable[[], None]
) -> tuple[list[Verdict], int]:
    """Greedy answers in the order of `items`, and how many requests failed; a failed one counts as wrong."""
    gate = asyncio.Semaphore(concurrency)
    num_failed = 0

    async def ask(item: Item) -> Verdict:
        nonlocal num_failed
        async with gate:
            conversation = messages(item)  # here, one at a time: espeak-ng knows only one thread
            try:
                answer = await openai.chat.completions.create(model=model, messages=conversation, temperature=0, max_tokens=MAX_TOKENS)
                reply = answer.choices[0].message.content or ""
            except Exception as error:
                num_failed += 1
                reply = f"({type(error).__name__})"
            on_answer()
            return Verdict(item, reply)

    return list(await asyncio.gather(*(ask(item) for item in items))), num_failed


# --- tables ------------------------------------------------------------------------------------------------------------------


def grouped(verdicts: Sequence[Verdict]) -> dict[str, Tally]:
    """By slice, by "slice / task", and over all media slices."""
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.item.slice_name].append(verdict)
        groups[f"{verdict.item.slice_name} / {verdict.item.question.task}"].append(verdict)
        if verdict.item.slice_name in MEDIA_SLICES:
            groups["all media"].append(verdict)
    return {name: Tally.of(some) for name, some in sorted(groups.items())}


def macro_accuracy(tallies: dict[str, Tally]) -> float | None:
    """GA as the SLO means it: the mean over the media slices, each weighing the same."""
    shares = [tallies[name].right / tallies[name].items for name in MEDIA_SLICES if name in tallies]
    return round(sum(shares) / len(shares), 4) if shares else None


def table(title: str, tallies: dict[str, Tally]) -> Table:
    shown = Table(title=title)
    shown.add_column("slice / task")
    for column in ("items", "GA", ">= (95 %)", "HOR", "<= (95 %)", "mentions", "COV"):
        shown.add_column(column, justify="right")
    for name, tally in tallies.items():
        f = tally.figures()
        has_objects = tally.mentions > 0
        shown.add_row(
            name, f"{tally.items}", _shown(f["accuracy"]), _shown(f["accuracy_lower_95"]), _shown(f["hallucinated_object_rate"]),
            _shown(f["hallucinated_object_rate_upper_95"] if has_objects else None), f"{tally.mentions}", _shown(f["coverage"]),
            style=None if "/" in name else "bold",
        )  # fmt: skip
    return shown


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    items = sample_items(options.items, FIRST_SEED)
    report: dict[str, Any] = {"script": "measure_tiny", "items": len(items), "concurrency": options.concurrency, "models": {}}
    with tempfile.TemporaryDirectory(prefix="mmserve-measure-") as scratch:
        async with given_or_own_server(options.url, Path(scratch)) as url, client(url) as openai:
            for model in options.models:
                with Progress(console=console) as progress:
                    task = progress.add_task(model, total=len(items))
                    started = time.monotonic()
                    verdicts, num_failed = await ask_all(openai, model, items, options.concurrency, partial(progress.advance, task))
                    seconds = time.monotonic() - started
                tallies = grouped(verdicts)
                console.print(table(f"{model}: {len(items)} items in {seconds:.0f} s, {num_failed} failed requests", tallies))
                for verdict in [v for v in verdicts if not v.is_right][: options.show_wrong]:
                    question = verdict.item.question
                    line = f"{verdict.item.slice_name}: {question.text!r} -> {verdict.reply!r}, right is {question.answer!r}"
                    console.print(line, highlight=False, markup=False)
                report["models"][model] = {
                    "seconds": round(seconds, 1),
                    "failed_requests": num_failed,
                    "accuracy_macro": macro_accuracy(tallies),
                    "groups": {name: tally.figures() for name, tally in tallies.items()},
                }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", type=loopback_url, help="a running server on this machine; by default one is started")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=["small", "large"], choices=["small", "large", "auto"])
    parser.add_argument("--show-wrong", type=int, default=20, metavar="N", help="print the first N wrong answers")
    console = Console(width=120)
    report = asyncio.run(measure(parser.parse_args(), console))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
