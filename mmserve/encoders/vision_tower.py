"""Pictures to embedding rows: a frozen CLIP tower and one projector per decoder.  Runs in the encoder worker only.

Rows are the hidden states of one layer without the class token (LLaVA's rule), before any post-layernorm when that layer is the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import CLIPVisionModel

from mmserve.composition import VisionSpec
from mmserve.models.adapters import Projector
from mmserve.models.tower_weights import load_module
from mmserve.models.weights import BadCheckpoint

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's own, per channel


class VisionTower:
    """One CLIP tower with the projectors of all decoders."""

    def __init__(self, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> None:
        if spec.format != "clip":
            raise BadCheckpoint(f"vision format must be clip, got {spec.format!r}")
        self._tower = load_module(CLIPVisionModel, spec.directory, device, dtype)
        config = self._tower.config
        num_rows = (config.image_size // config.patch_size) ** 2
        if (config.image_size, num_rows) != (spec.image_size, spec.tokens_per_item):
            raise BadCheckpoint(
                f"the tower makes {num_rows} rows of {config.image_size} pixels, "
                f"the composition says {spec.tokens_per_item} of {spec.image_size}"
            )
        self._layer = spec.feature_layer
        self._device = device
        self._dtype = dtype
        self._projectors = {name: Projector(file, config.hidden_size, device, dtype) for name, file in spec.projectors.items()}
        self._num_rows = num_rows
        self._side = spec.image_size
        # (x / 255 - mean) / std as one product and one sum, per channel
        std = torch.tensor(STD, device=device)
        self._scale = (1 / (255 * std)).view(3, 1, 1)
        self._offset = (-torch.tensor(MEAN, device=device) / std).view(3, 1, 1)

    @property
    def decoders(self) -> tuple[str, ...]:
        return tuple(self._projectors)

    def blank(self) -> torch.Tensor:
        """Features of a made-up item, for the warm-up."""
        return torch.zeros(1, self._side, self._side, 3, dtype=torch.uint8)

    def num_rows(self, features: torch.Tensor) -> int:
        return len(features) * self._num_rows

    @torch.inference_mode()
    def encode(self, items: Sequence[torch.Tensor], num_rows: Sequence[int], decoder: str) -> list[torch.Tensor]:
        """uint8 [tiles, side, side, 3] each -> [tiles * tokens_per_item, H] each, projected for `decoder`.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        counts = [self.num_rows(item) for item in items]
        if counts != list(num_rows):
            raise ValueError(f"pictures of {counts} rows for {list(num_rows)} reserved")
        pixels = torch.cat(list(items)).to(self._device).permute(0, 3, 1, 2).float() * self._scale + self._offset
        states = self._tower(pixels.to(self._dtype), output_hidden_states=True).hidden_states[self._layer]
        rows = self._projectors[decoder](states[:, 1:])
        return list(rows.flatten(0, 1).split(counts))
