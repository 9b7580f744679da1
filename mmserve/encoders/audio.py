"""Samples: any clip on the allow-list becomes mono float32 at the encoder's rate.  Belongs in a decode process.

Headers lie about length, so frames are counted by decoding block by block, and counting stops at the limit: a few bytes of silence
may claim hours.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import soundfile
import soxr

from mmserve.encoders.mpeg_frames import with_true_length
from mmserve.errors import BadRequest, TooLarge, UndecodableMedia, UnsupportedMedia
from mmserve.media import AudioHeader, MediaLimits

ACCEPTED = "WAV, FLAC, OGG (Vorbis or Opus), MP3"
BLOCK_FRAMES = 65_536
_UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's word for a FLAC that was written into a pipe

_FORMATS = {"wav": {"WAV", "WAVEX", "RF64"}, "flac": {"FLAC"}, "ogg": {"OGG"}, "mp3": {"MP3"}}
_SUBTYPES = {
    "wav": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"},
    "flac": {"PCM_S8", "PCM_16", "PCM_24"},
    "ogg": {"VORBIS", "OPUS"},
    "mp3": {"MPEG_LAYER_III"},
}
_OTHER_KINDS = (
    (b"\x1aE\xdf\xa3", "webm"), (b"#!AMR", "amr"), (b"FORM", "aiff"), (b".snd", "au"), (b"caff", "caf"), (b"0&\xb2u", "wma"),
    (b"MThd", "midi"), (b"RIFX", "rifx"), (b"riff", "w64"), (b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
)  # fmt: skip


def probe(data: bytes, limits: MediaLimits, param: str | None) -> AudioHeader:
    """Rate, channels and the true number of frames.  Raises the 4xx that says why the clip can't be taken."""
    if len(data) > limits.max_audio_bytes:
        raise TooLarge(f"a clip may have at most {limits.max_audio_bytes} bytes, got {len(data)}", param=param)
    num_frames = 0
    with _open(data, param) as (name, file):
        _check_shape(file, limits, param)
        for block in _blocks(file, param):
            num_frames += len(block)
            if num_frames > limits.max_audio_s * file.samplerate:
                raise TooLarge(f"a clip may last at most {limits.max_audio_s:g} s", param=param)
        if num_frames == 0:
            raise BadRequest("the clip is empty: it has no samples", param=param, code="audio_empty")
        return AudioHeader(name, file.samplerate, file.channels, num_frames)


def decode(data: bytes, sample_rate: int, num_samples: int, limits: MediaLimits | None = None) -> np.ndarray:
    """float32 [num_samples] at `sample_rate`: channels averaged, then resampled, peaks clipped to 1.

    `num_samples` follows from the probed header; another length than that by more than rounding is refused.
    """
    limits = limits or MediaLimits()
    with _open(data, None) as (_, file):
        _check_shape(file, limits, None)
        # One second of grace: the probe has refused what is too long, this only bounds memory.
        most = int((num_samples / sample_rate + 1) * file.samplerate)
        blocks, num_frames = [], 0
        for block in _blocks(file, None):
            blocks.append(block.mean(axis=1, dtype=np.float32))
            num_frames += len(block)
            if num_frames > most:
                break
        rate = file.samplerate
    mono = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    expected = -(-num_frames * sample_rate // rate)
    if num_frames == 0 or abs(expected - num_samples) > 1:
        raise UndecodableMedia("the clip decodes to another length than it was probed to have")
    samples = mono if rate == sample_rate else soxr.resample(mono, rate, sample_rate, quality="HQ")
    fitted = np.zeros(num_samples, np.float32)
    fitted[: len(samples)] = samples[:num_samples]
    return np.clip(fitted, -1.0, 1.0, out=fitted)


def sniff(data: bytes) -> str | None:
    """The container by its own bytes: one of `wav`, `flac`, `ogg`, `mp3`, the name of one that is not accepted, or None."""
    if data[:4] in (b"RIFF", b"RF64"):
        return "wav" if data[8:12] == b"WAVE" else "image/webp" if data[8:12] == b"WEBP" else "riff"
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS"):
        return "ogg"
    if data.startswith(b"ID3"):
        return "mp3"
    if len(data) >= 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        layer = data[1] >> 1 & 3
        if data.startswith(b"\xff\xd8\xff"):
            return "image/jpeg"
        return {1: "mp3", 0: "aac"}.get(layer, "mpeg layer I or II")
    if data[4:8] == b"ftyp":
        return "3gp" if data[8:11] == b"3gp" else "m4a or mp4"
    for magic, name in _OTHER_KINDS:
        if data.startswith(magic):
            return name
    return None


class _StraightOn(soundfile.SoundFile):  # type: ignore[misc]
    """After each read the library seeks to where it is, which fails at the end of a stream that doesn't say where that is."""

    def seekable(self) -> bool:
        return self.frames != _UNKNOWN_FRAMES and bool(super().seekable())


@contextmanager
def _open(data: bytes, param: str | None) -> Iterator[tuple[str, soundfile.SoundFile]]:
    name = sniff(data)
    if name is None:
        raise UndecodableMedia(f"the bytes are not a clip; accepted are {ACCEPTED}", param=param)
    if name not in _FORMATS:
        raise _unsupported(name, param)
    try:
        file = _StraightOn(io.BytesIO(with_true_length(data) if name == "mp3" else data))
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError):
        raise UndecodableMedia("the clip can't be decoded: it is damaged or cut off", param=param) from None
    with file:
        if file.format not in _FORMATS[name] or file.subtype not in _SUBTYPES[name]:
            raise _unsupported(f"{file.format} with {file.subtype}", param)
        yield name, file


def _blocks(file: soundfile.SoundFile, param: str | None) -> Iterator[np.ndarray]:
    """float32 [n, channels] until nothing more comes out, whatever the header said.  The array is reused."""
    buffer = np.empty((BLOCK_FRAMES, file.channels), np.float32)
    while True:
        try:
            block = file.read(out=buffer)
        except (soundfile.SoundFileError, RuntimeError):
            raise UndecodableMedia("the clip can't be decoded: it is damaged or cut off", param=param) from None
        if len(block) == 0:
            return
        if not np.isfinite(block).all():
            raise BadRequest("the clip has samples that are not finite numbers", param=param, code="audio_not_finite")
        yield block


def _check_shape(file: soundfile.SoundFile, limits: MediaLimits, param: str | None) -> None:
    if not limits.min_sample_rate <= file.samplerate <= limits.max_sample_rate:
        message = f"the sample rate must be between {limits.min_sample_rate} and {limits.max_sample_rate} Hz, got {file.samplerate}"
        raise BadRequest(message, param=param, code="audio_sample_rate")
    if not 1 <= file.channels <= limits.max_channels:
        raise BadRequest(f"a clip may have at most {limits.max_channels} channels, got {file.channels}", param=param, code="audio_channels")


def _unsupported(name: str, param: str | None) -> UnsupportedMedia:
    return UnsupportedMedia(f"unsupported audio format: {name}; accepted are {ACCEPTED}", param=param, code="unsupported_audio_format")
