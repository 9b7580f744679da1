"""Headers are read without decoding, refuse what may not be decoded, and never cost more than a glance."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.encoders.exif import read_orientation
from mmserve.encoders.image_header import MAX_SCANS, count_scans, read_header, sniff
from mmserve.errors import BadRequest, MmserveError, TooLarge, UndecodableMedia, UnsupportedMedia
from mmserve.media import ImageHeader, MediaLimits
from tests import media_corpus as corpus

LIMITS = MediaLimits()
PARAM = "messages[0].content[1]"


def status_of(data: bytes) -> int:
    """200 for a header within the limits, else that of the refusal."""
    try:
        header = read_header(data, LIMITS, PARAM)
    except MmserveError as error:
        return error.status
    return 200 if 0 < header.width * header.height <= LIMITS.max_image_pixels else 500


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP"])
def test_dimensions_are_read_from_every_accepted_container(format: str) -> None:
    data = corpus.save(corpus.scene(97, 65), format)
    assert read_header(data, LIMITS, PARAM) == ImageHeader(format.lower(), 97, 65)


def test_all_three_kinds_of_webp_are_measured() -> None:
    for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}):
        data = corpus.save(corpus.scene(97, 65), "WEBP", **options)
        assert read_header(data, LIMITS, None) == ImageHeader("webp", 97, 65)


def test_dimensions_are_those_stored_before_orientation() -> None:
    assert read_header(corpus.oriented(6, "JPEG"), LIMITS, None) == ImageHeader("jpeg", 64, 96, orientation=6)


@pytest.mark.parametrize(("data", "name"), corpus.OTHER_PICTURES.items(), ids=list(corpus.OTHER_PICTURES.values()))
def test_other_kinds_are_refused_by_name_with_the_accepted_ones(data: bytes, name: str) -> None:
    with pytest.raises(UnsupportedMedia, match=rf"unsupported image format: {name}; accepted are JPEG, PNG, GIF, WebP") as caught:
        read_header(data, LIMITS, PARAM)
    assert (caught.value.status, caught.value.code, caught.value.param) == (415, "unsupported_image_format", PARAM)


@pytest.mark.parametrize("data", [b"", b"hello", b"\0" * 100, b"{}", b"\xff\xd8", b"\x89PNG\r\n"])
def test_what_is_no_picture_at_all_is_undecodable(data: bytes) -> None:
    with pytest.raises(UndecodableMedia, match="not a picture"):
        read_header(data, LIMITS, PARAM)


@pytest.mark.parametrize(
    ("marker", "kind"),
    [(0xC3, "lossless jpeg"), (0xC9, "arithmetic-coded jpeg"), (0xCA, "arithmetic-coded jpeg"), (0xC5, "hierarchical jpeg")],
)
def test_rare_jpeg_processes_are_refused_by_name(marker: int, kind: str) -> None:
    with pytest.raises(UnsupportedMedia, match=kind):
        read_header(corpus.with_sof(corpus.save(corpus.scene(), "JPEG"), marker), LIMITS, None)


def test_a_12_bit_jpeg_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedMedia, match="12-bit jpeg"):
        read_header(corpus.with_sof(corpus.save(corpus.scene(), "JPEG"), 0xC1, bits=12), LIMITS, None)


@pytest.mark.parametrize("data", [corpus.webp_canvas_bomb(), corpus.png_bomb(), corpus.gif_with_frame_beyond_screen()])
def test_bombs_are_refused_by_their_header(data: bytes) -> None:
    with pytest.raises(TooLarge):
        read_header(data, LIMITS, PARAM)


def test_a_webp_whose_canvas_is_cut_off_is_undecodable() -> None:
    with pytest.raises(UndecodableMedia):
        read_header(corpus.webp_canvas_bomb()[:29], LIMITS, PARAM)


def test_too_many_pixels_are_refused_with_both_numbers() -> None:
    with pytest.raises(TooLarge, match="at most 16000000 pixels, got 5000x4000=20000000"):
        read_header(corpus.with_size(corpus.save(corpus.scene(), "JPEG"), 5000, 4000), LIMITS, PARAM)


def test_a_side_is_limited_even_when_the_pixels_are_few() -> None:
    with pytest.raises(TooLarge, match="at most 16384 pixels, got 20000x200"):
        read_header(corpus.with_size(corpus.save(corpus.scene(), "JPEG"), 20_000, 200), LIMITS, None)


def test_the_aspect_ratio_is_checked_before_any_decode() -> None:
    read_header(corpus.save(corpus.scene(200, 1), "PNG"), LIMITS, None)
    with pytest.raises(BadRequest, match="201x1") as caught:
        read_header(corpus.save(corpus.scene(201, 1), "PNG"), LIMITS, None)
    assert caught.value.code == "image_aspect_ratio"


def test_an_empty_picture_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty: 0x5"):
        read_header(corpus.with_size(corpus.save(corpus.scene(), "JPEG"), 0, 5), LIMITS, None)


def test_a_progressive_jpeg_passes_and_a_thousand_scans_do_not() -> None:
    read_header(corpus.progressive_jpeg(), LIMITS, None)
    read_header(corpus.scan_bomb(50), LIMITS, None)
    with pytest.raises(TooLarge, match="64 scans"):
        read_header(corpus.scan_bomb(1000), LIMITS, None)


def test_scan_markers_inside_metadata_are_not_scans() -> None:
    """Thumbnails, profiles and comments may hold any bytes."""
    data = corpus.save(corpus.scene(), "JPEG")
    comment = b"\xff\xda" * 500
    data = data[:2] + b"\xff\xfe" + struct.pack(">H", 2 + len(comment)) + comment + data[2:]
    assert count_scans(data) == 1
    read_header(data, LIMITS, None)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff" * 3_000_000,  # fill bytes for ever
        b"\xff\xd8" + b"\xff\xfe\0\2" * 700_000,  # empty comments for ever
        b"GIF89a\1\0\1\0\0\0\0" + b"\x21\xfe" + b"\1x" * 1_500_000,  # one comment in tiny pieces
        b"GIF89a\1\0\1\0\0\0\0" + b"\x21\xfe\0" * 1_000_000,  # empty comments for ever
        b"\xff\xd8\xff\xc2\0\x0b\x08\0\1\0\1\1\1\x11\0" + b"\xff\xfe\0\2" * 10_000 + b"\xff\xda\0\2" * 65,  # scans behind comments
    ],
)
def test_headers_that_never_end_are_given_up_early(data: bytes) -> None:
    with pytest.raises((UndecodableMedia, TooLarge)):
        read_header(data, LIMITS, None)
    assert MAX_SCANS == 64


def test_a_gif_frame_that_sticks_out_of_its_screen_counts() -> None:
    assert read_header(corpus.gif_with_frame_beyond_screen(100), LIMITS, None) == ImageHeader("gif", 100, 100)


@pytest.mark.parametrize("name", list(corpus.odd_pictures()))
def test_every_cut_of_a_good_file_is_a_header_or_a_refusal(name: str) -> None:
    data = corpus.odd_pictures()[name]
    for length in range(0, min(len(data), 700), 7):
        assert status_of(data[:length]) in (200, 400, 413, 415, 422)


@given(
    st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"\0\0\0\x20ftyp", b""]),
    st.binary(max_size=200),
)
def test_any_bytes_give_a_header_or_a_refusal(magic: bytes, rest: bytes) -> None:
    assert status_of(magic + rest) in (200, 400, 413, 415, 422)


def test_sniffing_goes_by_bytes_only() -> None:
    assert sniff(b"\xff\xd8\xff\xe1") == "jpeg"
    assert sniff(b"no such thing") is None


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_cut_off_file_has_an_orientation_or_none(format: str) -> None:
    data = corpus.oriented(6, format)
    name = format.lower()
    found = {read_orientation(data[:length], name) for length in range(len(data) + 1)}
    assert found == {1, 6}
    assert read_orientation(data, name) == 6


def test_an_orientation_behind_megabytes_of_fill_is_found_in_no_time() -> None:
    data = corpus.oriented(6, "JPEG")
    assert read_orientation(data[:2] + b"\xff" * 2**22 + data[2:], "jpeg") == 6


def test_an_endless_chain_of_segments_has_no_orientation() -> None:
    assert read_orientation(b"\xff\xd8" + b"\xff\xe0\x00\x02" * 10_000, "jpeg") == 1
    assert read_orientation(b"\x89PNG\r\n\x1a\n" + bytes(12) * 10_000, "png") == 1
