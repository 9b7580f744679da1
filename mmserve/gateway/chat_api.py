"""`/v1/chat/completions`: a JSON body becomes a ChatRequest here, or a BadRequest, and nowhere else.

Media are counted first, then decoded from base64; what kind of file they are is for the engine to sniff.
"""

from __future__ import annotations

from mmserve.errors import BadRequest, UnsupportedMedia
from mmserve.gateway.call import HARMLESS, NOT_OFFERED, Bounds, Call, Caller, NotOffered, check_media_counts, parse_common, refuse
from mmserve.gateway.data_uri import decode_base64, parse_data_uri
from mmserve.gateway.fields import Fields, shown
from mmserve.gateway.json_body import parse_object
from mmserve.media import MediaItem, MediaKind
from mmserve.request import Message, Part

MAX_MESSAGES = 4096
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KINDS = {"image_url": MediaKind.IMAGE, "input_audio": MediaKind.AUDIO, "audio_url": MediaKind.AUDIO}
DETAILS = ("auto", "low", "high")
NOT_OFFERED_IN_MESSAGES: NotOffered = {
    "tool_calls": (([],), "this server calls no tools"),
    "function_call": (([],), "this server calls no tools"),
    "tool_call_id": (([],), "this server calls no tools"),
    "audio": ((), "answers are text only"),
    "refusal": ((), "answers are plain text"),
    "reasoning_content": (("",), "answers are plain text"),
}
HARMLESS_IN_MESSAGES = ("name", "annotations", "cache_control")
HARMLESS_IN_PARTS = ("cache_control",)
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus")
# Besides image/* and audio/*: what a client says that doesn't know, and what recorders and MIME tables call sound.
_DECLARED = {
    MediaKind.IMAGE: ("", "application/octet-stream"),
    MediaKind.AUDIO: ("", "application/octet-stream", "application/ogg", "video/ogg", "video/webm", "video/mp4"),
}


def parse_chat(data: bytes, bounds: Bounds, caller: Caller) -> Call:
    """Raises BadRequest or UnsupportedMedia naming the field."""
    fields = Fields(parse_object(data))
    messages = fields.required("messages", fields.items("messages"))
    check_media_counts(_kinds(messages), bounds.limits, "messages")
    logprobs = _logprobs(fields)
    common = parse_common(fields, bounds, caller, logprobs=logprobs)
    refuse(fields, NOT_OFFERED)
    fields.ignore(HARMLESS)
    fields.done()
    return common.call(_messages(messages), caller)


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs")
    if top is not None and not 0 <= top <= 20:
        raise BadRequest(f"top_logprobs must be between 0 and 20, got {top}", param="top_logprobs")
    if top and not wanted:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else None


def _kinds(messages: list[object]) -> list[MediaKind]:
    """A first look at what media there are, by the parts' types alone."""
    parts = [
        part
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    ]
    return [_KINDS[kind] for part in parts if isinstance(kind := part.get("type"), str) and kind in _KINDS]


def _messages(values: list[object]) -> tuple[Message, ...]:
    if not 0 < len(values) <= MAX_MESSAGES:
        raise BadRequest(f"messages must be 1 to {MAX_MESSAGES} messages, got {len(values)}", param="messages")
    return tuple(_message(Fields(value, f"messages[{i}]")) for i, value in enumerate(values))


def _message(fields: Fields) -> Message:
    role = fields.required("role", fields.text("role"))
    if role not in ROLES:
        raise BadRequest(f"{fields.param('role')} must be one of {', '.join(ROLES)}, got {shown(role)}", param=fields.param("role"))
    refuse(fields, NOT_OFFERED_IN_MESSAGES)
    fields.ignore(HARMLESS_IN_MESSAGES)
    content = fields.required("content", fields.take("content"))
    fields.done()
    return Message(ROLES[role], _parts(content, fields.param("content"), role))


def _parts(content: object, where: str, role: str) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} must be a string or a list of parts", param=where)
    return tuple(_part(Fields(value, f"{where}[{i}]"), role) for i, value in enumerate(content))


def _part(fields: Fields, role: str) -> Part:
    kind = fields.required("type", fields.text("type"))
    fields.ignore(HARMLESS_IN_PARTS)
    if kind in _KINDS and role != "user":
        raise BadRequest(f"{fields.param('type')} is {kind}, which only a user's message can hold", param=fields.param("type"))
    part: Part
    match kind:
        case "text":
            part = fields.required("text", fields.text("text"))
        case "image_url":
            part = _image(fields.required("image_url", fields.inner("image_url")))
        case "input_audio":
            part = _input_audio(fields.required("input_audio", fields.inner("input_audio")))
        case "audio_url":
            part = _audio_url(fields.required("audio_url", fields.inner("audio_url")))
        case _:
            known = ", ".join(["text", *_KINDS])
            raise BadRequest(f"{fields.param('type')} must be one of {known}, got {shown(kind)}", param=fields.param("type"))
    fields.done()
    return part


def _image(fields: Fields) -> MediaItem:
    param = fields.param("url")
    url = fields.required("url", fields.text("url"))
    detail = fields.choice("detail", DETAILS) or "auto"
    fields.done()
    return MediaItem(MediaKind.IMAGE, media_from_uri(url, MediaKind.IMAGE, param), detail, param)


def _audio_url(fields: Fields) -> MediaItem:
    param = fields.param("url")
    url = fields.required("url", fields.text("url"))
    fields.done()
    return MediaItem(MediaKind.AUDIO, media_from_uri(url, MediaKind.AUDIO, param), param=param)


def _input_audio(fields: Fields) -> MediaItem:
    param = fields.param("data")
    text = fields.required("data", fields.text("data"))
    name = fields.required("format", fields.text("format"))
    if name.lower() not in AUDIO_FORMATS:
        accepted = ", ".join(AUDIO_FORMATS)
        raise UnsupportedMedia(f"audio format {shown(name)} is not supported; accepted: {accepted}", param=fields.param("format"))
    fields.done()
    return MediaItem(MediaKind.AUDIO, decode_base64(text, param), param=param)


def media_from_uri(uri: str, kind: MediaKind, param: str) -> bytes:
    """The bytes of a `data:` URI whose declared type, if it says anything, is of the right kind.  What they are is sniffed later."""
    declared, data = parse_data_uri(uri, param)
    if not declared.startswith(f"{kind.value}/") and declared not in _DECLARED[kind]:
        raise BadRequest(f"the data: URI says {shown(declared)}, expected {kind.value}/...", param=param)
    return data
