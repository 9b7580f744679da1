"""Content that ended workers, by its hash: refused for a while, so that whoever asks again does no more harm.  Pure; time is an argument.

Hashes are of what was computed, not of who asked: the same prompt or picture of another client would do the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from mmserve.errors import ContentQuarantined
from mmserve.media import MediaSpan

TTL_S = 3600.0
MAX_ENTRIES = 1024


class Quarantine:
    def __init__(self) -> None:
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, digest: bytes, now_s: float) -> None:
        self._until_s[digest] = now_s + TTL_S
        self._until_s.move_to_end(digest)
        if len(self._until_s) > MAX_ENTRIES:
            self._until_s.popitem(last=False)

    def check(self, digest: bytes, now_s: float, *, param: str | None) -> None:
        """Raises ContentQuarantined."""
        until_s = self._until_s.get(digest)
        if until_s is None:
            return
        if now_s >= until_s:
            del self._until_s[digest]
            return
        raise ContentQuarantined("this content has ended workers of the server and is not tried again for now", param=param)


def prompt_digest(model: str, token_ids: array[int], spans: Iterable[MediaSpan]) -> bytes:
    """SHA-256 over everything that decides what a decoder computes for a prompt: its ids, and which media stand where."""
    digest = hashlib.sha256(model.encode() + b"\0" + token_ids.tobytes())
    for span in spans:
        digest.update(span.start.to_bytes(8, "little") + span.key)
    return digest.digest()
