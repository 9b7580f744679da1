"""Kills the server's processes under a real load, and compares every answer with that of a server left in peace.

    python -m scripts.chaos --kill decoder --streams 32 --rounds 20
    python -m scripts.chaos --kill decoder --signal STOP        hangs instead of dying: only its lack of progress shows it
    python -m scripts.chaos --kill nobody --streams 64          side by side, streams don't notice each other
    python -m scripts.chaos --kill main                         no process outlives it, and the next one's caches are right

Starts two servers of its own, one after the other, with the bundled model: the first is asked everything undisturbed, each request alone.
Answers must be equal to the byte, each must end once, and after each round ledger, readiness, counters, processes, descriptors, threads
and memory must be in order.  Exit status 1 if anything is off; ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.faults import death_of_main, rounds
from scripts.faults.kills import KINDS, Kind
from scripts.faults.rounds import Plan, Round
from scripts.faults.strict_client import Answer, StrictClient
from scripts.loopback import running

MAIN = "main"
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


async def oracle(plan: Plan, directory: Path, console: Console) -> dict[int, list[Answer]]:
    """What a server in peace answers, by round; -1 is what is asked before the first."""
    answers: dict[int, list[Answer]] = {}
    async with running(directory) as server, StrictClient(server.url) as client:
        for index in range(-1, plan.num_rounds):
            if plan.kind.fresh_media or not answers:
                with console.status(f"undisturbed, round {index + 1} of {plan.num_rounds}"):
                    answers[index] = await rounds.undisturbed(client, plan.requests(index))
            else:
                answers[index] = answers[-1]
    return answers


async def chaos(plan: Plan, scratch: Path, console: Console) -> dict[str, Any]:
    peace, war = scratch / "peace", scratch / "war"
    peace.mkdir()
    war.mkdir()
    answers = await oracle(plan, peace, console)

    def expected(index: int) -> Sequence[Answer]:
        return answers[index]

    def show(one: Round) -> None:
        where = ", ".join(f"{strike.role} {strike.pid}" for strike in one.strikes)
        console.print(f"round {one.index}: {where or 'nobody'}; {one.num_identical} of {plan.num_streams} identical", *one.off)

    if plan.name == MAIN:
        played = await death_of_main.play(war, plan, expected, show)
    else:
        async with running(war) as server:
            played = await rounds.play(server, plan, expected, show)
    console.print(table(played, plan.num_streams))
    report = {"script": "chaos", "kill": plan.name, "signal": plan.signal.name, **rounds.figures(played, plan.num_streams)}
    return {**report, "ok": not report["off"] and report["identical"] == report["streams"]}


def table(played: Sequence[Round], num_streams: int) -> Table:
    shown = Table(title="rounds")
    for column in (
        "round",
        "killed",
        "complete",
        "identical",
        "longest pause, s",
        "of others, s",
        "not ready after, s",
        "ready again after, s",
        "off",
    ):
        shown.add_column(column, justify="left" if column in ("killed", "off") else "right")
    for one in played:
        seconds = (max(one.pauses_s, default=None), max(one.pauses_of_others_s, default=None), one.flip_s, one.back_s)
        shown.add_row(
            str(one.index),
            "\n".join(strike.role for strike in one.strikes),
            f"{one.num_complete}/{num_streams}",
            f"{one.num_identical}/{num_streams}",
            *("" if value is None else f"{value:.2f}" for value in seconds),
            "\n".join(one.off),
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", choices=[*KINDS, MAIN], default="decoder")
    parser.add_argument("--signal", choices=SIGNALS, default="KILL", help="STOP: the worker hangs instead of dying")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times which all limits of time may take longer, on a slow or busy machine"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the servers go with us
    if options.signal == "STOP" and options.kill in (MAIN, "twice", "decode-process"):
        parser.error(f"--kill {options.kill} is about death: it takes no --signal STOP")
    kind = KINDS[options.kill] if options.kill in KINDS else Kind(KINDS["encoder"].strike, fresh_media=True)
    plan = Plan(options.kill, kind, options.streams, options.rounds, SIGNALS[options.signal], options.patience)
    with tempfile.TemporaryDirectory(prefix="mmserve-chaos-") as scratch:
        report = asyncio.run(chaos(plan, Path(scratch), Console(width=160, stderr=True)))
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
