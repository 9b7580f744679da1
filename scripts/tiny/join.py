"""Joins towers and decoder: distils projectors onto the ideal tokens, then tunes decoder and projectors on real features.

The same for the large decoder, which starts as the small one with layers that do nothing yet.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from rich.progress import Progress, track
from torch import nn

from scripts.tiny import tokenizer as tokens
from scripts.tiny.batch import Batch, Outcome, collate, forward
from scripts.tiny.decoder import (
    LARGE_LAYERS,
    SMALL_LAYERS,
    Embedder,
    Learner,
    SymbolicSource,
    Tally,
    embed_groups,
    optimizers,
    set_share,
)
from scripts.tiny.projector import Projector
from scripts.tiny.real import AudioPool, RealFrames, RealPatches, RealSource, VisionPool, held_out_pools, train_pools
from scripts.tiny.rows import RowMaker, Slot
from scripts.tiny.symbolic import NUM_PATCHES

SEED = 40
WEIGHTS = {"single": 0.17, "pair": 0.28, "audio": 0.05, "spoken": 0.38, "both": 0.07, "text": 0.05}
SYMBOLIC_SHARE = 0.15  # of the batches
TEXT_FIRST_SHARE = 0.6
NUM_SYMBOLIC = (40, 80)
LR, LARGE_LR = 0.003, 0.0015
AVERAGE_DECAY = 0.99
MERGE_S = 45.0  # between two merges of the ranks' weights
DISTIL_STEPS = 1200


@dataclass(frozen=True, slots=True)
class Phase:
    """A share of the tuning: how many patches of a picture are kept, and rows to a batch."""

    share: float
    num_patches: tuple[int, int]
    rows: int


PHASES = (Phase(0.6, (56, 110), 8), Phase(0.3, (96, 200), 7), Phase(0.1, (NUM_PATCHES, NUM_PATCHES), 3))


class Joined(Learner):
    """A decoder, its ideal tokens and its two projectors."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(tokens.train(), num_layers)
        self.vision_projector, self.audio_projector = Projector(), Projector()
        self.source: RealSource | None = None

    def embed(self, words: torch.Tensor, slots: Sequence[Slot]) -> torch.Tensor:
        return embed_groups(slots, self.embedders(words))

    def embedders(self, words: torch.Tensor) -> dict[type, Embedder]:
        source = self.source
        if source is None:
            return super().embedders(words)
        return super().embedders(words) | {
            RealPatches: lambda payloads: self.vision_projector(source.vision_features(payloads)),
            RealFrames: lambda payloads: self.audio_projector(source.audio_features(payloads)),
        }


# --- projectors --------------------------------------------------------------------------------------------------------------


def distil(joined: Joined, pictures: VisionPool, clips: AudioPool) -> tuple[float, float]:
    """Teach both projectors the ideal tokens; return the share of their variance that is left unexplained (vision, audio)."""
    words = joined.decoder.model.embed_tokens.weight.detach()
    generator = random.Random(SEED)

    def some_patches() -> tuple[torch.Tensor, torch.Tensor]:
        features, targets = [], []
        for _ in range(24):
            index = generator.randrange(len(pictures.scenes))
            labels = pictures.labels(index)
            things = labels.kind.nonzero()[0]
            kept = [*generator.choices(things.tolist(), k=48), *generator.sample(range(NUM_PATCHES), 48)]
            features.append(torch.from_numpy(pictures.features[index][kept]).float())
            targets.append(joined.ideal.vision_rows(words, [labels.at(kept)]))
        return torch.cat(features), torch.cat(targets)

    def some_frames() -> tuple[torch.Tensor, torch.Tensor]:
        indices = [generator.randrange(len(clips.utterances)) for _ in range(32)]
        features = torch.cat([torch.from_numpy(clips.features[i]).float() for i in indices])
        return features, joined.ideal.audio_rows(words, [clips.labels(i) for i in indices])

    return _distil_one(joined.vision_projector, some_patches, "vision"), _distil_one(joined.audio_projector, some_frames, "audio")


def _distil_one(projector: Projector, draw: Callable[[], tuple[torch.Tensor, torch.Tensor]], name: str) -> float:
    with torch.no_grad():
        features = torch.cat([draw()[0] for _ in range(8)])
        mean, scale = features.mean(0), features.std(0) + 1e-4
        projector.linear_1.weight.mul_(2.0 / scale)  # features come in any size: start from whitened ones
        projector.linear_1.bias.sub_(projector.linear_1.weight @ mean)
        projector.linear_2.weight.mul_(0.1)
    opt = torch.optim.AdamW(projector.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    left = 1.0
    for step in track(range(DISTIL_STEPS), description=f"distil {name}"):
        opt.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1 - step / DISTIL_STEPS)
        with torch.no_grad():
            features, targets = draw()
        error = (projector(features) - targets).square().mean()
        loss = error / targets.var(0).mean()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        left = 0.95 * left + 0.05 * loss.item()
    return left


