"""Counts before bytes: the length that a header or a probe gives a prompt is what decoder and tower then fill, to the row."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import published_audio
import published_models as published
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import WhisperFeatureExtractor

from mmserve.composition import AudioSpec, VisionSpec, load_composition
from mmserve.encoders import audio, image
from mmserve.encoders.image_header import read_header
from mmserve.errors import BadRequest, MmserveError
from mmserve.media import MediaItem, MediaKind, MediaLimits, PreparedMedia, content_digest
from mmserve.models.tower import Tower, TowerItem
from mmserve.token_fuser import fuse
from mmserve.worker.encoder_worker import load_towers
from tests import media_corpus as corpus

LIMITS = MediaLimits()
CPU = torch.device("cpu")
FORMATS = {"JPEG": {}, "PNG": {"compress_level": 1}, "WEBP": {"quality": 20, "method": 0}}
EYES = {"llava_next": published.build_llava_next, "qwen2_5_omni": published_audio.build_omni}
EARS: dict[str, Callable[[Path], Path] | None] = {
    "mmserve-tiny": None,
    "qwen2_audio": published_audio.build_qwen2_audio,
    "qwen2_5_omni": published_audio.build_omni,
    "ultravox": published_audio.build_ultravox,
}


class Eye:
    """A composition's way from a picture's bytes to its rows."""

    def __init__(self, name: str, directory: Path) -> None:
        self.spec: VisionSpec = load_composition(EYES[name](directory)).vision_of("small")
        self.tower: Tower = load_towers({"small": self.spec}, CPU, torch.float32)["small"]

    def promise(self, data: bytes) -> PreparedMedia:
        header, content = read_header(data, LIMITS, None), content_digest(data)
        return PreparedMedia(MediaItem(MediaKind.IMAGE, data), content, header, self.spec.windows(content, "small", header))

    def deliver(self, promised: PreparedMedia) -> int:
        """Rows that come of it.  The features go to a place whose shape follows from the header, too."""
        pixels = image.decode(promised.item.data, self.spec.fit, LIMITS)
        size = promised.picture_size
        assert size is not None
        assert pixels.shape == self.spec.fit.feature_shape(*size)
        (rows,) = self.tower.encode([TowerItem(torch.from_numpy(pixels.copy()), promised.num_rows, size)], "small")
        return len(rows)


class Ear:
    """The same for clips."""

    def __init__(self, name: str, directory: Path) -> None:
        build = EARS[name]
        self.name = name
        self.spec: AudioSpec = load_composition(build and build(directory)).audio_of("small")
        self.tower: Any = load_towers({"small": self.spec}, CPU, torch.float32)["small"]

    def promise(self, data: bytes) -> PreparedMedia:
        header, content = audio.probe(data, LIMITS, None), content_digest(data)
        num_samples = self.spec.num_samples(header.num_frames, header.sample_rate)
        windows = self.spec.windows(content, "small", num_samples)
        return PreparedMedia(MediaItem(MediaKind.AUDIO, data), content, header, windows, num_samples)

    def deliver(self, promised: PreparedMedia) -> int:
        """Rows that come of it, window by window, which lie end to end and leave nothing out."""
        samples = audio.decode(promised.item.data, self.spec.sample_rate, promised.num_samples, LIMITS)
        edges = [0, *(window.stop for window in promised.windows)]
        assert [window.start for window in promised.windows] == edges[:-1]
        assert edges[-1] == len(samples)
        num_rows = 0
        for window in promised.windows:
            heard = samples[window.start : window.stop]
            (rows,) = self.tower.encode([TowerItem(torch.from_numpy(heard), window.num_rows)], "small")
            assert len(rows) == self.rows_by_transformers(heard)
            num_rows += len(rows)
        return num_rows

    def rows_by_transformers(self, samples: np.ndarray) -> int:
        """By its feature extractor and the tower's own lengths: a tower that pads could be cut to any count and not complain."""
        if self.name == "ultravox":  # transformers doesn't have it: 16 frames a row, at least 2 frames, chunks of 200
            frames = max(math.ceil(len(samples) / 160), 2)
            return sum(math.ceil(min(200, frames - start) / 16) for start in range(0, frames, 200))
        extract = WhisperFeatureExtractor(feature_size=80, padding_side="left" if self.name == "qwen2_5_omni" else "right")
        mask = extract(samples, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt").attention_mask
        frames = mask.sum(-1)
        if self.name == "mmserve-tiny":  # every frame that holds some of the clip counts, and four make a row
            return math.ceil(int(frames) / 4)
        _, lengths = self.tower._tower._get_feat_extract_output_lengths(frames)
        return int(lengths)


def fused_length(promised: PreparedMedia) -> int:
    """Of a prompt of five text tokens around the item."""
    return len(fuse([[7, 8, 9], promised.item, [7, 8]], {id(promised.item): promised}).token_ids)


@pytest.fixture(scope="module", params=list(EYES))
def eye(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eye:
    return Eye(request.param, tmp_path_factory.mktemp("eye") / "model")


@pytest.fixture(scope="module", params=list(EARS))
def ear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ear:
    return Ear(request.param, tmp_path_factory.mktemp("ear") / "model")


# --- pictures


def gif_with_frame_elsewhere() -> bytes:
    """The screen is smaller than its frame, which lies off its corner, too: a decoder makes a larger picture of it."""
    data = bytearray(corpus.save(corpus.scene(), "GIF"))
    frame = data.index(b"\x2c", 13 + 3 * 2 ** ((data[10] & 7) + 1))
    data[6:10] = struct.pack("<HH", 10, 10)
    data[frame + 1 : frame + 5] = struct.pack("<HH", 40, 0)
    return bytes(data)


def turned(size: tuple[int, int], orientation: int, format: str, shade: int = 90) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return corpus.save(Image.new("RGB", size, (shade, 120, 30)), format, exif=exif, **FORMATS[format])


@cache
def pictures() -> dict[str, bytes]:
    """All of the corpus that is meant to be seen, and what states its size in more than one place."""
    upright = corpus.save(corpus.scene(), "JPEG")
    on_its_side = turned((90, 30), 6, "JPEG")
    exif = on_its_side[2 : 4 + int.from_bytes(on_its_side[4:6], "big")]
    late = corpus.oriented(6, "PNG")
    start = late.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(late[start : start + 4], "big")
    end = late.rindex(b"IEND") - 4
    return corpus.odd_pictures() | {
        f"{format} on its side {orientation}": corpus.oriented(orientation, format)
        for format in ("JPEG", "MPO", "PNG", "WEBP")
        for orientation in range(1, 9)
    } | {
        "exif behind another segment": upright[:2] + b"\xff\xfe\x00\x04hi" + exif + upright[2:],
        "exif twice": upright[:2] + exif + exif.replace(b"\x06", b"\x01") + upright[2:],
        "exif behind the pixels": late[:start] + late[stop:end] + late[start:stop] + late[end:],
        "exif that is broken": corpus.save(corpus.scene(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
        "orientation 9": corpus.oriented(9, "JPEG"),
        "frame elsewhere": gif_with_frame_elsewhere(),
        "webp frames": corpus.save(corpus.scene(90, 30), "WEBP", save_all=True, append_images=[corpus.scene(90, 30)], duration=100),
        "as long as may be": corpus.save(corpus.scene(1400, 7), "PNG"),
        "as high as may be": corpus.save(corpus.scene(7, 1400), "PNG"),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(pictures()))
def test_a_picture_fills_the_rows_that_its_header_promised(eye: Eye, name: str) -> None:
    promised = eye.promise(pictures()[name])
    assert fused_length(promised) == 5 + eye.deliver(promised)


def test_a_picture_on_its_side_is_promised_other_rows_than_an_upright_one(eye: Eye) -> None:
    """Else the tests of this file would not notice a header that doesn't look."""
    grids = [eye.promise(turned((600, 90), orientation, "PNG")) for orientation in (1, 6)]
    shapes = [eye.spec.fit.feature_shape(*promised.picture_size) for promised in grids]
    assert grids[0].picture_size == (600, 90)
    assert grids[1].picture_size == (90, 600)
    assert shapes[0] != shapes[1] or grids[0].num_rows != grids[1].num_rows


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 8), st.sampled_from(list(FORMATS)))
@example(641, 479, 6, "JPEG")
@example(3, 577, 8, "WEBP")
@settings(max_examples=40, deadline=None)
def test_a_picture_of_any_size_and_turn_fills_the_rows_that_were_promised(
    eye: Eye, width: int, height: int, orientation: int, format: str
) -> None:
    assume(max(width, height) <= 200 * min(width, height))
    promised = eye.promise(turned((width, height), orientation, format))
    assert fused_length(promised) == 5 + eye.deliver(promised)


# --- clips


def flac_out_of_a_pipe(num_samples: int) -> bytes:
    """`ffmpeg -f flac -` can't go back to say how long it was: it says 0.  These were refused as damaged."""
    data = bytearray(corpus.clip(corpus.tone(num_samples), corpus.RATE, "FLAC", "PCM_16"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    return bytes(data)


@cache
def clips() -> dict[str, bytes]:
    """All of the corpus that is meant to be heard, and lengths around the edges of windows, frames and rows."""
    edges = [1, 159, 160, 161, 321, 480, 481, 639, 640, 641, 1_119, 1_121, 31_999, 32_000, 32_001, 79_999, 80_000, 80_001, 160_000, 160_001]
    return {name: data for name, (data, _) in corpus.odd_clips().items()} | {
        "mp3 without a length": corpus.mp3_without_length(6 * corpus.RATE),
        "flac out of a pipe": flac_out_of_a_pipe(6 * corpus.RATE),
        "flac longer than it says": corpus.flac_with_claimed_frames(corpus.RATE // 2),
        **{f"{count} samples": corpus.wav(corpus.tone(count)) for count in edges},
    }


def hear(ear: Ear, data: bytes) -> None:
    """The clip fills what was promised, or nothing was promised, for one of the two reasons there are."""
    header = audio.probe(data, LIMITS, None)
    longest_s = math.inf if ear.spec.is_cut or ear.spec.window_s is None else ear.spec.window_s
    try:
        promised = ear.promise(data)
    except MmserveError as refusal:
        is_short = isinstance(refusal, BadRequest) and refusal.code == "audio_too_short"
        assert header.duration_s < 0.03 if is_short else header.duration_s > longest_s
        return
    assert fused_length(promised) == 5 + ear.deliver(promised)


@pytest.mark.parametrize("name", list(clips()))
def test_a_clip_fills_the_rows_that_its_probe_promised(ear: Ear, name: str) -> None:
    hear(ear, clips()[name])


@given(
    st.sampled_from([8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000]),
    st.floats(0, 1),
    st.integers(1, 2),
    st.sampled_from([("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]),
)
@example(44_100, 1.0, 2, ("WAV", "PCM_16"))
@example(48_000, 0.99999, 1, ("OGG", "OPUS"))
@settings(max_examples=20, deadline=None)
def test_a_clip_of_any_length_and_rate_fills_the_rows_that_were_promised(
    ear: Ear, rate: int, share: float, channels: int, kind: tuple[str, str]
) -> None:
    if kind[1] == "OPUS":
        rate = 48_000 if rate % 1000 or rate > 48_000 else rate
    assume(kind[0] != "MP3" or rate <= 48_000)
    longest_s = 2.0 if ear.name == "qwen2_audio" else 6.0  # of what this test makes; the former hears no more
    samples = corpus.tone(max(1, int(share * longest_s * rate)), rate)
    hear(ear, corpus.clip(np.repeat(samples[:, None], channels, axis=1), rate, *kind))


def test_a_clip_out_of_a_pipe_is_heard_to_its_end() -> None:
    data = flac_out_of_a_pipe(6 * corpus.RATE)
    assert audio.probe(data, LIMITS, None).num_frames == 6 * corpus.RATE
    heard = audio.decode(data, corpus.RATE, 6 * corpus.RATE)
    assert np.abs(heard - corpus.tone(6 * corpus.RATE)).max() < 1e-3
