"""Pixels come out upright, over white, in sRGB, from the first frame; half a picture is none."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mmserve.composition.picture_fit import Stretch
from mmserve.encoders import image
from mmserve.errors import TooLarge, UndecodableMedia, UnsupportedMedia
from mmserve.media import MediaLimits
from tests import media_corpus as corpus

SIZE = 48


def decode(data: bytes, size: int, limits: MediaLimits | None = None) -> np.ndarray:
    """The one tile of a picture stretched to a square."""
    (tile,) = image.decode(data, Stretch(size, 1), limits)
    return tile


def quarters(pixels: np.ndarray) -> list[tuple[int, ...]]:
    """The four corners, row by row."""
    return [tuple(int(value) for value in pixels[y, x]) for y in (4, -5) for x in (4, -5)]


def close(pixels: np.ndarray, expected: list[tuple[int, int, int]], within: int = 3) -> bool:
    return all(abs(a - b) <= within for got, want in zip(quarters(pixels), expected, strict=True) for a, b in zip(got, want, strict=True))


SCENE = [corpus.RED, corpus.GREEN, corpus.BLUE, corpus.YELLOW]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_every_orientation_equals_the_upright_picture_exactly(format: str, orientation: int) -> None:
    assert (decode(corpus.oriented(orientation, format), SIZE) == decode(corpus.save(corpus.scene(), "PNG"), SIZE)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "MPO"])
def test_every_orientation_of_a_photo_is_upright(format: str, orientation: int) -> None:
    assert close(decode(corpus.oriented(orientation, format), SIZE), SCENE)


@pytest.mark.parametrize("orientation", [0, 9, 255, 65_535])
def test_an_orientation_that_does_not_exist_changes_nothing(orientation: int) -> None:
    assert close(decode(corpus.oriented(orientation, "JPEG"), SIZE), SCENE)


def test_a_broken_exif_block_changes_nothing() -> None:
    assert close(decode(corpus.save(corpus.scene(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff", quality=95, subsampling=0), SIZE), SCENE)


@pytest.mark.parametrize(
    "name", ["jpeg", "progressive", "png", "gif", "webp", "lossless webp", "animated gif", "apng", "animated webp", "mpo", "4:1:1"]
)
def test_every_accepted_container_shows_the_first_frame(name: str) -> None:
    assert close(decode(corpus.odd_pictures()[name], SIZE), SCENE)


@pytest.mark.parametrize("name", list(corpus.odd_pictures()))
def test_every_odd_picture_becomes_a_full_square_of_rgb(name: str) -> None:
    pixels = decode(corpus.odd_pictures()[name], SIZE)
    assert (pixels.shape, pixels.dtype) == ((SIZE, SIZE, 3), np.dtype(np.uint8))


def test_what_is_transparent_is_white_whatever_colour_lies_under_it() -> None:
    blue, white = corpus.BLUE, (255, 255, 255)
    assert quarters(decode(corpus.invisible_colours(), SIZE)) == [white, blue, white, blue]


def test_a_transparent_palette_entry_is_white_not_black() -> None:
    red, white = corpus.RED, (255, 255, 255)
    assert quarters(decode(corpus.palette_with_transparency(), SIZE)) == [white, red, white, red]


def test_half_transparent_black_over_white_is_grey() -> None:
    for mode in ("RGBA", "LA"):
        data = corpus.save(Image.new("RGBA", (8, 8), (0, 0, 0, 128)).convert(mode), "PNG")
        assert quarters(decode(data, SIZE)) == [(127, 127, 127)] * 4


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    assert quarters(decode(corpus.png_16_bit_grey(0x4080), SIZE)) == [(0x40, 0x40, 0x40)] * 4
    assert quarters(decode(corpus.png_16_bit_grey(0x4080, clear=0x4080), SIZE)) == [(255, 255, 255)] * 4


def test_16_bit_rgb_is_scaled() -> None:
    assert quarters(decode(corpus.png_16_bit_rgb(0x1000, 0x8000, 0xFF00), SIZE)) == [(0x10, 0x80, 0xFF)] * 4


@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_is_not_inverted(adobe: bool) -> None:
    assert close(decode(corpus.cmyk_jpeg(adobe=adobe), SIZE), [corpus.RED] * 4, within=6)


def test_a_profile_is_applied_so_that_linear_grey_becomes_srgb_grey() -> None:
    data = corpus.save(Image.new("RGB", (8, 8), (128, 128, 128)), "PNG", icc_profile=corpus.linear_profile())
    assert close(decode(data, SIZE), [(188, 188, 188)] * 4, within=2)


def test_a_profile_for_another_colour_space_or_none_at_all_is_ignored() -> None:
    grey = corpus.save(Image.new("L", (8, 8), 128), "PNG", icc_profile=corpus.linear_profile())
    broken = corpus.save(Image.new("RGB", (8, 8), (128, 128, 128)), "PNG", icc_profile=b"not a profile")
    assert quarters(decode(grey, SIZE)) == quarters(decode(broken, SIZE)) == [(128, 128, 128)] * 4


def test_a_large_photo_is_scaled_while_decoding_and_looks_the_same() -> None:
    assert close(decode(corpus.save(corpus.scene(1600, 1200), "JPEG", quality=95, subsampling=0), SIZE), SCENE)


@pytest.mark.parametrize("name", ["jpeg", "progressive", "png", "webp", "lossless webp"])
def test_a_truncated_picture_is_refused_not_half_shown(name: str) -> None:
    data = corpus.odd_pictures()[name]
    with pytest.raises(UndecodableMedia):
        decode(data[: len(data) * 2 // 3], SIZE)


def test_a_jpeg_that_lacks_only_its_end_is_refused() -> None:
    with pytest.raises(UndecodableMedia):
        decode(corpus.save(corpus.scene(), "JPEG")[:-200], SIZE)


def test_a_size_that_pillow_sees_and_the_header_hid_is_still_checked() -> None:
    with pytest.raises(TooLarge):
        decode(corpus.save(corpus.scene(), "PNG"), SIZE, MediaLimits(max_image_pixels=1000))


@pytest.mark.parametrize("data", [b"BM" + bytes(60), b"%!PS-Adobe-3.0 EPSF-3.0\n", b"II*\0" + bytes(60), b""])
def test_decoders_nobody_asked_for_are_never_started(data: bytes) -> None:
    with pytest.raises(UnsupportedMedia):
        decode(data, SIZE)


def test_errors_have_a_fixed_text_without_addresses() -> None:
    with pytest.raises(UndecodableMedia) as caught:
        decode(b"\x89PNG\r\n\x1a\n" + b"garbage" * 20, SIZE)
    assert caught.value.message == "the image can't be decoded: it is damaged or cut off"
    assert caught.value.__cause__ is None
