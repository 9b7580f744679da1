"""`/v1/completions`: text in, text on.  The old schema, for the clients that still speak it."""

from __future__ import annotations

from mmserve.errors import BadRequest
from mmserve.gateway.call import HARMLESS, Bounds, Call, Caller, NotOffered, parse_common, refuse
from mmserve.gateway.fields import Fields
from mmserve.gateway.json_body import parse_object
from mmserve.request import Message

DEFAULT_MAX_TOKENS = 16  # OpenAI's
NOT_OFFERED: NotOffered = {
    "echo": ((False,), "answers don't repeat their prompt"),
    "suffix": (("",), "the models here don't fill in the middle"),
    "response_format": (({"type": "text"},), "answers are free text"),
}


def parse_completion(data: bytes, bounds: Bounds, caller: Caller) -> Call:
    """Raises BadRequest naming the field."""
    fields = Fields(parse_object(data))
    prompt = _prompt(fields)
    common = parse_common(fields, bounds, caller, logprobs=fields.integer("logprobs"), default_max_tokens=DEFAULT_MAX_TOKENS)
    refuse(fields, NOT_OFFERED)
    fields.only("best_of", [common.sampling.n], "it must equal n")
    fields.ignore(HARMLESS)
    fields.done()
    return common.call((Message("user", (prompt,)),), caller, raw_prompt=True)


def _prompt(fields: Fields) -> str:
    value = fields.required("prompt", fields.take("prompt"))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise BadRequest("prompt must be one string: no token ids, and one prompt a request", param="prompt")
    if not value:
        raise BadRequest("prompt must not be empty", param="prompt")
    return value
