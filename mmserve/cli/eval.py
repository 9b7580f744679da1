"""`mmserve eval`: is what a server says about pictures and clips true?  Figures with bounds, reports, a gate; two runs compared."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mmserve.cli.numbers import count, positive, share, whole
from mmserve.config import ConfigError, from_mapping
from mmserve.errors import MmserveError
from mmserve.evals.calibration import load_labels
from mmserve.evals.compare import BadReport, compare, comparison_table, load_report
from mmserve.evals.endpoint import Endpoint, EndpointError
from mmserve.evals.fidelity import FidelityError
from mmserve.evals.gate import Bars
from mmserve.evals.golden import BUNDLED, SLICES, BadGoldenSet, GoldenSet, load_golden_set
from mmserve.evals.importers import import_chair, import_pope
from mmserve.evals.judge import Judge, JudgeFailed
from mmserve.evals.report import report_of
from mmserve.evals.report_html import html_report
from mmserve.evals.report_text import markdown_report, report_tables
from mmserve.evals.session import Evaluation, Settings, evaluate

_NEEDS_JUDGE_URL = ("judge_model", "judge_labels", "judge_log")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("server", "one that runs, or else one that is started for the time"))
    _add_questions(parser.add_argument_group("questions"))
    _add_judge(parser.add_argument_group("judge of open answers", "without one they are reported as unscored"))
    _add_output(parser.add_argument_group("what comes out"))
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="instead of a run")
    _add_compare(actions.add_parser("compare", help="two runs over the same items, pair by pair"))
    _add_import_pope(actions.add_parser("import-pope", help="make a golden set of POPE's questions"))
    _add_import_chair(actions.add_parser("import-chair", help="make a golden set of COCO's annotations and CHAIR's synonyms"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", help="any OpenAI-compatible server")
    group.add_argument("--model", help="served name; small, large or auto of ours (default: the first the server lists)")
    group.add_argument("--api-key", default=os.environ.get("MMSERVE_API_KEY"), help="its key; or in the variable MMSERVE_API_KEY")
    group.add_argument("--request-timeout", type=positive, default=300.0, metavar="S", help="give up on an answer (default %(default)g s)")
    group.add_argument("--wav-only", action="store_true", help="send every clip as WAV, for servers that take no other")
    group.add_argument("--serve", type=Path, metavar="DIR", help="start this model instead of the bundled one")
    group.add_argument("--device", default="auto", help="where that one runs (default %(default)s)")
    group.add_argument("--dtype", default="auto", help="its weights and KV cache (default %(default)s)")


def _add_questions(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--set", type=Path, default=BUNDLED, metavar="DIR", help="a golden set (default: the bundled model's)")
    group.add_argument("--slices", nargs="+", choices=SLICES, help="only these")
    group.add_argument("--per-slice", type=count, metavar="N", help="at most so many items of each slice, evenly spread")
    group.add_argument("--concurrency", type=count, default=8, help="questions under way at once (default %(default)s)")
    group.add_argument("--max-tokens", type=count, default=128, help="of an answer (default %(default)s)")
    group.add_argument(
        "--states-per-slice", type=whole, default=6, metavar="N", help="items asked again with caches warm and cold (default %(default)s)"
    )
    group.add_argument("--reference", type=Path, metavar="DIR", help="compare greedy answers with transformers running this directory")


def _add_judge(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--judge-url", help="any OpenAI-compatible server")
    group.add_argument("--judge-model", help="its served name (default: the first it lists)")
    group.add_argument("--judge-key", default=os.environ.get("MMSERVE_JUDGE_KEY"), help="or in the variable MMSERVE_JUDGE_KEY")
    group.add_argument("--judge-labels", type=Path, metavar="FILE", help="labelled claims to calibrate it with")
    group.add_argument("--judge-log", type=Path, metavar="FILE", help="its prompts and replies, one a line (default: judge.jsonl)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="figures and every answer")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="the tables")
    group.add_argument("--html", type=Path, metavar="FILE", help="one page with the failing items' pictures and clips")
    group.add_argument("--gate", action="store_true", help="exit with 1 if a bar is missed, with 3 if there are too few items to tell")
    bars = Bars()
    for name, meaning in {
        "accuracy": "lower bound of each slice's grounding accuracy",
        "hallucination": "upper bound of each slice's hallucinated-object rate",
        "coverage": "lower bound of each slice's coverage",
        "order": "upper bound of order probes reversed or unmoved",
    }.items():
        default = getattr(bars, name)
        group.add_argument(f"--bar-{name}", type=share, default=default, metavar="SHARE", help=f"{meaning} (default {default:g})")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="a report of eval --json")
    parser.add_argument("after", type=Path, help="another over the same set")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the comparison, with the items that changed")


def _add_import_pope(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("questions", type=Path, help="JSONL with question_id, image, text, label")
    parser.add_argument("pictures", type=Path, help="directory of the images it names")
    parser.add_argument("target", type=Path, help="the new set")
    parser.add_argument("--category", default="pope", help="such as random, popular or adversarial (default %(default)s)")


def _add_import_chair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("instances", type=Path, help="COCO's instances_*.json")
    parser.add_argument("synonyms", type=Path, help="a line for each object, its words separated by commas")
    parser.add_argument("pictures", type=Path, help="directory of the images it names")
    parser.add_argument("target", type=Path, help="the new set")
    parser.add_argument("--captions", type=Path, metavar="FILE", help="COCO's captions_*.json: what they name is there, too")
    parser.add_argument("--limit", type=count, help="only the first so many pictures")


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 if the gate says no, or something needed isn't there; 3 if the gate can't tell; 130 after Ctrl-C."""
    try:
        match args.action:
            case "compare":
                return _compare(args)
            case "import-pope":
                return _imported(import_pope(args.questions, args.pictures, args.target, category=args.category))
            case "import-chair":
                how = {"captions": args.captions, "limit": args.limit}
                return _imported(import_chair(args.instances, args.synonyms, args.pictures, args.target, **how))
        return asyncio.run(_evaluate(args))
    except (BadGoldenSet, BadReport, EndpointError, JudgeFailed, FidelityError) as problem:
        return _refuse(str(problem))
    except (ConfigError, MmserveError) as problem:
        return _refuse(problem.message)
    except KeyboardInterrupt:
        return 130


