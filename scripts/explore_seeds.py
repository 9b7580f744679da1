"""Random worlds by the thousand, each with arrivals, aborts, failed steps and deaths of its own.

    python -m scripts.explore_seeds --seeds 10000            on all cores; ends in one JSON line
    python -m scripts.explore_seeds --world engine --seeds 1000

"scheduler": scheduler, KV books and a fake worker.  After every step the books are checked and every slot that is read is compared with an
oracle.  "engine": the whole engine in virtual time, over workers made of arithmetic.  At the end of either every stream must have been the
one given alone and nothing may be held.  A failing seed is named and can be run again with `--first SEED --seeds 1`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path

from rich.progress import track

TESTS = Path(__file__).parent.parent / "tests"
NUM_STEPS = 20  # with arrivals; then whoever is there is served to the end
BLOCK_SIZES = (16, 256)
CHUNKS = {"scheduler": 50, "engine": 5}


def explore(world: str, first: int, count: int) -> tuple[int, dict[int, str]]:
    """Steps planned in all, and the story of each seed that failed."""
    sys.path.insert(0, str(TESTS))
    logging.disable(logging.WARNING)  # deaths and failed steps are what this is about
    num_steps, failures = 0, {}
    for seed in range(first, first + count):
        try:
            num_steps += _live_in_town(seed) if world == "scheduler" else _live_in_village(seed)
        except Exception:  # whatever it is, it is this seed's finding
            failures[seed] = traceback.format_exc()
    return num_steps, failures


def _live_in_town(seed: int) -> int:
    from test_scheduler_random import Town  # a test's own world, on the path only now

    town = Town(seed, BLOCK_SIZES[seed % 8 == 7])  # the larger size makes the longer prompts; one town in eight has it
    for _ in range(NUM_STEPS):
        town.step(rate=0.4)
    town.settle()
    return town.num_steps


def _live_in_village(seed: int) -> int:
    from test_engine_interleavings import live

    with tempfile.TemporaryDirectory(prefix="mmserve-village-") as data_dir:
        return live(seed, Path(data_dir)).num_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=CHUNKS, default="scheduler")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=cpu_count())
    args = parser.parse_args()
    started = time.perf_counter()
    chunk = CHUNKS[args.world]
    starts = range(args.first, args.first + args.seeds, chunk)
    counts = [min(chunk, args.first + args.seeds - start) for start in starts]
    num_steps, failures = 0, {}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for steps, failed in track(
            pool.map(partial(explore, args.world), starts, counts), "seeds", total=len(starts), disable=not sys.stderr.isatty()
        ):
            num_steps += steps
            failures |= failed
    for seed, story in failures.items():
        print(f"seed {seed}\n{story}", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(
        json.dumps({"world": args.world, "seeds": args.seeds, "steps": num_steps, "failed": sorted(failures), "seconds": round(seconds, 1)})
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
