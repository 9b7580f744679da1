"""What a picture's container says, read without decoding a pixel and before any library sees a byte.

Every reader is linear, bounded in steps, and stops at the first thing it can't vouch for.  Dimensions are an upper bound of what a
decoder will allocate: a GIF's first frame may stick out of its screen, so both count.
"""

from __future__ import annotations

import re
import struct

from mmserve.encoders.exif import read_orientation
from mmserve.errors import BadRequest, TooLarge, UndecodableMedia, UnsupportedMedia
from mmserve.media import ImageHeader, MediaLimits

ACCEPTED = "JPEG, PNG, GIF, WebP"
MAX_SCANS = 64  # of a JPEG; each one costs a pass over all coefficients
MAX_STEPS = 4096  # segments or blocks walked before the dimensions must have turned up

_PROGRESSIVE = 0xC2
_FILL = re.compile(rb"\xff+")
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # in entropy-coded data: neither stuffing nor a restart
_HEIF_BRANDS = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}
_AVIF_BRANDS = {b"avif", b"avis"}
_UNSUPPORTED_SOF = {
    0xC3: "lossless", 0xC5: "hierarchical", 0xC6: "hierarchical", 0xC7: "lossless", 0xC9: "arithmetic-coded", 0xCA: "arithmetic-coded",
    0xCB: "lossless", 0xCD: "hierarchical", 0xCE: "hierarchical", 0xCF: "lossless",
}  # fmt: skip
_OTHER_KINDS = (
    (b"BM", "bmp"), (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"\x00\x00\x01\x00", "ico"), (b"8BPS", "psd"), (b"%PDF", "pdf"),
    (b"%!PS", "postscript"), (b"\xc5\xd0\xd3\xc6", "postscript"), (b"\x00\x00\x00\x0cjP  ", "jpeg2000"), (b"\xff\x4f\xff\x51", "jpeg2000"),
    (b"\x00\x00\x00\x0cJXL ", "jpeg xl"), (b"\xff\x0a", "jpeg xl"), (b"SIMPLE  =", "fits"), (b"qoif", "qoi"), (b"DDS ", "dds"),
    (b"RIFF", "riff"), (b"OggS", "audio/ogg"), (b"fLaC", "audio/flac"), (b"ID3", "audio/mpeg"), (b"\x1aE\xdf\xa3", "webm"),
)  # fmt: skip


def read_header(data: bytes, limits: MediaLimits, param: str | None) -> ImageHeader:
    """Format and stored size of a picture that may be decoded.  Raises the 4xx that says why it may not.

    UnsupportedMedia: not on the allow-list.  TooLarge: pixels or sides.  BadRequest: a size no picture has.  UndecodableMedia: no
    dimensions to be found.
    """
    name = sniff(data)
    reader = _READERS.get(name or "")
    if reader is None:
        if name is None:
            raise UndecodableMedia(f"the bytes are not a picture; accepted are {ACCEPTED}", param=param)
        raise UnsupportedMedia(f"unsupported image format: {name}; accepted are {ACCEPTED}", param=param, code="unsupported_image_format")
    try:
        width, height = reader(data)
    except _Unsupported as error:
        raise UnsupportedMedia(f"unsupported image format: {error}", param=param, code="unsupported_image_format") from None
    except (_Malformed, struct.error, IndexError):
        raise UndecodableMedia(f"the {name.upper() if name else ''} header is damaged or cut off", param=param) from None
    check_size(width, height, limits, param)
    # Counting costs a millisecond a megabyte: plain photos are spared it here, and `image.decode` counts theirs.
    if name == "jpeg" and _jpeg_frame(data)[0] == _PROGRESSIVE and count_scans(data) > MAX_SCANS:
        raise TooLarge(f"a JPEG may have at most {MAX_SCANS} scans", param=param)
    assert name is not None
    return ImageHeader(name, width, height, read_orientation(data, name))


def check_size(width: int, height: int, limits: MediaLimits, param: str | None) -> None:
    """The limits of one picture; 413 gives both numbers."""
    if width < 1 or height < 1:
        raise BadRequest(f"the image is empty: {width}x{height}", param=param)
    if max(width, height) > limits.max_image_side:
        raise TooLarge(f"image sides may be at most {limits.max_image_side} pixels, got {width}x{height}", param=param)
    if width * height > limits.max_image_pixels:
        raise TooLarge(f"images may have at most {limits.max_image_pixels} pixels, got {width}x{height}={width * height}", param=param)
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        message = f"the longer side may be at most {limits.max_aspect_ratio:g} times the shorter, got {width}x{height}"
        raise BadRequest(message, param=param, code="image_aspect_ratio")


