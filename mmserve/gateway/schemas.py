"""What bodies look like, as JSON Schema: made from the tables and limits that the parsers check, so that the two can't disagree.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmserve.gateway import call, chat_api, completions_api, feedback_api
from mmserve.gateway.call import Bounds, NotOffered
from mmserve.media import MediaLimits
from mmserve.request import GUARDRAIL_MODES, MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOPS, RANGES, SamplingParams

Schema = dict[str, Any]

_INTEGERS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "n")
_ABOVE = ("top_p", "repetition_penalty")  # their least value is just above the range's
_BASE64 = r"^[A-Za-z0-9+/]+={0,2}$"


def chat_request(bounds: Bounds, models: Collection[str]) -> Schema:
    top_logprobs = optional(ranged("logprobs"))
    return _body(
        _common(bounds, models)
        | {"messages": _messages(bounds.limits), "logprobs": optional({"type": "boolean"}), "top_logprobs": top_logprobs}
        | not_offered(call.NOT_OFFERED),
        required=["messages"],
        rules=[_needs_stream(), _top_logprobs_need_logprobs()],
    )


def completion_request(bounds: Bounds, models: Collection[str]) -> Schema:
    text = {"type": "string", "minLength": 1}
    prompt = {"oneOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": 1}]}
    return _body(
        _common(bounds, models, default_max_tokens=completions_api.DEFAULT_MAX_TOKENS)
        | {
            "prompt": prompt | {"description": "one text; no token ids"},
            "logprobs": optional(ranged("logprobs")),
            "best_of": optional({"type": "integer"}) | {"description": "equal to n"},
        }
        | not_offered(completions_api.NOT_OFFERED),
        required=["prompt"],
        rules=[_needs_stream()],
    )


def generate_form(bounds: Bounds) -> Schema:
    limits = bounds.limits
    return {
        "type": "object",
        "properties": {
            "prompt": {"type": "string", "description": "<image-0> and <audio-0> say where media stand; media without one stand before it"},
            "image": {"type": "array", "items": _file("jpeg, png, gif or webp"), "maxItems": limits.max_images},
            "audio": {"type": "array", "items": _file("wav, mp3, flac or ogg"), "maxItems": limits.max_clips},
            "options": {"$ref": "#/components/schemas/GenerateOptions"},
        },
        "required": ["prompt"],
        "additionalProperties": False,
    }


def generate_options(bounds: Bounds, models: Collection[str]) -> Schema:
    return _body(
        _common(bounds, models)
        | {
            "detail": optional({"enum": list(chat_api.DETAILS)}),
            "logprobs": optional({"oneOf": [{"type": "boolean"}, ranged("logprobs")]}),
            "top_logprobs": optional({"type": "integer"}),
        },
        required=[],
        rules=[_needs_stream()],
    )


def feedback_request() -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": feedback_api.MAX_ID_LENGTH}
    return _body(
        {
            "request_id": text | {"description": "the id of an answer, with or without chatcmpl- before it"},
            "rating": {"enum": list(feedback_api.RATINGS)},
            "regenerated": optional({"type": "boolean"}),
        },
        required=["request_id", "rating"],
    )


def optional(schema: Schema) -> Schema:
    """null means "not given" everywhere."""
    return {"oneOf": [schema, {"type": "null"}]}


def ranged(name: str) -> Schema:
    low, high = RANGES[name]
    lowest = "exclusiveMinimum" if name in _ABOVE else "minimum"
    return {"type": "integer" if name in _INTEGERS else "number", lowest: low, "maximum": high}


def not_offered(fields: NotOffered) -> dict[str, Schema]:
    return {name: {"enum": [*allowed, None], "description": f"nothing else: {reason}"} for name, (allowed, reason) in fields.items()}


def _common(bounds: Bounds, models: Collection[str], *, default_max_tokens: int | None = None) -> dict[str, Schema]:
    """The fields of all routes that generate."""
    defaults = SamplingParams()
    sampling = {
        name: optional(ranged(name)) | ({} if default is None else {"default": default})
        for name in RANGES
        if name != "logprobs"
        for default in [getattr(defaults, name)]
    }
    length = "tokens of the answer; without it, as many as the context holds" if default_max_tokens is None else "tokens of the answer"
    max_tokens = optional(ranged("max_tokens")) | {"description": length}
    if default_max_tokens is not None:
        max_tokens["default"] = default_max_tokens
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    token_id = {"type": "integer", "minimum": 0, "exclusiveMaximum": bounds.vocab_size}
    options = {"include_usage": optional({"type": "boolean"}), "include_obfuscation": {}}
    return {
        "model": optional({"type": "string", "enum": list(models), "maxLength": call.MAX_MODEL_LENGTH}) | {"default": "auto"},
        "stream": optional({"type": "boolean"}) | {"default": False},
        "stream_options": optional({"type": "object", "properties": options, "additionalProperties": False}),
        **sampling,
        "top_k": optional({"type": "integer", "minimum": -1, "maximum": RANGES["top_k"][1]}) | {"description": "0 and -1: all"},
        "max_tokens": max_tokens,
        "max_completion_tokens": max_tokens | {"description": "the same; if both are given they must agree"},
        "stop": optional({"oneOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}]}),
        "stop_token_ids": optional({"type": "array", "items": token_id, "maxItems": call.MAX_STOP_TOKEN_IDS}),
        "ignore_eos": optional({"type": "boolean"}),
        "logit_bias": optional(_logit_bias()) | {"description": f"token ids, below {bounds.vocab_size} and each once, to what is added"},
        "priority": optional({"type": "integer", "minimum": call.MIN_PRIORITY, "maximum": call.MAX_PRIORITY})
        | {"description": "lower runs first"},
        "cache_salt": optional({"type": "string", "maxLength": call.MAX_SALT_LENGTH}),
        "allow_degraded": optional({"type": "boolean"})
        | {"description": "media whose encoder fails are left out, and `mmserve.degraded` says which; else that is a 503"},
        "guardrail": optional({"enum": list(GUARDRAIL_MODES)})
        | {"description": "objects that the answer names held against the pictures: `mmserve.guardrail` tells, or it is drawn once more"},
        "explain": optional({"type": "boolean"}) | {"description": "adds `mmserve`: route, where media came from, times and cost"},
        **{name: {"description": "ignored"} for name in call.HARMLESS},
    }


def _logit_bias() -> Schema:
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    return {"type": "object", "patternProperties": {"^[0-9]{1,9}$": bias}, "additionalProperties": False, "maxProperties": MAX_LOGIT_BIAS}


def _messages(limits: MediaLimits) -> Schema:
    """Only a user's message can hold media."""
    said = {"type": "string"}
    other_parts = {"type": "array", "items": _text_part(), "minItems": 1}
    user_parts = {
        "type": "array",
        "items": {"oneOf": [_text_part(), *_media_parts()]},
        "minItems": 1,
        "description": f"at most {limits.max_images} pictures and {limits.max_clips} clip(s) in a request, shown where they stand",
    }
    others = [role for role in chat_api.ROLES if role != "user"]
    return {
        "type": "array",
        "items": {"oneOf": [_message(["user"], [said, user_parts]), _message(others, [said, other_parts])]},
        "minItems": 1,
        "maxItems": chat_api.MAX_MESSAGES,
    }


