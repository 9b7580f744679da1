"""Trains `mmserve-tiny` from nothing and writes its model directory: towers, decoder, joining, export, scores.

    python -m scripts.train_tiny --work build/tiny

Takes under three hours on two CPU cores: two stages run at a time, each on one core.  Every stage keeps checkpoints under `--work`; start
the same command again to go on where it stopped.  A model below the bar is not written over the bundled one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console

from scripts.tiny import export, score
from scripts.tiny.card import Scores

BUNDLED = Path(__file__).resolve().parent.parent / "mmserve" / "models" / "tiny"
MIN_ACCURACY, MAX_HALLUCINATED = 0.92, 0.03  # in every slice, for both decoders
_SLICES = ("image", "images", "audio", "image+audio")


@dataclass(frozen=True, slots=True)
class Job:
    """One stage as a process of its own."""

    name: str
    arguments: tuple[str, ...]


def run_all(work: Path, jobs: Sequence[Job]) -> None:
    """Side by side; each writes to `work`/NAME.log.  Raises RuntimeError if one fails."""
    waiting = []
    for job in jobs:
        if (work / f"{job.name}.done").exists():
            continue
        log = (work / f"{job.name}.log").open("a")
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-m", *job.arguments], stdout=log, stderr=subprocess.STDOUT)
        waiting.append((job, process, log))
    console = Console()
    with console.status("starting") as status:
        began = time.monotonic()
        while any(process.poll() is None for _, process, _ in waiting):
            lines = [f"{job.name}: {_last_line(work / f'{job.name}.log')}" for job, process, _ in waiting if process.poll() is None]
            status.update(f"{(time.monotonic() - began) / 60:.0f} min\n" + "\n".join(lines))
            time.sleep(2)
    for job, process, log in waiting:
        log.close()
        if process.returncode != 0:
            raise RuntimeError(f"{job.name} failed with {process.returncode}: see {work / job.name}.log")
        (work / f"{job.name}.done").touch()
        console.print(f"{job.name} done")


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
    vision_dir, audio_dir, decoder_dir = work / "vision", work / "audio", work / "decoder"
    towers = ("--vision", str(vision_dir), "--audio", str(audio_dir))

    run_all(
        work, [Job("decoder", ("scripts.tiny.decoder", "--out", str(decoder_dir))), Job("vision", ("scripts.tiny.vision", str(vision_dir)))]
    )
    run_all(work, [Job("audio", ("scripts.tiny.audio", str(audio_dir)))])
    run_all(work, [Job("pools", ("scripts.tiny.real", *towers, "--cache", str(work / "cache")))])
    inputs = ("--decoder", str(decoder_dir), *towers, "--cache", str(work / "cache"))
    joins = [
        Job(f"join-{size}", ("scripts.tiny.join", "--out", str(work / f"join-{size}"), *inputs, "--size", size))
        for size in ("small", "large")
    ]
    run_all(work, joins)

    checkpoints = [work / f"join-{size}" / "checkpoint.pt" for size in ("small", "large")]
    candidate = work / "model"
    export.assemble(candidate, vision_dir, audio_dir, *checkpoints)
    scores = score.score(candidate, options.items)
    (work / "scores.json").write_text(json.dumps(scores, indent=1))
    if missed := failures(scores):
        sys.exit("below the bar, not written:\n" + "\n".join(missed))
    num_bytes = export.assemble(options.out, vision_dir, audio_dir, *checkpoints, work / "scores.json")
    Console().print(f"wrote {options.out}, {num_bytes / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
