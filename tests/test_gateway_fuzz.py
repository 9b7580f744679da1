"""Whatever is sent: a parsed request or an error that is the client's.  Nothing else ever comes out of the doors."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mmserve.errors import MmserveError
from mmserve.gateway.call import HARMLESS, Bounds, Caller
from mmserve.gateway.chat_api import parse_chat
from mmserve.gateway.completions_api import parse_completion
from mmserve.gateway.feedback_api import parse_feedback
from mmserve.gateway.generate_api import parse_generate
from mmserve.media import MediaLimits

NUM_BODIES = 150  # of each seed
BOUNDS = Bounds(vocab_size=1000, limits=MediaLimits())
CALLER = Caller("id")
FIELDS = (
    "prompt", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "logprobs", "top_logprobs", "n", "priority", "cache_salt", "explain", "tools", "response_format", "echo", "best_of", "request_id",
    "rating", "regenerated", "detail", *HARMLESS,
)  # fmt: skip
MEDIA = ("text", "image_url", "input_audio", "audio_url")
NUMBERS = (0, 1, -1, 2, 7, 1.0, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**39, -(10**39), float("nan"), float("inf"), float("-inf"))
WORDS = (
    "", "user", "system", "assistant", "data:image/png;base64,AAAA", "data:,", "data:audio/wav;base64,UklGRg", "wav", "m4a", "up", "auto",
    "7", "007", "é", "\x00", "\ud800", "<image-0>", "<audio-3>", "x" * 300,
)  # fmt: skip


def anything(rng: random.Random, depth: int = 3) -> Any:
    match rng.randrange(8 if depth else 5):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2 | 3:
            return rng.choice(NUMBERS)
        case 4:
            return rng.choice(WORDS)
        case 5:
            return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {
                rng.choice((*WORDS, *FIELDS, *MEDIA, "url", "data", "format")): anything(rng, depth - 1) for _ in range(rng.randrange(4))
            }


def part(rng: random.Random) -> Any:
    kind = rng.choice(MEDIA)
    inside = {
        "text": "Hi",
        "image_url": {"url": rng.choice(WORDS), "detail": rng.choice(["low", anything(rng, 1)])},
        "input_audio": {"data": rng.choice(["AAAA", *WORDS]), "format": rng.choice(["wav", anything(rng, 1)])},
        "audio_url": {"url": rng.choice(WORDS)},
    }[kind]
    return rng.choice([{"type": kind, kind: inside}, {"type": kind, kind: anything(rng)}, anything(rng)])


def body(rng: random.Random) -> dict[str, Any]:
    """Right enough to get past the first check, wrong somewhere."""
    fields: dict[str, Any] = {name: anything(rng, 2) for name in rng.sample(FIELDS, rng.randrange(4))}
    content = rng.choice(["Hi", [part(rng) for _ in range(rng.randrange(1, 4))], anything(rng)])
    fields["messages"] = rng.choice([[{"role": rng.choice(["user", anything(rng, 1)]), "content": content}], anything(rng)])
    if rng.random() < 0.5:
        fields["prompt"] = rng.choice(["Hi", anything(rng, 1)])
    return fields


def form(rng: random.Random) -> bytes:
    pieces = [(b"prompt", rng.choice(WORDS).encode("utf-8", "surrogatepass")), (b"options", json.dumps(body(rng)).encode())]
    pieces += [(rng.choice([b"image", b"audio", b"video"]), rng.randbytes(3)) for _ in range(rng.randrange(3))]
    head = b'\r\n--XX\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
    return b"".join(head % name + data for name, data in pieces) + b"\r\n--XX--"


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A byte changed, or a piece cut out."""
    start = rng.randrange(len(data))
    return data[:start] + rng.randbytes(rng.randrange(3)) + data[start + rng.randrange(4) :]


def check(parse: Any, data: bytes, *args: Any, **kwargs: Any) -> None:
    try:
        parse(data, *args, **kwargs)
    except MmserveError as error:
        if not 400 <= error.status < 500 or len(error.message) > 300:
            pytest.fail(f"{error.status}: {error.message} for {data[:500]!r}")
        json.dumps(error.body()).encode()


@pytest.mark.parametrize("seed", range(5))
def test_any_body_is_a_request_or_the_clients_error(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(NUM_BODIES):
        data = json.dumps(body(rng)).encode()
        for sent in (data, damaged(rng, data)):
            check(parse_chat, sent, BOUNDS, CALLER)
            check(parse_completion, sent, BOUNDS, CALLER)
            check(parse_feedback, sent, tenant="default", now_s=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_any_form_is_a_request_or_the_clients_error(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(NUM_BODIES):
        data = form(rng)
        check(parse_generate, data, b"XX", BOUNDS, CALLER)
        check(parse_generate, damaged(rng, data), b"XX", BOUNDS, CALLER)
