"""Train the vision tower: a small `CLIPVisionModel` whose every patch says what it shows, where, and before which background.

Supervision is dense and linear: one linear layer, thrown away afterwards, reads all labels from each patch's last hidden state.
Cheap views first: windows of 8 x 8 patches, then scenes with two thirds of their patches dropped, whole pictures last; a patch
keeps its own position embedding in all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.utils.logging import disable_progress_bar

from scripts.tiny.render import render
from scripts.tiny.views import HELD_OUT_SEED, Cut, Pool, cut_views
from scripts.tiny.vision_score import Predicted, score
from scripts.tiny.world import CELLS, COLORS, GRID, IMAGE_SIZE, KINDS, PATCH_SIZE, sample_scene

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_COUNT = 3
HEADS = {
    "classes": len(KINDS) + 1,
    "backgrounds": len(COLORS),
    "rows": GRID,
    "columns": GRID,
    "offsets": 2,
    "flags": 1,
    "cells": len(CELLS),
    "counts": MAX_COUNT,
}
LOSS_WEIGHTS = {
    "classes": 1.0,
    "backgrounds": 0.3,
    "rows": 0.1,
    "columns": 0.1,
    "offsets": 0.5,
    "flags": 3.0,
    "cells": 0.2,
    "counts": 0.2,
}
GATES = {"vote": 0.98, "background": 0.99, "flag": 0.97, "cell": 0.98, "kinds": 0.96}


@dataclass(frozen=True, slots=True)
class Stage:
    """One way of showing scenes, until `gate` (share of object patches named right in training views) or `num_steps`."""

    cut: Cut
    batch_size: int
    fresh: int  # scenes rendered anew each step
    num_steps: int
    gate: float
    lr: float


STAGES = (
    Stage("window", 64, fresh=12, num_steps=2000, gate=0.92, lr=3e-3),
    Stage("dropped", 16, fresh=6, num_steps=2400, gate=0.96, lr=1.5e-3),
    Stage("whole", 8, fresh=4, num_steps=1400, gate=1.1, lr=1e-3),
)
WARMUP_STEPS = 100
POOL_SIZE = 1024  # rendered scenes that views are cut from
SAVE_EVERY_S = 60.0
EVALUATE_EVERY_S = 480.0
INTERIM_SCENES, FINAL_SCENES = 100, 500  # held-out scenes scored while a stage runs, and when it ends
PUBLISH_VOTE = 0.9  # an object vote below this is no use to anyone


# ---------------------------------------------------------------------------------------------------------------------- model


def build_model() -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        patch_size=PATCH_SIZE,
        image_size=IMAGE_SIZE,
    )
    return CLIPVisionModel(config)


def load(out_dir: Path) -> CLIPVisionModel:
    """The latest published tower, in float32 and eval mode."""
    return CLIPVisionModel.from_pretrained(Path(out_dir) / "model", dtype=torch.float32).eval()


def features(model: CLIPVisionModel, images: np.ndarray | Tensor) -> Tensor:
    """uint8 [N, 336, 336, 3] -> float32 [N, 576, 128]: the last hidden state, without class token and post-layernorm."""
    pixels = _normalise(torch.as_tensor(images).permute(0, 3, 1, 2), channel_dim=1)
    return model(pixel_values=pixels).last_hidden_state[:, 1:]


def _normalise(pixels: Tensor, channel_dim: int) -> Tensor:
    shape = [1] * pixels.dim()
    shape[channel_dim] = 3
    mean, std = (torch.tensor(v).view(shape) for v in (CLIP_MEAN, CLIP_STD))
    return (pixels.float() / 255 - mean) / std


def encode_patches(model: CLIPVisionModel, patches: Tensor, positions: Tensor) -> Tensor:
    """Some patches of each picture, uint8 [N, T, 588] at positions int64 [N, T] -> float32 [N, T, 128].

    Equals `features` when all 576 are given.  A patch lies as in the convolution's weight: channel, row, column.
    """
    embeddings = model.embeddings
    pixels = _normalise(patches.unflatten(-1, (3, -1)), channel_dim=2).flatten(2)
    place = embeddings.position_embedding.weight
    embedded = F.linear(pixels, embeddings.patch_embedding.weight.flatten(1)) + place[1:][positions]
    first = (embeddings.class_embedding + place[0]).expand(len(patches), 1, -1)
    hidden = model.pre_layrnorm(torch.cat([first, embedded], dim=1))
    return model.encoder(inputs_embeds=hidden).last_hidden_state[:, 1:]


@torch.no_grad()
def initialise(model: CLIPVisionModel, patches: Tensor) -> None:
    """Start the patch embedding at the principal components of uint8 [N, 588] patches, the positions at sines and cosines."""
    pixels = _normalise(patches.unflatten(-1, (3, -1)), channel_dim=1).flatten(1)
    variance, directions = torch.linalg.eigh(torch.cov(pixels.T))
    width = model.config.hidden_size
    variance, directions = variance.flip(0)[:width], directions.flip(1)[:, :width]
    # Half-whitened: equal variance for the strong components, less for those that are mostly grain.
    filters = (directions / (variance + variance[width // 3]).sqrt()).T
    model.embeddings.patch_embedding.weight.copy_(filters.view(width, 3, PATCH_SIZE, PATCH_SIZE))
    frequency = torch.pi / GRID * torch.logspace(0, 1, width // 4)
    angle = torch.arange(GRID)[:, None] * frequency
    waves = torch.cat([angle.sin(), angle.cos()], dim=1)
    row, column = waves[:, None].expand(GRID, GRID, -1), waves[None].expand(GRID, GRID, -1)
    model.embeddings.position_embedding.weight[1:] = torch.cat([row, column], dim=-1).flatten(0, 1)


# ------------------------------------------------------------------------------------------------------------------- learning


def losses(read: dict[str, Tensor], labels: dict[str, Tensor]) -> dict[str, Tensor]:
    is_object = labels["classes"] > 0
    weight = torch.where(is_object, 1.0, 0.4)
    by_patch = F.cross_entropy(read["classes"].flatten(0, 1), labels["classes"].flatten(), reduction="none")
    result = {"classes": (by_patch * weight.flatten()).sum() / weight.sum()}
    for name in ("backgrounds", "rows", "columns", "cells", "counts"):
        total = F.cross_entropy(read[name].flatten(0, 1), labels[name].flatten(), ignore_index=-1, reduction="sum")
        result[name] = total / (labels[name] >= 0).sum().clamp(min=1)
    result["offsets"] = F.smooth_l1_loss(read["offsets"][is_object], labels["offsets"][is_object], beta=0.3)
    flags = read["flags"].squeeze(-1)
    by_patch = F.binary_cross_entropy_with_logits(flags, labels["flags"].float(), reduction="none", pos_weight=torch.tensor(3.0))
    result["flags"] = (by_patch * weight).sum() / weight.sum()
    return result


def read_heads(heads: nn.Linear, hidden: Tensor) -> dict[str, Tensor]:
    return dict(zip(HEADS, heads(hidden).split(list(HEADS.values()), dim=-1), strict=True))


@dataclass
class Student:
    """All that a checkpoint holds; `train` alone writes it."""

    model: CLIPVisionModel
    heads: nn.Linear
    optimizer: torch.optim.AdamW
    stage: int = 0
    step: int = 0  # of this stage
    next_seed: int = 0
    spent_s: float = 0.0
    stage_began_s: float = 0.0  # of spent_s
    named_right: float = 0.0  # moving average over this stage's views

    @classmethod
    def new(cls) -> Student:
        model, heads = build_model(), nn.Linear(128, sum(HEADS.values()))
        for parameter in model.post_layernorm.parameters():
            parameter.requires_grad_(False)  # nothing reads behind it
        trained = [p for p in (*model.parameters(), *heads.parameters()) if p.requires_grad]
        decayed = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.02}, {"params": [p for p in trained if p.dim() == 1]}]
        return cls(model, heads, torch.optim.AdamW(decayed, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0))

    @property
    def plain(self) -> dict[str, float]:
        return {n: getattr(self, n) for n in ("stage", "step", "next_seed", "spent_s", "stage_began_s", "named_right")}

    def save(self, path: Path) -> None:
        tensors = {n: getattr(self, n).state_dict() for n in ("model", "heads", "optimizer")}
        torch.save(tensors | self.plain, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    @classmethod
    def resume(cls, path: Path) -> Student:
        student, saved = cls.new(), torch.load(path, weights_only=True)
        for name in ("model", "heads", "optimizer"):
            getattr(student, name).load_state_dict(saved[name])
        for name in student.plain:
            setattr(student, name, saved[name])
        return student


def learn_one(student: Student, pool: Pool, rng: np.random.Generator, lr: float) -> float:
    """One step; returns the loss."""
    stage = STAGES[student.stage]
    pool.draw(stage.fresh)
    patches, positions, labels = cut_views(pool, stage.cut, stage.batch_size, rng)
    read = read_heads(student.heads, encode_patches(student.model, patches, positions))
    loss = torch.stack([LOSS_WEIGHTS[name] * value for name, value in losses(read, labels).items()]).sum()
    student.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in student.optimizer.param_groups for p in group["params"]], 1.0)
    for group in student.optimizer.param_groups:
        group["lr"] = lr
    student.optimizer.step()
    student.step += 1
    named_right = (read["classes"].argmax(-1) == labels["classes"])[labels["classes"] > 0].float().mean().item()
    weight = max(0.01, 1 / student.step)
    student.named_right += weight * (named_right - student.named_right)
    return loss.item()


def learning_rate(student: Student, max_s: float) -> float:
    """Warm-up at the start of each stage, a cosine to zero over the steps, or the time, that the last has."""
    stage = STAGES[student.stage]
    lr = stage.lr * min(1.0, (student.step + 1) / WARMUP_STEPS)
    if stage is STAGES[-1]:
        by_time = (student.spent_s - student.stage_began_s) / max(1.0, max_s - student.stage_began_s)
        lr *= 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(student.step / stage.num_steps, by_time)))
    return lr


@torch.no_grad()
def evaluate(model: CLIPVisionModel, heads: nn.Linear, num_scenes: int, *, first_seed: int = HELD_OUT_SEED) -> dict[str, float]:
    """Scores on whole pictures no training run saw; every second one is worn."""
    scenes = [sample_scene(random.Random(first_seed + i)) for i in range(num_scenes)]
    truths = [render(scene, augment=i % 2 == 1) for i, scene in enumerate(scenes)]
    predictions: list[Predicted] = []
    for start in range(0, num_scenes, 10):
        images = np.stack([truth.image for truth in truths[start : start + 10]])
        predictions.extend(_predict(read_heads(heads, features(model, images))))
    return score(scenes, truths, predictions)


def _predict(read: dict[str, Tensor]) -> list[Predicted]:
    grid = {name: values.unflatten(1, (GRID, GRID)) for name, values in read.items()}
    labels = {name: values.argmax(-1).numpy() for name, values in grid.items() if name not in ("offsets", "flags")}
    labels["counts"] = labels["counts"] + 1
    labels["offsets"], labels["flags"] = grid["offsets"].numpy(), grid["flags"].squeeze(-1).sigmoid().numpy()
    return [Predicted(**{name: values[i] for name, values in labels.items()}) for i in range(len(labels["flags"]))]


def publish(student: Student, out_dir: Path, scores: dict[str, float]) -> None:
    """Replace `model/`, `heads.pt` and `scores.json` by this student's."""
    fresh, final, old = (out_dir / name for name in ("model.tmp", "model", "model.old"))
    disable_progress_bar()
    student.model.save_pretrained(fresh)
    if final.exists():
        final.rename(old)
    fresh.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    torch.save(student.heads.state_dict(), out_dir / "heads.pt")
    (out_dir / "scores.json").write_text(json.dumps({"train": student.plain, "held_out": scores}, indent=2))


