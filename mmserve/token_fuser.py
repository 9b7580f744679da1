"""One ordered sequence of text, image and audio tokens.  Pure: counts and digests only, so it runs before anything is encoded.

Rows are found by their span, never by a token id: what stands in `token_ids` under a span is filler that no tokenizer output can imitate
and no user text can move.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmserve.media import MediaItem, MediaKind, MediaSpan, PreparedMedia

FILLER_ID = 0


@dataclass(frozen=True, slots=True)
class FusedPrompt:
    token_ids: array[int]  # [T], FILLER_ID under a span
    spans: tuple[MediaSpan, ...]  # in order, disjoint; one for each window

    @property
    def num_image_tokens(self) -> int:
        return self._rows(MediaKind.IMAGE)

    @property
    def num_audio_tokens(self) -> int:
        return self._rows(MediaKind.AUDIO)

    @property
    def num_text_tokens(self) -> int:
        return len(self.token_ids) - self.num_image_tokens - self.num_audio_tokens

    def _rows(self, kind: MediaKind) -> int:
        return sum(span.stop - span.start for span in self.spans if span.kind is kind)


def fuse(pieces: Sequence[Sequence[int] | MediaItem], prepared: Mapping[int, PreparedMedia]) -> FusedPrompt:
    """Lay the pieces end to end.  `prepared` maps `id(item)` to its counts: two parts may hold equal bytes and still be two items."""
    token_ids = array("i")
    spans: list[MediaSpan] = []
    for piece in pieces:
        if not isinstance(piece, MediaItem):
            token_ids.extend(piece)
            continue
        for window in prepared[id(piece)].windows:
            start = len(token_ids)
            token_ids.extend([FILLER_ID] * window.num_rows)
            spans.append(MediaSpan(window.key, window.kind, start, len(token_ids), window.grid))
    return FusedPrompt(token_ids, tuple(spans))