def _message(roles: list[str], contents: list[Schema]) -> Schema:
    known: dict[str, Schema] = {"role": {"enum": roles}, "content": {"oneOf": contents}}
    ignored = {name: {"description": "ignored"} for name in chat_api.HARMLESS_IN_MESSAGES}
    return _body(known | not_offered(chat_api.NOT_OFFERED_IN_MESSAGES) | ignored, required=["role", "content"])


def _text_part() -> Schema:
    return _part("text", {"type": "string"})


def _media_parts() -> list[Schema]:
    """A client may send what is not quite base64; this is what it should send."""
    picture = {"type": "string", "pattern": "^data:image/[a-z0-9.+-]+;base64," + _BASE64[1:]}
    clip = {"type": "string", "pattern": "^data:audio/[a-z0-9.+-]+;base64," + _BASE64[1:]}
    data = {"type": "string", "pattern": _BASE64}
    return [
        _part("image_url", _body({"url": picture, "detail": optional({"enum": list(chat_api.DETAILS)})}, required=["url"])),
        _part("input_audio", _body({"data": data, "format": {"enum": list(chat_api.AUDIO_FORMATS)}}, required=["data", "format"])),
        _part("audio_url", _body({"url": clip}, required=["url"])),
    ]


def _part(kind: str, inside: Schema) -> Schema:
    ignored = {name: {"description": "ignored"} for name in chat_api.HARMLESS_IN_PARTS}
    return _body({"type": {"const": kind}, kind: inside} | ignored, required=["type", kind])


def _file(kinds: str) -> Schema:
    return {"type": "string", "contentMediaType": "application/octet-stream", "description": kinds}


def _body(properties: Mapping[str, Schema], *, required: list[str], rules: list[Schema] | None = None) -> Schema:
    """An object in which nothing unknown may stand."""
    schema: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return schema | ({"required": required} if required else {}) | ({"allOf": rules} if rules else {})


def _needs_stream() -> Schema:
    return {
        "if": {"properties": {"stream_options": {"type": "object"}}, "required": ["stream_options"]},
        "then": {"properties": {"stream": {"const": True}}, "required": ["stream"]},
    }


def _top_logprobs_need_logprobs() -> Schema:
    return {
        "if": {"properties": {"top_logprobs": {"type": "integer", "minimum": 1}}, "required": ["top_logprobs"]},
        "then": {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
    }
