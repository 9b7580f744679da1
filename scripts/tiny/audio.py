"""The audio tower: a small Whisper encoder that learns which word or sound is heard in every token frame.

The linear head that names the frames is thrown away afterwards; the encoder's pooled output is what an adapter reads.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import nn
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperEncoder
from transformers.utils.logging import disable_progress_bar

from scripts.tiny.audio_score import Score, held_out_clips, score
from scripts.tiny.clips import Pool, make_window
from scripts.tiny.speak import FRAME_SAMPLES, Clip
from scripts.tiny.world import FRAME_LABELS, SAMPLE_RATE, TOKENS_PER_SECOND, WINDOW_S

HIDDEN = 128
WINDOW_TOKENS = int(WINDOW_S * TOKENS_PER_SECOND)  # 125
WINDOW_SAMPLES = int(WINDOW_S * SAMPLE_RATE)
REACHES = (3, 6, 10)  # encoder frames of 20 ms that the first layers' heads look ahead and back, to begin with
SHARPNESS = 1.5
BATCH = 16  # windows
PEAK_LR = 1.5e-3
WARMUP_STEPS = 150
DECAY_SHARE = 0.4  # the last part of training, over which the learning rate falls to nothing
# That part comes early once a quick check reaches these.
READY = {"word": 0.96, "noun": 0.96, "form": 0.98, "sound": 0.97}
# What a finished tower must reach on held-out voices.
GATE = {"word": 0.97, "noun": 0.95, "form": 0.99, "sound": 0.97}
SILENCE_WEIGHT = 0.3


def build() -> WhisperEncoder:
    """Fresh, with larger weights than transformers would draw: its convolutions would start 40 times below the positions."""
    config = WhisperConfig(
        d_model=HIDDEN,
        encoder_layers=4,
        encoder_attention_heads=4,
        encoder_ffn_dim=512,
        num_mel_bins=80,
        max_source_positions=2 * WINDOW_TOKENS,
        dropout=0.0,
        init_std=0.05,
    )
    model = WhisperEncoder(config)
    for convolution in (model.conv1, model.conv2):
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    for layer, reach in zip(model.layers, REACHES, strict=False):
        _look_around(layer.self_attn, (-reach, -reach // 3, reach // 3, reach))
    return model


@torch.no_grad()
def _look_around(attention: WhisperAttention, offsets: tuple[int, ...]) -> None:
    """Start each head looking at the frame `offset` away; from random weights, finding the neighbours takes most of the training.

    With (sin wt, cos wt) as positions, queries turned by w * offset make the score the sum of cos w(t + offset - s), largest there.
    """
    head_dim, half = HIDDEN // len(offsets), HIDDEN // 2
    waves = torch.linspace(0, 26, head_dim // 2).long()
    sines, cosines = waves, half + waves
    omega = torch.exp(-math.log(10_000) / (half - 1) * waves)
    for head, offset in enumerate(offsets):
        odd = head * head_dim + torch.arange(0, head_dim, 2)
        turn_sin, turn_cos = torch.sin(omega * offset), torch.cos(omega * offset)
        attention.k_proj.weight[odd, sines] += SHARPNESS
        attention.k_proj.weight[odd + 1, cosines] += SHARPNESS
        attention.q_proj.weight[odd, sines] += SHARPNESS * turn_cos
        attention.q_proj.weight[odd, cosines] += SHARPNESS * turn_sin
        attention.q_proj.weight[odd + 1, cosines] += SHARPNESS * turn_cos
        attention.q_proj.weight[odd + 1, sines] -= SHARPNESS * turn_sin


def load(out_dir: Path) -> WhisperEncoder:
    """The trained tower that `train` left in `out_dir`, ready to run."""
    model: WhisperEncoder = WhisperEncoder.from_pretrained(out_dir / "model")
    return model.eval()


def pooled(model: WhisperEncoder, mels: torch.Tensor) -> torch.Tensor:
    """[B, 80, 500] -> [B, 125, 128]: the mean of each two output frames."""
    hidden: torch.Tensor = model(mels).last_hidden_state
    return hidden.unflatten(1, (WINDOW_TOKENS, 2)).mean(2)


@functools.cache
def _extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=80, chunk_length=int(WINDOW_S), sampling_rate=SAMPLE_RATE)


def mel_windows(waveforms: Sequence[np.ndarray]) -> torch.Tensor:
    """float32 [B, 80, 500]; each waveform is at most one window, padded with zeros."""
    mels: torch.Tensor = _extractor()(list(waveforms), sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    return mels


@torch.no_grad()
def features(model: WhisperEncoder, waveforms: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """float32 [ceil(samples / 640), 128] of each waveform; longer ones are cut into windows of 5 s."""
    pieces = [wave[i : i + WINDOW_SAMPLES] for wave in waveforms for i in range(0, len(wave), WINDOW_SAMPLES)]
    rows: list[torch.Tensor] = []
    for i in range(0, len(pieces), BATCH):
        batch = pieces[i : i + BATCH]
        hidden = pooled(model, mel_windows(batch))
        rows += [hidden[j, : -(-len(piece) // FRAME_SAMPLES)] for j, piece in enumerate(batch)]
    remaining = iter(rows)
    return [torch.cat([next(remaining) for _ in range(0, len(wave), WINDOW_SAMPLES)]) for wave in waveforms]


class _Learner(nn.Module):
    """Tower and frame head."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = build()
        self.head = nn.Linear(HIDDEN, len(FRAME_LABELS))

    def loss(self, clips: Sequence[Clip], rng: random.Random) -> torch.Tensor:
        labels = torch.zeros(len(clips), WINDOW_TOKENS, dtype=torch.long)
        for row, clip in zip(labels, clips, strict=True):
            row[: len(clip.labels)] = torch.from_numpy(clip.labels)
        mels = mel_windows([clip.waveform for clip in clips])
        logits = self.head(pooled(self.tower, _mask(mels, rng)))
        weight = torch.ones(len(FRAME_LABELS))
        weight[0] = SILENCE_WEIGHT
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)

    @torch.no_grad()
    def frame_labels(self, waveforms: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [self.head(rows).argmax(1).numpy() for rows in features(self.tower, waveforms)]


def _mask(mels: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """SpecAugment (Park et al. 2019): a few bands and short moments of each window are flattened to its mean."""
    for mel in mels:
        flat = mel.mean()
        for _ in range(rng.randrange(3)):
            low, width = rng.randrange(80), rng.randrange(1, 14)
            mel[low : low + width] = flat
        for _ in range(rng.randrange(5)):
            start, width = rng.randrange(mel.shape[1]), rng.randrange(1, 14)
            mel[:, start : start + width] = flat
    return mels


class _Trainer:
    """Steps, checkpoints and the clock, which is CPU time so that a busy machine learns as much."""

    def __init__(self, out_dir: Path, num_steps: int, max_minutes: float, seed: int) -> None:
        self._path = out_dir / "checkpoint.pt"
        self._num_steps, self._max_s, self._seed = num_steps, max_minutes * 60, seed
        torch.manual_seed(seed)
        self.learner = _Learner()
        parameters = [p for p in self.learner.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
        self._pool = Pool()
        self.step, self._earlier_s = 0, 0.0
        self.end = 1.0  # the progress at which training is over
        if self._path.exists():
            state = torch.load(self._path, weights_only=True)
            self.learner.load_state_dict(state["learner"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self._earlier_s, self.end = state["step"], state["elapsed_s"], state["end"]
        self._started_s = time.process_time()

    @property
    def elapsed_s(self) -> float:
        return self._earlier_s + time.process_time() - self._started_s

    @property
    def progress(self) -> float:
        """0 to 1, whichever of steps and time is nearer its end."""
        return max(self.step / self._num_steps, self.elapsed_s / self._max_s)

    def decay_now(self) -> None:
        self.end = min(self.end, self.progress + DECAY_SHARE)

    def save(self) -> None:
        state = {
            "learner": self.learner.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "end": self.end,
        }
        torch.save(state, self._path.with_suffix(".new"))
        self._path.with_suffix(".new").replace(self._path)

    def run_step(self) -> float:
        # Seeds from 2**30 on belong to the held-out clips.
        rng = random.Random((self._seed * 1_000_003 + self.step) % 2**30)
        rate = min(1.0, (self.step + 1) / WARMUP_STEPS, max(0.0, self.end - self.progress) / DECAY_SHARE)
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK_LR * rate
        alone = 0.2 + 0.4 * self.progress
        loss = self.learner.loss([make_window(self._pool, rng, alone) for _ in range(BATCH)], rng)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        return float(loss)


def train(out_dir: Path, max_minutes: float = 45.0, num_steps: int = 2250, seed: int = 0) -> Score:
    """Train or go on training; leaves `out_dir/model` and returns its score on voices never heard.

    `max_minutes` is CPU time, over all restarts.  Raises RuntimeError if the tower ends below GATE: more steps or minutes go on from there.
    """
    torch.set_num_threads(1)
    disable_progress_bar()
    out_dir.mkdir(parents=True, exist_ok=True)
    trainer = _Trainer(out_dir, num_steps, max_minutes, seed)
    quick = held_out_clips(1)
    saved_s = logged_s = time.monotonic()
    loss = float("nan")
    with Progress() as bar:
        task = bar.add_task("audio tower", total=1.0, completed=trainer.progress)
        while trainer.progress < trainer.end:
            loss = trainer.run_step()
            bar.update(task, completed=trainer.progress, description=f"audio tower, loss {loss:.3f}")
            if time.monotonic() - saved_s > 60:
                trainer.save()
                saved_s = time.monotonic()
            if time.monotonic() - logged_s > 30 and not bar.console.is_terminal:
                print(f"audio step={trainer.step} loss={loss:.3f} cpu_minutes={trainer.elapsed_s / 60:.1f}", flush=True)
                logged_s = time.monotonic()
            if trainer.step % 250 == 0:
                _save_model(trainer.learner.tower, out_dir)
                check = score(trainer.learner.frame_labels, quick)
                print(f"audio step={trainer.step} {check.line()}", flush=True)
                if check.meets(READY):
                    trainer.decay_now()
    trainer.save()
    _save_model(trainer.learner.tower, out_dir)
    result = score(trainer.learner.frame_labels, held_out_clips(5))
    print(result.report(), flush=True)
    if not result.meets(GATE):
        raise RuntimeError(f"audio tower below its gate: {result.line()}")
    return result


def _save_model(tower: WhisperEncoder, out_dir: Path) -> None:
    tower.save_pretrained(out_dir / "model.new")
    (out_dir / "model").mkdir(exist_ok=True)
    for path in (out_dir / "model.new").iterdir():
        path.replace(out_dir / "model" / path.name)
    (out_dir / "model.new").rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--max-minutes", type=float, default=45.0)
    parser.add_argument("--num-steps", type=int, default=2250)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.out_dir, arguments.max_minutes, arguments.num_steps, arguments.seed)


if __name__ == "__main__":
    main()
