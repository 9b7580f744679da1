"""`mmserve plan`: how many cards a rate takes, how to cut a box up for it, how soon answers come, what they cost.  By formulas alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from mmserve.bench.traffic import parse_shares
from mmserve.cli.numbers import count, finite, share
from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_json
from mmserve.composition.weights import BadModel
from mmserve.config import GPU_TPOT_TARGET_MS, SchedulerConfig
from mmserve.planner.costs import USD_PER_GPU_HOUR
from mmserve.planner.fleet import NUM_RANKS, Demand, Slo, ranked
from mmserve.planner.refit import refit
from mmserve.planner.replica_load import Decoder
from mmserve.planner.sheet import Sheet, plan
from mmserve.planner.workload import BLEND, MODALITIES, Workload
from mmserve.roofline.hardware import CARDS, SHAPES, DecoderShape, shape_of_config

DEFAULTS = Workload()
SCHEDULER = SchedulerConfig()
USD_LIMIT_PER_1000 = 4.50
WIDTH = 140  # of tables that don't go to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_demand(parser.add_argument_group("what is asked"))
    _add_lengths(parser.add_argument_group("what requests carry"))
    _add_machine(parser.add_argument_group("what answers it"))


def _add_demand(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rps", type=finite, default=250.0, help="requests a second (default %(default)g)")
    group.add_argument(
        "--mix", type=_mix, default=dict(BLEND), metavar="MIX",
        help="blend (half text; the default), shares as in text=.5,image=.5, or a JSON object of them, as such or in a file",
    )  # fmt: skip
    group.add_argument("--price-per-gpu-hour", type=finite, metavar="USD", help="of one card (default: 2.00 for an A100, 3.80 for an H200)")
    group.add_argument("--json", action="store_true", help="print the plan as one JSON object instead of tables")


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-len", type=finite, default=DEFAULTS.mean_text, help="tokens of text, on average (default %(default)g)")
    group.add_argument(
        "--output-len", type=finite, default=DEFAULTS.mean_answer, help="tokens of an answer, on average (default %(default)g)"
    )
    group.add_argument("--picture-tokens", type=count, default=DEFAULTS.picture_tokens, help="of one picture (default %(default)s)")
    group.add_argument("--audio-len", type=finite, default=DEFAULTS.median_clip_s, metavar="S", help="median clip (default %(default)g s)")
    group.add_argument(
        "--repeat-rate", type=_less_than_all, default=DEFAULTS.repeat_rate, help="share of requests seen before (default %(default)g)"
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--hardware", choices=CARDS, default="a100", help="cards of the box (default %(default)s)")
    group.add_argument("--gpus", type=count, default=8, help="how many a box has (default %(default)s)")
    group.add_argument(
        "--model", default="llama-8b", help="llama-8b (the default), llama-70b, or a model directory: its config.json is read"
    )
    group.add_argument("--large", metavar="MODEL", help="a large decoder beside it")
    group.add_argument(
        "--large-share", type=_less_than_all, default=0.15, help="of the requests that goes to the large one (default %(default)g)"
    )
    group.add_argument(
        "--tensor-parallel-size", "-tp", "--tp", type=count, help="cards of each replica of the last decoder (default: tried out)"
    )
    group.add_argument("--max-num-seqs", type=count, default=SCHEDULER.max_num_seqs, help="as of the server (default %(default)s)")
    group.add_argument(
        "--max-num-batched-tokens", type=count, default=SCHEDULER.max_num_batched_tokens, help="as of the server (default %(default)s)"
    )
    group.add_argument("--tpot-target-ms", type=finite, default=GPU_TPOT_TARGET_MS, help="as of the server (default %(default)g)")
    group.add_argument(
        "--bench", type=Path, nargs="+", default=[], metavar="FILE",
        help="results of `mmserve bench --save-result` or of scripts.gpu_check on this machine, to go by them",
    )  # fmt: skip
    group.add_argument("--bench-replicas", type=count, default=1, help="replicas that the bench was of (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """The exit status: 0 if the rate can be carried by some number of boxes."""
    try:
        demand = _demand(args)
        sheet = plan(ranked(demand), args.rps, args.price_per_gpu_hour or USD_PER_GPU_HOUR[args.hardware])
    except (BadModel, ValueError) as error:
        print(f"mmserve plan: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(orjson.dumps(_rounded(sheet)).decode())
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        for table in _tables(args, demand.slo, sheet):
            console.print(table)
            console.print()
    return 0 if sheet["num_boxes"] else 1


def _demand(args: argparse.Namespace) -> Demand:
    workload = replace(
        DEFAULTS,
        mean_text=args.input_len,
        mean_answer=args.output_len,
        picture_tokens=args.picture_tokens,
        median_clip_s=args.audio_len,
        repeat_rate=args.repeat_rate,
    ).with_shares(args.mix)
    reports = [_read_report(path) for path in args.bench]
    names = {"small": args.model} | ({"large": args.large} if args.large else {})
    decoders = {}
    for name, model in names.items():
        decoder = Decoder(
            _shape(model),
            CARDS[args.hardware],
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            tpot_target_s=args.tpot_target_ms / 1e3,
        )
        fitted = refit(decoder, reports, num_replicas=args.bench_replicas)
        is_last = name == list(names)[-1]
        ranks = (args.tensor_parallel_size,) if args.tensor_parallel_size and is_last else NUM_RANKS
        decoders[name] = {num_ranks: replace(fitted, num_ranks=num_ranks) for num_ranks in ranks}
    shares = {"small": 1 - args.large_share, "large": args.large_share} if args.large else {"small": 1.0}
    return Demand(workload, decoders, shares, num_gpus=args.gpus)


def _shape(model: str) -> DecoderShape:
    """Raises BadModel."""
    if model in SHAPES:
        return SHAPES[model]
    config = read_json(Path(model) / "config.json")
    for inner in ("thinker_config", "text_config"):
        config = config.get(inner, config)
    return shape_of_config(complete_config(config))


def _read_report(path: Path) -> Mapping[str, Any]:
    """The JSON object in the file, or on its last line, as both tools print it.  Raises ValueError."""
    try:
        text = path.read_text()
        found = json.loads(text if text.lstrip().startswith("{") else text.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


def _tables(args: argparse.Namespace, slo: Slo, sheet: Sheet) -> Sequence[Table]:
    tables = [_splits_table(args, slo, sheet), _modality_table(sheet["one_box"], f"{sheet['best']}, offered {sheet['rate']:g} a second")]
    if sheet["at_its_limit"]:
        tables.append(
            _modality_table(sheet["at_its_limit"], f"{sheet['best']}, at the {sheet['best_carries']:.0f} a second that it carries")
        )
        tables += [_fleet_table(sheet), _cost_table(sheet)]
    return [*tables, _kv_table(sheet)]


def _splits_table(args: argparse.Namespace, slo: Slo, sheet: Sheet) -> Table:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in sheet["shares"].items())
    promises = (
        f"text TTFT p50 < {slo.text_ttft_p50_s * 1e3:g} ms, media p99 < {slo.media_ttft_p99_s * 1e3:g}, TPOT p50 < {slo.tpot_p50_s * 1e3:g}"
    )
    table = _table(
        f"{args.gpus} x {args.hardware.upper()}, {' and '.join(filter(None, (args.model, args.large)))}: {shares}",
        ("split", "carries /s", "beyond that", f"good of {sheet['rate']:g} /s", "boxes for it"),
        caption=f"carries: {promises}, at most {slo.shed_share:.0%} refused",
    )
    for row in sheet["splits"]:
        figures = f"{row['carries']:.1f}", row["breaks_first"], f"{row['goodput']:.1f}", _number(row["num_boxes"])
        table.add_row(row["split"], *figures, style="bold" if row["split"] == sheet["best"] else None)
    return table


def _modality_table(one_box: Sheet, title: str) -> Table:
    table = _table(title, ("", "offered /s", "answered /s", "refused", "TTFT p50", "p99 (est.)", "TPOT p50", "p99 (est.)"))
    for decoder, figures in one_box["decoders"].items():
        for name, row in figures["modalities"].items():
            refused = f"{1 - row['answered'] / row['offered']:.0%}"
            times = (f"{row[key]:.0f}" for key in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"))
            table.add_row(f"{decoder} {name}", f"{row['offered']:.1f}", f"{row['answered']:.1f}", refused, *times)
        times = (f"{figures[key]:.0f}" for key in ("tpot_ms_p50", "tpot_ms_p99"))
        table.add_row(f"{decoder}, all", f"{figures['offered']:.1f}", f"{figures['answered']:.1f}", "", "", "", *times, style="dim")
    notes = [
        f"{decoder}: "
        + ", ".join(f"{pool['kind']} {pool['num_replicas']:.1f} x {pool['rows_per_replica']:.0f}" for pool in figures["pools"])
        for decoder, figures in one_box["decoders"].items()
    ]
    table.caption = f"replicas x rows of {'; '.join(notes)}\np99s are estimates, without what fairness between tenants adds"
    if one_box["breaks"]:
        table.caption += f"\nnot kept: {'; '.join(one_box['breaks'])}"
    return table


def _fleet_table(sheet: Sheet) -> Table:
    table = _table(f"A fleet for {sheet['rate']:g} a second", ("pool", "busy cards", "cards to have"))
    for name, row in sheet["gpus"].items():
        table.add_row(name, f"{row['busy']:.2f}", str(row["cards"]))
    usd = f"${sheet['usd_per_hour']:.2f} an hour, ${sheet['usd_per_1000']:.3f} per 1,000 requests"
    table.caption = f"{sheet['num_boxes']} boxes of {sheet['best']}: {usd}"
    return table


def _cost_table(sheet: Sheet) -> Table:
    limit = sheet["encoder_share_limit"]
    table = _table(
        "What a request costs",
        ("", "decoder GPU-ms", "encoder GPU-ms", "of a text request", "$ per 1,000"),
        caption=f"at the rate that a box carries; limits: ${USD_LIMIT_PER_1000:.2f}, and {limit:.0%} to encode",
    )
    for decoder, costs in sheet["costs"].items():
        for name, cost in costs.items():
            share = f"{cost['encoder_share']:.0%}"
            figures = f"{cost['decoder_gpu_ms']:.1f}", f"{cost['encoder_gpu_ms']:.1f}", share, f"{cost['usd_per_1000']:.3f}"
            table.add_row(f"{decoder} {name}", *figures)
    return table


def _kv_table(sheet: Sheet) -> Table:
    table = _table(
        f"KV cache of a replica, offered {sheet['rate']:g} a second to one box",
        ("", "tokens", "in use", "p99 prompt", "left beside it", "sequences that fit"),
    )
    for name, kv in sheet["kv"].items():
        left = f"{kv['headroom_tokens']:,} ({kv['headroom_blocks']:,} blocks)"
        fit = f"{kv['sequences_that_fit']:,}, of which {kv['max_num_seqs']:,} may run"
        table.add_row(name, f"{kv['tokens']:,}", f"{kv['used_tokens']:,.0f}", f"{kv['p99_prompt']:,}", left, fit)
    return table


def _table(title: str, headings: Sequence[str], caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right")
    return table


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any of this is good for."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _mix(text: str) -> dict[str, float]:
    if text == "blend":
        return dict(BLEND)
    if not text.lstrip().startswith("{") and not text.endswith(".json"):
        return parse_shares(text, MODALITIES)
    shares = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    return parse_shares(",".join(f"{name}={share}" for name, share in shares.items()), MODALITIES)


def _less_than_all(text: str) -> float:
    if (value := share(text)) == 1:
        raise ValueError(text)
    return value
