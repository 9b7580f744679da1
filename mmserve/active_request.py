"""An accepted request while it runs: turns the tokens of its sequences into deltas for the door, and keeps what the end must settle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mmserve.canary import Arm
from mmserve.costs import Bill
from mmserve.doubt import Doubt
from mmserve.errors import MmserveError, NumericalError, Overloaded
from mmserve.media import MediaWindow, PreparedMedia
from mmserve.modality_router import Route
from mmserve.plan import SampledToken
from mmserve.quota import Reservation
from mmserve.request import ChatRequest, FinishReason, MediaUsage, TokenLogprob, Usage
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.scheduler.sequence import Sequence
from mmserve.token_stream import Delta, Generation
from mmserve.tokenizer import Detokenizer, StopChecker, Tokenizer


@dataclass(slots=True)
class Choice:
    """One of a request's n answers.  Outlives the replicas that its sequence visits."""

    index: int
    sequence: Sequence
    detokenizer: Detokenizer
    stops: StopChecker
    finished: bool = False


@dataclass(slots=True)
class ActiveRequest:
    """Written by the engine only."""

    request: ChatRequest
    route: Route
    generation: Generation
    seed: int
    arrival_s: float  # monotonic
    admitted_s: float
    reservation: Reservation  # of its tenant's quota, held until the end
    num_media_bytes: int  # of the shared buffer, held until the end
    overhead: str | None  # why it is nobody's and stays out of the ledger: readiness, shadow; None: it is a client's
    bill: Bill
    arm: Arm | None = None  # of a canary's trial, in which its answer counts
    doubt: Doubt | None = None  # while the first tokens are held back: the large decoder may have to answer
    choices: tuple[Choice, ...] = ()  # this and the next two begin anew when an encoder fails
    media: tuple[PreparedMedia, ...] = ()
    windows: Mapping[bytes, tuple[PreparedMedia, MediaWindow]] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)  # id of an item whose encoder failed -> why
    sources: dict[bytes, str] = field(default_factory=dict)  # window key -> memory, disk, joined or encoded
    pinned: list[bytes] = field(default_factory=list)
    first_token_s: float | None = None
    last_token_s: float = 0.0

    @property
    def question(self) -> bytes:
        """A digest of who asks, the words and the media, whichever encoder makes the rows of these."""
        sequence = self.choices[0].sequence
        digest = hashlib.sha256(f"{len(self.request.tenant)} {self.request.tenant}".encode())
        digest.update(sequence.token_ids[: sequence.num_prompt].tobytes())
        for item in self.media:
            digest.update(item.content)
        return digest.digest()

    @property
    def generated_tokens(self) -> int:
        return sum(len(choice.sequence.token_ids) - choice.sequence.num_prompt for choice in self.choices)

    @property
    def used_tokens(self) -> int:
        """What its tenant pays for, prompt and answers: nothing if it ended before its first step and before any encode of its own."""
        has_begun = "encoded" in self.sources.values() or any(choice.sequence.first_step_s is not None for choice in self.choices)
        return self.choices[0].sequence.num_prompt + self.generated_tokens if has_begun else 0

    def usage(self) -> Usage:
        """As it stands now; complete after the end."""
        first = self.choices[0].sequence
        return replace(
            self.generation.usage,
            completion_tokens=self.generated_tokens,
            cached_tokens=first.num_cached_tokens,
            media=tuple(self._media_usage(item) for item in self.media),
        )

    def _media_usage(self, item: PreparedMedia) -> MediaUsage:
        first = self.choices[0].sequence
        in_kv = {span.key for span in first.spans if span.stop <= first.num_cached_tokens}
        # Rows that another request left in memory a moment ago were never asked for.
        sources = {"kv" if window.key in in_kv else self.sources.get(window.key, "memory") for window in item.windows}
        # The dearest source names the item: a clip of which one window was encoded was encoded.
        source = next(name for name in ("encoded", "joined", "disk", "memory", "kv") if name in sources)
        return MediaUsage(item.item.kind.value, item.content.hex(), item.num_rows, source, item.is_fallback)


def take_token(active: ActiveRequest, choice: Choice, update: TokenUpdate, now_s: float) -> FinishReason | MmserveError | None:
    """Push what the update says to the stream.  Returns how the choice ended, if it did."""
    if update.error is not None:
        if update.error == NumericalError.code:
            return NumericalError("the model produced numbers that are not finite")
        return Overloaded("the device has no memory for this request")
    text, stopped = "", False
    reason = update.finish_reason
    if update.token is not None:
        active.first_token_s = active.first_token_s or now_s
        active.last_token_s = now_s
        # The token that ends an answer is not part of its text.
        piece = "" if reason is FinishReason.STOP else choice.detokenizer.push(update.token.token_id)
        text, stopped = choice.stops.push(piece)
    if stopped:
        reason = FinishReason.STOP
    elif reason is not None:
        tail, stopped = choice.stops.push(choice.detokenizer.flush())
        text += tail + ("" if stopped else choice.stops.flush())
        reason = FinishReason.STOP if stopped else reason
    token = update.token
    if token is not None:
        logprobs = (_logprob(token),) if active.request.sampling.logprobs is not None else ()
        active.generation.push(Delta(choice.index, text, (token.token_id,), logprobs, reason))
    elif text or reason is not None:
        active.generation.push(Delta(choice.index, text, finish_reason=reason))
    choice.finished = reason is not None
    return reason


def new_choice(index: int, sequence: Sequence, tokenizer: Tokenizer, said: Choice | None = None) -> Choice:
    """`said` is what another decoder with the same tokenizer has said of it: this is the rest."""
    if said is not None:
        sequence.resume(said.sequence)
        return Choice(index, sequence, said.detokenizer, said.stops, said.finished)
    tail = sequence.token_ids[-4:].tolist()
    return Choice(index, sequence, tokenizer.detokenizer(tail), StopChecker(sequence.sampling.stop))


def record_timings(active: ActiveRequest, now_s: float) -> dict[str, float]:
    """Seconds by stage, for `Server-Timing` and `explain`."""
    first_step = active.choices[0].sequence.first_step_s or now_s
    first_token = active.first_token_s or now_s
    return {
        "prepare": active.admitted_s - active.arrival_s,
        "queue": first_step - active.admitted_s,
        "prefill": first_token - first_step,
        "decode": now_s - first_token,
        "total": now_s - active.arrival_s,
    }


def _logprob(token: SampledToken) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob if token.logprob is not None else 0.0, token.top)
