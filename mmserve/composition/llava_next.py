"""LLaVA-NeXT (1.6): the tiles of LLaVA 1.5, several to a picture, with what is black left out and a newline row behind each row."""

from __future__ import annotations

from mmserve.composition.clip_pixels import read_clip_pixels
from mmserve.composition.llava import PROJECTOR_NAMES, build_llava, tile_size
from mmserve.composition.model import Directory, Model, require
from mmserve.composition.picture_fit import AnyRes
from mmserve.composition.weights import BadModel, WeightNames

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # the default of transformers
_NAMES = WeightNames((*PROJECTOR_NAMES.renames, ("model.image_newline", "image_newline"), ("image_newline", "image_newline")))


def read_llava_next(directory: Directory) -> Model:
    """Raises BadModel."""
    require(directory.config, "vision_feature_select_strategy", ("default",))
    is_tied = bool(directory.config.get("tie_word_embeddings", False))
    return build_llava(directory, _fit(directory), _NAMES, is_tied=is_tied)


def _fit(directory: Directory) -> AnyRes:
    side, patches = tile_size(directory)
    pixels = read_clip_pixels(directory.path)
    whole = pixels.fit(side, patches**2)
    if whole.resize not in (None, side, (side, side)):
        raise BadModel(f"image processor: tiles are resized to {whole.resize}, the tower takes {side}x{side}")
    pinpoints = directory.config.get("image_grid_pinpoints") or _PINPOINTS
    if pixels.values.get("image_grid_pinpoints", pinpoints) != pinpoints:
        raise BadModel("image_grid_pinpoints of the model and of its image processor differ")
    canvases = tuple((width, height) for height, width in pinpoints)
    if any(width % side or height % side for width, height in canvases):
        raise BadModel(f"image_grid_pinpoints must be multiples of {side}, got {pinpoints}")
    return AnyRes(side, patches, canvases, pixels.resample)