async def _evaluate(args: argparse.Namespace) -> int:
    golden = _golden_set(args)
    labels = load_labels(args.judge_labels) if args.judge_labels is not None else []
    if args.judge_url is None and any(getattr(args, name) is not None for name in _NEEDS_JUDGE_URL):
        return _refuse("a judge needs --judge-url")
    settings = Settings(
        concurrency=args.concurrency,
        max_tokens=args.max_tokens,
        states_per_slice=args.states_per_slice,
        reference=args.reference,
        bars=Bars(args.bar_accuracy, args.bar_hallucination, args.bar_coverage, args.bar_order),
    )
    async with _url(args) as url, _endpoint(url, args) as endpoint, _judge(args) as judge:
        with Progress(*_COLUMNS, console=Console(stderr=True)) as bars:
            evaluation = await evaluate(endpoint, golden, settings, _progress(bars), judge, labels)
    report = report_of(evaluation)
    _write_reports(args, report, evaluation)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for table in report_tables(report):
        console.print(table)
    return int(evaluation.decision.outcome) if args.gate else 0


def _golden_set(args: argparse.Namespace) -> GoldenSet:
    golden = load_golden_set(args.set)
    if args.slices is not None:
        golden = golden.only(args.slices)
    return golden if args.per_slice is None else golden.thinned(args.per_slice)


@asynccontextmanager
async def _url(args: argparse.Namespace) -> AsyncIterator[str]:
    """The server that was named, or one of our own in this process, on a free port and with an empty cache."""
    if args.url is not None:
        yield args.url
        return
    from mmserve.engine import AsyncEngine  # neither is needed to talk to a server that runs
    from mmserve.gateway.server import Gateway

    with tempfile.TemporaryDirectory(prefix="mmserve-eval-") as scratch:
        values = {"data-dir": scratch, "port": 0, "log-level": "warning", "device": args.device, "dtype": args.dtype}
        config = from_mapping(values | ({"model": str(args.serve)} if args.serve is not None else {}))
        with Console(stderr=True).status("starting the model"):
            engine = AsyncEngine(config)
            await engine.start()
        try:
            async with Gateway(engine, config) as gateway:
                yield gateway.url
        finally:
            await engine.close()


def _endpoint(url: str, args: argparse.Namespace) -> Endpoint:
    api_key = args.api_key if args.url is not None else None
    return Endpoint(url, model=args.model, api_key=api_key, timeout_s=args.request_timeout, wav_only=args.wav_only)


@asynccontextmanager
async def _judge(args: argparse.Namespace) -> AsyncIterator[Judge | None]:
    if args.judge_url is None:
        yield None
        return
    async with Endpoint(args.judge_url, model=args.judge_model, api_key=args.judge_key, timeout_s=args.request_timeout) as endpoint:
        with Judge(endpoint, args.judge_log or Path("judge.jsonl")) as judge:
            yield judge


_COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()


def _progress(bars: Progress) -> Callable[[str, int], nullcontext[Callable[[], None]]]:
    """On stderr, so that stdout stays a report."""

    def start(what: str, total: int) -> nullcontext[Callable[[], None]]:
        task = bars.add_task(what, total=total)
        return nullcontext(lambda: bars.advance(task))

    return start


def _write_reports(args: argparse.Namespace, report: dict[str, Any], evaluation: Evaluation) -> None:
    if args.json is not None:
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    if args.markdown is not None:
        args.markdown.write_text(markdown_report(report))
    if args.html is not None:
        args.html.write_text(html_report(report, evaluation))


def _compare(args: argparse.Namespace) -> int:
    comparisons = compare(load_report(args.before), load_report(args.after))
    if args.json is not None:
        args.json.write_bytes(orjson.dumps({name: c.as_json() for name, c in comparisons.items()}, option=orjson.OPT_INDENT_2))
    Console().print(comparison_table(comparisons))
    return 0


def _imported(golden: GoldenSet) -> int:
    print(f"{golden.name}: {len(golden.items)} items")
    return 0


def _refuse(message: str) -> int:
    print(f"mmserve eval: {message}", file=sys.stderr)
    return 1
