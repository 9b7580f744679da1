"""Windows of sound to embedding rows: a frozen Whisper encoder and one projector per decoder.  Runs in the encoder worker only.

A window is padded with silence to the tower's length, frames of the last hidden state are averaged down to `tokens_per_second`, and
what the padding made is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmserve.composition import AudioSpec
from mmserve.models.adapters import Projector
from mmserve.models.tower_weights import load_module
from mmserve.models.weights import BadCheckpoint


class AudioTower:
    """One Whisper encoder with the projectors of all decoders."""

    def __init__(self, spec: AudioSpec, device: torch.device, dtype: torch.dtype) -> None:
        if spec.format != "whisper":
            raise BadCheckpoint(f"audio format must be whisper, got {spec.format!r}")
        self._tower = load_module(WhisperEncoder, spec.directory, device, dtype)
        config = self._tower.config
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
        self._projectors = {name: Projector(file, config.d_model, device, dtype) for name, file in spec.projectors.items()}

    @property
    def decoders(self) -> tuple[str, ...]:
        return tuple(self._projectors)

    def blank(self) -> torch.Tensor:
        """Features of a made-up item, for the warm-up."""
        return torch.zeros(self._window)

    def num_rows(self, features: torch.Tensor) -> int:
        return -(-len(features) // self._samples_per_row)

    @torch.inference_mode()
    def encode(self, items: Sequence[torch.Tensor], num_rows: Sequence[int], decoder: str) -> list[torch.Tensor]:
        """float32 samples [n] each, at most a window -> [num_rows, H] each, projected for `decoder`.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        counts = [self.num_rows(item) for item in items]
        if counts != list(num_rows) or any(len(item) > self._window for item in items):
            raise ValueError(f"windows of {[len(item) for item in items]} samples for {list(num_rows)} rows reserved")
        mels = self._features(
            [item.numpy() for item in items],
            sampling_rate=self._features.sampling_rate,
            max_length=self._window,
            return_tensors="pt",
            device=str(self._device),
        ).input_features
        states = self._tower(mels.to(self._device, self._dtype)).last_hidden_state
        rows = self._projectors[decoder](states.unflatten(1, (-1, self._pool)).mean(dim=2))
        return [item[:count] for item, count in zip(rows, counts, strict=True)]
