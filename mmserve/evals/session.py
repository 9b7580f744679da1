"""One evaluation: a golden set is asked of a server, and its answers are scored, judged and probed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.evals import probes
from mmserve.evals.calibration import Label, calibrate, judge_figures
from mmserve.evals.endpoint import Endpoint, RequestFailed
from mmserve.evals.fidelity import compare_with_reference
from mmserve.evals.figures import by_slice
from mmserve.evals.gate import Bars, Decision, decide
from mmserve.evals.golden import GoldenSet, Item
from mmserve.evals.judge import Judge, judge_all, needs_judge
from mmserve.evals.probes import OrderProbe, StateProbe
from mmserve.evals.scoring import Scored, failed, score
from mmserve.grounding.vocabulary import Vocabulary

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]  # what is done, and how often; yields what counts it


@dataclass(frozen=True, slots=True)
class Settings:
    concurrency: int = 8
    max_tokens: int = 128
    states_per_slice: int = 6  # state probes; each costs four requests
    reference: Path | None = None  # a directory that transformers can run by itself
    reference_items: int = 24
    bars: Bars = Bars()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All that was found.  `order` is empty where nothing probes it; `states` is None where the server can't be asked for them."""

    golden: GoldenSet
    url: str
    model: str
    seconds: float
    answers: list[Scored]
    order: list[OrderProbe]
    states: list[StateProbe] | None
    fidelity: dict[str, Any] | None
    judging: dict[str, Any] | None  # what the judge ruled, and how far it can be trusted
    bars: Bars
    decision: Decision


async def evaluate(
    endpoint: Endpoint, golden: GoldenSet, settings: Settings, progress: Progress, judge: Judge | None = None, labels: Sequence[Label] = ()
) -> Evaluation:
    """Raises JudgeFailed if the judge can't be calibrated, FidelityError if the reference can't be run."""
    began_s = time.monotonic()
    answers, order = await _ask(endpoint, golden, settings, progress)
    judging = None
    if judge is not None:
        answers, judging = await _judge(judge, answers, labels, settings, progress)
    states = await _states(endpoint, golden, settings, progress)
    fidelity = await _fidelity(endpoint, golden, settings, progress)
    decision = decide(by_slice(answers), probes.confused_share(order) if order else None, states or (), settings.bars)
    seconds = time.monotonic() - began_s
    return Evaluation(
        golden, endpoint.url, endpoint.model or "", seconds, answers, order, states, fidelity, judging, settings.bars, decision
    )


async def _ask(endpoint: Endpoint, golden: GoldenSet, settings: Settings, progress: Progress) -> tuple[list[Scored], list[OrderProbe]]:
    """Every item once, and those that probe the order of pictures a second time with the pictures swapped."""
    clusters, vocabulary = golden.clusters(), golden.vocabulary
    probed = [item for item in golden.items if item.if_swapped]
    asked = [*golden.items, *map(probes.swapped, probed)]
    with progress("questions", len(asked)) as on_done:
        replies = await _ask_all(endpoint, asked, settings, on_done)
    straight = {item.id: reply for item, reply in zip(golden.items, replies, strict=False)}
    answers = [_scored(item, clusters[item.id], straight[item.id], vocabulary) for item in golden.items]
    order = [
        probes.order_probe(item, clusters[item.id], _text(straight[item.id]), _text(reply), vocabulary)
        for item, reply in zip(probed, replies[len(golden.items) :], strict=True)
    ]
    return answers, order


async def _ask_all(endpoint: Endpoint, items: Sequence[Item], settings: Settings, on_done: Callable[[], None]) -> list[str | RequestFailed]:
    gate = asyncio.Semaphore(settings.concurrency)

    async def ask(item: Item) -> str | RequestFailed:
        async with gate:
            try:
                return (await endpoint.ask(item.parts, max_tokens=settings.max_tokens)).text
            except RequestFailed as problem:
                return problem
            finally:
                on_done()

    return list(await asyncio.gather(*(ask(item) for item in items)))


def _scored(item: Item, cluster: str, reply: str | RequestFailed, vocabulary: Vocabulary) -> Scored:
    return failed(item, cluster, str(reply)) if isinstance(reply, RequestFailed) else score(item, cluster, reply, vocabulary)


def _text(reply: str | RequestFailed) -> str:
    return "" if isinstance(reply, RequestFailed) else reply


async def _judge(
    judge: Judge, answers: list[Scored], labels: Sequence[Label], settings: Settings, progress: Progress
) -> tuple[list[Scored], dict[str, Any]]:
    calibration = None
    if labels:
        with progress("labels", len(labels)) as on_done:
            calibration = await calibrate(judge, labels, settings.concurrency, on_done)
    with progress("open answers", sum(map(needs_judge, answers))) as on_done:
        answers = await judge_all(judge, answers, settings.concurrency, on_done)
    return answers, judge_figures(answers, calibration)


async def _states(endpoint: Endpoint, golden: GoldenSet, settings: Settings, progress: Progress) -> list[StateProbe] | None:
    items = probes.state_items(golden.items, settings.states_per_slice)
    if not items or not await probes.explains(endpoint):
        return None
    with progress("states of the caches", len(items)) as on_done:
        how = {"max_tokens": settings.max_tokens, "concurrency": settings.concurrency}
        return await probes.state_probes(endpoint, items, on_done=on_done, **how)


async def _fidelity(endpoint: Endpoint, golden: GoldenSet, settings: Settings, progress: Progress) -> dict[str, Any] | None:
    if settings.reference is None:
        return None
    with progress("beside transformers", settings.reference_items) as on_done:
        return await compare_with_reference(endpoint, golden, settings.reference, settings.reference_items, on_done)
