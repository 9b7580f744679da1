"""Trains `mmserve-tiny` from nothing and writes its model directory: towers, decoder, joining, export, scores, probes.

    python -m scripts.train_tiny --work build/tiny

Planned for under three hours on two CPU cores (so far its stages were only run one by one): two run at a time, each on one core.  Every
stage keeps checkpoints under `--work`; start the same command again to go on where it stopped.  A model below the bar is not written
over the bundled one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console

from scripts.tiny import export, probe, score
from scripts.tiny.card import Scores

BUNDLED = Path(__file__).resolve().parent.parent / "mmserve" / "models" / "tiny"
MIN_ACCURACY, MAX_HALLUCINATED = 0.92, 0.03  # in every slice, for both decoders
_SLICES = ("image", "images", "audio", "image+audio")


@dataclass(frozen=True, slots=True)
class Job:
    """One stage as a process of its own."""

    name: str
    arguments: tuple[str, ...]


def run_chains(work: Path, *chains: Sequence[Job]) -> None:
    """Chains side by side, the jobs of one after another; each writes to `work`/NAME.log.  Raises RuntimeError if one fails."""
    console = Console()
    with console.status("starting") as status, ThreadPoolExecutor(len(chains)) as pool:
        running: dict[str, float] = {}  # name -> when it began
        futures = [pool.submit(_run_chain, work, chain, running) for chain in chains]
        while not all(future.done() for future in futures):
            lines = [f"{n}, {(time.monotonic() - t) / 60:.0f} min: {_last_line(work / f'{n}.log')}" for n, t in list(running.items())]
            status.update("\n".join(lines) or "starting")
            time.sleep(2)
    for future in futures:
        future.result()


def _run_chain(work: Path, chain: Sequence[Job], running: dict[str, float]) -> None:
    for job in chain:
        done = work / f"{job.name}.done"
        if done.exists():
            continue
        running[job.name] = time.monotonic()
        with (work / f"{job.name}.log").open("a") as log:
            ended = subprocess.run([sys.executable, "-W", "ignore", "-m", *job.arguments], stdout=log, stderr=subprocess.STDOUT)
        del running[job.name]
        if ended.returncode != 0:
            raise RuntimeError(f"{job.name} failed with {ended.returncode}: see {work / job.name}.log")
        done.touch()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1][-160:] if lines else ""


def failures(scores: Scores) -> list[str]:
    """What is below the bar."""
    return [
        f"{decoder} {name}: accuracy {scores[decoder][name]['accuracy']}, hallucinated {scores[decoder][name]['hallucinated']}"
        for decoder in scores
        for name in _SLICES
        if scores[decoder][name]["accuracy"] < MIN_ACCURACY or scores[decoder][name]["hallucinated"] > MAX_HALLUCINATED
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="checkpoints, caches and logs")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="the model directory")
    parser.add_argument("--items", type=int, default=2000, help="held-out items to score")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    vision_dir, audio_dir, decoder_dir, cache_dir = (str(work / name) for name in ("vision", "audio", "decoder", "cache"))
    small_dir, large_dir = str(work / "join-small"), str(work / "join-large")

    run_chains(
        work,
        [
            Job("vision", ("scripts.tiny.vision", vision_dir)),
            Job("pictures", ("scripts.tiny.real", "--vision", vision_dir, "--cache", cache_dir)),
        ],
        [
            Job("decoder", ("scripts.tiny.decoder", "--out", decoder_dir, "--max-minutes", "40")),
            Job("audio", ("scripts.tiny.audio", audio_dir)),
            Job("clips", ("scripts.tiny.real", "--audio", audio_dir, "--cache", cache_dir)),
        ],
    )
    join = ("scripts.tiny.join", "--vision", vision_dir, "--audio", audio_dir, "--cache", cache_dir)
    run_chains(  # both cores for each
        work,
        [
            Job("join-small", (*join, "--start", decoder_dir, "--out", small_dir, "--max-minutes", "50")),
            Job("join-large", (*join, "--size", "large", "--start", small_dir, "--out", large_dir, "--max-minutes", "30")),
        ],
    )

    small, large = (work / f"join-{size}" / "joined.pt" for size in ("small", "large"))
    candidate = work / "model"
    export.assemble(candidate, work / "vision", work / "audio", small, large)
    scores = score.score(candidate, options.items)
    (work / "scores.json").write_text(json.dumps(scores, indent=1))
    if missed := failures(scores):
        sys.exit("below the bar, not written:\n" + "\n".join(missed))
    num_bytes = export.assemble(options.out, work / "vision", work / "audio", small, large, work / "scores.json")
    probe.train(options.out)
    Console().print(f"wrote {options.out}, {num_bytes / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