def train(out_dir: Path, max_minutes: float = 65.0, *, seed: int = 0) -> dict[str, float]:
    """Train, or carry on from `out_dir`, until the last stage ends or time is short; return the held-out scores.

    The last stage always gets its share of the time: earlier ones are cut short for it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = out_dir / "checkpoint.pt"
    student = Student.resume(checkpoint) if checkpoint.exists() else Student.new()
    with _Reporter() as reporter:
        if student.stage < len(STAGES):
            _learn(student, out_dir, max_minutes * 60, seed, reporter)
        published = out_dir / "scores.json"
        if not published.exists():
            raise RuntimeError(
                f"no tower reached an object vote of {PUBLISH_VOTE} in {max_minutes} min; raise max_minutes and start afresh"
            )
        scores: dict[str, float] = json.loads(published.read_text())["held_out"]
        missed = {name: scores[name] for name, bar in GATES.items() if scores[name] < bar}
        reporter.note(f"vision missed={missed}" if missed else "vision reached every bar")
    return scores


def _learn(student: Student, out_dir: Path, max_s: float, seed: int, reporter: _Reporter) -> None:
    rng = np.random.default_rng((seed, student.next_seed))
    pool = Pool(POOL_SIZE, student.next_seed)
    pool.draw(POOL_SIZE // 2)
    if student.next_seed == 0:
        initialise(student.model, torch.from_numpy(pool.patches[:400].reshape(-1, pool.patches.shape[-1])[::8].copy()))

    clock, saved_s, evaluated_s = time.monotonic(), student.spent_s, student.spent_s
    while student.stage < len(STAGES):
        loss = learn_one(student, pool, rng, learning_rate(student, max_s))
        student.next_seed = pool.next_seed
        student.spent_s, clock = student.spent_s + time.monotonic() - clock, time.monotonic()
        reporter.show(student, loss)
        is_over = _stage_is_over(student, max_s)
        if is_over or student.spent_s > evaluated_s + EVALUATE_EVERY_S:
            _examine(student, out_dir, reporter, FINAL_SCENES if is_over else INTERIM_SCENES)
            evaluated_s = student.spent_s
        if is_over:
            student.stage, student.step, student.named_right, student.stage_began_s = student.stage + 1, 0, 0.0, student.spent_s
        if is_over or student.spent_s > saved_s + SAVE_EVERY_S:
            student.save(out_dir / "checkpoint.pt")
            saved_s = student.spent_s


def _examine(student: Student, out_dir: Path, reporter: _Reporter, num_scenes: int) -> None:
    """Score on held-out scenes; publish if fit to be used.  The latest counts, not the luckiest: a score chosen from many flatters."""
    scores = evaluate(student.model.eval(), student.heads, num_scenes)
    reporter.note(f"vision held_out={json.dumps({name: round(value, 4) for name, value in scores.items()})}")
    if scores["vote"] >= PUBLISH_VOTE:
        publish(student, out_dir, scores)


def _stage_is_over(student: Student, max_s: float) -> bool:
    stage = STAGES[student.stage]
    if stage is STAGES[-1]:
        return student.step >= stage.num_steps or student.spent_s >= max_s
    share = (0.3, 0.6)[student.stage]  # of the time, by which this stage must have ended
    is_learned = student.step > WARMUP_STEPS and student.named_right >= stage.gate
    return is_learned or student.step >= stage.num_steps or student.spent_s >= share * max_s


class _Reporter:
    """A progress bar on a terminal, a line every 30 s elsewhere."""

    def __init__(self) -> None:
        columns = (TextColumn("vision"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.console = Console()
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("")
        self.noted_at = -30.0

    def __enter__(self) -> _Reporter:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, student: Student, loss: float) -> None:
        stage = STAGES[student.stage]
        text = f"{stage.cut} loss={loss:.3f} named_right={student.named_right:.3f}"
        self.progress.update(self.task, completed=student.step, total=stage.num_steps, description=text)
        if not self.console.is_terminal and student.spent_s > self.noted_at + 30:
            self.note(f"vision spent_s={student.spent_s:.0f} step={student.step}/{stage.num_steps} {text}")
            self.noted_at = student.spent_s

    def note(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--max-minutes", type=float, default=65.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    scores = train(arguments.out_dir, arguments.max_minutes, seed=arguments.seed)
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
