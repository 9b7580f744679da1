"""Bytes to a JSON object, strictly: UTF-8, no duplicate names, no NaN, no numbers beyond a float, bounded depth and count.

Pure, so that it can run in a thread: a body with pictures in it takes milliseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from mmserve.errors import BadRequest, UnsupportedMedia

MAX_DEPTH = 32
MAX_VALUES = 500_000  # a body of 32 MiB could hold ten million empty lists, at 56 bytes each
_FEW = 1_000
_MAX_DIGITS = 40  # of an integer: beyond any field's range, and below what makes int() slow
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^\s";]+)', re.IGNORECASE)


def parse_object(data: bytes, *, what: str = "the body") -> dict[str, object]:
    """The one JSON object in `data`.  Raises BadRequest and nothing else, whatever the bytes."""
    if len(data) > MAX_VALUES and sum(_count(data, mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise BadRequest(f"{what} has more than {MAX_VALUES} values")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{what} is not UTF-8: byte {error.start} is wrong") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise BadRequest(f"{what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadRequest(f"{what} is nested deeper than {MAX_DEPTH}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object, got {kind_of(value)}")
    _check_tree(value, what)
    return value


def check_content_type(header: str | None) -> None:
    """JSON must be called JSON: a web page elsewhere can't send that type without being asked first."""
    media_type = (header or "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMedia(f"content type {media_type[:60] or 'missing'} is not supported; send application/json")
    charset = _CHARSET.search(header or "")
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise BadRequest("the body's charset must be utf-8")


def kind_of(value: object) -> str:
    """What JSON calls it, for messages."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def _count(data: bytes, mark: bytes) -> int:
    """As `data.count(mark)`, and in no time where there are few: the search for the next one leaps over a picture's base64."""
    num_found, position = 0, data.find(mark)
    while position >= 0:
        if num_found == _FEW:
            return num_found + data.count(mark, position)
        num_found, position = num_found + 1, data.find(mark, position + 1)
    return num_found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadRequest(f"the name {name[:60]!r} stands twice in one object", param=name[:60])
    return result


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise BadRequest(f"an integer of {len(digits)} digits is out of range")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRequest(f"the number {digits[:40]} is out of range")
    return value


def _constant(name: str) -> None:
    raise BadRequest(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant)


def _check_tree(root: Mapping[str, object], what: str) -> None:
    """Depth, and strings that are text: a lone surrogate can be written in JSON but in no encoding."""
    level: list[object] = [root]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
                below.extend(value)
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str) and not value.isascii():
                _check_text(value, what)
        if not below:
            return
        level = below
    if any(isinstance(value, dict | list) for value in level):
        raise BadRequest(f"{what} is nested deeper than {MAX_DEPTH}")


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest(f"{what} holds half a surrogate pair, which is no text") from None