def sniff(data: bytes) -> str | None:
    """The container by its own bytes, whatever anybody called it; None when they are like nothing known."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"RIFF") and data[8:12] in (b"WEBP", b"WAVE", b"AVI "):
        return {b"WEBP": "webp", b"WAVE": "audio/wav", b"AVI ": "avi"}[data[8:12]]
    if data[4:8] == b"ftyp":
        brands = {data[8:12], *(data[i : i + 4] for i in range(16, min(int.from_bytes(data[:4], "big"), 256), 4))}
        return "avif" if brands & _AVIF_BRANDS else "heic" if brands & _HEIF_BRANDS else "mp4"
    for magic, name in _OTHER_KINDS:
        if data.startswith(magic):
            return name
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"<") and (b"<svg" in start or start.startswith(b"<?xml")):
        return "svg"
    return None


def count_scans(data: bytes) -> int:
    """Scans of a JPEG's first picture, or more than MAX_SCANS if it can't be followed to its end in bounded steps."""
    at_most = data.count(b"\xff\xda")
    if at_most <= MAX_SCANS:  # the true number can't be higher
        return at_most
    position, scans, steps = 2, 0, 0
    while scans <= MAX_SCANS and (match := _MARKER.search(data, position)):
        marker, position = data[match.end() - 1], match.end()
        if marker == 0xD9:
            return scans
        scans += marker == 0xDA
        steps += 1
        if steps > MAX_STEPS:
            return MAX_SCANS + 1
        if marker not in (0x01, 0xD8):
            position += int.from_bytes(data[position : position + 2], "big")
    return scans


class _Malformed(Exception):
    pass


class _Unsupported(Exception):
    pass


def _jpeg_size(data: bytes) -> tuple[int, int]:
    _, width, height = _jpeg_frame(data)
    return width, height


def _jpeg_frame(data: bytes) -> tuple[int, int, int]:
    """(marker, width, height) of the frame header: C0 baseline, C1 extended, C2 progressive."""
    position = 2
    for _ in range(MAX_STEPS):
        fill = _FILL.match(data, position)
        if fill is None:
            raise _Malformed
        marker, position = data[fill.end()], fill.end() + 1
        if marker in (0xD8, 0x01) or 0xD0 <= marker <= 0xD7:  # these stand alone
            continue
        if marker in _UNSUPPORTED_SOF:
            raise _Unsupported(f"{_UNSUPPORTED_SOF[marker]} jpeg")
        if marker in (0xD9, 0xDA):  # the picture ends, or its data begin, before any size
            raise _Malformed
        (length,) = struct.unpack_from(">H", data, position)
        if length < 2:
            raise _Malformed
        if marker in (0xC0, 0xC1, 0xC2):
            bits, height, width = struct.unpack_from(">BHH", data, position + 2)
            if bits != 8:
                raise _Unsupported(f"{bits}-bit jpeg")
            return marker, width, height
        position += length
    raise _Malformed


def _png_size(data: bytes) -> tuple[int, int]:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind == b"CgBI":
        raise _Unsupported("Apple's CgBI variant of png")
    if (length, kind) != (13, b"IHDR"):
        raise _Malformed
    return width, height


def _gif_size(data: bytes) -> tuple[int, int]:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _colour_table_bytes(flags)
    for _ in range(MAX_STEPS):
        introducer = data[position]
        if introducer == 0x2C:
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, position + 1)
            return max(width, left + frame_width), max(height, top + frame_height)
        if introducer != 0x21:
            raise _Malformed
        position += 2
        for _ in range(MAX_STEPS):
            size = data[position]
            position += 1 + size
            if size == 0:
                break
        else:
            raise _Malformed
    raise _Malformed


def _colour_table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(_exactly(data[27:30], 3), "little")
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise _Malformed
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        start_code, width, height = struct.unpack_from("<3sHH", data, 23)
        if start_code != b"\x9d\x01\x2a":
            raise _Malformed
        return width & 0x3FFF, height & 0x3FFF
    raise _Malformed


def _exactly(part: bytes, count: int) -> bytes:
    if len(part) != count:
        raise _Malformed
    return part


_READERS = {"jpeg": _jpeg_size, "png": _png_size, "gif": _gif_size, "webp": _webp_size}
