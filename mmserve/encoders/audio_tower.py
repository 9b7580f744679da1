"""Windows of sound to embedding rows: a frozen Whisper encoder and one projector per decoder.  Runs in the encoder worker only.

A window is padded with silence to the tower's length, frames of the last hidden state are averaged down to `tokens_per_second`, and
what the padding made is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmserve.composition import WhisperSpec
from mmserve.models.adapters import Projector
from mmserve.models.tower import TowerItem, check_counts
from mmserve.models.tower_weights import load_module
from mmserve.models.weights import BadCheckpoint


class AudioTower:
    """One Whisper encoder with the projectors of all decoders."""

    def __init__(self, spec: WhisperSpec, device: torch.device, dtype: torch.dtype) -> None:
        config = WhisperConfig.from_dict(dict(spec.config))
        self._tower = load_module(WhisperEncoder, config, spec.weights, device, dtype)
        self._window = round(spec.window_s * spec.sample_rate)
        self._num_rows = spec.num_rows
        num_rows, remainder = divmod(self._window, spec.samples_per_token)
        self._pool, unpooled = divmod(config.max_source_positions, max(num_rows, 1))
        if remainder or unpooled or self._pool < 1:
            raise BadCheckpoint(
                f"the tower's {config.max_source_positions} positions don't pool to {spec.tokens_per_second} rows a second "
                f"in windows of {spec.window_s} s"
            )
        self._features = WhisperFeatureExtractor(feature_size=config.num_mel_bins, sampling_rate=spec.sample_rate)
        self._device = device
        self._dtype = dtype
        self._projectors = {name: Projector(weights, config.d_model, device, dtype) for name, weights in spec.projectors.items()}

    def blank(self) -> TowerItem:
        return TowerItem(torch.zeros(self._window), self._num_rows(self._window))

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """float32 samples [n] each, at most a window -> [num_rows, H] each, projected for `decoder`.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        check_counts(items, self._num_rows, self._window)
        mels = self._features(
            [item.features.numpy() for item in items],
            sampling_rate=self._features.sampling_rate,
            max_length=self._window,
            return_tensors="pt",
            device=str(self._device),
        ).input_features
        states = self._tower(mels.to(self._device, self._dtype)).last_hidden_state
        rows = self._projectors[decoder](states.unflatten(1, (-1, self._pool)).mean(dim=2))
        return [each[: item.num_rows] for each, item in zip(rows, items, strict=True)]
