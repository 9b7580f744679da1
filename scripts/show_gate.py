"""Four faults that a server answers through with confidence, and whether the gate stops each: which slice caught it, by what.

    python -m scripts.show_gate                    starts servers of its own
    python -m scripts.show_gate --per-slice 100    sooner, and with wider bounds

adapter: noise in the vision projectors of a copy of the bundled model.  swapped: two pictures arrive in the other order.  stale: every
tenth request with a picture is answered from the picture of the one before.  hits: only a picture that a cache knows is answered from
another one, so that whatever is asked once is right.  Exit status 1 if one gets through, or if the honest server is stopped by a value (not
for too few items).  Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from mmserve import composition
from mmserve.evals.compare import compare
from mmserve.evals.endpoint import Endpoint
from mmserve.evals.golden import BUNDLED, GoldenSet, load_golden_set
from mmserve.evals.report import report_of
from mmserve.evals.session import Settings, evaluate
from scripts.loopback import given_or_own_server, loopback_url, server

STALE_EVERY = 10
# The slices that a fault must show in.  Text never sees one.
MUST_CATCH = {"adapter": {"image", "images", "image+audio"}, "swapped": {"images"}, "stale": {"image"}, "hits": {"image"}}

Body = dict[str, Any]


# --- faults ------------------------------------------------------------------------------------------------------------------


def damage_adapter(directory: Path, noise: float) -> Path:
    """A copy of the bundled model whose vision projectors carry noise, in units of each tensor's own spread.

    Without its guardrail, whose probes know the weights that they were trained for, and refuse others.
    """
    copy = directory / "damaged"
    shutil.copytree(composition.BUNDLED, copy)
    toml = copy / "composition.toml"
    toml.write_text(toml.read_text().partition("[guardrail]")[0])
    random = torch.Generator().manual_seed(0)
    for path in sorted(copy.glob("projectors/vision-*.safetensors")):
        noisy = {
            name: tensor + noise * tensor.float().std() * torch.randn(tensor.shape, generator=random)
            for name, tensor in load_file(path).items()
        }
        save_file({name: tensor.to(torch.bfloat16) for name, tensor in noisy.items()}, path)
    return copy


def swap_pictures(body: Body) -> None:
    """The first two change places."""
    pictures = _pictures(body)
    if len(pictures) >= 2:
        pictures[0]["image_url"], pictures[1]["image_url"] = pictures[1]["image_url"], pictures[0]["image_url"]


class StaleCache:
    """Every so manieth request with a picture gets the first picture of the one before."""

    def __init__(self, every: int) -> None:
        self._every, self._count = every, 0
        self._last: dict[str, str] | None = None

    def __call__(self, body: Body) -> None:
        pictures = _pictures(body)
        if not pictures:
            return
        self._count += 1
        fresh = pictures[0]["image_url"]
        if self._count % self._every == 0 and self._last is not None:
            pictures[0]["image_url"] = self._last
        self._last = fresh


class StaleHits:
    """A picture that comes again under the same `cache_salt` becomes the last other one, as from a cache that mixes up its keys."""

    def __init__(self) -> None:
        self._known: set[tuple[str | None, str]] = set()  # salt and URL
        self._shown: dict[str, dict[str, str]] = {}  # by URL, as they first came

    def __call__(self, body: Body) -> None:
        for part in _pictures(body)[:1]:
            fresh = part["image_url"]
            key = body.get("cache_salt"), fresh["url"]
            others = [url for url in self._shown if url != fresh["url"]]
            if key in self._known and others:
                part["image_url"] = self._shown[others[-1]]
            self._known.add(key)
            self._shown.setdefault(fresh["url"], fresh)


def _pictures(body: Body) -> list[dict[str, Any]]:
    contents = [message["content"] for message in body["messages"] if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] == "image_url"]


@asynccontextmanager
async def faulty(url: str, fault: Callable[[Body], None]) -> AsyncIterator[str]:
    """A door before the server at `url` that changes what comes through."""
    async with aiohttp.ClientSession() as session:

        async def chat(request: web.Request) -> web.Response:
            body = await request.json()
            fault(body)
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                return web.json_response(body=await answer.read(), status=answer.status)

        async def models(request: web.Request) -> web.Response:
            async with session.get(f"{url}/v1/models") as answer:
                return web.json_response(body=await answer.read(), status=answer.status)

        app = web.Application(client_max_size=2**25)
        app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


# --- showing -----------------------------------------------------------------------------------------------------------------


class Show:
    """One golden set against one server after the other."""

    def __init__(self, golden: GoldenSet, settings: Settings, console: Console) -> None:
        self._golden, self._settings, self._console = golden, settings, console
        self._honest: dict[str, Any] | None = None
        self.results: dict[str, dict[str, Any]] = {}

    async def measure(self, name: str, url: str) -> None:
        """The first to be measured is what the others are compared with."""
        async with Endpoint(url) as endpoint:
            with Progress(console=self._console, transient=True) as bars:
                report = report_of(await evaluate(endpoint, self._golden, self._settings, _counted(bars, name)))
        self._honest = self._honest or report
        gate, slices = report["gate"], report["slices"]
        self.results[name] = {
            "outcome": gate["outcome"],
            "breached": sorted({finding["slice"] for finding in gate["findings"] if finding["breach"]}),
            "accuracy": {slice_name: figures["grounding_accuracy"]["value"] for slice_name, figures in slices.items()},
            "hallucinated": {slice_name: figures["hallucinated_object_rate"]["value"] for slice_name, figures in slices.items()},
            "order": {key: report["order"][key] for key in ("probes", "right", "reversed", "unmoved", "wrong")},
            "states_equal": report["states"] and f"{report['states']['equal']}/{report['states']['probes']}",
            "p_value": {slice_name: c.p_value for slice_name, c in compare(self._honest, report).items()},
        }
        self._console.print(f"[bold]{name}[/]: {gate['outcome']}")
        for finding in gate["findings"]:
            self._console.print(f"  {finding['text']}", highlight=False)

    def escaped(self) -> Iterator[str]:
        if self.results["honest"]["breached"]:
            yield f"the honest server breaches the gate in {self.results['honest']['breached']}"
        for name in self.results.keys() - {"honest"}:
            if not MUST_CATCH[name] <= set(self.results[name]["breached"]):
                yield f"{name} was to be caught in {sorted(MUST_CATCH[name])}, and was in {self.results[name]['breached']}"


def _counted(bars: Progress, name: str) -> Callable[[str, int], AbstractContextManager[Callable[[], None]]]:
    @contextmanager
    def counted(what: str, total: int) -> Iterator[Callable[[], None]]:
        task = bars.add_task(f"{name}: {what}", total=total)
        yield lambda: bars.advance(task)

    return counted


async def show(options: argparse.Namespace, console: Console) -> Show:
    golden = load_golden_set(BUNDLED).thinned(options.per_slice)
    showing = Show(golden, Settings(concurrency=options.concurrency), console)
    with tempfile.TemporaryDirectory(prefix="mmserve-gate-") as scratch:
        directory = Path(scratch)
        async with given_or_own_server(options.url, directory) as url:
            await showing.measure("honest", url)
            for name, fault in {"swapped": swap_pictures, "stale": StaleCache(STALE_EVERY), "hits": StaleHits()}.items():
                if name in options.faults:
                    async with faulty(url, fault) as door:
                        await showing.measure(name, door)
        if "adapter" in options.faults:
            data_dir = directory / "data"
            data_dir.mkdir()
            async with server(data_dir, "--model", str(damage_adapter(directory, options.noise))) as url:
                await showing.measure("adapter", url)
    return showing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", type=loopback_url, help="a running server of the bundled model on this machine; by default one is started")
    parser.add_argument("--per-slice", type=int, default=200)
    parser.add_argument("--faults", nargs="+", choices=list(MUST_CATCH), default=list(MUST_CATCH), help="only these")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--noise", type=float, default=1.0, help="standard deviations of the projector's weights (default %(default)g)")
    options = parser.parse_args()
    console = Console(width=160, stderr=True)
    showing = asyncio.run(show(options, console))
    problems = list(showing.escaped())
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    print(json.dumps({"script": "show_gate", "per_slice": options.per_slice, "noise": options.noise, "results": showing.results}))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
