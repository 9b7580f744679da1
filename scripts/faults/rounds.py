"""Rounds of a load with a kill in it: every answer beside that of an undisturbed server, and what must hold once it is quiet again."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from scripts.faults.kills import Attack, Kind, Progress, Strike, needs
from scripts.faults.mixed_load import Request, mixed_requests
from scripts.faults.outside import POLL_S, QUIET_S, Baseline, Readiness, ledger_faults, watched_readiness
from scripts.faults.strict_client import Answer, BrokenProtocol, StrictClient
from scripts.loopback import Running, scrape

FIRST_SEED = 2**30
BACK_S = 10.0  # a killed worker is ready again
FLIP_S = 1.0  # readiness says that one is missing
NOTICE_S = 5.0  # beyond the time a step may take, for a worker that hangs
STEP_S = 1.0  # what a step of the bundled model may take on a busy machine
QUIET = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")  # nothing of it is left when everybody has gone
Outcome = Answer | BaseException


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one.  `off` says in words what should not be."""

    index: int
    strikes: list[Strike]
    num_complete: int
    num_identical: int
    pauses_s: list[float]  # each stream's longest
    pauses_of_others_s: list[float]  # the same of streams that have nothing to do with what was killed
    flip_s: float | None  # from the first strike until readiness said so
    back_s: float | None  # from the last strike until it was ready again
    off: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    kind: Kind
    num_streams: int
    num_rounds: int
    signal: signal.Signals
    patience: float  # times which everything that has a limit may take longer: a busy machine

    def requests(self, index: int) -> list[Request]:
        """Of round `index`; -1 is the one before anything is killed."""
        seed = FIRST_SEED + (index + 1 if self.kind.fresh_media else 0)
        return mixed_requests(self.num_streams, seed, self.kind.picture_size)


async def undisturbed(client: StrictClient, requests: Sequence[Request]) -> list[Answer]:
    """What each is answered alone.  Raises BrokenProtocol if one is not."""
    answers = []
    for request in requests:
        answer = await client.ask(request.body)
        if answer.code is not None:
            raise BrokenProtocol(f"{request.name} failed on an undisturbed server: {answer.status} {answer.code}")
        answers.append(answer)
    return answers


async def ask_all(client: StrictClient, requests: Sequence[Request], progress: Progress) -> list[Outcome]:
    """All at once; exceptions in the place of answers that never came."""

    async def ask(request: Request) -> Answer:
        return await client.ask(request.body, lambda: progress.note(request.name))

    return list(await asyncio.gather(*map(ask, requests), return_exceptions=True))


async def play(running: Running, plan: Plan, expected: Callable[[int], Sequence[Answer]], on_round: Callable[[Round], None]) -> list[Round]:
    """All rounds of a plan against a server that lives through them."""
    pid, rounds = running.process.pid, []
    async with StrictClient(running.url) as client, watched_readiness(running.url) as readiness:
        await ask_all(client, plan.requests(-1), Progress())  # pools, caches and buffers have the size that they need
        baseline = Baseline(pid)
        for index in range(plan.num_rounds):
            attack = Attack(pid, index, random.Random(FIRST_SEED + index), plan.signal, plan.requests(index))
            before = await scrape(running.url)
            outcomes, off = await _under_attack(client, plan.kind, attack)
            if not await readiness.until_ready(6 * BACK_S * plan.patience):
                off.append("not ready again")
            after = await scrape(running.url)
            off += differences(attack.requests, outcomes, expected(index))
            off += await ledger_faults(running.data_dir, [o for o in outcomes if isinstance(o, Answer)])
            off += await baseline.faults()
            off += await held(running.url)
            restarts = after.total("worker_restarts_total") - before.total("worker_restarts_total")
            if plan.kind.is_worker and restarts != len(attack.strikes):
                off.append(f"worker_restarts counted {restarts:g} of {len(attack.strikes)}")
            if plan.kind.carries_streams and not after.total("stream_recoveries_total") > before.total("stream_recoveries_total"):
                off.append("stream_recoveries counted nothing")
            rounds.append(_report(plan, attack, outcomes, expected(index), readiness, off))
            on_round(rounds[-1])
    return rounds


async def _under_attack(client: StrictClient, kind: Kind, attack: Attack) -> tuple[list[Outcome], list[str]]:
    """The outcomes, and what went wrong with the attack itself."""
    asking = asyncio.create_task(ask_all(client, attack.requests, attack.progress))

    async def strike() -> None:
        await kind.strike(attack)

    striking = asyncio.create_task(strike())
    await asyncio.wait({asking, striking}, return_when=asyncio.FIRST_COMPLETED)
    if striking.done():
        striking.result()
    outcomes = await asking
    if striking.done():
        return outcomes, []
    striking.cancel()
    await asyncio.gather(striking, return_exceptions=True)
    return outcomes, ["the streams were over before the kill: nothing was tried"]


