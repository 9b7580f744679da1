"""Windows of sound to embedding rows: a frozen Whisper encoder and one projector per decoder.  Runs in the encoder worker only.

A window is padded with silence to the tower's length, frames of the last hidden state are averaged down to `tokens_per_second`, and
what the padding made is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmserve.composition import AudioSpec
from mmserve.models.adapters import Projector
from mmserve.models.tower import TowerItem
from mmserve.models.tower_weights import load_module
from mmserve.models.weights import BadCheckpoint


class AudioTower:
    """One Whisper encoder with the projectors of all decoders."""

    def __init__(self, spec: AudioSpec, device: torch.device, dtype: torch.dtype) -> None:
        config = WhisperConfig.from_dict(dict(spec.config))
        self._tower = load_module(WhisperEncoder, config, spec.weights, device, dtype)
        self._window = round(spec.window_s * spec.sample_rate)
        self._samples_per_row = spec.samples_per_token
        num_rows, remainder = divmod(self._window, self._samples_per_row)
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
        return TowerItem(torch.zeros(self._window), self._window // self._samples_per_row)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """float32 samples [n] each, at most a window -> [num_rows, H] each, projected for `decoder`.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        lengths = [len(item.features) for item in items]
        counts = [-(-length // self._samples_per_row) for length in lengths]
        if counts != [item.num_rows for item in items] or max(lengths) > self._window:
            raise ValueError(f"windows of {lengths} samples for {[item.num_rows for item in items]} rows reserved")
        mels = self._features(
            [item.features.numpy() for item in items],
            sampling_rate=self._features.sampling_rate,
            max_length=self._window,
            return_tensors="pt",
            device=str(self._device),
        ).input_features
        states = self._tower(mels.to(self._device, self._dtype)).last_hidden_state
        rows = self._projectors[decoder](states.unflatten(1, (-1, self._pool)).mean(dim=2))
        return [item[:count] for item, count in zip(rows, counts, strict=True)]
