"""Pixels: any picture that people really send becomes upright RGB tiles without metadata.

`decode` belongs in a decode process.  Headers are read elsewhere, without Pillow: `image_header`, whose names this module re-exports.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
import PIL.TiffImagePlugin  # noqa: F401  EXIF is a TIFF, and a decode process can open no file when it meets the first one
from PIL import GifImagePlugin, Image, ImageCms, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from mmserve.composition.picture_fit import PictureFit, Stretch
from mmserve.encoders.exif import read_orientation
from mmserve.encoders.image_header import MAX_SCANS, check_size, count_scans, read_header, sniff
from mmserve.encoders.tiles import cut_tiles
from mmserve.errors import UndecodableMedia, UnsupportedMedia
from mmserve.media import MediaLimits

__all__ = ["check_size", "count_scans", "decode", "read_header", "sniff"]

# The classes themselves: Pillow's registry also knows decoders nobody asked for, and gives an MPO's JPEG to another class.
_OPENERS: dict[str, type[ImageFile.ImageFile]] = {
    "jpeg": JpegImagePlugin.JpegImageFile,
    "png": PngImagePlugin.PngImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
}
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
_UNDO = {  # EXIF's number -> what undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PROFILE_SPACES = {"L": "GRAY", "RGB": "RGB ", "CMYK": "CMYK"}


def decode(data: bytes, fit: PictureFit, limits: MediaLimits | None = None) -> np.ndarray:
    """uint8 [tiles, height, width, 3]: the first frame, upright, over white where it is transparent, in sRGB, brought to size by `fit`.

    Raises UndecodableMedia for anything Pillow can't make a whole picture of: a truncated file is not half a picture.
    """
    limits = limits or MediaLimits()
    name = sniff(data) or ""
    opener = _OPENERS.get(name)
    if opener is None:
        raise UnsupportedMedia("unsupported image format")
    if name == "jpeg" and count_scans(data) > MAX_SCANS:
        raise UndecodableMedia(f"a JPEG may have at most {MAX_SCANS} scans")
    try:
        with warnings.catch_warnings(action="ignore"), opener(io.BytesIO(data)) as image:
            check_size(*image.size, limits, None)  # what Pillow is about to allocate, whatever the header said
            if isinstance(fit, Stretch) and isinstance(image, JpegImagePlugin.JpegImageFile):
                image.draft(None, (2 * fit.side, 2 * fit.side))  # scaled while decoding, never below twice the target
            image.load()
            profile = image.info.get("icc_profile")
            plain = _plain(image)
            if isinstance(fit, Stretch):  # small first: colours cost a pass over all pixels
                plain = _upright(plain, data, name).resize((fit.side, fit.side), Image.Resampling.BICUBIC)
                return np.asarray(_to_srgb(_over_white(plain), profile))[None]
            return cut_tiles(_to_srgb(_over_white(_upright(plain, data, name)), profile), fit)
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, ArithmeticError, AttributeError, RuntimeError):
        raise UndecodableMedia("the image can't be decoded: it is damaged or cut off") from None  # Pillow's own texts name addresses


def _upright(image: Image.Image, data: bytes, name: str) -> Image.Image:
    orientation = read_orientation(data, name)
    return image.transpose(_UNDO[orientation]) if orientation in _UNDO else image


def _plain(image: Image.Image) -> Image.Image:
    """8 bits a channel, no palette: L, LA, RGB, RGBA or CMYK."""
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    clear = image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    if image.mode in ("1", "L", "LA", "La"):
        return image.convert("LA" if clear else "L")
    if image.mode == "CMYK":
        return image
    return image.convert("RGBA" if clear else "RGB")


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode not in ("LA", "RGBA"):
        return image
    white = Image.new(image.mode[:-1], image.size, "white")
    white.paste(image.convert(white.mode), mask=image.getchannel("A"))
    return white


def _from_16_bit(image: Image.Image) -> Image.Image:
    """The high byte.  Pillow's own conversion of 16-bit grey clips at 255 instead."""
    samples = np.asarray(image).astype(np.int64)
    grey = np.clip(samples >> 8, 0, 255).astype(np.uint8)
    if isinstance(clear := image.info.get("transparency"), int):
        grey[samples == clear] = 255
    return Image.fromarray(grey)


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Colour-manage what carries a usable profile; take the rest for sRGB."""
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if source.profile.xcolor_space == _PROFILE_SPACES[image.mode]:
                converted = ImageCms.profileToProfile(image, source, _SRGB, ImageCms.Intent.PERCEPTUAL, outputMode="RGB")
                assert converted is not None
                return converted
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
            pass  # a broken profile is no reason to refuse a good picture
    return image.convert("RGB")