# --- ranks -------------------------------------------------------------------------------------------------------------------


class Ranks:
    """Processes that tune copies of one model on rows of their own and now and then merge their weights (local SGD, Stich 2019).

    One on each core does almost twice the work of one on two cores: the matrices are too small to be shared out.  Merges are due by the
    clock, so that a slower core holds nobody up, and a rank counts for as much as it has seen since the last one.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        due = torch.tensor([time.monotonic() + MERGE_S], dtype=torch.float64)
        dist.broadcast(due, 0)
        self._due = due.item()  # one machine: all ranks read the same clock
        self._num_seen = 0

    def merge(self, num_seen: int, *states: dict[str, torch.Tensor]) -> int | None:
        """Once it is due: make each state the ranks' mean, in place, and return how many questions all have seen since the last time."""
        self._num_seen += num_seen
        if time.monotonic() < self._due:
            return None
        total = torch.tensor([self._num_seen], dtype=torch.float64)
        dist.all_reduce(total)
        for tensor in (tensor for state in states for tensor in state.values()):
            tensor.mul_(self._num_seen / total.item())
            dist.all_reduce(tensor)
        self._due += MERGE_S
        self._num_seen = 0
        return int(total.item())


def run_ranks(num_ranks: int, function: Callable[..., None], *arguments: object) -> None:
    """`function(*arguments)` in every rank, each on one thread."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_rank, (num_ranks, f"file://{directory}/store", function, arguments), nprocs=num_ranks)


def _rank(rank: int, num_ranks: int, store: str, function: Callable[..., None], arguments: Sequence[object]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED + rank)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    function(*arguments)
    dist.destroy_process_group()


# --- tuning ------------------------------------------------------------------------------------------------------------------


def tune(joined: Joined, pictures: VisionPool, clips: AudioPool, out_dir: Path, max_minutes: float, lr: float) -> None:
    """Until the time is over; the learning rate falls to zero with it.

    `joined` ends as the running mean of its weights: steps on few long rows are noisy.
    """
    ranks = Ranks()
    opts = optimizers(joined, joined.decoder, lr)
    base = [opt.param_groups[0]["lr"] for opt in opts]
    checkpoint = out_dir / "checkpoint.pt"
    step, num_seen, spent_s = 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        joined.load_state_dict(state["joined"])
        for opt, kept in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(kept)
        step, num_seen, spent_s = state["step"], state["seen"], state["spent_s"]
        average = state["average"]
    else:
        average = {name: value.clone() for name, value in joined.state_dict().items()}
    tally = Tally()
    merged_at = time.monotonic()
    done = spent_s / (60 * max_minutes)
    with Progress(disable=ranks.rank > 0) as progress:
        bar = progress.add_task(f"tune {out_dir.name}", total=1.0)
        while done < 1:
            left = max(0.0, 1 - (spent_s + time.monotonic() - merged_at) / (60 * max_minutes))
            set_share(opts, base, min(1.0, (step + 1) / 50, left / 0.6))
            batch, is_real = _draw(joined, pictures, clips, done, random.Random((SEED + ranks.rank) * 10_000_000 + step))
            outcome: Outcome = joined(batch)
            outcome.loss.backward()
            nn.utils.clip_grad_norm_(joined.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, value in joined.state_dict().items():
                    average[name].lerp_(value, max(1 - AVERAGE_DECAY, 1 / (step + 1)))
            if is_real:
                tally.add(batch, outcome)
            step += 1
            newly_seen = ranks.merge(len(outcome.right), joined.state_dict(), average)
            if newly_seen is None:
                continue
            num_seen += newly_seen
            spent_s, merged_at = spent_s + MERGE_S, merged_at + MERGE_S
            done = spent_s / (60 * max_minutes)
            progress.update(bar, completed=done)
            if ranks.rank == 0:
                state = {
                    "joined": joined.state_dict(), "average": average, "optimizers": [opt.state_dict() for opt in opts],
                    "step": step, "seen": num_seen, "spent_s": spent_s,
                }  # fmt: skip
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
                if not progress.console.is_terminal:
                    print(f"{time.strftime('%H:%M:%S')} {out_dir.name} done={done:.2f} step={step} seen={num_seen} {tally}", flush=True)
    joined.load_state_dict(average)


def _draw(joined: Joined, pictures: VisionPool, clips: AudioPool, done: float, rng: random.Random) -> tuple[Batch, bool]:
    phase = _phase(done)
    what = rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
    real = RealSource(pictures, clips, phase.num_patches)
    joined.source = real
    is_real = rng.random() >= SYMBOLIC_SHARE
    maker = RowMaker(joined.tokenizer, real if is_real else SymbolicSource(NUM_SYMBOLIC), num_questions=12)
    return collate(maker.make_some(rng, what, phase.rows, TEXT_FIRST_SHARE)), is_real


def _phase(done: float) -> Phase:
    for phase in PHASES:
        if done < phase.share:
            return phase
        done -= phase.share
    return PHASES[-1]


@torch.no_grad()
def evaluate(joined: Joined, pictures: VisionPool, clips: AudioPool, num_batches: int = 40) -> Tally:
    """Answers right word for word, on held-out pools and with all patches."""
    joined.source = source = RealSource(pictures, clips, (NUM_PATCHES, NUM_PATCHES))
    maker = RowMaker(joined.tokenizer, source, num_questions=12)
    rng, tally = random.Random(2**30 + SEED), Tally(decay=1.0)
    for number in range(num_batches):
        what = tuple(WEIGHTS)[number % len(WEIGHTS)]
        batch = collate([maker.make(rng, what) for _ in range(4)])
        tally.add(batch, forward(joined.decoder, None, batch, joined.embed))
    return tally


def grow(small: Joined, num_layers: int = LARGE_LAYERS) -> Joined:
    """A deeper copy that computes the same: before each layer a new one, whose outputs are zero so far."""
    large = Joined(num_layers)
    rest = {k: v for k, v in small.state_dict().items() if ".layers." not in k}
    large.load_state_dict(rest, strict=False)
    old = small.decoder.model.layers
    stride = num_layers // len(old)
    for index, layer in enumerate(large.decoder.model.layers):
        if index % stride == stride - 1:
            layer.load_state_dict(old[index // stride].state_dict())
        else:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    return large


def load(path: Path, num_layers: int) -> Joined:
    joined = Joined(num_layers)
    joined.load_state_dict(torch.load(path, weights_only=True))
    return joined.eval()


@dataclass(frozen=True, slots=True)
class Inputs:
    vision_dir: Path
    audio_dir: Path
    cache_dir: Path


def train_small(out_dir: Path, decoder_dir: Path, inputs: Inputs, max_minutes: float) -> None:
    """One rank's part of writing `out_dir`/joined.pt.  Resumes.  Rank 0 prints held-out scores."""
    pictures, clips = train_pools(inputs.vision_dir, inputs.audio_dir, inputs.cache_dir)
    torch.manual_seed(SEED)  # all ranks start from the same projectors
    joined = Joined(SMALL_LAYERS)
    if not (out_dir / "checkpoint.pt").exists():
        learned = torch.load(decoder_dir / "checkpoint.pt", weights_only=True)["learner"]
        joined.load_state_dict(learned, strict=False)  # all but the projectors
        left = distil(joined, pictures, clips)
        print(f"{time.strftime('%H:%M:%S')} distilled, unexplained variance: vision {left[0]:.3f}, audio {left[1]:.3f}", flush=True)
    tune(joined, pictures, clips, out_dir, max_minutes, LR)
    _finish(joined, out_dir, inputs)


