"""What crosses the wall between the main process and a worker, and nothing else does.

A plan is complete: it carries everything one forward pass needs, so that a worker remembers KV bytes, the tokens it sampled last, and
nothing about requests.  Plans are run in the order in which they are sent; the next may be sent while one runs.
Letters for shapes: S rows (sequences), T tokens, B blocks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmserve.composition import AS_WRITTEN, EncoderSpec, WeightNames
from mmserve.media import MediaKind
from mmserve.shared_buffer import BufferSlice
from mmserve.transport import Rendezvous


class RowSampling(NamedTuple):
    """How to draw one row's next token.  The draw is a function of (seed, position), so a replayed row draws the same.

    One is made per sampled row and step: as a tuple it is made, sent and read several times faster than as a dataclass.
    """

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0  # uint64
    position: int = 0  # index of the token to draw within the sequence
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_ids: np.ndarray | None = None  # int32, only with a repetition penalty
    output_ids: np.ndarray | None = None  # int32, only with a penalty; without the token that the step before samples
    banned_ids: tuple[int, ...] = ()  # end tokens while fewer than min_tokens are out
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    entropy: bool = False  # whether the token's is wanted


@dataclass(frozen=True, slots=True)
class MediaSlice:
    """Rows [row_start, row_start + num_rows) of a window's embedding go to tokens [token_start, ...) of the plan."""

    key: bytes  # of the window; main pins its rows while the step is in flight
    rows: BufferSlice  # [num_rows of the window, H] in the shared buffer
    row_start: int
    num_rows: int
    token_start: int  # index into StepPlan.token_ids


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` of block `source` to block `target` before anything else in the step."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over S sequences.  Tokens of a row are contiguous; row s has tokens [query_starts[s], query_starts[s+1])."""

    step_id: int
    seq_ids: tuple[int, ...]  # [S], for logs and results; a worker attaches no meaning to them
    token_ids: np.ndarray  # int32 [T]; at media rows and where a row of `sampled_by` has its token any valid id
    positions: np.ndarray  # int32 [P, T], P = 1, or 3 for multi-axis rotary models
    slot_mapping: np.ndarray  # int32 [T], block_id * block_size + offset
    query_starts: np.ndarray  # int32 [S + 1]
    context_lens: np.ndarray  # int32 [S], tokens with KV after this step
    block_tables: np.ndarray  # int32 [S, B], padded with 0
    wants_token: np.ndarray  # bool [S], True where this step reaches the row's last token
    sampling: tuple[RowSampling | None, ...]  # [S], None where wants_token is False
    sampled_by: np.ndarray  # int32 [S], row of the plan before this one that samples the row's only token; -1: its tokens are here
    copies: tuple[BlockCopy, ...] = ()
    media: tuple[MediaSlice, ...] = ()

    def completed(self, sampled: Sequence[SampledToken | None]) -> StepPlan:
        """This plan with the tokens that the step before sampled; token 0 for a row that failed, as nobody looks at what becomes of it."""
        waiting = np.flatnonzero(self.sampled_by >= 0)
        if not len(waiting):
            return self
        token_ids, sampling = self.token_ids.copy(), list(self.sampling)
        for row in waiting.tolist():
            token = sampled[self.sampled_by[row]]
            token_id = 0 if token is None else token.token_id
            token_ids[self.query_starts[row]] = token_id
            how = sampling[row]
            if how is not None and how.output_ids is not None:
                sampling[row] = how._replace(output_ids=np.append(how.output_ids, np.int32(token_id)))
        return replace(self, token_ids=token_ids, sampling=tuple(sampling))


class SampledToken(NamedTuple):
    """A tuple for the same reason as RowSampling."""

    token_id: int
    logprob: float | None = None  # of token_id under the model's own distribution: temperature 1, before penalties
    top: tuple[tuple[int, float], ...] = ()
    entropy: float | None = None  # of the same distribution, nats


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    tokens: tuple[SampledToken | None, ...]  # [S], None where wants_token was False or the row failed
    failed_rows: tuple[int, ...] = ()  # rows whose logits were not finite: `numerical_error`
    seconds: float = 0.0  # compute time


OUT_OF_MEMORY = "out_of_memory"
FOLLOWS_FAILED_STEP = "follows_failed_step"  # it needs tokens that were never sampled, and was not tried


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The whole step did not run, and no KV can be trusted to have been written.  The worker lives on."""

    step_id: int
    reason: str  # OUT_OF_MEMORY or FOLLOWS_FAILED_STEP
    seconds: float = field(default=0.0, compare=False)  # compute time, for nothing


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What a simulated device pretends to hold."""

    shape: str  # llama-8b or llama-70b
    token_ids: tuple[int, ...]  # what answers are drawn from


@dataclass(frozen=True, slots=True)
class DecoderWorkerSpec:
    """What a decoder worker is started with."""

    name: str  # small or large
    directory: Path  # transformers layout: config.json, *.safetensors
    device: str  # cpu, cuda:N or sim:CARD:N
    dtype: str  # float32, bfloat16 or float16
    num_threads: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int  # CPU; on CUDA what gpu_memory_utilization leaves
    gpu_memory_utilization: float
    config: Mapping[str, Any] | None = None  # the decoder's own, complete; None: the directory's config.json
    names: WeightNames = AS_WRITTEN  # name of a tensor in the files -> Llama's name, None for another part's
    simulated: SimulatedModel | None = None  # on a simulated device


@dataclass(frozen=True, slots=True)
class Rank:
    """A process's place in its tensor-parallel group."""

    rank: int
    size: int
    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class EncoderWorkerSpec:
    """What an encoder worker is started with.  It maps the shared buffer, too."""

    kind: MediaKind
    specs: Mapping[str, EncoderSpec]  # by decoder; decoders with one and the same spec share a tower
    device: str
    dtype: str  # of the rows it writes, the decoder's dtype
    num_threads: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class DecoderReady:
    """First message of a decoder worker, after a warm-up step went through."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """One window.  `features` holds uint8 RGB [tiles, height, width, 3] or float32 mono samples [n], written by a decode process."""

    features: BufferSlice
    rows: BufferSlice  # [num_rows, H] to be written
    picture_size: tuple[int, int] | None = None  # width and height of the upright picture, before it was cut into tiles


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """One batch through one tower, projected for one decoder."""

    plan_id: int
    decoder: str  # whose projector: small or large
    items: tuple[EncodeItem, ...]


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """`errors[i]` is None when rows of item i are written and finite, else a code: encoder_nan or out_of_memory."""

    plan_id: int
    errors: tuple[str | None, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EncoderReady:
    """First message of an encoder worker, after a dummy batch went through."""

    warmup_s: float


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The only other message to a worker: finish and exit 0."""
