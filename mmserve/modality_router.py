"""Reads a request's manifest: which encoder pools see it, and a stable name for each item.  Pure; looks at no byte of media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmserve.errors import BadRequest
from mmserve.media import MediaItem, MediaKind, MediaLimits

TEXT_BIT, IMAGE_BIT, AUDIO_BIT = 1, 2, 4  # of the ledger's modality_mask
_MIXES = {0: "text", IMAGE_BIT: "image", AUDIO_BIT: "audio", IMAGE_BIT | AUDIO_BIT: "image_audio"}


@dataclass(frozen=True, slots=True)
class Route:
    placeholders: tuple[str, ...]  # "image-0", "audio-0": one per item, in the client's order, counted by kind
    pools: frozenset[MediaKind]
    modality_mask: int

    @property
    def modality_mix(self) -> str:
        """The metrics' label: text, image, audio or image_audio."""
        return mix_of(self.modality_mask)


def mix_of(modality_mask: int) -> str:
    """text, image, audio or image_audio."""
    return _MIXES[modality_mask & ~TEXT_BIT]


def route(items: Sequence[MediaItem], *, has_text: bool, limits: MediaLimits) -> Route:
    """Raises BadRequest when there are more items of a kind than one request may carry."""
    counts = dict.fromkeys(MediaKind, 0)
    placeholders = []
    for item in items:
        placeholders.append(f"{item.kind.value}-{counts[item.kind]}")
        counts[item.kind] += 1
    for kind, limit in ((MediaKind.IMAGE, limits.max_images), (MediaKind.AUDIO, limits.max_clips)):
        if counts[kind] > limit:
            raise BadRequest(f"at most {limit} {kind.value} items in one request, got {counts[kind]}", param="messages")
    pools = frozenset(kind for kind, count in counts.items() if count)
    mask = (TEXT_BIT if has_text else 0) | (IMAGE_BIT if counts[MediaKind.IMAGE] else 0) | (AUDIO_BIT if counts[MediaKind.AUDIO] else 0)
    return Route(tuple(placeholders), pools, mask or TEXT_BIT)
