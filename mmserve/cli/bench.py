"""`mmserve bench`: open-loop load on any OpenAI-compatible server, with the flags and the output of vLLM's `bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from mmserve.bench.client import EndpointError, LoadClient, Outcome
from mmserve.bench.content import Content
from mmserve.bench.isolation import measure_isolation, plan_burst
from mmserve.bench.report import isolation_table, modality_table, result_block
from mmserve.bench.session import Measurement, measure
from mmserve.bench.statistics import GOODPUT_METRICS, METRICS
from mmserve.bench.traffic import Modality, Traffic, parse_shares
from mmserve.cli.numbers import count, finite, positive, share, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("server"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_content(parser.add_argument_group("what is sent"))
    _add_measurement(parser.add_argument_group("what is counted"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="where the server is (default %(default)s)")
    group.add_argument("--model", help="served name (default: the first the server lists)")
    group.add_argument("--api-key", default=os.environ.get("MMSERVE_API_KEY"), help="its key; or in the variable MMSERVE_API_KEY")
    group.add_argument("--request-timeout", type=positive, default=600.0, metavar="S", help="give up on an answer (default %(default)g s)")


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", type=count, default=100, help="requests to send (default %(default)s)")
    group.add_argument("--request-rate", type=positive, default=math.inf, help="requests a second (default inf: all at once)")
    group.add_argument("--burstiness", type=finite, default=1.0, help="1: Poisson arrivals; less comes in bursts, more evenly (default 1)")
    group.add_argument("--max-concurrency", type=count, help="hold requests back while so many are under way")
    group.add_argument("--mix", type=_mix, default={Modality.TEXT: 1.0}, help="shares, as in text=.45,image=.40,audio=.10,image_audio=.05")
    group.add_argument("--repeat-rate", type=share, default=0.0, help="share of requests that repeat another's media and words (default 0)")
    group.add_argument("--seed", type=int, default=0, help="the same seed sends the same requests at the same times (default 0)")
    group.add_argument("--isolation", action="store_true", help="text alone, then the same text under pictures; prints the ratios")
    group.add_argument("--burst-rate", type=finite, default=4.0, help="pictures a second under --isolation (default %(default)g)")


def _add_content(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-len", type=count, default=100, help="words of a prompt (default %(default)s)")
    group.add_argument("--output-len", type=count, default=64, help="most tokens of an answer (default %(default)s)")
    group.add_argument(
        "--image-size", type=_image_sizes, default="640x480", help="WxH, or shares as in 640x480=.7,1920x1080=.3 (default %(default)s)"
    )
    group.add_argument("--audio-len", type=finite, default=5.0, metavar="S", help="length of a clip (default %(default)g s)")
    group.add_argument("--ignore-eos", action="store_true", help="ask for answers of exactly --output-len tokens")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is the most likely answer (default 0)")


def _add_measurement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-warmups", type=whole, default=0, help="requests before the clock starts, not counted (default 0)")
    group.add_argument(
        "--goodput", type=_bound, nargs="+", default=[], metavar="METRIC:MS", help="count what keeps this, as in ttft:400 tpot:35"
    )
    group.add_argument(
        "--percentile-metrics", type=_metrics, default="ttft,tpot,itl", help=f"of {', '.join(METRICS)} (default %(default)s)"
    )
    group.add_argument("--metric-percentiles", type=_percentiles, default="99", help="as in 50,90,99 (default %(default)s)")
    group.add_argument("--save-result", type=Path, metavar="FILE", help="write the result and what each request saw as JSON")


def run(args: argparse.Namespace) -> int:
    """The exit status: 0 if at least one request was answered."""
    if args.isolation and math.isinf(args.request_rate):
        return _refuse("--isolation needs a finite --request-rate")
    if args.save_result is not None and not args.save_result.parent.is_dir():
        return _refuse(f"{args.save_result.parent} is not a directory")
    try:
        return asyncio.run(_isolation(args) if args.isolation else _bench(args))
    except EndpointError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


async def _bench(args: argparse.Namespace) -> int:
    async with _client(args) as client:
        model = args.model or await client.first_model()
        with _progress(args.num_prompts) as on_outcome:
            result, requests = await measure(client, _traffic(args), _content(args), model, _measurement(args), on_outcome)
    print(result_block(result, metrics=args.percentile_metrics, percentiles=args.metric_percentiles))
    Console(width=_table_width()).print(modality_table(result["by_modality"], args.metric_percentiles))
    for error in sorted({error for error in requests["errors"] if error})[:10]:
        Console(stderr=True).print(Text(error, style="red"))
    return _end(args, result, requests, result["completed"])


async def _isolation(args: argparse.Namespace) -> int:
    alone, together = plan_burst(_traffic(args), args.burst_rate)
    async with _client(args) as client:
        model = args.model or await client.first_model()
        with _progress(len(alone) + len(together)) as on_outcome:
            how = _content(args), model, _measurement(args), on_outcome
            result = await measure_isolation(client, _traffic(args), args.burst_rate, *how)
    for title in ("text_alone", "image_burst"):
        table = modality_table(result[title], args.metric_percentiles)
        table.title = title.replace("_", " ")
        Console(width=_table_width()).print(table)
    Console(width=_table_width()).print(isolation_table(result["comparison"]))
    return _end(args, result, {}, result["image_burst"][Modality.TEXT]["completed"])


def _end(args: argparse.Namespace, result: dict[str, Any], requests: dict[str, list[Any]], num_completed: int) -> int:
    """The last line is the result as JSON."""
    result = {"date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), "base_url": args.base_url, **result}
    if args.save_result is not None:
        args.save_result.write_bytes(orjson.dumps(result | requests, option=orjson.OPT_INDENT_2))
    print(orjson.dumps(result).decode(), flush=True)
    return 0 if num_completed else 1


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A bar on stderr, so that stdout stays a report."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda outcome: progress.advance(task)


def _client(args: argparse.Namespace) -> LoadClient:
    return LoadClient(args.base_url, api_key=args.api_key, timeout_s=args.request_timeout)


def _traffic(args: argparse.Namespace) -> Traffic:
    return Traffic(args.num_prompts, args.request_rate, args.burstiness, args.mix, args.repeat_rate, args.seed)


def _content(args: argparse.Namespace) -> Content:
    lengths = args.input_len, args.output_len, args.image_size, args.audio_len
    return Content(*lengths, ignore_eos=args.ignore_eos, temperature=args.temperature, seed=args.seed)


def _measurement(args: argparse.Namespace) -> Measurement:
    return Measurement(args.max_concurrency, args.num_warmups, args.metric_percentiles, dict(args.goodput))


def _refuse(message: str) -> int:
    print(f"mmserve bench: {message}", file=sys.stderr)
    return 1


def _table_width() -> int:
    """What doesn't go to a terminal isn't folded to one."""
    return Console().width if sys.stdout.isatty() else 160


def _mix(text: str) -> dict[Modality, float]:
    return {Modality(name): share for name, share in parse_shares(text, list(Modality)).items()}


def _image_sizes(text: str) -> dict[tuple[int, int], float]:
    shares = parse_shares(text)
    return {(count(size.partition("x")[0]), count(size.partition("x")[2])): share for size, share in shares.items()}


def _bound(text: str) -> tuple[str, float]:
    metric, _, bound = text.partition(":")
    if metric not in GOODPUT_METRICS:
        raise ValueError(text)
    return metric, positive(bound)


def _metrics(text: str) -> Sequence[str]:
    names = text.split(",")
    if not set(names) <= METRICS.keys():
        raise ValueError(text)
    return names


def _percentiles(text: str) -> Sequence[float]:
    ranks = [float(rank) for rank in text.split(",")]
    if not all(0 <= rank <= 100 for rank in ranks):
        raise ValueError(text)
    return ranks
