"""Asks a running server held-out questions of each decoder, and writes down what a router could have known and what it should have done.

    python -m scripts.routing.outcomes --items 3000 --out scripts/routing/outcomes.jsonl.gz

Needs `espeak-ng` and the Noto Color Emoji font.  A file that has some of the items already is gone on with.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import Progress

from scripts.loopback import client, given_or_own_server, loopback_url
from scripts.measure_tiny import MAX_TOKENS, messages
from scripts.tiny.questions import is_right
from scripts.tiny.score import Item, sample_items
from scripts.tiny.world import Scene, Utterance

TRAINING_SEED = 2**30 + 5_000_000  # no training of the model and no scoring draws these
HELD_OUT_SEED = 2**30 + 6_000_000
NUM_ENTROPIES = 6  # tokens at the start of an answer
NUM_TOP = 20  # alternatives that entropy is taken over; the rest counts as one


@dataclass(frozen=True, slots=True)
class Attempt:
    """One decoder's answer."""

    right: bool
    entropies: tuple[float, ...]  # nats, of the first tokens' distributions
    gpu_seconds: float  # 0 where the server doesn't say
    usd: float
    model: str = ""  # who answered, and why
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question: what is known before it is answered, and each decoder's attempt."""

    seed: int
    slice_name: str
    task: str
    text: str
    num_images: int
    num_clips: int
    attempts: dict[str, Attempt]  # by decoder

    @classmethod
    def parse(cls, line: str) -> Outcome:
        fields = json.loads(line)
        attempts = {name: Attempt(**each | {"entropies": tuple(each["entropies"])}) for name, each in fields.pop("attempts").items()}
        return cls(**fields, attempts=attempts)


def read_outcomes(path: Path) -> list[Outcome]:
    with gzip.open(path, "rt") as file:
        return [Outcome.parse(line) for line in file]


def write_outcomes(path: Path, outcomes: Iterable[Outcome]) -> None:
    with gzip.GzipFile(path, "wb", mtime=0) as file:  # equal outcomes give equal files
        file.writelines(json.dumps(asdict(each)).encode() + b"\n" for each in sorted(outcomes, key=lambda each: each.seed))


def entropy(token: Any) -> float:
    """Of one token of the OpenAI client's logprobs, nats; what isn't among the alternatives counts as one."""
    shares = [math.exp(other.logprob) for other in token.top_logprobs]
    shares.append(max(0.0, 1 - sum(shares)))
    return -sum(share * math.log(share) for share in shares if share > 0)


async def attempt(openai: AsyncOpenAI, model: str, item: Item, conversation: list[Any]) -> Attempt:
    answer = await openai.chat.completions.create(
        model=model,
        messages=conversation,
        temperature=0,
        max_tokens=MAX_TOKENS,
        logprobs=True,
        top_logprobs=NUM_TOP,
        extra_body={"explain": True},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    said = (answer.model_extra or {})["mmserve"]
    cost = said.get("cost", {})
    return Attempt(
        right=is_right(item.question, choice.message.content or ""),
        entropies=tuple(round(entropy(token), 6) for token in choice.logprobs.content[:NUM_ENTROPIES]),
        gpu_seconds=sum(cost.get("gpu_seconds", {}).values()),
        usd=cost.get("usd", 0.0),
        model=said["route"]["model"],
        reason=said["route"]["reason"],
    )


async def ask_each(
    openai: AsyncOpenAI, items: Sequence[Item], models: Sequence[str], concurrency: int, on_outcome: Callable[[Outcome], None]
) -> None:
    """All items of each model, greedily; what goes wrong ends it."""
    gate = asyncio.Semaphore(concurrency)

    async def ask(item: Item) -> None:
        async with gate:
            conversation = messages(item)  # here, one at a time: espeak-ng knows only one thread
            attempts = {model: await attempt(openai, model, item, conversation) for model in models}
            kinds = [type(part) for part in item.parts]
            on_outcome(
                Outcome(
                    item.seed, item.slice_name, item.question.task, item.question.text, kinds.count(Scene), kinds.count(Utterance), attempts
                )
            )

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(ask(item))


async def collect(options: argparse.Namespace, console: Console) -> None:
    known = {each.seed: each for each in (read_outcomes(options.out) if options.out.exists() else [])}
    items = [item for item in sample_items(options.items, options.first_seed) if item.seed not in known]
    with tempfile.TemporaryDirectory(prefix="mmserve-routing-") as scratch, Progress(console=console) as progress:
        task = progress.add_task("questions", total=len(items))

        def keep(outcome: Outcome) -> None:
            known[outcome.seed] = outcome
            progress.advance(task)
            if len(known) % 100 == 0:
                write_outcomes(options.out, known.values())

        async with given_or_own_server(options.url, Path(scratch)) as url, client(url) as openai:
            await ask_each(openai, items, ("small", "large"), options.concurrency, keep)
    write_outcomes(options.out, known.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", type=loopback_url, help="a running server on this machine; by default one is started")
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--first-seed", type=int, default=TRAINING_SEED)
    parser.add_argument("--concurrency", type=int, default=6)
    options = parser.parse_args()
    asyncio.run(collect(options, Console(stderr=True, width=100)))
    outcomes = read_outcomes(options.out)
    rights = [(each.attempts["small"].right, each.attempts["large"].right) for each in outcomes]
    print(
        json.dumps(
            {
                "script": "routing.outcomes",
                "items": len(outcomes),
                "both_right": rights.count((True, True)),
                "only_small_right": rights.count((True, False)),
                "only_large_right": rights.count((False, True)),
                "both_wrong": rights.count((False, False)),
            }
        )
    )


if __name__ == "__main__":
    main()
