"""Which way up a picture was stored, read from its EXIF block alone: a count of rows needs it before a pixel is decoded.

The decoder turns pictures by this same number, so that counts and pixels can't disagree.
"""

from __future__ import annotations

import re
import struct

_TAG = 0x0112  # Orientation
_MAX_STEPS = 4096  # segments, chunks or entries walked
_FILL = re.compile(rb"\xff+")
_SHORT = 3  # TIFF's type of a 16-bit number


def read_orientation(data: bytes, format: str) -> int:
    """1 to 8 as EXIF numbers them; 1, upright, when nothing usable is said: a broken tag is no reason to refuse a good picture."""
    try:
        block = _BLOCKS[format](data) if format in _BLOCKS else None
        value = None if block is None else _parse_tiff(block.removeprefix(b"Exif\0\0"))
    except (struct.error, IndexError):
        return 1
    return value if value is not None and 1 <= value <= 8 else 1


def _parse_tiff(block: bytes) -> int | None:
    """The tag in the first directory: two bytes of byte order, 42, the directory's offset; then entries of twelve bytes."""
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return None
    magic, offset = struct.unpack_from(order + "HI", block, 2)
    if magic != 42:
        return None
    (count,) = struct.unpack_from(order + "H", block, offset)
    for entry in range(offset + 2, offset + 2 + 12 * min(count, _MAX_STEPS), 12):
        tag, kind, _, value = struct.unpack_from(order + "HHIH", block, entry)
        if tag == _TAG:
            return int(value) if kind == _SHORT else None
    return None


def _jpeg_block(data: bytes) -> bytes | None:
    position = 2
    for _ in range(_MAX_STEPS):
        fill = _FILL.match(data, position)
        if fill is None:
            return None
        marker, position = data[fill.end()], fill.end() + 1
        if marker in (0xD8, 0x01) or 0xD0 <= marker <= 0xD7:  # these stand alone
            continue
        if marker in (0xD9, 0xDA):
            return None
        (length,) = struct.unpack_from(">H", data, position)
        if marker == 0xE1 and data.startswith(b"Exif\0\0", position + 2):
            return data[position + 2 : position + length]
        position += length
    return None


def _png_block(data: bytes) -> bytes | None:
    position = 8
    for _ in range(_MAX_STEPS):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"eXIf":
            return data[position + 8 : position + 8 + length]
        if kind == b"IEND":
            return None
        position += 12 + length
    return None


def _webp_block(data: bytes) -> bytes | None:
    position = 12
    for _ in range(_MAX_STEPS):
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == b"EXIF":
            return data[position + 8 : position + 8 + length]
        position += 8 + length + length % 2
    return None


_BLOCKS = {"jpeg": _jpeg_block, "png": _png_block, "webp": _webp_block}
