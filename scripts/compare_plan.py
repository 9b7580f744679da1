"""Formulas beside the simulated box: `python -m scripts.compare_plan`, seven 8B decoders and one encoder at 60, 250 and 600 a second.

Rate carried inside the limits, time per token and first token of text, by `mmserve.planner` and as `scripts.simulate` plays it.  Ends in
one JSON line, and in status 1 if a ratio is off by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from mmserve.config import GPU_QUEUE_WAIT_S, GPU_TPOT_TARGET_MS, SchedulerConfig
from mmserve.planner.box import Encoders, Replicas, kinds_of
from mmserve.planner.replica_load import Decoder
from mmserve.planner.workload import Workload
from mmserve.roofline.hardware import CARDS, LLAMA_8B
from mmserve.scheduler.admission import QueueLimits
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.sim.virtual_time import run_in_virtual_time
from scripts.simulation.box import TOPOLOGIES, Box, Outcome
from scripts.simulation.report import Slo
from scripts.simulation.traffic import Traffic, generate

TOPOLOGY = "7small+1enc"
NUM_REPLICAS, NUM_ENCODERS = 7, 1
MAX_MODEL_LEN = 8192

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[60.0, 250.0, 600.0], help="requests a second of the blend")
    parser.add_argument("--card", choices=CARDS, default="a100")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals, the warm-up among them")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds at the start that count for nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.2)
    args = parser.parse_args()
    console = Console()
    rows = []
    for rate in args.rates:
        with console.status(f"{rate:g} requests a second ..."):
            simulated = simulate(rate, args.card, (args.warm_up, args.duration), args.seed)
        planned = formulas(simulated["offered_rps"], args.card)
        ratios = {name: planned[name] / simulated[name] for name in planned}
        rows.append({"rate": rate, "planned": planned, "simulated": simulated, "ratios": ratios})
    console.print(table(rows))
    worst = max(abs(ratio - 1) for row in rows for ratio in row["ratios"].values())  # type: ignore[attr-defined]
    print(json.dumps({"rows": rows, "worst": worst, "settings": vars(args)}))
    raise SystemExit(int(worst > args.tolerance))


def formulas(rate: float, card: str) -> Figures:
    replicas = Replicas(kinds_of(Decoder(LLAMA_8B, CARDS[card]), Workload()), NUM_REPLICAS, Encoders(CARDS[card], NUM_ENCODERS))
    outcome = replicas.at(rate)
    text_s, _ = outcome.ttft_s("text")
    return {"goodput_rps": outcome.carried, "tpot_ms_p50": 1e3 * outcome.tpot_p50_s, "text_ttft_ms_p50": 1e3 * text_s}


def simulate(rate: float, card: str, window_s: tuple[float, float], seed: int) -> Figures:
    """Of requests that arrive within the window."""
    start_s, stop_s = window_s
    requests = generate((Traffic(rate, 0.0, stop_s),), seed)

    async def run() -> Sequence[Outcome]:
        config = SchedulerConfig()
        limits = SchedulerLimits(MAX_MODEL_LEN, config.max_num_seqs, config.max_num_batched_tokens, GPU_TPOT_TARGET_MS)
        queue = QueueLimits(config.max_num_queued_reqs, GPU_QUEUE_WAIT_S)
        box = Box(TOPOLOGIES[TOPOLOGY], CARDS[card], limits, queue, large_share=0.0)
        await box.run(requests)
        return box.outcomes

    within = [each for each in run_in_virtual_time(run()) if start_s <= each.request.arrival_s < stop_s]
    answered = [each for each in within if each.finished]
    return {
        "offered_rps": len(within) / (stop_s - start_s),
        "goodput_rps": sum(map(Slo().holds, within)) / (stop_s - start_s),
        "tpot_ms_p50": 1e3 * float(np.median([each.tpot_s for each in answered if each.num_tokens > 1])),
        "text_ttft_ms_p50": 1e3 * float(np.median([each.ttft_s for each in answered if each.request.modality == "text"])),
    }


def table(rows: Sequence[dict[str, object]]) -> Table:
    shown = Table("offered /s", "", "formulas", "simulated", "ratio", title=f"{TOPOLOGY}: formulas beside the simulated box")
    for row in rows:
        planned, simulated, ratios = (dict(row[key]) for key in ("planned", "simulated", "ratios"))  # type: ignore[call-overload]
        for i, name in enumerate(planned):
            offered = f"{simulated['offered_rps']:.1f}" if i == 0 else ""
            shown.add_row(offered, name, f"{planned[name]:.1f}", f"{simulated[name]:.1f}", f"{ratios[name]:.2f}")
    return shown


if __name__ == "__main__":
    main()
