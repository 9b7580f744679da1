"""Clips to embedding rows: Whisper's encoder and Ultravox' projectors.  Runs in the encoder worker only.

A clip's frames go through the encoder in chunks.  The encoder is computed no longer than its longest chunk, and attends to nothing that
only fills a chunk up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmserve.composition.mel_frames import SAMPLES_PER_FRAME
from mmserve.composition.ultravox import MIN_FRAMES, UltravoxSpec
from mmserve.models.adapters import StackingProjector
from mmserve.models.tower import TowerItem, check_counts
from mmserve.models.tower_weights import load_module

MAX_CHUNKS = 16  # in one forward pass: a clip may have several


class _Chunk(NamedTuple):
    frames: torch.Tensor  # [given, bins]
    num_heard: int  # leading frames that are sound; the rest are zeros, which the convolutions see


class UltravoxTower:
    """One encoder with the projectors of all decoders."""

    def __init__(self, spec: UltravoxSpec, device: torch.device, dtype: torch.dtype) -> None:
        config = WhisperConfig.from_dict(dict(spec.config))
        self._tower = load_module(WhisperEncoder, config, spec.weights, device, dtype)
        self._spec = spec
        self._features = WhisperFeatureExtractor(feature_size=config.num_mel_bins, sampling_rate=spec.sample_rate)
        self._device = device
        self._dtype = dtype
        self._projectors = {
            name: StackingProjector(
                weights, config.d_model, device, dtype,
                stack_factor=spec.stack_factor, inner_size=spec.inner_size, norm_is_mid=spec.norm_is_mid,
            )
            for name, weights in spec.projectors.items()
        }  # fmt: skip

    def blank(self) -> TowerItem:
        chunk = self._spec.frames_per_chunk * SAMPLES_PER_FRAME
        return TowerItem(torch.zeros(chunk), self._spec.num_rows(chunk))

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """float32 samples [n] each -> [num_rows, H] each, projected for `decoder`.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        check_counts(items, self._spec.num_rows)
        chunks = [chunk for item in items for chunk in self._chunks(item.features)]
        projector = self._projectors[decoder]
        rows: list[torch.Tensor] = []
        for start in range(0, len(chunks), MAX_CHUNKS):
            part = chunks[start : start + MAX_CHUNKS]
            projected = projector(self._states(part))
            rows += [each[: self._spec.rows_of_chunk(chunk.num_heard)] for each, chunk in zip(projected, part, strict=True)]
        return list(torch.cat(rows).split([item.num_rows for item in items]))

    def _chunks(self, samples: torch.Tensor) -> list[_Chunk]:
        """A clip of one chunk is as long as it is; of several, the last is filled up: the model was trained so."""
        shortest = MIN_FRAMES * SAMPLES_PER_FRAME
        mels = self._features(
            F.pad(samples, (0, max(0, shortest - len(samples)))).numpy(),
            sampling_rate=self._spec.sample_rate,
            padding="longest",
            pad_to_multiple_of=SAMPLES_PER_FRAME,
            truncation=False,
            return_tensors="pt",
            device=str(self._device),
        ).input_features[0]
        parts = mels.to(self._device).t().split(self._spec.frames_per_chunk)
        if len(parts) == 1:
            return [_Chunk(parts[0], len(parts[0]))]
        return [_Chunk(F.pad(part, (0, 0, 0, self._spec.frames_per_chunk - len(part))), len(part)) for part in parts]

    def _states(self, chunks: Sequence[_Chunk]) -> torch.Tensor:
        """[chunks, positions of the longest, width]; zeros where a chunk has ended."""
        tower = self._tower
        mels = pad_sequence([chunk.frames for chunk in chunks], batch_first=True).to(self._dtype)
        given = torch.tensor([len(chunk.frames) for chunk in chunks], device=self._device)
        heard = torch.tensor([chunk.num_heard for chunk in chunks], device=self._device)
        states = F.gelu(tower.conv1(mels.transpose(1, 2))) * _first(given, mels.shape[1]).unsqueeze(1)
        states = F.gelu(tower.conv2(states)).transpose(1, 2)
        num_positions = states.shape[1]
        states = states + tower.embed_positions.weight[:num_positions]
        mask = _first((heard + 1) // 2, num_positions)[:, None, None]
        for layer in tower.layers:
            states = layer(states, mask)
        return tower.layer_norm(states) * _first((given + 1) // 2, num_positions).unsqueeze(2)


def _first(counts: torch.Tensor, width: int) -> torch.Tensor:
    """bool [n, width], True for the first counts[i] of row i"""
    return torch.arange(width, device=counts.device) < counts.unsqueeze(1)
