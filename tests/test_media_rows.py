"""Media as people really send them, through the real door, the real decode process and real towers: heard and seen, or refused by name."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import pytest_asyncio
import tiny_model
from attacked import Answer, Target, attacked, clip_part, picture_part

from mmserve.media import MediaItem, MediaKind
from tests import media_corpus as corpus

pytestmark = pytest.mark.asyncio(loop_scope="module")

UPRIGHT = corpus.save(corpus.scene(), "PNG")
JPEG = corpus.save(corpus.scene(), "JPEG")
SECOND = corpus.wav(corpus.tone())
PICTURES_ARE = "accepted are JPEG, PNG, GIF, WebP"
CLIPS_ARE = "accepted are WAV, FLAC, OGG (Vorbis or Opus), MP3"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    async with attacked(tiny_model.build(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("data")) as target:
        yield target
        assert target.num_deaths == 0  # whatever was sent here, no decode process was lost


async def by_either_route(target: Target, kind: MediaKind, data: bytes) -> Answer:
    """The one answer that both give."""
    part = picture_part if kind is MediaKind.IMAGE else clip_part
    chat, form = await target.ask(part(data)), await target.send_form(kind.value, data)
    assert chat.status == form.status
    if chat.status != 200:
        assert (chat.error["message"], chat.error["code"]) == (form.error["message"], form.error["code"])
    return chat


# --- what is taken


@pytest.mark.parametrize("name", list(corpus.odd_pictures()))
async def test_an_odd_picture_is_seen(target: Target, name: str) -> None:
    answer = await by_either_route(target, MediaKind.IMAGE, corpus.odd_pictures()[name])
    assert answer.status == 200
    assert answer.body["usage"]["prompt_tokens_details"]["image_tokens"] == tiny_model.TOKENS_PER_IMAGE


@pytest.mark.parametrize("name", list(corpus.odd_clips()))
async def test_an_odd_clip_is_heard(target: Target, name: str) -> None:
    data, num_samples = corpus.odd_clips()[name]
    answer = await by_either_route(target, MediaKind.AUDIO, data)
    assert answer.status == 200
    assert answer.body["usage"]["prompt_tokens_details"]["audio_tokens"] == rows_by_the_rule(num_samples)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
async def test_a_picture_stored_on_its_side_or_mirrored_gets_the_upright_ones_answer(target: Target, format: str) -> None:
    expected = (await target.ask(picture_part(UPRIGHT))).text
    answers = [(await by_either_route(target, MediaKind.IMAGE, corpus.oriented(turn, format))).text for turn in range(1, 9)]
    assert answers == [expected] * 8
    turned = corpus.save(corpus.scene().transpose(corpus.UNDO[6]), "PNG")
    assert (await target.ask(picture_part(turned))).text != expected


@pytest.mark.parametrize("format", ["JPEG", "MPO"])
async def test_photos_stored_any_way_are_seen(target: Target, format: str) -> None:
    for turn in (*range(9), 9, 65_535):
        assert (await by_either_route(target, MediaKind.IMAGE, corpus.oriented(turn, format))).status == 200


async def test_every_picture_sent_is_a_picture_encoded(target: Target) -> None:
    for count in (1, 2, 8):
        answer = await target.ask(*(picture_part(UPRIGHT) for _ in range(count)), clip_part(SECOND))
        details = answer.body["usage"]["prompt_tokens_details"]
        assert (details["image_tokens"], details["audio_tokens"]) == (count * tiny_model.TOKENS_PER_IMAGE, tiny_model.TOKENS_PER_SECOND)
    for part in ({"image_url": picture_part(UPRIGHT)["image_url"]}, {"type": "video_url", "video_url": {"url": "data:,"}}):
        assert (await target.ask(part)).status == 400
    assert (await target.ask(*(picture_part(UPRIGHT) for _ in range(9)))).status == 400


PLAIN = base64.b64encode(JPEG).decode()
URIS = {
    "as it should be": f"data:image/jpeg;base64,{PLAIN}",
    "in capitals": f"DATA:Image/JPEG;BASE64,{PLAIN}",
    "with parameters": f"data:image/jpeg;charset=utf-8;name=a.jpg;base64,{PLAIN}",
    "another spelling of the type": f"data:image/jpg;base64,{PLAIN}",
    "another type of picture": f"data:image/png;base64,{PLAIN}",
    "a type that is none": f"data:image/whatever;base64,{PLAIN}",
    "no type": f"data:;base64,{PLAIN}",
    "any bytes": f"data:application/octet-stream;base64,{PLAIN}",
    "no padding": f"data:image/jpeg;base64,{PLAIN.rstrip('=')}",
    "broken lines": "data:image/jpeg;base64," + "\r\n".join(PLAIN[i : i + 76] for i in range(0, len(PLAIN), 76)),
    "URL-safe": f"data:image/jpeg;base64,{base64.urlsafe_b64encode(JPEG).decode()}",
    "percent escapes": f"data:image/jpeg;base64,{PLAIN.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
}
NOT_URIS = {
    "base64 alone": PLAIN,
    "an address": "https://example.com/a.jpg",
    "no base64 said": f"data:image/jpeg,{PLAIN}",
    "base64 not last": f"data:image/jpeg;base64;charset=utf-8,{PLAIN}",
    "escapes instead of base64": "data:image/png,%89PNG%0D%0A",
    "a strange character": f"data:image/jpeg;base64,{PLAIN[:40]}*{PLAIN[40:]}",
    "data after padding": "data:image/jpeg;base64,aGVsbG8=aGVsbG8=",
    "three signs of padding": "data:image/jpeg;base64,aGVsbG8===",
    "a length that can't be": "data:image/jpeg;base64,aGVsb",
    "two alphabets": "data:image/jpeg;base64,_-/+",
    "nothing": "data:image/jpeg;base64,",
    "a clip by its type": f"data:audio/wav;base64,{PLAIN}",
}


@pytest.mark.parametrize("name", list(URIS))
async def test_a_uri_that_clients_write_gets_the_pictures_answer(target: Target, name: str) -> None:
    assert len(PLAIN.rstrip("=")) % 4 in (2, 3)  # else there is no padding to leave out
    expected = (await target.ask(picture_part(JPEG, "image/jpeg"))).text
    answer = await target.ask({"type": "image_url", "image_url": {"url": URIS[name]}})
    assert (answer.status, answer.text) == (200, expected)


@pytest.mark.parametrize("name", list(NOT_URIS))
async def test_a_uri_that_is_none_is_a_400_that_names_its_place(target: Target, name: str) -> None:
    answer = await target.ask({"type": "image_url", "image_url": {"url": NOT_URIS[name]}})
    assert (answer.status, answer.error["param"]) == (400, "messages[0].content[0].image_url.url")


# --- what is refused


@pytest.mark.parametrize(("data", "name"), corpus.OTHER_PICTURES.items(), ids=list(corpus.OTHER_PICTURES.values()))
async def test_a_kind_of_picture_that_is_not_taken_is_a_415_naming_it_and_those_that_are(target: Target, data: bytes, name: str) -> None:
    answer = await by_either_route(target, MediaKind.IMAGE, data)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_image_format")
    assert answer.error["message"] == f"unsupported image format: {name}; {PICTURES_ARE}"


@pytest.mark.parametrize(("data", "name"), corpus.OTHER_CLIPS.items(), ids=list(corpus.OTHER_CLIPS.values()))
async def test_a_kind_of_clip_that_is_not_taken_is_a_415_naming_it_and_those_that_are(target: Target, data: bytes, name: str) -> None:
    answer = await by_either_route(target, MediaKind.AUDIO, data)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_audio_format")
    assert name in answer.error["message"]
    assert CLIPS_ARE in answer.error["message"]


BAD_PICTURES: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "cut off": (lambda: JPEG[: len(JPEG) * 2 // 3], 422, "undecodable_media"),
    "without its end marker": (lambda: JPEG[:-2], 422, "undecodable_media"),
    "a cut PNG": (lambda: UPRIGHT[:-30], 422, "undecodable_media"),
    "no picture": (lambda: b"hello, this is text", 422, "undecodable_media"),
    "HTML": (lambda: b"<html><body>404</body></html>", 422, "undecodable_media"),
    "a strip of 201 to 1": (lambda: corpus.save(corpus.scene(402, 2), "PNG"), 400, "image_aspect_ratio"),
    "20 megapixels": (lambda: corpus.with_size(JPEG, 5000, 4000), 413, "too_large"),
    "a side of 20,000": (lambda: corpus.with_size(JPEG, 20_000, 200), 413, "too_large"),
    "no width": (lambda: corpus.with_size(JPEG, 0, 8), 400, "invalid_request_error"),
    "12 bits": (lambda: corpus.with_sof(JPEG, 0xC1, bits=12), 415, "unsupported_image_format"),
    "arithmetic coding": (lambda: corpus.with_sof(JPEG, 0xC9), 415, "unsupported_image_format"),
    "lossless": (lambda: corpus.with_sof(JPEG, 0xC3), 415, "unsupported_image_format"),
}
BAD_CLIPS: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "no samples": (lambda: corpus.wav(np.zeros(0)), 400, "audio_empty"),
    "not a number": (lambda: corpus.wav_of_floats([0.0, math.nan] * 800), 400, "audio_not_finite"),
    "infinite": (lambda: corpus.wav_of_floats([0.0, math.inf] * 800), 400, "audio_not_finite"),
    "a double beyond a float": (lambda: corpus.raw_wav(np.full(99, 1e300).tobytes(), code=3, bits=64), 400, "audio_not_finite"),
    "61 seconds": (lambda: corpus.wav(np.zeros(61 * corpus.RATE)), 413, "too_large"),
    "nine channels": (lambda: corpus.raw_wav(bytes(1800), channels=9), 400, "audio_channels"),
    "half a FLAC": (lambda: half(corpus.clip(corpus.tone(), corpus.RATE, "FLAC", "PCM_16")), 422, "undecodable_media"),
    "a wrong bit in a FLAC": (lambda: flipped(corpus.clip(corpus.tone(), corpus.RATE, "FLAC", "PCM_16")), 422, "undecodable_media"),
    "ADPCM": (lambda: corpus.wav(corpus.tone(), subtype="IMA_ADPCM"), 415, "unsupported_audio_format"),
    "text": (lambda: b"hello", 422, "undecodable_media"),
}


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes((data[middle] ^ 0x10,)) + data[middle + 1 :]


@pytest.mark.parametrize("name", list(BAD_PICTURES))
async def test_a_picture_that_is_not_whole_or_too_large_is_refused(target: Target, name: str) -> None:
    make, status, code = BAD_PICTURES[name]
    answer = await by_either_route(target, MediaKind.IMAGE, make())
    assert (answer.status, answer.error["code"]) == (status, code)


@pytest.mark.parametrize("name", list(BAD_CLIPS))
async def test_a_clip_that_is_not_sound_is_refused(target: Target, name: str) -> None:
    make, status, code = BAD_CLIPS[name]
    answer = await by_either_route(target, MediaKind.AUDIO, make())
    assert (answer.status, answer.error["code"]) == (status, code)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
async def test_half_an_ogg_is_what_is_there_or_a_refusal(target: Target, subtype: str) -> None:
    answer = await by_either_route(target, MediaKind.AUDIO, half(corpus.clip(corpus.tone(96_000, 48_000), 48_000, "OGG", subtype)))
    assert answer.status in (200, 400, 422)  # cut in the first page, there is nothing to hear


# --- lengths


def rows_by_the_rule(num_samples: int) -> int:
    """Of windows of a second: a frame each 10 ms, rounded up; a row each four frames, rounded up."""
    window = int(tiny_model.WINDOW_S * corpus.RATE)
    lengths = [min(window, num_samples - start) for start in range(0, num_samples, window)]
    return sum(math.ceil(math.ceil(length / 160) / 4) for length in lengths)


async def test_clips_of_every_length_become_as_many_rows_as_the_rule_says(target: Target) -> None:
    """Servers broke at some lengths only: just over two seconds, ten milliseconds, one sample."""
    tone = corpus.tone(80_000)
    for num_samples in range(1, 80_001, 137):
        item = MediaItem(MediaKind.AUDIO, corpus.wav(tone[:num_samples]))
        prepared = await target.engine._media.prepare(item, "small", b"")
        assert (prepared.num_samples, prepared.num_rows) == (num_samples, rows_by_the_rule(num_samples))
    for num_samples in range(1, 80_001, 137 * 23):
        answer = await target.ask(clip_part(corpus.wav(tone[:num_samples])))
        assert answer.status == 200
        assert answer.body["usage"]["prompt_tokens_details"]["audio_tokens"] == rows_by_the_rule(num_samples)


async def test_a_clip_gets_its_own_answer_not_the_previous_ones(target: Target) -> None:
    """Silence and a moment of sound were answered with the words of the request before."""
    silence, moment = corpus.wav(np.zeros(8_000)), corpus.wav(corpus.tone(160))
    alone = [(await target.ask(clip_part(data))).text for data in (silence, moment)]
    for data, expected in zip((silence, moment), alone, strict=True):
        assert (await target.ask(clip_part(SECOND))).text != expected
        assert (await target.ask(clip_part(data))).text == expected