async def held(url: str, api_key: str | None = None, timeout_s: float = QUIET_S) -> list[str]:
    """What the server still holds for requests, after `timeout_s` of quiet at most."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        reading = await scrape(url, api_key)
        left = {name: value for name in QUIET if (value := reading.total(name))}
        if not left or time.monotonic() > deadline_s:
            return [f"{name} is {value:g}" for name, value in left.items()]
        await asyncio.sleep(POLL_S)


def differences(requests: Sequence[Request], outcomes: Sequence[Outcome], expected: Sequence[Answer]) -> list[str]:
    """One line for each request that did not end as it should, with the first place where the texts part."""
    return [
        f"{request.name}: {difference}"
        for request, outcome, answer in zip(requests, outcomes, expected, strict=True)
        if (difference := how_it_differs(outcome, answer)) is not None
    ]


def how_it_differs(outcome: Outcome, expected: Answer) -> str | None:
    if isinstance(outcome, BrokenProtocol | aiohttp.ClientError | TimeoutError):
        return f"{type(outcome).__name__} {outcome}"
    if isinstance(outcome, BaseException):
        raise outcome  # ours
    if outcome.code is not None:
        return f"failed with {outcome.status} {outcome.code}"
    if outcome.said == expected.said:
        return None
    if outcome.finish_reasons != expected.finish_reasons:
        return f"ended with {outcome.finish_reasons}, undisturbed with {expected.finish_reasons}"
    got, wanted = next((a, b) for a, b in zip(outcome.texts, expected.texts, strict=True) if a != b)
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return f"differs at character {at}: {got[at : at + 24]!r}, undisturbed {wanted[at : at + 24]!r}"


def _report(
    plan: Plan, attack: Attack, outcomes: Sequence[Outcome], expected: Sequence[Answer], readiness: Readiness, off: list[str]
) -> Round:
    answers = [outcome if isinstance(outcome, Answer) and outcome.code is None else None for outcome in outcomes]
    streams = [(r, a) for r, a in zip(attack.requests, answers, strict=True) if a is not None and r.body["stream"]]
    flip_s = back_s = None
    if attack.strikes and plan.kind.is_worker:
        flip_s = readiness.since(attack.strikes[0].at_s, is_ready=False)
        back_s = readiness.since(attack.strikes[-1].at_s, is_ready=True)
        off = [*off, *_late(plan, flip_s, back_s)]
    return Round(
        attack.index,
        attack.strikes,
        num_complete=sum(answer is not None for answer in answers),
        num_identical=sum(answer is not None and answer.said == e.said for answer, e in zip(answers, expected, strict=True)),
        pauses_s=[answer.longest_pause_s for _, answer in streams],
        pauses_of_others_s=[
            answer.longest_pause_s
            for request, answer in streams
            if attack.strikes and not any(needs(request, strike.role) for strike in attack.strikes)
        ],
        flip_s=flip_s,
        back_s=back_s,
        off=off,
    )


def _late(plan: Plan, flip_s: float | None, back_s: float | None) -> list[str]:
    noticed_s = 0.0 if plan.signal is signal.SIGKILL else NOTICE_S + STEP_S
    late = []
    if flip_s is None or flip_s > (noticed_s + FLIP_S) * plan.patience:
        late.append(f"readiness flipped after {flip_s} s")
    if back_s is not None and back_s > (noticed_s + BACK_S) * plan.patience:
        late.append(f"ready again after {back_s:.1f} s")
    return late


def figures(rounds: Sequence[Round], num_streams: int) -> Mapping[str, object]:
    """The sum of them, for the JSON line."""
    pauses_s = [pause for one in rounds for pause in one.pauses_s]
    others_s = [pause for one in rounds for pause in one.pauses_of_others_s]
    flips_s, backs_s = [r.flip_s for r in rounds if r.flip_s is not None], [r.back_s for r in rounds if r.back_s is not None]
    return {
        "streams": len(rounds) * num_streams,
        "complete": sum(one.num_complete for one in rounds),
        "identical": sum(one.num_identical for one in rounds),
        "strikes": sum(len(one.strikes) for one in rounds),
        "longest_pause_s": round(max(pauses_s, default=0.0), 2),
        "pause_s_p50": round(statistics.median(pauses_s), 3) if pauses_s else None,
        "longest_pause_of_others_s": round(max(others_s), 2) if others_s else None,
        "not_ready_after_s_worst": round(max(flips_s), 2) if flips_s else None,
        "ready_again_after_s_worst": round(max(backs_s), 2) if backs_s else None,
        "off": [f"round {one.index}: {line}" for one in rounds for line in one.off],
    }
