"""Clips to embedding rows: Qwen2-Audio's encoder and its linear projectors.  Runs in the encoder worker only.

A clip is padded with silence to the tower's length, which the encoder computes and attends to nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Qwen2AudioEncoder, Qwen2AudioEncoderConfig, WhisperFeatureExtractor

from mmserve.composition.mel_frames import num_frames
from mmserve.composition.qwen2_audio import Qwen2AudioSpec
from mmserve.models.adapters import LinearProjector
from mmserve.models.tower import TowerItem, check_counts
from mmserve.models.tower_weights import load_module


class Qwen2AudioTower:
    """One encoder with the projectors of all decoders."""

    def __init__(self, spec: Qwen2AudioSpec, device: torch.device, dtype: torch.dtype) -> None:
        config = Qwen2AudioEncoderConfig.from_dict(dict(spec.config))
        self._tower = load_module(Qwen2AudioEncoder, config, spec.weights, device, dtype)
        self._spec = spec
        self._window = int(spec.window_s * spec.sample_rate)
        self._num_positions = config.max_source_positions
        self._features = WhisperFeatureExtractor(feature_size=config.num_mel_bins, sampling_rate=spec.sample_rate)
        self._device = device
        self._dtype = dtype
        self._projectors = {name: LinearProjector(weights, config.d_model, device, dtype) for name, weights in spec.projectors.items()}

    def blank(self) -> TowerItem:
        return TowerItem(torch.zeros(self._window), self._spec.num_rows(self._window))

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """float32 samples [n] each, at most a window -> [num_rows, H] each, projected for `decoder`.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        check_counts(items, self._spec.num_rows, self._window)
        mels = self._features(
            [item.features.numpy() for item in items],
            sampling_rate=self._spec.sample_rate,
            max_length=self._window,
            return_tensors="pt",
            device=str(self._device),
        ).input_features
        num_heard = torch.tensor([-(-num_frames(len(item.features)) // 2) for item in items], device=self._device)
        is_heard = torch.arange(self._num_positions, device=self._device) < num_heard.unsqueeze(1)
        states = self._tower(mels.to(self._device, self._dtype), attention_mask=is_heard[:, None, None]).last_hidden_state
        return [rows[: item.num_rows] for rows, item in zip(self._projectors[decoder](states), items, strict=True)]
