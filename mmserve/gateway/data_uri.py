"""`data:` URIs by RFC 2397 and the base64 in them, strictly: what isn't base64 is refused, never skipped.

Accepted because clients send it: line breaks, missing padding, the URL-safe alphabet, percent-escapes, any case of `data:` and `base64`.
"""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

from mmserve.errors import BadRequest

_MAX_HEADER = 1024  # characters before the comma
_SLICE = 64 * 1024  # characters decoded at a time; in between, other threads get the interpreter
_SPACE = b"\r\n\t "
_UNUSUAL = "%\r\n\t -_"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_ALIASES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png", "audio/x-wav": "audio/wav"}


def parse_data_uri(uri: str, param: str) -> tuple[str, bytes]:
    """(media type in lower case, or "" when none is given; the bytes).  Raises BadRequest."""
    if uri[:5].lower() != "data:":
        raise BadRequest("expected a data: URI; this server fetches nothing from elsewhere", param=param)
    comma = uri.find(",", 5, 5 + _MAX_HEADER)
    if comma < 0:
        raise BadRequest("the data: URI has no comma after its media type", param=param)
    media_type, *parameters = uri[5:comma].split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise BadRequest("the data: URI must be base64: data:<type>;base64,<data>", param=param)
    media_type = media_type.strip().lower()
    return _ALIASES.get(media_type, media_type), decode_base64(uri, param, comma + 1)


def decode_base64(text: str, param: str, start: int = 0) -> bytes:
    """The bytes of `text` from `start` on.  Raises BadRequest if it is empty or not base64."""
    if not text.isascii() or any(text.find(mark, start) >= 0 for mark in _UNUSUAL):
        text, start = _usual(text[start:], param), 0
    tail = text[max(start, len(text) - 4) :]
    padding = len(tail) - len(tail.rstrip("="))
    length = len(text) - start - padding
    missing = -length % 4
    if missing == 3 or padding > missing:
        raise BadRequest("the data is not base64: its length is wrong", param=param)
    if not length:
        raise BadRequest("the data is empty", param=param)
    return _decode(text, start, "=" * (missing - padding), length * 3 // 4, param)


def _usual(text: str, param: str) -> str:
    """Without escapes and spaces, in the usual alphabet."""
    if not text.isascii():
        raise _outside(param)
    data = unquote_to_bytes(text) if "%" in text else text.encode()
    data = data.translate(None, _SPACE)
    if b"-" in data or b"_" in data:
        if b"+" in data or b"/" in data:
            raise BadRequest("the data mixes the two alphabets of base64", param=param)
        data = data.translate(_URL_SAFE)
    return data.decode("latin-1")


def _decode(text: str, start: int, more_padding: str, num_bytes: int, param: str) -> bytes:
    """Slice by slice from the text itself: megabytes that are copied cost more than what is done with them."""
    try:
        pieces = [binascii.a2b_base64(text[at : at + _SLICE], strict_mode=True) for at in range(start, len(text) - _SLICE, _SLICE)]
        rest = start + len(pieces) * _SLICE
        pieces.append(binascii.a2b_base64(text[rest:] + more_padding, strict_mode=True))
    except ValueError:  # binascii's own, or that of an escape which isn't ASCII
        raise _outside(param) from None
    result = b"".join(pieces)
    if len(result) != num_bytes:  # strict decoding lets padding pass at the end of a slice
        raise BadRequest("the data is not base64: padding before its end", param=param)
    return result


def _outside(param: str) -> BadRequest:
    return BadRequest("the data is not base64: a character outside its alphabet", param=param)
