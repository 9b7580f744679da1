"""An eight-card box under load, in virtual time: `python -m scripts.simulate --rate 60`.

The scheduler, KV books, caches, placement and admission are the real ones; cards, decode cores and time are modelled.  Prints a table,
draws a picture with `--plot FILE.png` (needs matplotlib, from the dev extra), and ends in one JSON line.

With `--image-surge` the same requests are run twice more, without the surge and without any pictures, to see what text noticed of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mmserve.config import GPU_QUEUE_WAIT_S, GPU_TPOT_TARGET_MS, SchedulerConfig
from mmserve.roofline.hardware import CARDS
from mmserve.scheduler.admission import QueueLimits
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.sim.virtual_time import run_in_virtual_time
from scripts.simulation.box import TOPOLOGIES, Box
from scripts.simulation.report import Slo, isolation, isolation_table, plot, summarize, table
from scripts.simulation.traffic import BLEND, IMAGES_ONLY, NUM_TENANTS, Request, Traffic, generate

MAX_MODEL_LEN = 8192
DEFAULTS = SchedulerConfig()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="7small+1enc")
    parser.add_argument("--card", choices=CARDS, default="a100")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second of the blend")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals, the warm-up among them")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds at the start that count for nothing")
    parser.add_argument("--burst", type=float, help="requests a second in the middle third")
    parser.add_argument(
        "--image-surge", type=float, help="this many times the pictures in the middle third: more requests, with nothing else"
    )
    parser.add_argument("--repeat-rate", type=float, default=0.2, help="share of requests about something that was there before")
    parser.add_argument("--tenants", type=int, default=NUM_TENANTS, help="whose shares of the requests are unequal (Zipf)")
    parser.add_argument("--large-share", type=float, default=0.15, help="share of requests for the large decoder, where there is one")
    parser.add_argument("--max-num-seqs", type=int, default=DEFAULTS.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, default=DEFAULTS.max_num_batched_tokens)
    parser.add_argument("--max-num-queued-reqs", type=int, default=DEFAULTS.max_num_queued_reqs)
    parser.add_argument("--max-queue-wait-s", type=float, default=GPU_QUEUE_WAIT_S)
    parser.add_argument("--tpot-target-ms", type=float, default=GPU_TPOT_TARGET_MS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser.parse_args()


def replace_args(args: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(args) | changes))


def traffic(args: argparse.Namespace) -> tuple[Traffic, ...]:
    alike = Traffic(args.rate, 0.0, args.duration, repeat_rate=args.repeat_rate, num_tenants=args.tenants)
    parts = [alike]
    third = args.duration / 3
    middle = replace(alike, start_s=third, stop_s=2 * third)
    if args.burst is not None:
        parts.append(replace(middle, rate=args.burst - args.rate))
    if args.image_surge is not None:
        extra = args.rate * BLEND["image"] * (args.image_surge - 1)
        parts.append(replace(middle, rate=extra, mix=tuple(IMAGES_ONLY.items())))
    return tuple(parts)


async def simulate(args: argparse.Namespace, requests: list[Request]) -> tuple[Box, float]:
    """The box when all is over, and when that was."""
    limits = SchedulerLimits(MAX_MODEL_LEN, args.max_num_seqs, args.max_num_batched_tokens, args.tpot_target_ms)
    queue = QueueLimits(args.max_num_queued_reqs, args.max_queue_wait_s)
    box = Box(TOPOLOGIES[args.topology], CARDS[args.card], limits, queue, large_share=args.large_share)
    await box.run(requests)
    return box, asyncio.get_running_loop().time()


def main() -> None:
    args = parse_args()
    console = Console()
    began_s = time.perf_counter()
    requests = generate(traffic(args), args.seed)
    with console.status(f"{len(requests)} requests on {args.topology} ..."):
        box, simulated_s = run_in_virtual_time(simulate(args, requests))
    wall_s = time.perf_counter() - began_s
    title = f"{args.topology}, {args.card}, {args.rate:g} req/s"
    title += f", {args.burst:g} in the middle" if args.burst is not None else ""
    title += f", pictures x{args.image_surge:g} in the middle" if args.image_surge is not None else ""
    summary = summarize(box.outcomes, box.samples, (args.warm_up, args.duration), Slo())
    console.print(table(summary, title))
    if args.plot is not None:
        plot(box.outcomes, box.samples, Slo(), title, args.plot)
    middle = {}
    if args.image_surge is not None:
        calm = generate(traffic(replace_args(args, image_surge=None)), args.seed)
        runs = {"no pictures": [each for each in calm if not each.picture_sizes], "no surge": calm}
        outcomes = {}
        for name, fewer in runs.items():
            with console.status(f"the same with {name} ..."):
                outcomes[name] = run_in_virtual_time(simulate(args, fewer))[0].outcomes
        middle = isolation(outcomes | {"surge": box.outcomes}, (args.duration / 3, 2 * args.duration / 3))
        console.print(isolation_table(middle))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    print(
        json.dumps(
            {"simulated_s": simulated_s, "wall_s": wall_s, **summary, **({"isolation": middle} if middle else {}), "settings": settings}
        )
    )


if __name__ == "__main__":
    main()
