"""Hand-made mutants of the memory and scheduling rooms, each of which some test must catch.

    python -m scripts.mutants                                every mutant; ends in one JSON line, exit 1 if one lived

Each is one small slip in a copy of the tree: a release forgotten, two spans swapped, a salt skipped, `<` for `<=`.  The tests are those of
the pure rooms, from the quickest to the most thorough, up to the first that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
TESTS = (
    "test_paged_kv_hash.py",
    "test_token_fuser.py",
    "test_positions.py",
    "test_admission.py",
    "test_paged_kv.py",
    "test_scheduler.py",
    "test_scheduler_media.py",
    "test_scheduler_sharing.py",
    "test_scheduler_pressure.py",
    "test_steps_ahead.py",
    "test_crowd.py",
    "test_trials.py",
    "test_scheduler_random.py",
    "test_paged_kv_stateful.py",
)
TIMEOUT_S = 300  # a mutant that makes nothing move any more is caught, too


@dataclass(frozen=True, slots=True)
class Mutant:
    slip: str
    file: str  # below mmserve/
    old: str  # once in the file
    new: str


MUTANTS = (
    Mutant(
        "a copy's source is never let go",
        "paged_kv/kv_cache_manager.py",
        "            self._release_block(copy.source)\n        return copies",
        "            pass\n        return copies",
    ),
    Mutant(
        "a copy's source is let go before the step is sent",
        "paged_kv/kv_cache_manager.py",
        "            self._retain(prefix.source)\n            target = self._take()\n",
        "            target = self._take()\n            self._retain(prefix.source)\n",
    ),
    Mutant(
        "the last token comes from the cache",
        "paged_kv/kv_cache_manager.py",
        "min(num_strides * HASH_STRIDE, num_tokens - 1)",
        "min(num_strides * HASH_STRIDE, num_tokens)",
    ),
    Mutant(
        "the head of a chain is evicted first",
        "paged_kv/kv_cache_manager.py",
        "block_ids = table.block_ids[::-1]",
        "block_ids = table.block_ids[:]",
    ),
    Mutant("a revived block stays evictable", "paged_kv/kv_cache_manager.py", "        self._cache.unpark(block_id)\n", ""),
    Mutant(
        "untrusted content stays shared",
        "paged_kv/kv_cache_manager.py",
        "            if self._cache.holds(block_id):\n                self._cache.forget",
        "            if not self._cache.holds(block_id):\n                self._cache.forget",
    ),
    Mutant("the most recently used block is evicted", "paged_kv/prefix_cache.py", "popitem(last=False)", "popitem(last=True)"),
    Mutant(
        "a forgotten block is still found", "paged_kv/prefix_cache.py", "            del self._block_of[stride_hash]", "            pass"
    ),
    Mutant("the salt is skipped", "paged_kv/block_hash.py", 'b"mmserve-chain-1" + salt', 'b"mmserve-chain-1"'),
    Mutant(
        "pictures are hashed without what is in them",
        "paged_kv/block_hash.py",
        "span.key, first - span.start)",
        "bytes(32), first - span.start)",
    ),
    Mutant(
        "two pictures are swapped",
        "token_fuser.py",
        "return FusedPrompt(token_ids, tuple(spans))",
        "keys = [span.key for span in spans][::-1]\n"
        "    swapped = (MediaSpan(key, s.kind, s.start, s.stop, s.grid) for key, s in zip(keys, spans, strict=True))\n"
        "    return FusedPrompt(token_ids, tuple(swapped))",
    ),
    Mutant(
        "a slot is one off",
        "scheduler/plan_builder.py",
        "slots.extend(range(first, first + count))",
        "slots.extend(range(first + 1, first + count + 1))",
    ),
    Mutant(
        "a picture's later rows are its first",
        "scheduler/plan_builder.py",
        "MediaSlice(span.key, rows, first - span.start,",
        "MediaSlice(span.key, rows, 0,",
    ),
    Mutant(
        "a range runs over media that are not there",
        "scheduler/scheduler.py",
        "stop = len(sequence.token_ids) if missing is None else max(missing.start, start)",
        "stop = len(sequence.token_ids)",
    ),
    Mutant(
        "a late result is taken for the step in flight",
        "scheduler/scheduler.py",
        "if not self._steps or self._steps[0].step_id != step_id:",
        "if not self._steps:",
    ),
    Mutant(
        "who made room keeps what was computed where it was",
        "scheduler/sequence.py",
        "        self.epoch += 1\n",
        "",
    ),
    Mutant(
        "the token of another row is taken up",
        "scheduler/plan_builder.py",
        "index_before[sequence.seq_id] if is_unknown",
        "len(index_before) - 1 - index_before[sequence.seq_id] if is_unknown",
    ),
    Mutant(
        "a step that failed counts as computed",
        "scheduler/scheduler.py",
        "                row.sequence.rewind()\n",
        "                pass\n",
    ),
    Mutant(
        "a step is planned on one that builds on a failed one",
        "scheduler/scheduler.py",
        "        self._is_emptying = True  #",
        "        #",
    ),
    Mutant(
        "an answer goes on beyond its last token in flight",
        "scheduler/scheduler.py",
        "elif sequence.num_ahead and sequence.is_full(sequence.num_expected):",
        "elif False:",
    ),
    Mutant(
        "how to draw a token outlives the token",
        "scheduler/sequence.py",
        "        self.row_sampling = None  #",
        "        #",
    ),
    Mutant(
        "blocks are published before they are computed",
        "scheduler/scheduler.py",
        "sequence.extend_hashes(), stop)",
        "sequence.extend_hashes(), stop + HASH_STRIDE)",
    ),
    Mutant(
        "the longest answer is one token longer",
        "scheduler/sequence.py",
        "return num_tokens >= self.max_total_tokens or",
        "return num_tokens > self.max_total_tokens or",
    ),
    Mutant(
        "a prompt of exactly the context length is refused",
        "scheduler/admission.py",
        "if num_tokens > self._max_model_len:",
        "if num_tokens >= self._max_model_len:",
    ),
    Mutant(
        "the youngest is spared, the oldest preempted", "scheduler/scheduler.py", "victim = self._running[-1]", "victim = self._running[0]"
    ),
    Mutant(
        "a suspect runs among the others",
        "scheduler/scheduler.py",
        "            if sequence in self._trials:\n                continue\n",
        "",
    ),
    Mutant(
        "whoever waits behind the step that ran is blamed, too",
        "scheduler/scheduler.py",
        "            blame(self._steps[0])",
        "            blame(self._steps[-1])",
    ),
    Mutant(
        "a trial ends a token too early",
        "scheduler/trials.py",
        "sequence.trial_stop = sequence.num_tokens  #",
        "sequence.trial_stop = sequence.num_tokens - 1  #",
    ),
    Mutant(
        "a suspect that was cleared stays one",
        "scheduler/trials.py",
        "            self.leave(sequence)\n\n    def turns",
        "\n    def turns",
    ),
)


def plant(mutant: Mutant | None, tree: Path) -> None:
    """A copy of what the tests need, with the slip in it if there is one.  Raises ValueError if the code has moved on."""
    for name in ("mmserve", "tests", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    if mutant is None:
        return
    file = tree / "mmserve" / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.slip}: {mutant.file} has {text.count(mutant.old)} times {mutant.old!r}")
    file.write_text(text.replace(mutant.old, mutant.new))


def killer(mutant: Mutant | None) -> str | None:
    """The first test that fails with the slip, or None if it lives."""
    with tempfile.TemporaryDirectory(prefix="mmserve-mutant-") as scratch:
        tree = Path(scratch)
        plant(mutant, tree)
        tests = [f"tests/{name}" for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]
        try:
            run = subprocess.run(
                command, cwd=tree, env=os.environ | {"PYTHONPATH": scratch, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "no end"
        if run.returncode == 0:
            return None
        failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in run.stdout.splitlines() if line.startswith("FAILED ")]
        if not failed:
            raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return failed[0].removeprefix("tests/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    sound = killer(None)
    if sound is not None:
        raise SystemExit(f"the tree fails without a slip: {sound}")
    table = Table("slip", "caught by")
    with ThreadPoolExecutor(args.processes) as pool:
        killers = list(pool.map(killer, MUTANTS))
    for mutant, name in zip(MUTANTS, killers, strict=True):
        table.add_row(mutant.slip, name or "[red]nobody")
    Console(stderr=True).print(table)
    alive = [mutant.slip for mutant, name in zip(MUTANTS, killers, strict=True) if name is None]
    print(json.dumps({"mutants": len(MUTANTS), "killed": len(MUTANTS) - len(alive), "alive": alive}))
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
