"""What inputs are made from: the tests' odd pictures and clips, small and the same in every run."""

from __future__ import annotations

import io
import struct
from functools import cache

import numpy as np
import soundfile

from scripts.fuzzing.containers import join_ogg, split_ogg
from tests import media_corpus as corpus

_SERIAL = slice(10, 14)  # of a page's header without its magic


@cache
def pictures() -> tuple[bytes, ...]:
    turned = [corpus.oriented(orientation, format) for orientation in (3, 6) for format in ("JPEG", "PNG", "WEBP", "MPO")]
    bombs = [corpus.webp_canvas_bomb(), corpus.gif_with_frame_beyond_screen(100), corpus.scan_bomb(8)]
    return (*corpus.odd_pictures().values(), *turned, *bombs)


@cache
def clips() -> tuple[bytes, ...]:
    """A fifth of a second each: all of the decoder's paths are in the first blocks."""
    tone = corpus.tone(3_200)
    stereo = np.stack([tone, -tone], axis=1)
    made = [corpus.wav(tone, subtype=kind) for kind in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")]
    made += [corpus.wav(stereo), corpus.wav(tone, 44_100), corpus.wav(tone, subtype="IMA_ADPCM"), corpus.wav_of_floats([50.0, -1.0, 0.0])]
    made += [corpus.clip(tone, corpus.RATE, format, "PCM_16") for format in ("WAVEX", "RF64", "FLAC")]
    made += [corpus.clip(stereo, 48_000, "FLAC", "PCM_24"), corpus.raw_wav(bytes(600), data_size=0xFFFFFFFF, riff_size=0)]
    made += [_same_serial(corpus.clip(tone, corpus.RATE, "OGG", "VORBIS")), _same_serial(corpus.clip(tone, 48_000, "OGG", "OPUS"))]
    made += [_mp3(stereo, 44_100), _mp3(tone, 16_000), _mp3(tone, 8_000)]
    return tuple(made)


@cache
def strangers() -> tuple[bytes, ...]:
    """First bytes of what is not on either allow-list."""
    return (*corpus.OTHER_PICTURES, *corpus.OTHER_CLIPS)


def _same_serial(data: bytes) -> bytes:
    """A stream's number is drawn when it is written; a run that can be repeated needs the same."""
    pieces = [(head[: _SERIAL.start] + struct.pack("<I", 1) + head[_SERIAL.stop :], body) for head, body in split_ogg(data)]
    return join_ogg(pieces)


def _mp3(samples: np.ndarray, rate: int) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format="MP3", subtype="MPEG_LAYER_III")
    return out.getvalue()