def train_large(out_dir: Path, small_dir: Path, inputs: Inputs, max_minutes: float) -> None:
    """The same, grown from the joined small one.

    The result is the mean of the weights before and after tuning, which does better on held-out pictures than either of them
    (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").
    """
    pictures, clips = train_pools(inputs.vision_dir, inputs.audio_dir, inputs.cache_dir)
    torch.manual_seed(SEED)
    large = grow(load(small_dir / "joined.pt", SMALL_LAYERS)).train()
    before = {name: value.clone() for name, value in large.state_dict().items()}
    tune(large, pictures, clips, out_dir, max_minutes, LARGE_LR)
    large.load_state_dict({name: before[name].lerp(value, 0.5) for name, value in large.state_dict().items()})
    _finish(large, out_dir, inputs)


def _finish(joined: Joined, out_dir: Path, inputs: Inputs) -> None:
    if dist.get_rank() == 0:
        torch.save(joined.state_dict(), out_dir / "joined.pt")
        pools = held_out_pools(inputs.vision_dir, inputs.audio_dir, inputs.cache_dir)
        print(f"held out: {evaluate(joined.eval(), *pools)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="what scripts.tiny.decoder left; for large, what joining small left")
    for name in ("vision", "audio", "cache"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--max-minutes", type=float, default=40.0)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one for each core")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(options.vision, options.audio, options.cache)
    train = train_small if options.size == "small" else train_large
    run_ranks(options.ranks, train, options.out, options.start, inputs, options.max_minutes)


if __name__ == "__main__":
    main()
