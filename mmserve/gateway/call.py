"""What every generating route has in common: sampling fields, how the answer is wanted, and the fields that are known but not offered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mmserve.errors import BadRequest
from mmserve.gateway.fields import Fields
from mmserve.media import MediaKind, MediaLimits
from mmserve.request import GUARDRAIL_MODES, MAX_LOGIT_BIAS, ChatRequest, Message, SamplingParams
from mmserve.tenants import DEFAULT_TENANT

NotOffered = Mapping[str, tuple[Collection[object], str]]
"""Fields that are known and not offered: what may stand in them anyway, and why nothing else."""

# They change nothing about an answer of ours, so they are ignored, as OpenAI ignores what a model doesn't know.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
)  # fmt: skip
# Features of OpenAI's schema that would change the answer and aren't here: silently leaving them out would be a lie.
NOT_OFFERED: NotOffered = {
    "tools": (([],), "this server calls no tools"),
    "functions": (([],), "this server calls no tools"),
    "tool_choice": (("none", "auto"), "this server calls no tools"),
    "function_call": (("none", "auto"), "this server calls no tools"),
    "parallel_tool_calls": ((True, False), "this server calls no tools"),
    "response_format": (({"type": "text"},), "answers are free text"),
    "modalities": ((["text"],), "answers are text only"),
    "audio": ((), "answers are text only"),
    "reasoning_effort": (("none",), "the models here don't reason apart from their answer"),
    "verbosity": (("medium",), "say in the prompt how long the answer shall be"),
    "web_search_options": ((), "this server searches nothing"),
}
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_LENGTH = 256  # characters
MAX_MODEL_LENGTH = 256
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the parsers need to know about the server."""

    vocab_size: int
    limits: MediaLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the guard found out."""

    request_id: str
    tenant: str = DEFAULT_TENANT
    priority: int = 0  # the best that a tenant's requests may have
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request: what the engine gets, and how the client wants the answer."""

    request: ChatRequest
    stream: bool = False
    include_usage: bool = False  # in a stream, as one more chunk
    explain: bool = False


@dataclass(frozen=True, slots=True)
class Common:
    """The fields that all generating routes share."""

    sampling: SamplingParams
    model: str
    priority: int
    cache_salt: str
    stream: bool
    include_usage: bool
    explain: bool
    allow_degraded: bool
    guardrail: str | None

    def call(self, messages: tuple[Message, ...], caller: Caller, *, raw_prompt: bool = False) -> Call:
        """What was asked for, about these messages."""
        request = ChatRequest(
            messages=messages,
            sampling=self.sampling,
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt,
            tenant=caller.tenant,
            request_id=caller.request_id,
            guardrail=self.guardrail,
            allow_degraded=self.allow_degraded,
            raw_prompt=raw_prompt,
        )
        return Call(request, self.stream, self.include_usage, self.explain)


def parse_common(fields: Fields, bounds: Bounds, caller: Caller, *, logprobs: int | None, default_max_tokens: int | None = None) -> Common:
    stream = fields.flag("stream") or False
    model = fields.text("model", max_length=MAX_MODEL_LENGTH)
    return Common(
        sampling=parse_sampling(fields, bounds, logprobs=logprobs, default_max_tokens=default_max_tokens),
        model="auto" if model is None else model,
        priority=_priority(fields, caller),
        cache_salt=_cache_salt(fields, caller),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        explain=fields.flag("explain") or False,
        allow_degraded=fields.flag("allow_degraded") or False,
        guardrail=fields.choice("guardrail", GUARDRAIL_MODES),
    )


def parse_sampling(fields: Fields, bounds: Bounds, *, logprobs: int | None, default_max_tokens: int | None = None) -> SamplingParams:
    """Types are checked here and ranges in SamplingParams: both say which field it was."""
    given: Mapping[str, object] = {
        "max_tokens": _max_tokens(fields, default_max_tokens),
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p"),
        "seed": fields.integer("seed"),
        "stop": _stop(fields),
        "stop_token_ids": _stop_token_ids(fields, bounds.vocab_size),
        "min_tokens": fields.integer("min_tokens"),
        "ignore_eos": fields.flag("ignore_eos"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "logit_bias": _logit_bias(fields, bounds.vocab_size),
        "logprobs": logprobs,
        "n": fields.integer("n"),
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def refuse(fields: Fields, not_offered: NotOffered) -> None:
    """Raises BadRequest for the first of these fields that asks for what isn't here."""
    for name, (allowed, reason) in not_offered.items():
        fields.only(name, allowed, reason)


def check_media_counts(kinds: Collection[MediaKind], limits: MediaLimits, param: str) -> None:
    """Before any of them is decoded from base64."""
    for kind, most, noun in ((MediaKind.IMAGE, limits.max_images, "images"), (MediaKind.AUDIO, limits.max_clips, "audio clips")):
        count = sum(1 for one in kinds if one is kind)
        if count > most:
            raise BadRequest(f"at most {most} {noun} in a request, got {count}", param=param)


def _priority(fields: Fields, caller: Caller) -> int:
    """What the request says is added to what its tenant has, and can only make it later.  Who is no tenant may say anything."""
    own = fields.integer("priority") or 0
    least = MIN_PRIORITY if caller.tenant == DEFAULT_TENANT else 0
    if not least <= own <= MAX_PRIORITY:
        raise BadRequest(f"priority must be between {least} and {MAX_PRIORITY}, got {own}", param=fields.param("priority"))
    return caller.priority + own


def _cache_salt(fields: Fields, caller: Caller) -> str:
    """A tenant's own salt is secret and of fixed length: nobody else can name it, whatever is added to it or said without one."""
    return caller.cache_salt + (fields.text("cache_salt", max_length=MAX_SALT_LENGTH) or "")


def _max_tokens(fields: Fields, default: int | None) -> int | None:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise BadRequest(f"max_tokens ({old}) and max_completion_tokens ({new}) disagree", param="max_completion_tokens")
    return new if new is not None else old if old is not None else default


def _top_k(fields: Fields) -> int | None:
    value = fields.integer("top_k")
    return 0 if value == -1 else value  # clients of other servers say -1 for "all"


def _stop(fields: Fields) -> tuple[str, ...] | None:
    value = fields.take("stop")
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise BadRequest("stop must be a string or a list of strings", param="stop")
    return tuple(value)


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...] | None:
    value = fields.items("stop_token_ids")
    if value is None:
        return None
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(f"stop_token_ids must be at most {MAX_STOP_TOKEN_IDS} ids, got {len(value)}", param="stop_token_ids")
    ids = []
    for token_id in value:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise BadRequest(f"stop_token_ids must be integers from 0 to {vocab_size - 1}", param="stop_token_ids")
        ids.append(token_id)
    return tuple(ids)


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float] | None:
    value = fields.take("logit_bias")
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise BadRequest(f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} token ids and numbers", param="logit_bias")
    result: dict[int, float] = {}
    for key, bias in value.items():
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else vocab_size
        if token_id >= vocab_size:
            raise BadRequest(f"logit_bias must name token ids from 0 to {vocab_size - 1}", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise BadRequest(f"logit_bias of token {token_id} must be a number", param="logit_bias")
        if token_id in result:  # "7" and "07"
            raise BadRequest(f"logit_bias names token {token_id} twice", param="logit_bias")
        result[token_id] = float(bias)
    return result


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    include_usage = options.flag("include_usage") or False
    options.ignore(["include_obfuscation"])
    options.done()
    return include_usage
