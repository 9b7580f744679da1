"""Media as the engine sees them before anything is decoded: bytes, a header, a digest, and the rows they will become."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum


class MediaKind(Enum):
    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One picture or clip as the client sent it.  `param` names its place in the request, for error messages."""

    kind: MediaKind
    data: bytes
    detail: str = "auto"  # image: low, high or auto
    param: str | None = None


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the container says, read without decoding a pixel."""

    format: str  # jpeg, png, gif or webp
    width: int  # pixels, as stored: before EXIF orientation
    height: int
    orientation: int = 1  # EXIF's number; 5 to 8 lie on their side

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as the picture is meant to be seen."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """`num_frames` is counted, not claimed: formats whose header can lie are decoded to count them."""

    format: str  # wav, flac, ogg or mp3
    sample_rate: int  # Hz
    channels: int
    num_frames: int  # samples per channel at `sample_rate`

    @property
    def duration_s(self) -> float:
        return self.num_frames / self.sample_rate


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Checked from headers, before any decode."""

    max_images: int = 8
    max_clips: int = 1
    max_image_pixels: int = 16_000_000
    max_request_pixels: int = 40_000_000
    max_image_side: int = 16_384
    max_aspect_ratio: float = 200.0
    max_audio_bytes: int = 10 * 2**20
    max_audio_s: float = 60.0
    min_sample_rate: int = 8_000
    max_sample_rate: int = 192_000
    max_channels: int = 8
    decode_cpu_s: float = 2.0
    decode_wall_s: float = 5.0
    decode_memory_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class MediaWindow:
    """The unit of encoding: one picture, or one window of a clip.  It becomes exactly `num_rows` embedding rows.

    `key` is the identity of those rows: equal keys, equal rows.  It covers the content, the preprocessing, the encoder's and the
    projector's weights, the window and the salt, so that caches and hash chains need look at nothing else.
    """

    key: bytes  # 32 bytes, SHA-256
    kind: MediaKind
    num_rows: int
    index: int = 0  # of the window within its item
    start: int = 0  # audio: [start, stop) in samples at the encoder's rate; images: unused
    stop: int = 0
    grid: tuple[int, int] | None = None  # rows of a picture, down and across, where the decoder's positions have an axis for each


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Rows [start, stop) of a sequence that come from the window `key` instead of the embedding table."""

    key: bytes
    kind: MediaKind
    start: int
    stop: int
    grid: tuple[int, int] | None = None  # as in the window: the key decides it


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """An item whose cost is known: probed, hashed, cut into windows, and not decoded yet."""

    item: MediaItem
    content: bytes  # 32 bytes, SHA-256 of item.data
    header: ImageHeader | AudioHeader
    windows: tuple[MediaWindow, ...]
    num_samples: int = 0  # audio: length of the clip at the encoder's rate
    is_fallback: bool = False  # its rows come from the fallback encoder, as the windows' keys say

    @property
    def picture_size(self) -> tuple[int, int] | None:
        """Width and height of the upright picture; None for a clip."""
        return self.header.upright_size if isinstance(self.header, ImageHeader) else None

    @property
    def num_rows(self) -> int:
        return sum(window.num_rows for window in self.windows)


def content_digest(data: bytes) -> bytes:
    """SHA-256 of the bytes as sent.  Releases the GIL, but megabytes still belong off the event loop."""
    return hashlib.sha256(data).digest()


def window_key(
    *,
    content: bytes,
    kind: MediaKind,
    encoder: bytes,
    index: int,
    start: int,
    stop: int,
    num_rows: int,
    detail: str = "auto",
    salt: bytes = b"",
) -> bytes:
    """Identity of one window's rows.  Every field has a fixed length or a length before it, so no two inputs collide by shifting.

    `encoder` is the digest of encoder weights, projector weights and preprocessing (`composition.EncoderSpec.version`).
    """
    digest = hashlib.sha256(b"mmserve-window-1")
    for part in (kind.value.encode(), content, encoder, detail.encode(), salt):
        digest.update(len(part).to_bytes(4, "little") + part)
    for number in (index, start, stop, num_rows):
        digest.update(number.to_bytes(8, "little"))
    return digest.digest()
