"""One entry of the disk cache as bytes: a header and the rows as they lie in memory.  Pure.

The header's digest covers everything, the window's key included, so rows can't be served under another picture's name.
"""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np

MAGIC = b"MMROWS1\n"
HEADER = struct.Struct("<8s32s12sIIdQ32s")  # magic, key, dtype, rows, hidden, created (s since the epoch), bytes, SHA-256


def pack(key: bytes, rows: np.ndarray, dtype: str, created_s: float) -> bytes:
    """Header and rows [num_rows, hidden] as one entry."""
    payload = rows.tobytes()
    fields = (MAGIC, key, dtype.encode(), rows.shape[0], rows.shape[1], created_s, len(payload))
    digest = hashlib.sha256(HEADER.pack(*fields, b""))
    digest.update(payload)
    return HEADER.pack(*fields, digest.digest()) + payload


def unpack(key: bytes, entry: bytes) -> tuple[float, str, tuple[int, int], memoryview] | None:
    """(created, dtype, shape, rows as bytes) of a sound entry of this very key, else None."""
    if len(entry) < HEADER.size:
        return None
    *fields, stored = HEADER.unpack_from(entry)
    magic, stored_key, dtype, num_rows, hidden, created_s, num_bytes = fields
    payload = memoryview(entry)[HEADER.size :]
    if (magic, stored_key, num_bytes) != (MAGIC, key, len(payload)) or not math.isfinite(created_s):
        return None
    digest = hashlib.sha256(HEADER.pack(*fields, b""))
    digest.update(payload)
    if digest.digest() != stored:
        return None
    return created_s, dtype.rstrip(b"\0").decode(errors="replace"), (num_rows, hidden), payload
