"""From an item's header to its windows: what it will cost, and under which keys its rows are found."""

from __future__ import annotations

from mmserve.composition.specs import Composition
from mmserve.media import AudioHeader, ImageHeader, MediaItem, PreparedMedia


def prepare_media(
    item: MediaItem,
    content: bytes,
    header: ImageHeader | AudioHeader,
    composition: Composition,
    decoder: str,
    *,
    salt: bytes = b"",
    is_fallback: bool = False,
) -> PreparedMedia:
    """`content` is the digest of the item's bytes.  Raises the error of whatever the model doesn't take."""
    if isinstance(header, ImageHeader):
        vision = composition.vision_of(decoder, item.param)
        windows = vision.windows(content, decoder, header, detail=item.detail, salt=salt)
        return PreparedMedia(item, content, header, windows, is_fallback=is_fallback)
    audio = composition.audio_of(decoder, item.param)
    num_samples = audio.num_samples(header.num_frames, header.sample_rate)
    windows = audio.windows(content, decoder, num_samples, salt=salt, param=item.param)
    return PreparedMedia(item, content, header, windows, num_samples, is_fallback)
