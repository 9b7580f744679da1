"""Media files taken apart, damaged where a parser looks, and put together again with lengths and checksums that are right.

A flipped byte in a PNG is caught by its checksum and in a RIFF by a length; what lies behind those is only reached by a file whose shell
is sound.  Pure: every change is a function of the generator it is given.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence

MAX_BYTES = 400_000  # what grows beyond is cut
_INTERESTING = (0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 100, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 16_383, 16_384)
_EDGES = (32_767, 32_768, 65_535, 65_536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"

Pieces = list[tuple[bytes, bytes]]  # (kind or header, payload)
Split = Callable[[bytes], Pieces]
Join = Callable[[Pieces], bytes]


def damaged(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to four changes, of the shell or of what is in it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = reshaped(rng, data) if rng.random() < 0.5 else scratched(rng, data, others)
    return data[:MAX_BYTES]


def scratched(rng: random.Random, data: bytes, others: Sequence[bytes] = (b"",)) -> bytes:
    """One change to bytes that nobody understands."""
    if not data:
        return rng.randbytes(rng.randrange(64))
    at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 128))  # headers are at the front
    end = min(len(data), at + rng.choice((1, 2, 4, 16, 256, 4096)))
    match rng.randrange(8):
        case 0 | 1:
            return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]
        case 2:
            return data[:at] + _number(rng) + data[at:][4:]
        case 3:
            return data[:at] + rng.randbytes(end - at) + data[end:]
        case 4:
            return data[:at] + data[end:]
        case 5:
            return data[:end] + data[at:end] * rng.choice((1, 2, 50)) + data[end:]
        case 6:
            return data[:at]
        case _:
            other = rng.choice(others)
            return data[:at] + other[rng.randrange(len(other) + 1) :]


def reshaped(rng: random.Random, data: bytes) -> bytes:
    """One change to the pieces of a container that is understood; else to its bytes."""
    split, join = next(((split, join) for magic, split, join in _CONTAINERS if data.startswith(magic)), (None, None))
    pieces = [] if split is None else split(data)
    if join is None or not pieces:
        return scratched(rng, data)
    i = rng.randrange(len(pieces))
    kind, payload = pieces[i]
    match rng.randrange(8):
        case 0:
            del pieces[i]
        case 1:
            pieces[i:i] = [pieces[i]] * rng.choice((1, 1, 3, 70))
        case 2:
            j = rng.randrange(len(pieces))
            pieces[i], pieces[j] = pieces[j], pieces[i]
        case 3:
            pieces[i] = (rng.choice(pieces)[0], payload)
        case 4 if kind == b"IDAT":
            pieces[i] = (kind, _recompressed(rng, payload))
        case _:
            pieces[i] = (kind, scratched(rng, payload))
    return join(pieces)


def _number(rng: random.Random) -> bytes:
    return struct.pack(rng.choice(("<I", ">I")), rng.choice(_EDGES if rng.random() < 0.3 else _INTERESTING))


def _recompressed(rng: random.Random, payload: bytes) -> bytes:
    """Other rows, soundly packed: filters and lengths that don't fit."""
    try:
        rows = zlib.decompressobj().decompress(payload, 4 * MAX_BYTES)
    except zlib.error:
        return payload
    return zlib.compress(scratched(rng, rows), 1)


# --- containers: every `join` writes right lengths and checksums over whatever the pieces are --------------------------------


def split_png(data: bytes) -> Pieces:
    pieces, at = [], len(_PNG_MAGIC)
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        pieces.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return pieces


def join_png(pieces: Pieces) -> bytes:
    chunks = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in pieces)
    return _PNG_MAGIC + b"".join(chunks)


def split_riff(data: bytes) -> Pieces:
    """The first piece is the form's name, with nothing in it."""
    pieces, at = [(data[8:12], b"")], 12
    while at + 8 <= len(data):
        (length,) = struct.unpack_from("<I", data, at + 4)
        pieces.append((data[at : at + 4], data[at + 8 : at + 8 + length]))
        at += 8 + length + length % 2
    return pieces


def join_riff(pieces: Pieces) -> bytes:
    (form, lost), *rest = pieces or [(b"WAVE", b"")]
    body = form + lost + b"".join(kind + struct.pack("<I", len(part)) + part + bytes(len(part) % 2) for kind, part in rest)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def split_jpeg(data: bytes) -> Pieces:
    """Segments up to the first scan; the scan and what follows are one piece without a length of its own."""
    pieces, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", data, at + 2)
        pieces.append((data[at : at + 2], data[at + 4 : at + 2 + length]))
        at += 2 + max(length, 2)
    return [*pieces, (b"", data[at:])]


def join_jpeg(pieces: Pieces) -> bytes:
    segments = (mark + struct.pack(">H", min(len(body) + 2, 65_535)) + body if mark else body for mark, body in pieces)
    return b"\xff\xd8" + b"".join(segments)


def split_ogg(data: bytes) -> Pieces:
    """Pages: (version to segment count, without checksum; segment table and what it counts)."""
    pieces, at = [], 0
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        num_segments = data[at + 26]
        stop = at + 27 + num_segments + sum(data[at + 27 : at + 27 + num_segments])
        pieces.append((data[at + 4 : at + 22] + data[at + 26 : at + 27], data[at + 27 : stop]))
        at = stop
    return pieces


def join_ogg(pieces: Pieces) -> bytes:
    out = bytearray()
    for head, body in pieces:
        page = b"OggS" + head[:18] + bytes(4) + head[18:] + body
        out += page[:22] + struct.pack("<I", _ogg_checksum(page)) + page[26:]
    return bytes(out)


def split_flac(data: bytes) -> Pieces:
    """Metadata blocks; the frames are one piece."""
    pieces, at, is_last = [], 4, False
    while not is_last and at + 4 <= len(data):
        is_last, kind, length = bool(data[at] & 0x80), data[at] & 0x7F, int.from_bytes(data[at + 1 : at + 4], "big")
        pieces.append((bytes((kind,)), data[at + 4 : at + 4 + length]))
        at += 4 + length
    return [*pieces, (b"", data[at:])]


def join_flac(pieces: Pieces) -> bytes:
    last = max((i for i, (kind, _) in enumerate(pieces) if kind), default=0)
    blocks = (
        bytes((kind[0] | (0x80 if i == last else 0),)) + len(body).to_bytes(3, "big") + body if kind else body
        for i, (kind, body) in enumerate(pieces)
    )
    return b"fLaC" + b"".join(blocks)


_CONTAINERS: tuple[tuple[bytes, Split, Join], ...] = (
    (_PNG_MAGIC, split_png, join_png),
    (b"RIFF", split_riff, join_riff),
    (b"\xff\xd8", split_jpeg, join_jpeg),
    (b"OggS", split_ogg, join_ogg),
    (b"fLaC", split_flac, join_flac),
)


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        value <<= 24
        for _ in range(8):
            value = (value << 1 ^ 0x04C11DB7 if value & 0x80000000 else value << 1) & 0xFFFFFFFF
        table.append(value)
    return tuple(table)


_CRC = _crc_table()


def _ogg_checksum(page: bytes) -> int:
    """RFC 3533: like zlib's polynomial, but the other way round."""
    value = 0
    for byte in page:
        value = (value << 8 & 0xFFFFFFFF) ^ _CRC[value >> 24 ^ byte]
    return value
