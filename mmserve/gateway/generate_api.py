"""`/v1/generate`: a form with files instead of base64.  `<image-0>` and `<audio-0>` in the prompt say where the media stand."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmserve.errors import BadRequest
from mmserve.gateway.call import HARMLESS, Bounds, Call, Caller, check_media_counts, parse_common
from mmserve.gateway.chat_api import DETAILS
from mmserve.gateway.fields import Fields, shown
from mmserve.gateway.json_body import parse_object
from mmserve.gateway.multipart import FormPart, parse_multipart
from mmserve.media import MediaItem, MediaKind
from mmserve.request import Message, Part

_PLACEHOLDER = re.compile(r"<(image|audio)-(0|[1-9][0-9]{0,8})>")
_KINDS = {"image": MediaKind.IMAGE, "audio": MediaKind.AUDIO}


def parse_generate(body: bytes, boundary: bytes, bounds: Bounds, caller: Caller) -> Call:
    """Raises BadRequest naming the part or the option."""
    parts = parse_multipart(body, boundary)
    for part in parts:
        if part.name not in ("prompt", "options", *_KINDS):
            raise BadRequest(f"unknown part {shown(part.name)}; known: prompt, image, audio, options", param=part.name[:120])
    check_media_counts([_KINDS[part.name] for part in parts if part.name in _KINDS], bounds.limits, "image or audio")
    options = _single(parts, "options")
    fields = Fields({} if options is None else parse_object(options, what="options"), "")
    detail = fields.choice("detail", DETAILS) or "auto"
    common = parse_common(fields, bounds, caller, logprobs=_logprobs(fields))
    fields.ignore(HARMLESS)
    fields.done()
    pieces = place_media(_prompt(parts), _media(parts, detail))
    if not pieces:
        raise BadRequest("prompt must not be empty", param="prompt")
    call = common.call((Message("user", pieces),), caller)
    check_media_counts([item.kind for item in call.request.media], bounds.limits, "prompt")
    return call


def place_media(prompt: str, media: Sequence[MediaItem]) -> tuple[Part, ...]:
    """Text and media in order: media that the prompt doesn't name stand before it.

    Raises BadRequest for a placeholder without media.
    """
    numbered = {
        (kind, i): item
        for kind in MediaKind
        for i, item in enumerate(one for one in media if one.kind is kind)
    }  # fmt: skip
    pieces: list[Part] = []
    named: set[tuple[MediaKind, int]] = set()
    position = 0
    for match in _PLACEHOLDER.finditer(prompt):
        key = (_KINDS[match[1]], int(match[2]))
        if key not in numbered:
            count = sum(1 for kind, _ in numbered if kind is key[0])
            raise BadRequest(f"the prompt names {match[0]}, but the form has {count} part(s) {match[1]}", param="prompt")
        pieces += [prompt[position : match.start()], numbered[key]]
        named.add(key)
        position = match.end()
    pieces.append(prompt[position:])
    unnamed = [item for item in media if not any(numbered[key] is item for key in named)]
    return tuple(piece for piece in [*unnamed, *pieces] if piece != "")


def _logprobs(fields: Fields) -> int | None:
    """A number as in completions, or a boolean and `top_logprobs` as in chat."""
    value = fields.take("logprobs")
    if value is None or isinstance(value, bool):
        top = fields.integer("top_logprobs") or 0
        if top and not value:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return top if value else None
    return fields.integer("logprobs")


def _prompt(parts: Sequence[FormPart]) -> str:
    data = _single(parts, "prompt")
    if data is None:
        raise BadRequest("the part prompt is required", param="prompt")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest("the part prompt is not UTF-8", param="prompt") from None


def _media(parts: Sequence[FormPart], detail: str) -> list[MediaItem]:
    """In the form's order."""
    counts = {"image": 0, "audio": 0}
    media: list[MediaItem] = []
    for part in parts:
        if part.name not in _KINDS:
            continue
        param = f"{part.name}[{counts[part.name]}]"
        counts[part.name] += 1
        if not part.data:
            raise BadRequest(f"{param} is empty", param=param)
        other = "audio/" if part.name == "image" else "image/"
        if part.content_type.startswith(other):
            raise BadRequest(f"{param} says {shown(part.content_type)}, expected {part.name}/...", param=param)
        media.append(MediaItem(_KINDS[part.name], part.data, detail if part.name == "image" else "auto", param))
    return media


def _single(parts: Sequence[FormPart], name: str) -> bytes | None:
    found = [part.data for part in parts if part.name == name]
    if len(found) > 1:
        raise BadRequest(f"the part {name} stands twice", param=name)
    return found[0] if found else None
