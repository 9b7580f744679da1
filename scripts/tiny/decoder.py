"""Trains the small decoder on symbolic media: no pixels, no sound, fresh scenes for ever, from easy to all there is."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.tiny import tokenizer as tokens
from scripts.tiny.batch import Batch, Hints, Outcome, collate, forward
from scripts.tiny.muon import Muon
from scripts.tiny.projector import DECODER_WIDTH
from scripts.tiny.rows import RowMaker, Slot
from scripts.tiny.symbolic import NUM_PATCHES, FrameLabels, IdealTokens, PatchLabels, frame_labels, noisy_patches
from scripts.tiny.world import Scene, Utterance, sample_scene

Embedder = Callable[[list[Any]], torch.Tensor]  # payloads of one type -> their rows, joined
SMALL_LAYERS, LARGE_LAYERS = 4, 8
SEED = 20
NOISE = 0.2  # of a media row, relative to its size
CHECKPOINT_S = 60.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Drawn until every task in `gates` is right this often (a running mean), or `until`, a share of the whole training, is over."""

    name: str
    weights: dict[str, float]  # RowMaker kinds
    num_patches: tuple[int, int]
    rows: int
    until: float
    gates: dict[str, float]
    text_first_share: float = 0.0  # of the batches


STAGES = (
    Stage("one picture, few patches", {"single": 1.0}, (14, 20), 7, 0.15, {"presence": 0.9, "background": 0.97, "where": 0.8}),
    Stage("one picture", {"single": 1.0}, (28, 48), 7, 0.35, {"presence": 0.93, "count": 0.85, "where": 0.9, "name": 0.65}),
    Stage(
        "two pictures", {"single": 0.4, "pair": 0.4, "audio": 0.15, "text": 0.05}, (24, 44), 7, 0.5,
        {"which": 0.85, "count": 0.87, "word": 0.85},
    ),
    Stage(
        "everything", {"single": 0.14, "pair": 0.37, "audio": 0.09, "spoken": 0.23, "both": 0.09, "text": 0.08}, (24, 64), 7, 1.0, {},
        text_first_share=0.3,
    ),
)  # fmt: skip
DECAY_SHARE = 0.3  # of the whole training, at its end


