"""Pictures to embedding rows: a frozen CLIP tower and one projector per decoder.  Runs in the encoder worker only.

Rows are the hidden states of one layer (LLaVA's rule), before any post-layernorm when that layer is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from mmserve.composition import ClipSpec
from mmserve.composition.picture_fit import AnyRes
from mmserve.models.adapters import Projector
from mmserve.models.tower import TowerItem
from mmserve.models.tower_weights import load_module
from mmserve.models.weights import BadCheckpoint

MAX_TILES = 48  # in one forward pass: a batch of pictures may hold several times as many


class VisionTower:
    """One CLIP tower with the projectors of all decoders."""

    def __init__(self, spec: ClipSpec, device: torch.device, dtype: torch.dtype) -> None:
        config: Any = CLIPVisionConfig.from_dict(dict(spec.config))
        self._tower = load_module(CLIPVisionModel, config, spec.weights, device, dtype)
        self._first = 0 if spec.keeps_class_token else 1
        num_rows = (config.image_size // config.patch_size) ** 2 + 1 - self._first
        expected = spec.fit.rows_per_tile
        if (spec.fit.side, expected) != (config.image_size, num_rows):
            raise BadCheckpoint(
                f"the tower makes {num_rows} rows of {config.image_size} pixels, the composition says {expected} of {spec.fit.side}"
            )
        self._fit = spec.fit
        depth = config.num_hidden_layers
        if not all(-depth - 1 <= layer <= depth for layer in spec.feature_layers):
            raise BadCheckpoint(f"feature layers {list(spec.feature_layers)} of a tower of {depth} layers")
        self._layers = [layer % (depth + 1) for layer in spec.feature_layers]
        del self._tower.encoder.layers[max(self._layers) :]  # nobody reads what comes out of them
        self._device = device
        self._dtype = dtype
        self._projectors = {
            name: Projector(
                weights, config.hidden_size * len(spec.feature_layers), device, dtype,
                activation=spec.activation, has_bias=spec.projector_bias, has_newline=isinstance(spec.fit, AnyRes),
            )
            for name, weights in spec.projectors.items()
        }  # fmt: skip
        # (x * rescale - mean) / std as one product and one sum, per channel
        std = torch.tensor(spec.std, device=device)
        self._scale = (spec.rescale / std).view(3, 1, 1)
        self._offset = (-torch.tensor(spec.mean, device=device) / std).view(3, 1, 1)

    def blank(self) -> TowerItem:
        size = (self._fit.side, self._fit.side)
        return TowerItem(torch.zeros(self._fit.feature_shape(*size), dtype=torch.uint8), self._fit.num_rows(*size), size)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        """uint8 [tiles, side, side, 3] each -> [num_rows, H] each, projected for `decoder`.

        Raises ValueError if an item would not give exactly the rows that were reserved for it.
        """
        projector = self._projectors[decoder]
        tiles = torch.cat([item.features for item in items])
        rows = torch.cat([projector(self._features(part)) for part in tiles.split(MAX_TILES)])
        per_item = rows.split([len(item.features) for item in items])
        arranged = [self._arrange(tile_rows, item, projector) for tile_rows, item in zip(per_item, items, strict=True)]
        if any(len(each) != item.num_rows for each, item in zip(arranged, items, strict=True)):
            raise ValueError(f"pictures of {[len(each) for each in arranged]} rows for {[item.num_rows for item in items]} reserved")
        return arranged

    def _features(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 [tiles, side, side, 3] -> [tiles, rows_per_tile, width of the tower times layers]"""
        pixels = tiles.to(self._device).permute(0, 3, 1, 2).float() * self._scale + self._offset
        states = self._tower(pixels.to(self._dtype), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][:, self._first :] for layer in self._layers], dim=-1)

    def _arrange(self, rows: torch.Tensor, item: TowerItem, projector: Projector) -> torch.Tensor:
        """[tiles, rows_per_tile, H] -> [num_rows, H]"""
        if not isinstance(self._fit, AnyRes):
            return rows.flatten(0, 1)
        assert item.picture_size is not None, "tiles of a picture of unknown size"
        assert projector.newline is not None
        across, down = self._fit.grid(*item.picture_size)
        top, bottom, left, right = self._fit.shown(*item.picture_size)
        patches = self._fit.patches
        canvas = rows[1:].unflatten(1, (patches, patches)).unflatten(0, (down, across)).transpose(1, 2)
        shown = canvas.flatten(2, 3).flatten(0, 1)[top:bottom, left:right]
        lines = torch.cat([shown, projector.newline.expand(len(shown), 1, -1)], dim=1)
        return torch.cat([rows[0], lines.flatten(0, 1)])
