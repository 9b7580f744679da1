"""Random towns by the thousand: scheduler, KV books and a fake worker under arrivals, aborts, failed steps and deaths: a town for each.

    python -m scripts.explore_seeds --seeds 10000            on all cores; ends in one JSON line

After every step the books are checked and every slot that is read is compared with an oracle; at its end every stream must have been the
one given alone and no block may be held.  A failing seed is named and can be run again with `--first SEED --seeds 1`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path

from rich.progress import track

TESTS = Path(__file__).parent.parent / "tests"
NUM_STEPS = 20  # with arrivals; then whoever is there is served to the end
BLOCK_SIZES = (16, 256)
CHUNK = 50


def explore(first: int, count: int) -> tuple[int, dict[int, str]]:
    """Steps made in all, and the story of each seed that failed."""
    sys.path.insert(0, str(TESTS))
    from test_scheduler_random import Town  # a test's own world, on the path only now

    num_steps, failures = 0, {}
    for seed in range(first, first + count):
        # The larger size makes the longer prompts; one town in eight has it.
        town = Town(seed, BLOCK_SIZES[seed % 8 == 7])
        try:
            for _ in range(NUM_STEPS):
                town.step(rate=0.4)
            town.settle()
        except Exception:  # whatever it is, it is this seed's finding
            failures[seed] = traceback.format_exc()
        num_steps += town.num_steps
    return num_steps, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=cpu_count())
    args = parser.parse_args()
    started = time.perf_counter()
    starts = range(args.first, args.first + args.seeds, CHUNK)
    counts = [min(CHUNK, args.first + args.seeds - start) for start in starts]
    num_steps, failures = 0, {}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for steps, failed in track(pool.map(explore, starts, counts), "seeds", total=len(starts), disable=not sys.stderr.isatty()):
            num_steps += steps
            failures |= failed
    for seed, story in failures.items():
        print(f"seed {seed}\n{story}", file=sys.stderr)
    seconds = time.perf_counter() - started
    print(json.dumps({"seeds": args.seeds, "steps": num_steps, "failed": sorted(failures), "seconds": round(seconds, 1)}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
