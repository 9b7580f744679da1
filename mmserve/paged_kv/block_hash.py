"""Names for what KV blocks hold: one hash per stride of 16 tokens, chained from the first token on.

Two sequences have the same hash for a stride exactly when everything attention can see there is the same: the salt, every text id
and, under media, which rows of which window.  The stride is the same whatever the size of a physical block.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable

from mmserve.media import MediaSpan

HASH_STRIDE = 16  # tokens

_ID_BYTES = array("i").itemsize
_STRIDE_BYTES = HASH_STRIDE * _ID_BYTES
_RUN = struct.Struct("<BB32sQ")  # first token in the stride, count, window key, first row in the window


def chain_hashes(
    token_ids: array[int], spans: Iterable[MediaSpan], *, salt: bytes, parent: bytes | None = None, start: int = 0
) -> list[bytes]:
    """32 bytes for every full stride from token `start` on; `parent` is the hash of the stride before it.

    Ids under a span don't count, whatever placeholder stands there: a picture is known by its key and the row within it.
    """
    assert start % HASH_STRIDE == 0, f"start {start} is not a multiple of {HASH_STRIDE}"
    assert (parent is None) == (start == 0), "a chain starts at token 0, and only there"
    num_strides = len(token_ids) // HASH_STRIDE - start // HASH_STRIDE
    if num_strides <= 0:
        return []
    stop = start + num_strides * HASH_STRIDE
    ids = bytearray(token_ids[start:stop].tobytes())
    runs: dict[int, bytes] = {}
    for span in spans:
        _add_runs(runs, ids, span, start, stop)
    # Every field has a fixed length, so no two strides have the same bytes.
    chain = parent if parent is not None else hashlib.sha256(b"mmserve-chain-1" + salt).digest()
    hashes = []
    for stride in range(num_strides):
        chain += ids[stride * _STRIDE_BYTES : (stride + 1) * _STRIDE_BYTES]
        if stride in runs:
            chain += runs[stride]
        chain = hashlib.sha256(chain).digest()
        hashes.append(chain)
    return hashes


def _add_runs(runs: dict[int, bytes], ids: bytearray, span: MediaSpan, start: int, stop: int) -> None:
    """Blank the span's ids within [start, stop) and note, stride by stride, which rows stand there instead."""
    first, last = max(span.start, start), min(span.stop, stop)
    if first >= last:
        return
    ids[(first - start) * _ID_BYTES : (last - start) * _ID_BYTES] = bytes((last - first) * _ID_BYTES)
    while first < last:
        stride, offset = divmod(first - start, HASH_STRIDE)
        count = min(HASH_STRIDE - offset, last - first)
        runs[stride] = runs.get(stride, b"") + _RUN.pack(offset, count, span.key, first - span.start)
        first += count
