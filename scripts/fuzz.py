"""Sends hundreds of thousands of damaged inputs through one of the four doors that take bytes from outside.

    python -m scripts.fuzz --door image --inputs 250000 --seed 0 --resume fuzz-image
    python -m scripts.fuzz --door image --inputs 1 --first 4711        one input again, by its number

`json` and `uri`: the gateway's parsers, in this process.  `image` and `audio`: header check and a real decode process under its limits.
One input in `--wire-every` goes through a real server as well.  An input is a function of door, seed and number.

Whatever is neither a value nor an error of the client's is a finding: it is kept in the directory, once for each cause.  So is, apart,
what cost a decode process its life: that is contained, and one 4xx.  A run that is stopped goes on where its directory says.  Exit status
1 if anything was found; ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from mmserve.media import MediaKind
from scripts.fuzzing.doors import DOORS, Door, Finding, JsonDoor, MediaDoor, UriDoor, Wire, gather_sent, make_input
from scripts.loopback import scrape, server

TESTS = Path(__file__).parent.parent / "tests"
REPORT_EVERY = 1_000  # inputs
NUM_SENT = 8  # side by side, over the wire
ANSWER_TIMEOUT_S = 60.0
MAX_CONTAINED = 20  # kept, of each sort


class Record:
    """What a run has seen, and its directory: progress, findings, and inputs that were contained."""

    def __init__(self, directory: Path, door: str, seed: int, first: int) -> None:
        self.door, self.seed = door, seed
        self.next_index = first
        self.outcomes: Counter[str] = Counter()
        self.findings: Counter[str] = Counter()
        self.num_wire = 0
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._progress = directory / f"{door}-{seed}.json"
        if self._progress.exists():
            said = json.loads(self._progress.read_text())
            self.next_index, self.num_wire = said["next_index"], said["wire"]
            self.outcomes.update(said["outcomes"])
            self.findings.update(said["findings"])

    def save(self) -> None:
        written = self._progress.with_suffix(".part")
        written.write_text(json.dumps(self.as_json(), indent=1))
        written.replace(self._progress)

    def as_json(self) -> dict[str, object]:
        return {
            "door": self.door, "seed": self.seed, "next_index": self.next_index, "wire": self.num_wire,
            "outcomes": dict(self.outcomes.most_common()), "findings": dict(self.findings),
        }  # fmt: skip

    def note(self, outcome: str, index: int, data: bytes) -> None:
        self.outcomes[outcome] += 1
        if "contained" in outcome and self.outcomes[outcome] <= MAX_CONTAINED:
            self._keep("contained", index, data, outcome)

    def find(self, error: BaseException, index: int, data: bytes) -> None:
        cause = _cause(error)
        self.findings[cause] += 1
        if self.findings[cause] == 1:
            self._keep("findings", index, data, "".join(traceback.format_exception(error)))
            print(f"FOUND {self.door} seed={self.seed} index={index}: {cause}", flush=True)

    def _keep(self, kind: str, index: int, data: bytes, story: str) -> None:
        place = self._directory / kind
        place.mkdir(exist_ok=True)
        name = f"{self.door}-{self.seed}-{index}"
        (place / f"{name}.bin").write_bytes(data)
        (place / f"{name}.txt").write_text(story)


async def fuzz(record: Record, num_inputs: int, wire_every: int) -> None:
    async with AsyncExitStack() as stack:
        door = await stack.enter_async_context(_open(record.door))
        wire = await stack.enter_async_context(_wire(record.door)) if wire_every else None
        waiting: list[tuple[int, bytes, random.Random]] = []
        started_s, first, stop = time.monotonic(), record.next_index, record.next_index + num_inputs
        for index in range(first, stop):
            data, rng = make_input(record.door, record.seed, index)
            try:
                record.note(await door.try_one(data, rng), index, data)
            except Exception as error:  # whatever it is, it is this input's finding
                record.find(error, index, data)
            if wire is not None and index % wire_every == 0:
                waiting.append((index, data, rng))
            if len(waiting) == NUM_SENT or (waiting and index + 1 == stop):
                assert wire is not None
                await _send(wire, waiting, record)
                waiting = []
            record.next_index = index + 1
            if record.next_index % REPORT_EVERY == 0 and not waiting:
                record.save()
                rate = (record.next_index - first) / (time.monotonic() - started_s)
                print(f"{record.door} {record.next_index} rate={rate:.0f}/s {dict(record.outcomes.most_common(8))}", flush=True)
        record.save()


async def _send(wire: Wire, waiting: list[tuple[int, bytes, random.Random]], record: Record) -> None:
    outcomes = await gather_sent(wire, [(record.door, data, rng) for _, data, rng in waiting])
    for (index, data, _), outcome in zip(waiting, outcomes, strict=True):
        record.num_wire += 1
        if isinstance(outcome, BaseException):
            record.find(outcome, index, data)
        else:
            record.note(outcome, index, data)


@asynccontextmanager
async def _open(name: str) -> AsyncIterator[Door]:
    if name in ("json", "uri"):
        yield JsonDoor() if name == "json" else UriDoor()
        return
    async with MediaDoor.open(MediaKind(name)) as door:
        yield door


@asynccontextmanager
async def _wire(door: str) -> AsyncIterator[Wire]:
    """Text meets an engine that answers at once; media meet the bundled model, whose workers must all be alive at the end."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        if door in ("json", "uri"):
            sys.path.insert(0, str(TESTS))
            from fake_engine import ForgetfulEngine  # the tests' own, on the path only now
            from gateway_client import serving

            async with serving(ForgetfulEngine()) as fake:
                yield Wire(fake.url, http)
            return
        with tempfile.TemporaryDirectory(prefix="mmserve-fuzz-") as data_dir:
            async with server(Path(data_dir)) as url:
                yield Wire(url, http)
                restarts = (await scrape(url)).total("worker_restarts_total")
                if restarts:
                    raise Finding(f"{restarts:.0f} workers had to be started again")


def _cause(error: BaseException) -> str:
    """Equal for inputs that went wrong in the same place."""
    if isinstance(error, Finding):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return f"{type(error).__name__} at " + " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=DOORS, required=True)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, where the directory doesn't say")
    parser.add_argument("--resume", type=Path, help="directory of progress and findings; a temporary one by default, which is kept")
    parser.add_argument("--wire-every", type=int, default=50, help="one input in so many goes over HTTP too; 0: none")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    directory = arguments.resume or Path(tempfile.mkdtemp(prefix="mmserve-fuzz-"))
    record = Record(directory, arguments.door, arguments.seed, arguments.first)
    try:
        asyncio.run(fuzz(record, arguments.inputs, arguments.wire_every))
    except Finding as finding:
        record.find(finding, record.next_index, b"")
        record.save()
    print(json.dumps({**record.as_json(), "directory": str(directory)}))
    sys.exit(1 if record.findings else 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
