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
    return _ALIASES.get(media_type, media_type), decode_base64(uri[comma + 1 :], param)


def decode_base64(text: str, param: str) -> bytes:
    """The bytes of `text`.  Raises BadRequest if it is empty or not base64."""
    try:
        data = text.encode("ascii")
    except UnicodeEncodeError:
        raise BadRequest("the data is not base64: a character outside its alphabet", param=param) from None
    if b"%" in data:
        data = unquote_to_bytes(data)
    if any(space in data for space in _SPACE):
        data = data.translate(None, _SPACE)
    if b"-" in data or b"_" in data:
        if b"+" in data or b"/" in data:
            raise BadRequest("the data mixes the two alphabets of base64", param=param)
        data = data.translate(_URL_SAFE)
    padding = len(tail := data[-4:]) - len(tail.rstrip(b"="))
    length = len(data) - padding
    missing = -length % 4
    if missing == 3 or padding > missing:
        raise BadRequest("the data is not base64: its length is wrong", param=param)
    if not length:
        raise BadRequest("the data is empty", param=param)
    return _decode(data + b"=" * (missing - padding), length * 3 // 4, param)


def _decode(data: bytes, num_bytes: int, param: str) -> bytes:
    view = memoryview(data)
    try:
        pieces = [binascii.a2b_base64(view[start : start + _SLICE], strict_mode=True) for start in range(0, len(data), _SLICE)]
    except binascii.Error:
        raise BadRequest("the data is not base64: a character outside its alphabet", param=param) from None
    result = b"".join(pieces)
    if len(result) != num_bytes:  # strict decoding lets padding pass at the end of a slice
        raise BadRequest("the data is not base64: padding before its end", param=param)
    return result
