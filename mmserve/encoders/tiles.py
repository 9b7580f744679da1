"""Pixels brought to a tower's size by a `PictureFit`, exactly as the PIL image processors of transformers do it."""

from __future__ import annotations

import numpy as np
from PIL import Image

from mmserve.composition.picture_fit import AnyRes, PictureFit, ResizeAndCrop, SmartResize


def cut_tiles(image: Image.Image, fit: PictureFit) -> np.ndarray:
    """An upright RGB picture -> uint8 [tiles, height, width, 3]."""
    match fit:
        case ResizeAndCrop():
            return _crop(image, fit)[None]
        case AnyRes():
            return _any_res(image, fit)
        case SmartResize():
            return np.asarray(image.resize(fit.resized(*image.size), fit.resample))[None]
    raise TypeError(f"pixels can't be brought to {type(fit).__name__}")


def _crop(image: Image.Image, fit: ResizeAndCrop) -> np.ndarray:
    size = fit.resized(*image.size)
    resized = image if size == image.size else image.resize(size, fit.resample)
    if not fit.crop:
        return np.asarray(resized)
    # Beyond the picture there is black; where black can't be shared out evenly, the larger half comes first.
    left, top = ((whole - fit.side) // 2 for whole in size)
    return np.asarray(resized.crop((left, top, left + fit.side, top + fit.side)))


def _any_res(image: Image.Image, fit: AnyRes) -> np.ndarray:
    side = fit.side
    width, height = fit.canvas(*image.size)
    resized = image.resize(fit.resized(*image.size), fit.resample)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(resized, ((width - resized.width) // 2, (height - resized.height) // 2))
    tiles = np.asarray(canvas).reshape(height // side, side, width // side, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    return np.concatenate([np.asarray(image.resize((side, side), fit.resample))[None], tiles])
