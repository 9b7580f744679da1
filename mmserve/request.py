"""What a client asks for, checked once at the door.  Inside, these types can't be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from mmserve.errors import BadRequest
from mmserve.media import MediaItem

Part = str | MediaItem
"""One piece of a message's content, in the client's order."""


GUARDRAIL_MODES = ("off", "flag", "regenerate")
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_LOGIT_BIAS = 1024
RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "seed": (-(2**63), 2**64 - 1),
    "min_tokens": (0, 2**31 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
    "logprobs": (0, 20),
    "n": (1, 16),
}


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.  An instance is always in range: anything else raises BadRequest naming the field."""

    max_tokens: int | None = None  # None: up to the context length
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    logprobs: int | None = None  # alternatives reported per token; 0: the drawn token only
    n: int = 1

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails every comparison
                raise BadRequest(f"{name} must be between {low:g} and {high:g}, got {value}", param=name)
        if not 0 < self.top_p <= 1:
            raise BadRequest(f"top_p must be above 0 and at most 1, got {self.top_p}", param="top_p")
        if self.repetition_penalty <= 0:
            raise BadRequest(f"repetition_penalty must be above 0, got {self.repetition_penalty}", param="repetition_penalty")
        if len(self.stop) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_LENGTH for text in self.stop):
            raise BadRequest(f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", param="stop")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise BadRequest(f"logit_bias must be at most {MAX_LOGIT_BIAS} values between -100 and 100", param="logit_bias")


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # system, user or assistant
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`raw_prompt` requests (`/v1/completions`) have one user message of text and skip the chat template."""

    messages: tuple[Message, ...]
    sampling: SamplingParams = SamplingParams()
    model: str = "auto"
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    tenant: str = "default"
    request_id: str = ""  # the client's or the door's, for logs and headers; never a key
    raw_prompt: bool = False
    allow_degraded: bool = False  # rather without media whose encoder fails than not at all
    guardrail: str | None = None  # one of GUARDRAIL_MODES; None: the server's default

    @property
    def num_characters(self) -> int:
        """Of text, in all messages."""
        return sum(len(part) for message in self.messages for part in message.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[MediaItem, ...]:
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, MediaItem))

    @property
    def num_bytes(self) -> int:
        """What its text and media hold of memory, near enough."""
        return sum(len(part.data if isinstance(part, MediaItem) else part) for message in self.messages for part in message.parts)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class MediaUsage:
    """What became of one media item of the request: part of `explain`."""

    kind: str
    content_hash: str  # hex SHA-256 of the bytes sent
    num_tokens: int
    source: str  # kv, memory, disk, joined or encoded
    is_fallback: bool = False  # encoded by the fallback encoder


@dataclass(frozen=True, slots=True)
class MediaNotice:
    """What every answer says of an item that did not go the usual way."""

    kind: str
    index: int  # among the request's items of that kind
    reason: str  # an error's code


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request took of the GPUs, and what that costs."""

    gpu_seconds: Mapping[str, float]  # by stage: image_encode, audio_encode, prefill, decode
    usd: float
    saved_usd: float  # an estimate: what it would have cost more if no cache had held any of it

    def __add__(self, other: Cost) -> Cost:
        seconds = {stage: own + other.gpu_seconds.get(stage, 0.0) for stage, own in self.gpu_seconds.items()}
        return Cost(seconds, self.usd + other.usd, self.saved_usd + other.saved_usd)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    text_tokens: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0
    media: tuple[MediaUsage, ...] = ()
