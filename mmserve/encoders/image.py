"""Pixels: any picture that people really send becomes an upright RGB square without metadata.

`decode` belongs in a decode process.  Headers are read elsewhere, without Pillow: `image_header`, whose names this module re-exports.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
import PIL.TiffImagePlugin  # noqa: F401  EXIF is a TIFF, and a decode process can open no file when it meets the first one
from PIL import GifImagePlugin, Image, ImageCms, ImageFile, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from mmserve.encoders.image_header import MAX_SCANS, check_size, count_scans, read_header, sniff
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
_PROFILE_SPACES = {"L": "GRAY", "RGB": "RGB ", "CMYK": "CMYK"}


def decode(data: bytes, size: int, limits: MediaLimits | None = None) -> np.ndarray:
    """uint8 [size, size, 3]: the first frame, upright, over white where it is transparent, in sRGB, stretched to the square.

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
            if isinstance(image, JpegImagePlugin.JpegImageFile):
                image.draft(None, (2 * size, 2 * size))  # scaled while decoding, never below twice the target
            image.load()
            profile = image.info.get("icc_profile")
            upright = ImageOps.exif_transpose(image) if _orientation(image) in range(2, 9) else image
            small = _plain(upright).resize((size, size), Image.Resampling.BICUBIC)
            return np.asarray(_to_srgb(_over_white(small), profile))
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, ArithmeticError, AttributeError, RuntimeError):
        raise UndecodableMedia("the image can't be decoded: it is damaged or cut off") from None  # Pillow's own texts name addresses


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 when there is none or it can't be read: a broken tag is no reason to refuse a good picture."""
    try:
        value = image.getexif().get(0x0112, 1)
        return value if isinstance(value, int) else 1
    except Exception:  # whatever a broken EXIF block does to its parser
        return 1


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
