"""Bodies, forms and `data:` URIs: right enough to get past the first check, wrong somewhere.  Pure functions of a generator."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

from mmserve.gateway.call import HARMLESS

FIELDS = (
    "prompt", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "logprobs", "top_logprobs", "n", "priority", "cache_salt", "explain", "tools", "response_format", "echo", "best_of", "request_id",
    "rating", "regenerated", "detail", *HARMLESS,
)  # fmt: skip
MEDIA = ("text", "image_url", "input_audio", "audio_url")
NUMBERS = (0, 1, -1, 2, 7, 1.0, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**39, -(10**39), float("nan"), float("inf"), float("-inf"))
WORDS = (
    "", "user", "system", "assistant", "data:image/png;base64,AAAA", "data:,", "data:audio/wav;base64,UklGRg", "wav", "m4a", "up", "auto",
    "7", "007", "é", "\x00", "\ud800", "<image-0>", "<audio-3>", "x" * 300,
)  # fmt: skip
BOUNDARY = b"XX"
_SNIPPETS = (
    b"[" * 40, b"]" * 40, b'{"a":' * 40, b"1e999", b"-", b"9" * 50, b"NaN", b"-Infinity", b'"\\ud800"', b"\\u0000", b"\xff",
    b"\xef\xbb\xbf", b'"', b"\\", b",", b":", b"null", b"true", b"\x00", b"/*", b"\n", b'"\\x"', b"0x1", b"01", b"\xed\xa0\x80",
    b"\xc0\xaf", b"'",
)  # fmt: skip
_SCHEMES = ("data:", "DATA:", "Data:", "data", "dat:", " data:", "http://127.0.0.1:1/", "file:///etc/passwd", "", "data:data:")
_TYPES = ("image/png", "Image/PNG", "image/jpg", "audio/wav", "application/octet-stream", "", "text/html", "image", "/", "é/é", "x" * 2000)
_PARAMETERS = ("", ";charset=utf-8", ";base64", "; name=a,b", ";;", ";base64;x=1", ';name="a;base64,"')
_MARKERS = (";base64", ";BASE64", "; base64 ", ";base32", "", ";base64=", ";base64;")
_STRANGE = "=-_+/%\r\n\t *.,;\x00é€\ud800Aa0"


def body(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {name: _anything(rng, 2) for name in rng.sample(FIELDS, rng.randrange(4))}
    content = rng.choice(["Hi", [_part(rng) for _ in range(rng.randrange(1, 4))], _anything(rng)])
    fields["messages"] = rng.choice([[{"role": rng.choice(["user", _anything(rng, 1)]), "content": content}], _anything(rng)])
    if rng.random() < 0.5:
        fields["prompt"] = rng.choice(["Hi", _anything(rng, 1)])
    return fields


def plain_body(rng: random.Random) -> dict[str, Any]:
    """One that is right but for at most two fields, so that each field's own check is reached."""
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    return fields | {name: _anything(rng, 1) for name in rng.sample(FIELDS, rng.randrange(3)) if name != "prompt"}


def json_bytes(rng: random.Random) -> bytes:
    """A body as it goes over the wire, in two cases of three with damage to the text itself."""
    data = json.dumps((body if rng.random() < 0.5 else plain_body)(rng), ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice((0, 1, 1, 2))):
        data = damaged(rng, data)
    return data


def form(rng: random.Random) -> bytes:
    pieces = [(b"prompt", rng.choice(WORDS).encode("utf-8", "surrogatepass")), (b"options", json.dumps(body(rng)).encode())]
    pieces += [(rng.choice([b"image", b"audio", b"video"]), rng.randbytes(3)) for _ in range(rng.randrange(3))]
    head = b"\r\n--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
    data = b"".join(head % name + data for name, data in pieces) + b"\r\n--" + BOUNDARY + b"--"
    return damaged(rng, data) if rng.random() < 0.5 else data


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A byte changed, a piece cut out, or something put in that no parser likes."""
    start = rng.randrange(len(data)) if data else 0
    if rng.random() < 0.3:
        return data[:start] + rng.choice(_SNIPPETS) + data[start:]
    return data[:start] + rng.randbytes(rng.randrange(3)) + data[start + rng.randrange(4) :]


def uri(rng: random.Random) -> str:
    """Scheme, type, parameters and base64, each of them mostly right; then a few characters changed."""
    scheme, kind = _mostly(rng, _SCHEMES), _mostly(rng, _TYPES)
    text = scheme + kind + _mostly(rng, _PARAMETERS) + _mostly(rng, _MARKERS) + rng.choice((",", ",", ",", ",", ",", "", ",,"))
    text += _base64(rng)
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(_STRANGE) * rng.choice((1, 1, 1, 2, 3)) + text[at + rng.randrange(2) :]
    return text


def _base64(rng: random.Random) -> str:
    """Short, or long enough to be decoded in more than one slice."""
    size = rng.choice((0, 1, 2, 3, 4, 5, 100)) if rng.random() < 0.98 else rng.choice((49_151, 49_152, 49_153, 98_304, 150_000))
    encoded = rng.choice((base64.b64encode, base64.b64encode, base64.urlsafe_b64encode))(rng.randbytes(size)).decode()
    match rng.randrange(8):
        case 0:
            return encoded.rstrip("=")
        case 1:
            return "\r\n".join(encoded[i : i + 76] for i in range(0, len(encoded), 76))
        case 2:
            return encoded.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
        case 3:
            return encoded + rng.choice(("=", "==", "A", "AA", "=A", "\n", " ", "%0A", "%"))
    return encoded


def _mostly(rng: random.Random, choices: tuple[str, ...]) -> str:
    """The first of them, nine times in ten."""
    return choices[0] if rng.random() < 0.9 else rng.choice(choices)


def _anything(rng: random.Random, depth: int = 3) -> Any:
    match rng.randrange(8 if depth else 5):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2 | 3:
            return rng.choice(NUMBERS)
        case 4:
            return rng.choice(WORDS)
        case 5:
            return [_anything(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            names = (*WORDS, *FIELDS, *MEDIA, "url", "data", "format")
            return {rng.choice(names): _anything(rng, depth - 1) for _ in range(rng.randrange(4))}


def _part(rng: random.Random) -> Any:
    kind = rng.choice(MEDIA)
    inside = {
        "text": "Hi",
        "image_url": {"url": rng.choice(WORDS), "detail": rng.choice(["low", _anything(rng, 1)])},
        "input_audio": {"data": rng.choice(["AAAA", *WORDS]), "format": rng.choice(["wav", _anything(rng, 1)])},
        "audio_url": {"url": rng.choice(WORDS)},
    }[kind]
    return rng.choice([{"type": kind, kind: inside}, {"type": kind, kind: _anything(rng)}, _anything(rng)])
