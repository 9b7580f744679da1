"""How often the guardrail finds an object that isn't there, and how often it finds one that is: precision and recall, by model.

    python -m scripts.measure_guardrail                 200 answers of each decoder about held-out pictures
    python -m scripts.measure_guardrail --planted 0 --temperature 1.8       what a model makes up by itself when it is hot

An engine in this process answers questions about one picture or two.  Into half of its answers one object is written that none of the
pictures shows, often one that looks like what they do show; then each answer is held against its pictures as a request's would be.  What
the model itself got wrong counts, too.  Needs the Noto Color Emoji font.  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from mmserve.config import from_mapping
from mmserve.engine import AsyncEngine
from mmserve.evals.intervals import wilson
from mmserve.grounding.verdict import Verdict
from mmserve.media import MediaItem, MediaKind
from mmserve.request import ChatRequest, Message, SamplingParams
from scripts.loopback import png
from scripts.tiny.questions import DESCRIBE, LOOKALIKES, NAME, NAME_BOTH, affirmed_kinds
from scripts.tiny.render import render
from scripts.tiny.smalltalk import article
from scripts.tiny.world import KINDS, NUMBERS, PLURALS, Scene, sample_scene

FIRST_SEED = 2**30 + 4_000_000  # no training and no other scoring draws these


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer as it was checked, and what is wrong with it."""

    text: str
    false_kinds: frozenset[str]  # that it names and no picture shows
    true_kinds: frozenset[str]  # that it names rightly
    is_planted: bool
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Share:
    count: int
    total: int

    @property
    def value(self) -> float | None:
        return round(self.count / self.total, 4) if self.total else None

    @property
    def lower(self) -> float:
        """One-sided 95 % Wilson bound."""
        return round(wilson(self.count / self.total if self.total else 0.0, self.total, -1), 4)


# --- answers, true and less so -----------------------------------------------------------------------------------------------


def absent_kind(rng: random.Random, scenes: Sequence[Scene]) -> str:
    """Half of the time one that looks like what is there."""
    there = {kind for scene in scenes for kind in scene.kinds}
    alike = [kind for group in LOOKALIKES if there & set(group) for kind in group if kind not in there]
    return rng.choice(alike) if alike and rng.random() < 0.5 else rng.choice([kind for kind in KINDS if kind not in there])


def plant(rng: random.Random, text: str, kind: str) -> str:
    """The answer with `kind` in it as if it were there: in its first sentence, in one of its own, or in the place of what is there."""
    singular, plural = article(kind), f"{rng.choice(NUMBERS[1:3])} {PLURALS[kind]}"
    said = rng.choice((singular, plural))
    first, stop, rest = text.partition(".")
    named = sorted(affirmed_kinds(first))
    way = rng.choice(("list", "sentence", "swap"))
    if way == "swap" and named:
        words = [PLURALS[kind] if word == PLURALS[named[0]] else kind if word == named[0] else word for word in first.split()]
        return " ".join(words) + stop + rest
    if way == "list" and named:
        return f"{first} and {said}{stop}{rest}"
    return f"{text} There {'is' if said == singular else 'are'} also {said}."


async def ask(engine: AsyncEngine, model: str, seed: int, temperature: float, is_planted: bool) -> Sample:
    rng = random.Random(seed)
    scenes = [sample_scene(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    question = rng.choice(NAME_BOTH if len(scenes) > 1 else rng.choice((NAME, DESCRIBE)))
    pictures = [MediaItem(MediaKind.IMAGE, png(render(scene, augment=rng.random() < 0.4).image)) for scene in scenes]
    request = ChatRequest(
        (Message("user", (*pictures, question)),), SamplingParams(temperature=temperature, seed=seed, max_tokens=80), model=model
    )
    active = await engine._admit(request)
    text = "".join([delta.text async for delta in active.generation])
    if is_planted:
        text = plant(rng, text, absent_kind(rng, scenes))
    verdicts = await engine.guardrail.judge(active, [text])
    assert verdicts is not None, "the pictures are there"
    named, there = affirmed_kinds(text), {kind for scene in scenes for kind in scene.kinds}
    return Sample(text, frozenset(named - there), frozenset(named & there), is_planted, verdicts[0])


# --- figures -----------------------------------------------------------------------------------------------------------------


def figures(samples: Sequence[Sample]) -> dict[str, Share]:
    """Of answers: one is false if it names anything that isn't there.  Of objects: each that an answer names, once."""
    flagged = [sample for sample in samples if sample.verdict.unsupported]
    false = [sample for sample in samples if sample.false_kinds]
    found = sum(bool(sample.verdict.unsupported) for sample in false)
    pairs = [(kind, sample) for sample in samples for kind in sample.verdict.unsupported]
    right = sum(kind in sample.false_kinds for kind, sample in pairs)
    return {
        "answer_precision": Share(found, len(flagged)),
        "answer_recall": Share(found, len(false)),
        "object_precision": Share(right, len(pairs)),
        "object_recall": Share(right, sum(len(sample.false_kinds) for sample in samples)),
        "true_objects_let_through": Share(
            sum(kind not in sample.verdict.unsupported for sample in samples for kind in sample.true_kinds),
            sum(len(sample.true_kinds) for sample in samples),
        ),
    }


async def measure(options: argparse.Namespace, console: Console) -> dict[str, object]:
    report: dict[str, object] = {"script": "measure_guardrail", "answers": options.answers, "models": {}}
    with tempfile.TemporaryDirectory(prefix="mmserve-measure-") as scratch:
        async with AsyncEngine(from_mapping({"data-dir": scratch, "grounding-sample": 0})) as engine:
            for model in options.models:
                samples = [
                    await ask(
                        engine, model, FIRST_SEED + i, options.temperature, is_planted=(i + 1) * options.planted % 1 < options.planted
                    )
                    for i in track(range(options.answers), description=model, console=console)
                ]
                shares = figures(samples)
                table = Table(title=f"{model}: {sum(s.is_planted for s in samples)} of {len(samples)} answers with a planted object")
                for column in ("", "share", "of", ">= (95 %)"):
                    table.add_column(column)
                for name, share in shares.items():
                    table.add_row(name, str(share.value), str(share.total), str(share.lower))
                console.print(table)
                for sample in samples:
                    if set(sample.verdict.unsupported) != sample.false_kinds:
                        wrong = f"false {sorted(sample.false_kinds)}, flagged {list(sample.verdict.unsupported)}: {sample.text}"
                        console.print(wrong, highlight=False, markup=False)
                own = sum(bool(sample.false_kinds) for sample in samples if not sample.is_planted)
                models = report["models"]
                assert isinstance(models, dict)
                models[model] = {"false_of_its_own": own} | {
                    name: {"value": share.value, "of": share.total, "lower_95": share.lower} for name, share in shares.items()
                }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--planted", type=float, default=0.5, help="share of the answers into which an object is written")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--models", nargs="+", default=["small", "large"], choices=["small", "large"])
    report = asyncio.run(measure(parser.parse_args(), Console(width=120)))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
