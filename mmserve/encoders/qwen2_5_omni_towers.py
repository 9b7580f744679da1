"""Pictures and clips to embedding rows: the two towers of Qwen2.5-Omni.  Runs in the encoder worker only.

Both end in the decoder's width, so each serves one decoder and has no projector beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig, Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder, Qwen2_5OmniVisionEncoder

from mmserve.composition.mel_frames import SAMPLES_PER_FRAME
from mmserve.composition.qwen2_5_omni import OmniAudioSpec, OmniVisionSpec
from mmserve.models.tower import TowerItem, check_counts
from mmserve.models.tower_weights import load_module

_SILENCE = 5 * SAMPLES_PER_FRAME  # samples: every frame that a clip reaches into is there, and none of those mirrors the far end


class OmniVisionTower:
    """Pictures of any size, side by side in one forward pass."""

    def __init__(self, spec: OmniVisionSpec, device: torch.device, dtype: torch.dtype) -> None:
        config: Any = Qwen2_5OmniVisionEncoderConfig.from_dict(dict(spec.config))
        self._tower = load_module(Qwen2_5OmniVisionEncoder, config, spec.weights, device, dtype)
        self._fit = spec.fit
        self._patch, self._merge, self._frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        self._device = device
        self._dtype = dtype
        # (x * rescale - mean) / std as one product and one sum, per channel
        std = torch.tensor(spec.std, device=device)
        self._scale = spec.rescale / std
        self._offset = -torch.tensor(spec.mean, device=device) / std

    def blank(self) -> TowerItem:
        size = (2 * self._fit.row_side, 2 * self._fit.row_side)
        return TowerItem(torch.zeros(self._fit.feature_shape(*size), dtype=torch.uint8), self._fit.num_rows(*size), size)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """uint8 [1, height, width, 3] each -> [num_rows, H] each.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        grids = torch.tensor([(1, *(side // self._patch for side in item.features.shape[1:3])) for item in items], device=self._device)
        counts = (grids.prod(dim=1) // self._merge**2).tolist()
        if counts != [item.num_rows for item in items]:
            raise ValueError(f"pictures of {counts} rows for {[item.num_rows for item in items]} reserved")
        patches = torch.cat([self._patches(item.features[0]) for item in items])
        rows = self._tower(patches.to(self._dtype), grid_thw=grids).pooler_output
        return list(rows.split(counts))

    def _patches(self, picture: torch.Tensor) -> torch.Tensor:
        """uint8 [height, width, 3] -> [patches, 3 * frames * patch * patch]: those that share a row follow each other.

        A picture is a film of equal frames.
        """
        pixels = picture.to(self._device).float() * self._scale + self._offset
        height, width = picture.shape[:2]
        side = self._patch * self._merge
        parts = pixels.view(height // side, self._merge, self._patch, width // side, self._merge, self._patch, 3)
        ordered = parts.permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 3)  # [patches, 3, patch, patch]
        return ordered.unsqueeze(2).expand(-1, -1, self._frames, -1, -1).flatten(1)


class OmniAudioTower:
    """Clips of any length, end to end in one forward pass: attention stays within its chunks of two seconds."""

    def __init__(self, spec: OmniAudioSpec, device: torch.device, dtype: torch.dtype) -> None:
        config = Qwen2_5OmniAudioEncoderConfig.from_dict(dict(spec.config))
        self._tower = load_module(Qwen2_5OmniAudioEncoder, config, spec.weights, device, dtype)
        self._spec = spec
        self._features = WhisperFeatureExtractor(feature_size=config.num_mel_bins, sampling_rate=spec.sample_rate)
        self._device = device

    def blank(self) -> TowerItem:
        return TowerItem(torch.zeros(self._spec.sample_rate), self._spec.num_rows(self._spec.sample_rate))

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """float32 samples [n] each -> [num_rows, H] each.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        check_counts(items, self._spec.num_rows)
        mels = [self._mel(item.features) for item in items]
        lengths = torch.tensor([mel.shape[1] for mel in mels], device=self._device)
        rows = self._tower(torch.cat(mels, dim=1), feature_lens=lengths).last_hidden_state
        return list(rows.split([item.num_rows for item in items]))

    def _mel(self, samples: torch.Tensor) -> torch.Tensor:
        """[bins, frames].  The same as with padding to 300 s, at a fraction of the work."""
        silence = _SILENCE + -len(samples) % SAMPLES_PER_FRAME
        mel = self._features(
            F.pad(samples, (silence, 0) if self._spec.pads_left else (0, silence)).numpy(),
            sampling_rate=self._spec.sample_rate,
            padding="longest",
            truncation=False,
            return_tensors="pt",
            device=str(self._device),
        ).input_features[0]
        count = self._spec.num_frames(len(samples))
        return (mel[:, mel.shape[1] - count :] if self._spec.pads_left else mel[:, :count]).to(self._device)
