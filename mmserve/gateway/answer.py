"""Deltas to the objects of OpenAI's schema: chat and completions, whole or in chunks.  Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from mmserve.gateway.sse import event
from mmserve.grounding.verdict import Report
from mmserve.request import Cost, FinishReason, TokenLogprob, Usage
from mmserve.token_stream import Delta, Generation

TokenText = Callable[[int], str]
_MARK = "text of a delta"  # where it goes in an event; what is cut there is the last of its kind
_LEAST_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclass(slots=True)
class Choice:
    """One of n answers, as it grows.  Written by `collect`."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def collect(choices: list[Choice], deltas: Iterable[Delta]) -> None:
    for delta in deltas:
        choice = choices[delta.index]
        choice.text += delta.text
        choice.logprobs.extend(delta.logprobs)
        choice.finish_reason = delta.finish_reason or choice.finish_reason


class Schema(Protocol):
    """What differs between the two schemas: the names, and the inside of a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk's choice that comes before the first delta of choice `index`."""

    def piece(self, delta: Delta) -> dict[str, Any]: ...
    def whole(self, index: int, choice: Choice) -> dict[str, Any]: ...


MakeSchema = Callable[[TokenText], Schema]


class ChatSchema:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text

    def opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, delta: Delta) -> dict[str, Any]:
        said = {"content": delta.text} if delta.text else {}
        return {
            "index": delta.index,
            "delta": said,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": _reason(delta.finish_reason),
        }

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": _reason(choice.finish_reason),
        }

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        content = [
            self._token(token.token_id, token.logprob) | {"top_logprobs": [self._token(*other) for other in token.top]} for token in tokens
        ]
        return {"content": content, "refusal": None} if content else None

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


class CompletionSchema:
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._offsets: dict[int, int] = {}  # choice index -> characters of the tokens so far

    def opening(self, index: int) -> None:
        return None

    def piece(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs),
            "finish_reason": _reason(delta.finish_reason),
        }

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(index, choice.logprobs),
            "finish_reason": _reason(choice.finish_reason),
        }

    def _logprobs(self, index: int, tokens: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        texts, offsets, top = [], [], []
        logprobs: list[float] = []
        for token in tokens:
            texts.append(self._token_text(token.token_id))
            logprobs.append(_finite(token.logprob))
            top.append({self._token_text(token_id): _finite(logprob) for token_id, logprob in token.top})
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(texts[-1])
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets} if texts else None


class Answer:
    """The envelope around the choices of one generation."""

    def __init__(self, generation: Generation, schema: Schema, *, model: str, usage_in_chunks: bool, explain: bool) -> None:
        self._generation = generation
        self._schema = schema
        self._usage_in_chunks = usage_in_chunks
        self._explain = explain
        self._around: dict[int, tuple[bytes, bytes]] = {}  # choice index -> an event's bytes before and after its text
        self._head = {"id": schema.id_prefix + generation.request_id, "object": "", "created": generation.created, "model": model}

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """One event per delta that says anything, each choice's first with its opening before it."""
        pieces: list[bytes] = []
        for delta in deltas:
            around = self._around.get(delta.index)
            if around is None:
                around = self._around[delta.index] = self._cut(delta.index)
                if (opening := self._schema.opening(delta.index)) is not None:
                    said = self._said() if len(self._around) == 1 else {}
                    pieces.append(event(self._chunk(opening) | said))
            if delta.logprobs or delta.finish_reason is not None:
                pieces.append(event(self._chunk(self._schema.piece(delta))))
            elif delta.text:
                # Nearly all deltas are like this one, and dumping the same envelope again is most of what an event costs.
                pieces += [around[0], orjson.dumps(delta.text), around[1]]
        return b"".join(pieces)

    def closing(self) -> bytes:
        """What follows the last choice's end: usage, explanation and what the guardrail found, if the client asked for them."""
        if not self._usage_in_chunks and not self._explain and self._generation.grounding is None:
            return b""
        chunk: dict[str, Any] = self._head | {"object": self._schema.chunk_object, "choices": []}
        if self._usage_in_chunks:
            chunk["usage"] = usage_object(self._generation.usage)
        return event(chunk | self._explanation())

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = self._head | {"object": self._schema.chunk_object, "choices": [choice]}
        if self._usage_in_chunks:
            chunk["usage"] = None
        return chunk

    def _cut(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = event(self._chunk(self._schema.piece(Delta(index, _MARK)))).rpartition(orjson.dumps(_MARK))
        return before, after

    def whole(self, choices: Iterable[Choice]) -> dict[str, Any]:
        body = self._head | {"object": self._schema.whole_object}
        body["choices"] = [self._schema.whole(i, choice) for i, choice in enumerate(choices)]
        body["usage"] = usage_object(self._generation.usage)
        return body | self._explanation()

    def _explanation(self) -> dict[str, Any]:
        generation = self._generation
        explained = explanation(generation) if self._explain else {}
        grounded = {} if generation.grounding is None else {"guardrail": report_object(generation.grounding)}
        told = explained | notices(generation) | grounded
        return {"mmserve": told} if told else {}

    def _said(self) -> dict[str, Any]:
        """What a client is told of its media, asked or not."""
        said = notices(self._generation)
        return {"mmserve": said} if said else {}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "text_tokens": usage.text_tokens,
            "image_tokens": usage.image_tokens,
            "audio_tokens": usage.audio_tokens,
        },
    }


def notices(generation: Generation) -> dict[str, Any]:
    """Which media were left out and which a fallback encoded; nothing where all went the usual way."""
    kinds = {"degraded": generation.degraded, "fallback": generation.fallback}
    return {name: [{"kind": one.kind, "index": one.index, "reason": one.reason} for one in found] for name, found in kinds.items() if found}


def report_object(report: Report) -> dict[str, Any]:
    """What the guardrail found.  `start` and `stop` count characters of the choice's text; a `score` says how likely an object is there."""
    choices = [
        {
            "index": index,
            "score": _rounded(verdict.score),
            "unsupported": verdict.unsupported,
            "mentions": [
                {
                    "object": finding.mention.name,
                    "text": finding.text,
                    "start": finding.mention.start,
                    "stop": finding.mention.stop,
                    "stance": finding.mention.stance.value,
                    "score": _rounded(finding.score),
                    "supported": finding.is_supported,
                }
                for finding in verdict.findings
            ],
        }
        for index, verdict in enumerate(report.verdicts)
    ]
    head = {"mode": report.mode, "outcome": report.outcome, "score": _rounded(report.score), "draws": report.num_draws}
    return head | {"choices": choices}


def explanation(generation: Generation) -> dict[str, Any]:
    media = [
        {"kind": item.kind, "hash": item.content_hash, "tokens": item.num_tokens, "source": item.source}
        | ({"fallback": True} if item.is_fallback else {})
        for item in generation.usage.media
    ]
    return {
        "request_id": generation.request_id,
        "route": {"model": generation.model, "reason": generation.route_reason},
        "media": media,
        "stages_s": {stage: round(seconds, 6) for stage, seconds in generation.timings.items()},
        "fused_tokens": generation.usage.prompt_tokens,
    } | ({} if generation.cost is None else {"cost": cost_object(generation.cost)})


def cost_object(cost: Cost) -> dict[str, Any]:
    gpu_seconds = {stage: round(seconds, 9) for stage, seconds in cost.gpu_seconds.items()}
    return {"gpu_seconds": gpu_seconds, "usd": cost.usd, "saved_usd": cost.saved_usd}


def server_timing(timings: Mapping[str, float]) -> str:
    """The `Server-Timing` header: milliseconds."""
    return ", ".join(f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in timings.items())


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB
