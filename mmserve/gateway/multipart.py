"""`multipart/form-data` (RFC 7578) from a whole body in memory.  Pure and linear in the body's size; knows no file names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmserve.errors import BadRequest, UnsupportedMedia
from mmserve.gateway.fields import shown

MAX_PARTS = 64
MAX_PART_HEADERS = 4096  # bytes
_TYPE = re.compile(r"multipart/form-data\s*;.*?\bboundary=(?:\"([^\"]{1,70})\"|([^\s\";,]{1,70}))", re.IGNORECASE)
_NAME = re.compile(r';\s*name="((?:[^"\\]|\\.){0,200})"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FormPart:
    name: str
    content_type: str  # lower case, without parameters; "" when none is given
    data: bytes


def parse_boundary(content_type: str | None) -> bytes:
    """From the request's `Content-Type`.  Raises UnsupportedMedia."""
    match = _TYPE.match((content_type or "")[:1024])
    if match is None:
        media_type = (content_type or "").partition(";")[0].strip()
        raise UnsupportedMedia(f"content type {shown(media_type)} is not supported; send multipart/form-data with a boundary")
    return (match[1] or match[2]).encode("utf-8", "surrogateescape")


def parse_multipart(body: bytes, boundary: bytes) -> list[FormPart]:
    """The parts in order.  Raises BadRequest; what stands before the first boundary and after the last is ignored, as MIME says."""
    delimiter = b"\r\n--" + boundary
    # The first boundary may open the body, and its line break belongs to it.
    position = 0 if body.startswith(delimiter[2:]) else body.find(delimiter)
    if position < 0:
        raise BadRequest("the body holds no part: its boundary was not found")
    position += len(delimiter) - (2 if position == 0 and body.startswith(delimiter[2:]) else 0)
    parts: list[FormPart] = []
    while body[position : position + 2] != b"--":
        start = body.find(b"\r\n", position, position + MAX_PART_HEADERS)
        stop = body.find(delimiter, position)
        if start < 0 or stop < 0:
            raise BadRequest("the body ends before its last boundary")
        if len(parts) == MAX_PARTS:
            raise BadRequest(f"the form has more than {MAX_PARTS} parts")
        parts.append(_part(body, start + 2, stop))
        position = stop + len(delimiter)
    return parts


def _part(body: bytes, start: int, stop: int) -> FormPart:
    end = body.find(b"\r\n\r\n", start, min(start + MAX_PART_HEADERS, stop + 4))
    if end < 0 or end + 4 > stop:
        raise BadRequest("a part of the form has no headers, or too long ones")
    headers = _headers(body[start:end])
    name = _NAME.search(headers.get("content-disposition", ""))
    if name is None or not headers["content-disposition"].lower().startswith("form-data"):
        raise BadRequest("a part of the form has no name")
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in ("binary", "8bit", "7bit") or "content-encoding" in headers:
        raise BadRequest(f"the part {shown(name[1])} is encoded; send its bytes as they are", param=name[1])
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return FormPart(re.sub(r"\\(.)", r"\1", name[1]), content_type, body[end + 4 : stop])


def _headers(data: bytes) -> dict[str, str]:
    try:
        lines = data.decode("utf-8").split("\r\n")
    except UnicodeDecodeError:
        raise BadRequest("the headers of a part are not UTF-8") from None
    pairs = [line.partition(":") for line in lines]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