def build(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=tokens.VOCAB_SIZE, hidden_size=DECODER_WIDTH, intermediate_size=512, num_hidden_layers=num_layers,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=8192,
        rms_norm_eps=1e-5, initializer_range=0.05, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class SymbolicSource:
    """Scenes and clips as labels."""

    def __init__(self, num_patches: tuple[int, int]) -> None:
        self._num_patches = num_patches

    def scene(self, rng: random.Random) -> tuple[Scene, Slot]:
        scene = sample_scene(rng)
        labels = noisy_patches(np.random.default_rng(rng.getrandbits(30)), scene, rng.randint(*self._num_patches))
        return scene, Slot(labels.positions, NUM_PATCHES, labels, is_image=True)

    def clip(self, rng: random.Random, utterance: Utterance) -> Slot:
        labels, offsets, span = frame_labels(np.random.default_rng(rng.getrandbits(30)), utterance)
        return Slot(offsets, span, labels, is_image=False)


class Learner(nn.Module):
    """A decoder with what is learned beside it."""

    def __init__(self, tokenizer: Tokenizer, num_layers: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.decoder = build(num_layers)
        self.ideal = IdealTokens(tokenizer)
        self.hints = Hints()

    def embed(self, words: torch.Tensor, slots: Sequence[Slot]) -> torch.Tensor:
        """Rows of symbolic slots, in their order."""
        return embed_groups(slots, self.embedders(words))

    def embedders(self, words: torch.Tensor) -> dict[type, Embedder]:
        return {
            PatchLabels: lambda labels: self.ideal.vision_rows(words, labels, NOISE),
            FrameLabels: lambda labels: self.ideal.audio_rows(words, labels, NOISE),
        }

    def forward(self, batch: Batch) -> Outcome:
        return forward(self.decoder, self.hints, batch, self.embed)


def embed_groups(slots: Sequence[Slot], embedders: Mapping[type, Embedder]) -> torch.Tensor:
    """Rows of all slots in their order, each embedded by what its payload is."""
    pieces: dict[int, torch.Tensor] = {}
    for payload_type, embedder in embedders.items():
        mine = [i for i, slot in enumerate(slots) if isinstance(slot.payload, payload_type)]
        if mine:
            rows = embedder([slots[i].payload for i in mine])
            pieces |= dict(zip(mine, rows.split([len(slots[i].offsets) for i in mine]), strict=True))
    return torch.cat([pieces[i] for i in range(len(slots))])


def optimizers(learner: nn.Module, decoder: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    hidden = [p for p in decoder.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in hidden}
    others = [p for p in learner.parameters() if id(p) not in chosen]
    return [Muon(hidden, lr=lr, weight_decay=0.01), torch.optim.AdamW(others, lr=lr * 0.15, betas=(0.9, 0.98), weight_decay=0.0)]


def set_share(opts: Sequence[torch.optim.Optimizer], base: Sequence[float], share: float) -> None:
    for opt, lr in zip(opts, base, strict=True):
        for group in opt.param_groups:
            group["lr"] = lr * share


class Tally:
    """Running mean of exact answers by (slice, task), fresh items only: every item is seen once."""

    def __init__(self, decay: float = 0.99) -> None:
        self._decay = decay
        self.mean: dict[tuple[str, str], float] = {}
        self.seen: dict[tuple[str, str], int] = defaultdict(int)
        self.loss = 0.0

    def add(self, batch: Batch, outcome: Outcome) -> None:
        self.loss = 0.97 * self.loss + 0.03 * outcome.answer_loss if self.loss else outcome.answer_loss
        asked = [q for row in batch.rows for q in row.questions]
        for (question, slice_name), ok in zip(asked, outcome.right, strict=True):
            key = (slice_name, question.task)
            self.seen[key] += 1
            decay = min(self._decay, 1 - 1 / self.seen[key])
            self.mean[key] = decay * self.mean.get(key, 0.0) + (1 - decay) * ok

    def task(self, name: str) -> float:
        """The worst slice of a task; zero before it was seen enough."""
        means = [m for (s, t), m in self.mean.items() if t == name and self.seen[s, t] >= 60]
        return min(means, default=0.0)

    def __str__(self) -> str:
        by_slice: dict[str, list[str]] = defaultdict(list)
        for (slice_name, task), mean in sorted(self.mean.items()):
            by_slice[slice_name].append(f"{task} {mean:.2f}".replace("0.", ".").replace("1.00", "1."))
        return f"loss={self.loss:.3f} " + " | ".join(f"{name}: {', '.join(parts)}" for name, parts in by_slice.items())


def draw_batch(maker: RowMaker, stage: Stage, rng: random.Random) -> Batch:
    what = rng.choices(tuple(stage.weights), tuple(stage.weights.values()))[0]
    return collate(maker.make_some(rng, what, stage.rows, stage.text_first_share))


def train(out_dir: Path, *, max_minutes: float = 60.0, max_questions: int = 400_000, lr: float = 0.012) -> None:
    """Write `out_dir`/learner.pt; go on from its checkpoint if there is one.  Over when either limit is reached."""
    torch.manual_seed(SEED)
    tokenizer = tokens.train()
    learner = Learner(tokenizer, SMALL_LAYERS)
    opts = optimizers(learner, learner.decoder, lr)
    base = [opt.param_groups[0]["lr"] for opt in opts]
    checkpoint = out_dir / "checkpoint.pt"
    stage_index = step = num_seen = 0
    spent_s = 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        learner.load_state_dict(state["learner"])
        for opt, kept in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(kept)
        stage_index, step, num_seen, spent_s = state["stage"], state["step"], state["seen"], state["spent_s"]

    def save() -> None:
        out_dir.mkdir(parents=True, exist_ok=True)
        state = {
            "learner": learner.state_dict(), "optimizers": [opt.state_dict() for opt in opts],
            "stage": stage_index, "step": step, "seen": num_seen, "spent_s": spent_s,
        }  # fmt: skip
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    first_stage = stage_index
    clock = saved_at = logged_at = time.monotonic()
    with Progress() as progress:
        bar = progress.add_task("decoder", total=1.0)
        for stage_index in range(first_stage, len(STAGES)):
            stage, tally = STAGES[stage_index], Tally()
            maker = RowMaker(tokenizer, SymbolicSource(stage.num_patches))
            while not _passed(stage, tally):
                now = time.monotonic()
                spent_s, clock = spent_s + now - clock, now
                done = max(num_seen / max_questions, spent_s / (60 * max_minutes))
                if done >= stage.until:
                    break
                set_share(opts, base, min(1.0, (step + 1) / 100, (1 - done) / DECAY_SHARE))
                batch = draw_batch(maker, stage, random.Random(SEED * 10_000_000 + step))
                outcome = learner(batch)
                outcome.loss.backward()
                nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
                for opt in opts:
                    opt.step()
                    opt.zero_grad(set_to_none=True)
                tally.add(batch, outcome)
                step += 1
                num_seen += len(outcome.right)
                progress.update(bar, completed=done, description=stage.name)
                if now - logged_at > 30 and not progress.console.is_terminal:
                    logged_at = now
                    print(f"{time.strftime('%H:%M:%S')} {stage.name} done={done:.3f} step={step} seen={num_seen} {tally}", flush=True)
                if now - saved_at > CHECKPOINT_S:
                    saved_at = now
                    save()
            print(f"{time.strftime('%H:%M:%S')} end of {stage.name} step={step} seen={num_seen} {tally}", flush=True)
    stage_index = len(STAGES)
    save()
    torch.save(learner.state_dict(), out_dir / "learner.pt")


def _passed(stage: Stage, tally: Tally) -> bool:
    return bool(stage.gates) and all(tally.task(task) >= bar for task, bar in stage.gates.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-minutes", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.out, max_minutes=options.max_minutes)


if __name__ == "__main__":
    main()
