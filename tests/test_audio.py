"""Clips come out mono at the encoder's rate, of exactly the length that was counted; lies and noise are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.encoders.audio import decode, probe, sniff
from mmserve.encoders.mpeg_frames import with_true_length
from mmserve.errors import BadRequest, MmserveError, TooLarge, UndecodableMedia, UnsupportedMedia
from mmserve.media import MediaLimits
from tests import media_corpus as corpus
from tests.media_corpus import RATE, clip, raw_wav, tone, wav

LIMITS = MediaLimits()


def load(data: bytes) -> np.ndarray:
    """Probe, then decode to the length the engine would ask for."""
    header = probe(data, LIMITS, None)
    return decode(data, RATE, -(-header.num_frames * RATE // header.sample_rate))


def status_of(data: bytes) -> int:
    """200 for a clip within the limits, else that of the refusal."""
    try:
        header = probe(data, LIMITS, None)
    except MmserveError as error:
        return error.status
    return 200 if 0 < header.duration_s <= LIMITS.max_audio_s else 500


@pytest.mark.parametrize("name", list(corpus.odd_clips()))
def test_every_odd_clip_decodes_to_the_length_it_has(name: str) -> None:
    data, num_samples = corpus.odd_clips()[name]
    samples = load(data)
    assert (samples.shape, samples.dtype) == ((num_samples,), np.dtype(np.float32))
    assert np.abs(samples).max(initial=0) <= 1.0


@pytest.mark.parametrize(
    ("subtype", "within"),
    [("PCM_16", 1), ("PCM_24", 1), ("PCM_32", 1), ("FLOAT", 1), ("DOUBLE", 1), ("PCM_U8", 257), ("ULAW", 1100), ("ALAW", 1100)],
)
def test_every_kind_of_pcm_has_the_same_scale(subtype: str, within: int) -> None:
    """In steps of 16 bits; a wrong scale would be off by thousands."""
    assert np.abs(load(wav(tone(), subtype=subtype)) - tone()).max() * 32768 <= within


def test_unsigned_silence_is_zero() -> None:
    assert not load(raw_wav(b"\x80" * 800, bits=8)).any()


@pytest.mark.parametrize(
    ("rate", "format", "subtype"),
    [(8_000, "WAV", "PCM_16"), (44_100, "FLAC", "PCM_16"), (48_000, "OGG", "OPUS"), (22_050, "MP3", "MPEG_LAYER_III")],
)
def test_another_rate_keeps_the_pitch(rate: int, format: str, subtype: str) -> None:
    t = np.arange(rate) / rate
    samples = load(clip(0.5 * np.sin(2 * np.pi * 1000 * t), rate, format, subtype))
    spectrum = np.abs(np.fft.rfft(samples[:RATE] * np.hanning(len(samples[:RATE])), RATE))
    assert abs(int(spectrum.argmax()) - 1000) <= 2


def test_channels_are_averaged() -> None:
    left, right = np.full(1600, 0.5), np.full(1600, -0.25)
    assert np.allclose(load(wav(np.stack([left, right], axis=1), subtype="FLOAT")), 0.125)


def test_peaks_beyond_full_scale_are_clipped() -> None:
    assert np.abs(load(corpus.wav_of_floats([50.0, -50.0] * 100))).tolist() == [1.0] * 200


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_samples_that_are_not_finite_are_refused_at_the_probe(bad: float) -> None:
    with pytest.raises(BadRequest) as caught:
        probe(corpus.wav_of_floats([0.0] * 100 + [bad] + [0.0] * 100), LIMITS, "messages[0].content[0]")
    assert (caught.value.code, caught.value.param) == ("audio_not_finite", "messages[0].content[0]")
    with pytest.raises(BadRequest):
        decode(corpus.wav_of_floats([bad] * 10), RATE, 10)


def test_doubles_too_large_for_a_float_are_not_finite() -> None:
    data = raw_wav(np.array([0.0, 1e300, 0.0], "<f8").tobytes(), code=3, bits=64)
    with pytest.raises(BadRequest, match="not finite"):
        probe(data, LIMITS, None)


def test_an_empty_clip_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        probe(wav(np.zeros(0)), LIMITS, None)
    assert caught.value.code == "audio_empty"


@pytest.mark.parametrize("num_samples", [1, 2, 159, 160, 639, 640, 641, 31_999, 32_001, 80_000])
def test_the_number_of_samples_is_the_number_sent(num_samples: int) -> None:
    assert probe(wav(tone(num_samples)), LIMITS, None).num_frames == num_samples
    assert load(wav(tone(num_samples))).shape == (num_samples,)


def test_a_clip_that_is_too_long_is_refused_not_cut() -> None:
    limits = MediaLimits(max_audio_s=1.0)
    assert probe(wav(tone(RATE)), limits, None).num_frames == RATE
    with pytest.raises(TooLarge, match="at most 1 s"):
        probe(wav(tone(RATE + 1)), limits, None)


def test_minutes_of_silence_in_a_few_bytes_are_refused() -> None:
    data = corpus.silence_bomb()
    assert len(data) < 40_000
    with pytest.raises(TooLarge, match="at most 60 s"):
        probe(data, LIMITS, None)


def test_too_many_bytes_are_refused_with_both_numbers() -> None:
    with pytest.raises(TooLarge, match="at most 10 bytes, got 32044"):
        probe(wav(tone()), MediaLimits(max_audio_bytes=10), None)


@pytest.mark.parametrize("rate", [1, 7_999, 192_001])
def test_rates_nobody_records_at_are_refused_before_resampling(rate: int) -> None:
    """A megabyte at 1 Hz would be 64 GB at 16 kHz."""
    with pytest.raises(BadRequest) as caught:
        probe(raw_wav(bytes(2000), rate=rate), LIMITS, None)
    assert caught.value.code == "audio_sample_rate"


def test_too_many_channels_are_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        probe(raw_wav(bytes(18 * 100), channels=9), LIMITS, None)
    assert caught.value.code == "audio_channels"


@pytest.mark.parametrize("claim", [0, 1, 2**36 - 1])
def test_a_flac_that_lies_about_its_length_costs_no_memory(claim: int) -> None:
    assert status_of(corpus.flac_with_claimed_frames(claim)) in (200, 400, 422)


def test_an_mp3_without_a_length_is_counted_to_its_end() -> None:
    header = probe(corpus.mp3_without_length(), LIMITS, None)
    assert header.format == "mp3"
    assert abs(header.duration_s - 20.0) < 0.2
    assert len(load(corpus.mp3_without_length())) == header.num_frames


@pytest.mark.parametrize("claim", [0, 1, 100, 10**6])
def test_an_mp3_whose_count_lies_is_counted_to_its_end(claim: int) -> None:
    data = clip(tone(4 * RATE), RATE, "MP3", "MPEG_LAYER_III")
    at = max(data.find(b"Xing"), data.find(b"Info")) + 8
    header = probe(data[:at] + claim.to_bytes(4, "big") + data[at + 4 :], LIMITS, None)
    assert abs(header.duration_s - 4.0) < 0.2


def test_an_mp3_with_a_true_count_is_left_as_it_is() -> None:
    data = clip(tone(4 * RATE), RATE, "MP3", "MPEG_LAYER_III")
    assert with_true_length(data) == data


@pytest.mark.parametrize("format", ["FLAC", "OGG", "MP3", "WAV"])
def test_a_cut_file_is_refused_or_shorter_but_never_a_crash(format: str) -> None:
    subtype = {"FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III", "WAV": "PCM_16"}[format]
    data = clip(tone(4 * RATE), RATE, format, subtype)
    for part in (2, 3, 10):
        assert status_of(data[: len(data) // part]) in (200, 400, 422)


def test_a_clip_that_decodes_to_another_length_than_probed_is_refused() -> None:
    with pytest.raises(UndecodableMedia, match="another length"):
        decode(wav(tone(RATE)), RATE, RATE // 2)


@pytest.mark.parametrize(("data", "name"), corpus.OTHER_CLIPS.items(), ids=list(corpus.OTHER_CLIPS.values()))
def test_other_kinds_are_refused_by_name_with_the_accepted_ones(data: bytes, name: str) -> None:
    with pytest.raises(UnsupportedMedia, match=rf"{name}.*accepted are WAV, FLAC, OGG \(Vorbis or Opus\), MP3") as caught:
        probe(data, LIMITS, None)
    assert caught.value.code == "unsupported_audio_format"


@pytest.mark.parametrize("subtype", ["IMA_ADPCM", "MS_ADPCM", "GSM610"])
def test_codecs_off_the_list_are_refused_inside_a_wav_too(subtype: str) -> None:
    with pytest.raises(UnsupportedMedia, match=subtype):
        probe(wav(tone(8_000, 8_000), 8_000, subtype), LIMITS, None)


@pytest.mark.parametrize("data", [b"", b"hello", b"\0" * 100])
def test_what_is_no_clip_at_all_is_undecodable(data: bytes) -> None:
    with pytest.raises(UndecodableMedia, match="not a clip"):
        probe(data, LIMITS, None)


@given(
    st.sampled_from([b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0", b"fLaC\0\0\0\x22", b"OggS\0\2", b"\xff\xfb\x90\0", b"ID3\3\0", b""]),
    st.binary(max_size=300),
)
def test_any_bytes_give_a_header_or_a_refusal(magic: bytes, rest: bytes) -> None:
    assert status_of(magic + rest) in (200, 400, 413, 415, 422)


def test_sniffing_tells_mp3_from_its_cousins() -> None:
    assert [sniff(data) for data in (b"\xff\xfb", b"\xff\xf1", b"\xff\xfd", b"ID3")] == ["mp3", "aac", "mpeg layer I or II", "mp3"]
