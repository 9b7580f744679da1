"""How long an MP3 is: its frames counted one by one, and said in the place where decoders look.

A decoder that finds no count guesses from the first frames' bit rate and stops there; one that finds a wrong count stops where that says.
So a stream without a true count is given one.  Source for the layout of headers and of the Xing frame: ISO/IEC 11172-3 and 13818-3,
and the description of the Xing VBR header that LAME writes.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

_SYNC = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")  # layer III of MPEG 2.5, 2 and 1
_KBPS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KBPS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_RATES_1 = (44_100, 48_000, 32_000)
_COUNT_IS_THERE = 1  # of a Xing frame's flags
_INFO_BIT_RATE = 8  # index; long enough a frame at every rate


class _Frame(NamedTuple):
    start: int
    num_bytes: int
    side_info: int  # bytes between the header and the place for a Xing tag
    kind: tuple[int, int]  # version and rate bits: the same all through a stream


def with_true_length(data: bytes) -> bytes:
    """The same stream, with a Xing frame that counts right.  Streams it can't follow come back as they are."""
    first = _next_frame(data, _after_id3(data), None)
    if first is None:
        return data
    num_frames, position = 0, first.start
    while frame := _next_frame(data, position, first.kind):
        num_frames += 1
        position = frame.start + frame.num_bytes
    at = first.start + 4 + first.side_info
    if data[at : at + 4] not in (b"Xing", b"Info"):
        return _info_frame(data[first.start : first.start + 4], first, num_frames) + data[first.start :]
    (flags,) = struct.unpack(">I", data[at + 4 : at + 8].rjust(4, b"\0"))
    if not flags & _COUNT_IS_THERE:
        rest = first.start + first.num_bytes
        return _info_frame(data[first.start : first.start + 4], first, num_frames - 1) + data[rest:]
    return data[: at + 8] + struct.pack(">I", num_frames - 1) + data[at + 12 :]


def _after_id3(data: bytes) -> int:
    if not data.startswith(b"ID3") or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:  # seven bits each
        size = size << 7 | byte & 0x7F
    return 10 + size


def _next_frame(data: bytes, position: int, kind: tuple[int, int] | None) -> _Frame | None:
    """The first whole or cut frame at or after `position`, of that kind if one is given."""
    while match := _SYNC.search(data, position):
        frame = _parse(data, match.start())
        if frame is not None and kind in (None, frame.kind):
            return frame
        position = match.start() + 1
    return None


def _parse(data: bytes, start: int) -> _Frame | None:
    header = data[start : start + 4]
    if len(header) < 4:
        return None
    version, rate_index, rate_bits = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if rate_bits == 3 or rate_index in (0, 15):  # reserved, and "free format", which nobody writes
        return None
    mpeg_1, mono = version == 3, header[3] >> 6 == 3
    kbps = (_KBPS_1 if mpeg_1 else _KBPS_2)[rate_index]
    rate = _RATES_1[rate_bits] // {3: 1, 2: 2, 0: 4}[version]
    num_bytes = (144_000 if mpeg_1 else 72_000) * kbps // rate + (header[2] >> 1 & 1)
    side_info = (17 if mono else 32) if mpeg_1 else (9 if mono else 17)
    return _Frame(start, num_bytes, side_info, (version, rate_bits))


def _info_frame(header: bytes, like: _Frame, num_frames: int) -> bytes:
    """A silent frame that is no sound but a count."""
    own = bytes((0xFF, header[1] | 1, _INFO_BIT_RATE << 4 | header[2] & 0x0C, header[3]))
    parsed = _parse(own, 0)
    assert parsed is not None
    body = own + bytes(like.side_info) + b"Info" + struct.pack(">II", _COUNT_IS_THERE, num_frames)
    return body.ljust(parsed.num_bytes, b"\0")
