"""The one mutable record: a stream of tokens on its way from prompt to end.  Written by the scheduler, and by nobody else."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from mmserve.media import MediaSpan
from mmserve.paged_kv.block_hash import HASH_STRIDE, chain_hashes
from mmserve.paged_kv.kv_cache_manager import BlockTable
from mmserve.plan import RowSampling
from mmserve.request import FinishReason, SamplingParams
from mmserve.scheduler.positions import position_shift
from mmserve.shared_buffer import BufferSlice

RowsOf = Callable[[bytes], BufferSlice | None]
"""All a scheduler knows about media: where a window's rows are, or None while they are not there."""


class Status(Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request.  It outlives workers: everything needed to compute it again is here."""

    seq_id: int
    token_ids: array[int]  # prompt, then what was drawn; under a span any placeholder
    sampling: SamplingParams
    spans: tuple[MediaSpan, ...] = ()  # in order, disjoint, within the prompt
    seed: int = 0  # uint64
    eos_token_ids: tuple[int, ...] = ()
    max_total_tokens: int = 2**31 - 1  # prompt and answer together
    priority: int = 0  # lower runs first
    arrival_s: float = 0.0
    salt: bytes = b""  # sequences of different salts share nothing
    tenant: str = "default"  # whose use of the device it counts as
    num_judged: int = 0  # tokens at the answer's start whose entropy is wanted

    status: Status = Status.WAITING
    num_computed: int = 0  # leading tokens with KV in `block_table`, as far as steps have landed
    num_scheduled: int = 0  # the same once all steps in flight have landed
    num_ahead: int = 0  # tokens that steps in flight sample
    epoch: int = 0  # steps planned in an earlier one say nothing about this sequence any more
    block_table: BlockTable = field(default_factory=BlockTable)
    block_hashes: list[bytes] = field(default_factory=list)  # of every full stride; names content, so it survives preemption and death
    num_cached_tokens: int = 0  # found in the prefix cache when first admitted
    num_preemptions: int = 0
    num_worker_deaths: int = 0  # with a step of its in the works
    trial_stop: int = 0  # up to here it is computed alone: it was aboard more dying workers than one
    is_fatal: bool = False  # a worker died over it alone
    finish_reason: FinishReason | None = None
    first_step_s: float | None = None
    first_token_s: float | None = None
    num_steps: int = 0  # in flight, with a row of it
    num_charged: int = 0  # leading tokens that have been computed at least once
    prefill_gpu_s: float = 0.0  # its shares of the steps it was in, what was computed again left out
    decode_gpu_s: float = 0.0

    num_prompt: int = field(init=False)
    media_stop: int = field(init=False)  # every token from here on is text
    position_shift: int = field(init=False)  # from the index of such a token to its rotary position
    end_token_ids: frozenset[int] = field(init=False)
    row_sampling: RowSampling | None = field(init=False, default=None)  # kept by the plan builder while it can be reused

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)
        self.media_stop = self.spans[-1].stop if self.spans else 0
        self.position_shift = position_shift(self.spans)
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        self.end_token_ids = frozenset((*eos, *self.sampling.stop_token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def extend_hashes(self) -> list[bytes]:
        """Hash the strides that have become full since the last time; return all of them."""
        hashes = self.block_hashes
        if len(hashes) < len(self.token_ids) // HASH_STRIDE:
            start = len(hashes) * HASH_STRIDE
            spans = self.spans if start < self.media_stop else ()
            hashes += chain_hashes(self.token_ids, spans, salt=self.salt, parent=hashes[-1] if hashes else None, start=start)
        return hashes

    def missing_span(self, num_computed: int, rows_of: RowsOf) -> MediaSpan | None:
        """The first span that is needed beyond `num_computed` tokens and whose rows are not there."""
        if num_computed >= self.media_stop:
            return None
        for span in self.spans:
            if span.stop > num_computed and rows_of(span.key) is None:
                return span
        return None

    def missing_spans(self, num_computed: int, rows_of: RowsOf) -> list[tuple[Sequence, MediaSpan]]:
        """All of them, each with the sequence that waits for it."""
        return [(self, span) for span in self.spans if span.stop > num_computed and rows_of(span.key) is None]

    @property
    def num_expected(self) -> int:
        """Tokens it will have once all steps in flight have landed, unless it ends before."""
        return len(self.token_ids) + self.num_ahead

    def is_full(self, num_tokens: int) -> bool:
        """Whether it ends with that many tokens, whichever they are."""
        max_tokens = self.sampling.max_tokens
        return num_tokens >= self.max_total_tokens or (max_tokens is not None and num_tokens >= self.num_prompt + max_tokens)

    def append(self, token_id: int) -> FinishReason | None:
        """Add a drawn token; say whether it was the last, and why."""
        is_end = token_id in self.end_token_ids and self.num_output >= self.sampling.min_tokens
        self.token_ids.append(token_id)
        if is_end:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_full(len(self.token_ids)) else None

    def resume(self, other: Sequence) -> None:
        """Go on where `other` was given up, which had a prompt as long: at another decoder, and before it is scheduled here.

        That this decoder reads again what that one had computed is nobody's fault but ours, and is not charged.
        """
        self.token_ids.extend(other.token_ids[other.num_prompt :])
        self.num_charged = other.num_charged
        self.first_step_s, self.first_token_s = other.first_step_s, other.first_token_s

    def rewind(self) -> None:
        """Forget what steps in flight compute: they failed, or what they read is gone."""
        self.num_scheduled = self.num_computed
        self.num_ahead = 0
        self.epoch += 1
        self.row_sampling = None  # perhaps made for a token past `min_tokens`, before which it now is again
