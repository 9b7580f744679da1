"""An engine without models: it answers with words that depend on the request, at once, and shows what the door asked of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmserve.composition import Composition, DecoderSpec, PromptFormat, Weights
from mmserve.errors import MmserveError, ModelNotFound, Overloaded
from mmserve.ledger import Feedback
from mmserve.media import MediaItem, MediaLimits
from mmserve.metrics import Metrics
from mmserve.quota import QuotaBooks
from mmserve.request import ChatRequest, FinishReason, MediaUsage, TokenLogprob, Usage
from mmserve.tenants import Tenants
from mmserve.token_stream import Delta, Generation

WORDS = ("It", " is", " a", " cat", ".")


def fake_composition() -> Composition:
    config = {"vocab_size": 1000, "max_position_embeddings": 4096}
    nowhere = Path("/nowhere")
    prompt = PromptFormat(nowhere, "")
    return Composition("fake-tiny", {name: DecoderSpec(name, Weights(nowhere), config, prompt) for name in ("small", "large")})


@dataclass
class FakeLedger:
    feedback: list[Feedback] = field(default_factory=list)

    def record_feedback(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)


class FakeEngine:
    """`script` is called with each accepted generation and its request: by default it says WORDS and stops.

    `refusal`, when set, is what `submit` raises; one that `is_full` takes nothing.
    `cancelled` holds the ids of generations whose client left.
    """

    def __init__(self, script: Callable[[Generation, ChatRequest], None] | None = None) -> None:
        self.composition = fake_composition()
        self.metrics = Metrics()
        self.ledger = FakeLedger()
        self.limits = MediaLimits()
        self.tenants = Tenants()
        self.quotas = QuotaBooks(self.tenants.quota)
        self.max_model_len = 4096
        self.requests: list[ChatRequest] = []
        self.generations: list[Generation] = []
        self.cancelled: list[str] = []
        self.refusal: MmserveError | None = None
        self.is_full = False
        self.not_ready: set[str] = set()
        self.changed = asyncio.Event()  # set whenever a request is accepted or cancelled
        self._script = script or say_words

    def check_room(self, tenant: str) -> None:
        self.quotas.check_room(tenant, time.monotonic())
        if self.is_full:
            raise Overloaded("the queue is full", retry_after_s=2.4)

    async def submit(self, request: ChatRequest) -> Generation:
        if self.refusal is not None:
            raise self.refusal
        if request.model not in ("auto", "small", "large", self.composition.name):
            raise ModelNotFound("there is no such model", param="model")
        media = tuple(MediaUsage(item.kind.value, item.data.hex(), 576, "encoded") for item in request.media)
        usage = Usage(prompt_tokens=10 + 576 * len(media), cached_tokens=4, text_tokens=10, image_tokens=576 * len(media), media=media)
        generation = Generation(
            request_id=f"fake-{len(self.generations)}",
            model="large" if request.model == "large" else "small",
            route_reason="the client asked" if request.model in ("small", "large") else "short prompt",
            usage=usage,
            num_choices=request.sampling.n,
        )
        generation.timings = {"prepare": 0.001}
        generation.on_cancel = lambda: self._cancel(generation)
        self.requests.append(request)
        self.generations.append(generation)
        self._script(generation, request)
        self.changed.set()
        return generation

    def _cancel(self, generation: Generation) -> None:
        if generation.request_id not in self.cancelled:
            self.cancelled.append(generation.request_id)
        self.changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def record_feedback(self, feedback: Feedback) -> None:
        self.ledger.record_feedback(feedback)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def drain(self, timeout_s: float) -> None: ...

    def ready(self, route: str = "all") -> bool:
        return not self.not_ready if route == "all" else route not in self.not_ready

    def token_text(self, token_id: int, model: str) -> str:
        return WORDS[token_id % len(WORDS)]


class ForgetfulEngine(FakeEngine):
    """For hundreds of thousands of requests."""

    async def submit(self, request: ChatRequest) -> Generation:
        self.requests.clear()
        self.generations.clear()
        self.cancelled.clear()
        return await super().submit(request)


def say_words(generation: Generation, request: ChatRequest, words: tuple[str, ...] = WORDS) -> None:
    """Everything at once, for each choice: max_tokens is kept, logprobs are made up."""
    sampling = request.sampling
    count = min(len(words), sampling.max_tokens or len(words))
    for index in range(sampling.n):
        for i in range(count):
            generation.push(one_word(request, index, i, words[i]))
        reason = FinishReason.STOP if count == len(words) else FinishReason.LENGTH
        generation.push(Delta(index, finish_reason=reason))
    generation.usage = replace(generation.usage, completion_tokens=count * sampling.n)


def one_word(request: ChatRequest, index: int, token_id: int, word: str) -> Delta:
    wanted = request.sampling.logprobs
    logprobs = ()
    if wanted is not None:
        top = tuple((token_id + i, -0.5 - i) for i in range(wanted))
        logprobs = (TokenLogprob(token_id, -0.5, top),)
    return Delta(index, word, (token_id,), logprobs)


def say_nothing(generation: Generation, request: ChatRequest) -> None:
    """The generation stays open: the test pushes what it needs."""


def parts_of(request: ChatRequest) -> list[str | bytes]:
    """Text as text and media as their bytes, in order, all messages together."""
    return [part.data if isinstance(part, MediaItem) else part for message in request.messages for part in message.parts]


def say_first_word(generation: Generation, request: ChatRequest) -> None:
    """One word, and the generation stays open."""
    generation.push(Delta(0, "It"))
