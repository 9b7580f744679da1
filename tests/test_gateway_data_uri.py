"""`data:` URIs and base64: what clients really send is taken, what isn't base64 is never guessed at."""

from __future__ import annotations

import base64
import binascii

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.errors import BadRequest
from mmserve.gateway.chat_api import media_from_uri
from mmserve.gateway.data_uri import decode_base64, parse_data_uri
from mmserve.media import MediaKind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aGVsbG8=", b"hello"),
        ("aGVsbG8", b"hello"),
        ("aGVsbA==", b"hell"),
        ("aGVsbA=", b"hell"),
        ("aGVsbA", b"hell"),
        ("aGVs\r\nbG8=\n", b"hello"),
        ("aGVs bG8\t=", b"hello"),
        ("_-_-", b"\xff\xef\xfe"),
        ("/+/+", b"\xff\xef\xfe"),
        ("aGVsbG8%3D", b"hello"),
        ("%2F%2B/+", b"\xff\xef\xfe"),
    ],
)
def test_base64_that_clients_send_is_taken(text: str, expected: bytes) -> None:
    assert decode_base64(text, "x") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=",
        "====",
        " \n",
        "aGVsb",
        "aGV*sbG8=",
        "aGVsbG8==",
        "aGVsbG8===",
        "aGVsbG8=aGVsbG8=",
        "aG=sbG8=",
        "_-/+",
        "aGVsbGé",
        "aGVs\x00bG8=",
        "a",
        "%zz",
    ],
)
def test_what_is_not_base64_is_refused_not_skipped(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_base64(text, "messages[0].content[0].image_url.url")
    assert caught.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("data:image/png;base64,AAAA", "image/png"),
        ("DATA:Image/PNG;BASE64,AAAA", "image/png"),
        ("data:image/png;charset=utf-8;base64,AAAA", "image/png"),
        ("data:image/png;name=a.png;charset=utf-8; base64,AAAA", "image/png"),
        ("data:image/jpg;base64,AAAA", "image/jpeg"),
        ("data:;base64,AAAA", ""),
    ],
)
def test_the_media_type_is_found_among_its_parameters(uri: str, expected: str) -> None:
    assert parse_data_uri(uri, "x") == (expected, b"\0\0\0")


@pytest.mark.parametrize(
    "uri",
    [
        "", "data:", "iVBORw0KGgo=", "https://example.com/a.png", "file:///etc/passwd", "data:image/png,%89PNG", "data:image/png;base64",
        "data:image/png;base64;charset=utf-8,AAAA", "data:" + "x" * 5000 + ";base64,AAAA", " data:image/png;base64,AAAA",
    ],
)  # fmt: skip
def test_what_is_no_base64_data_uri_is_a_400(uri: str) -> None:
    with pytest.raises(BadRequest):
        parse_data_uri(uri, "x")


def test_the_declared_type_must_be_of_the_right_kind_or_say_nothing() -> None:
    for declared in ("image/png", "image/anything", "application/octet-stream", ""):
        assert media_from_uri(f"data:{declared};base64,AAAA", MediaKind.IMAGE, "x") == b"\0\0\0"
    for declared in ("audio/wav", "audio/mp4", "video/webm", "application/ogg", ""):
        assert media_from_uri(f"data:{declared};base64,AAAA", MediaKind.AUDIO, "x") == b"\0\0\0"
    for declared, kind in (("audio/wav", MediaKind.IMAGE), ("image/png", MediaKind.AUDIO), ("text/html", MediaKind.IMAGE)):
        with pytest.raises(BadRequest, match="expected"):
            media_from_uri(f"data:{declared};base64,AAAA", kind, "x")


def test_padding_at_the_edge_of_a_decoded_slice_is_still_in_the_middle() -> None:
    slice_length = 64 * 1024
    with pytest.raises(BadRequest):
        decode_base64("A" * (slice_length - 2) + "==" + "AAAA", "x")
    assert decode_base64("A" * (slice_length + 4), "x") == bytes((slice_length + 4) // 4 * 3)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.booleans(), st.booleans())
def test_any_bytes_come_back_with_either_alphabet_and_with_or_without_padding(data: bytes, url_safe: bool, padded: bool) -> None:
    text = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(data).decode()
    assert decode_base64(text if padded else text.rstrip("="), "x") == data


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="AZaz09+/-_=*\n é%", max_size=40))
def test_any_text_is_bytes_or_a_bad_request(text: str) -> None:
    try:
        data = decode_base64(text, "x")
    except BadRequest:
        return
    except binascii.Error:  # pragma: no cover
        pytest.fail("the decoder's own error came through")
    assert data
