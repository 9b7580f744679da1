"""One step of one decoder: plan in, result out.  Remembers weights and KV bytes, and nothing about requests."""

from __future__ import annotations

import dataclasses
import logging
import time

import numpy as np
import torch
from rich.console import Console

from mmserve.models.attention import AttentionShape
from mmserve.models.attention_choice import attention_for
from mmserve.models.decoder import Decoder
from mmserve.models.flash_attention import FlashAttention
from mmserve.models.parallel import WHOLE, Shard
from mmserve.plan import OUT_OF_MEMORY, DecoderReady, DecoderWorkerSpec, RowSampling, SampledToken, StepFailed, StepPlan, StepResult
from mmserve.shared_buffer import SharedMemory
from mmserve.worker import kv_budget, trial_steps
from mmserve.worker.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder
from mmserve.worker.device import is_out_of_memory, pin, release_memory, tensor_in, use_device
from mmserve.worker.load_progress import load_progress
from mmserve.worker.sampler import sample

log = logging.getLogger(__name__)

# Asks for nearly all tokens, so that all must be sorted: the most that sampling ever allocates.
_DEAREST_SAMPLING = RowSampling(temperature=1.0, min_p=1e-30, top_p=0.999999)


class ModelRunner:
    """Owns the weights and the KV pool of one decoder worker, or one rank's share of them."""

    def __init__(self, spec: DecoderWorkerSpec, memory: SharedMemory, shard: Shard = WHOLE) -> None:
        self._shard = shard
        self._spec = spec
        self._memory = memory
        self._device = use_device(spec.device)
        pin(memory, self._device)
        with load_progress(spec.name, Console(stderr=True), has_bar=shard.rank == 0) as on_progress:
            self._decoder = Decoder.load(
                spec.directory, self._device, getattr(torch, spec.dtype),
                config=spec.config, names=spec.names, shard=shard, on_progress=on_progress,
            )  # fmt: skip
        config = self._decoder.config
        self._num_axes = 3 if config.rope.sections else 1
        self._max_model_len = min(spec.max_model_len, config.max_position_embeddings)
        shape = AttentionShape(
            windows=config.windows,
            num_heads=self._decoder.num_local_heads,
            num_kv_heads=self._decoder.num_local_kv_heads,
            head_dim=config.head_dim,
            num_blocks=self._num_trial_blocks(),
            block_size=spec.block_size,
            device=self._device,
            dtype=self._decoder.dtype,
        )
        make_attention = attention_for(shape)
        self._graphs: DecodeGraphs | None = None
        self._attention = make_attention(shape)
        budget = kv_budget.budget_bytes(spec, self._device, self.run_largest_step)
        num_blocks = kv_budget.num_blocks(
            budget, shape.block_bytes, shape.block_size, max_num_seqs=spec.max_num_seqs, max_model_len=self._max_model_len
        )
        self._attention = make_attention(dataclasses.replace(shape, num_blocks=shard.least(num_blocks)))

    @property
    def ready(self) -> DecoderReady:
        config = self._decoder.config
        return DecoderReady(
            num_blocks=self._attention.num_blocks,
            block_size=self._attention.block_size,
            max_model_len=self._max_model_len,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
        )

    def warm_up(self) -> None:
        """A prefill, then a decode of two rows: every kernel of a later step has run.  Raises RuntimeError if a logit isn't finite.

        On a GPU with flash-attn decode steps are recorded first.
        """
        if self._device.type == "cuda":
            self.record_graphs(CudaRecorder(self._device))
        block_size = self._attention.block_size
        count = min(block_size, 8)
        tables = np.array([[0], [min(1, self._attention.num_blocks - 1)]], np.int32)
        for plan in (trial_steps.prefill([count], block_size), trial_steps.decode([count, 1], tables, block_size)):
            result = self.run(plan)
            if isinstance(result, StepFailed) or result.failed_rows:
                raise RuntimeError(f"the warm-up step failed: {result}")

    def record_graphs(self, recorder: Recorder) -> None:
        """Only flash-attn's kernels can be replayed: the others' shapes follow the longest context."""
        if isinstance(self._attention, FlashAttention):
            max_blocks = -(-self._max_model_len // self._attention.block_size)
            max_rows = min(self._spec.max_num_seqs, self._spec.max_num_batched_tokens)
            graphs = DecodeGraphs(self._decoder, self._attention, max_rows=max_rows, max_blocks=max_blocks, num_axes=self._num_axes)
            graphs.record(recorder)
            self._graphs = graphs

    @torch.inference_mode()
    def run_largest_step(self) -> None:
        """As many tokens as a step may have, and as many logits, drawn from in the dearest way."""
        hidden = self._hidden(trial_steps.prefill(self._trial_counts(), self._attention.block_size))
        last = torch.arange(self._spec.max_num_seqs, device=self._device) % len(hidden)
        sample(self._decoder.logits(hidden[last]), [_DEAREST_SAMPLING] * len(last))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult | StepFailed:
        """Out of memory is a result; any other fault is the end of this worker: a GPU that failed once fails for ever."""
        started = time.perf_counter()
        try:
            tokens, failed = self._run(plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or self._shard.size > 1:  # the other ranks wait in a collective: only a restart helps
                raise
            release_memory(self._device)
            log.warning("step=%d rows=%d tokens=%d out of memory", plan.step_id, len(plan.seq_ids), len(plan.token_ids))
            return StepFailed(plan.step_id, OUT_OF_MEMORY, time.perf_counter() - started)
        return StepResult(plan.step_id, tokens, failed, time.perf_counter() - started)

    def _run(self, plan: StepPlan) -> tuple[tuple[SampledToken | None, ...], tuple[int, ...]]:
        self._attention.copy_blocks(plan.copies)
        hidden = self._hidden(plan)
        is_finite = hidden.isfinite().all(dim=-1)  # still on the device: drawing tokens is the first that waits for it
        tokens: list[SampledToken | None] = [None] * len(plan.seq_ids)
        wanting = np.flatnonzero(plan.wants_token)
        if len(wanting):
            last = torch.from_numpy(plan.query_starts[wanting + 1].astype(np.int64) - 1).to(self._device)
            drawn = sample(self._decoder.logits(hidden[last]), [_sampling(plan, row) for row in wanting.tolist()])
            for row, token in zip(wanting.tolist(), drawn, strict=True):
                tokens[row] = token
        failed = _rows_of(plan, np.flatnonzero(~is_finite.cpu().numpy()))
        for row in failed:
            tokens[row] = None
            self._attention.wipe(plan.slot_mapping[plan.query_starts[row] : plan.query_starts[row + 1]])
        failed |= {row for row in wanting.tolist() if tokens[row] is None}
        return tuple(tokens), tuple(sorted(failed))

    def _hidden(self, plan: StepPlan) -> torch.Tensor:
        """[T, H], after the final norm."""
        if len(plan.positions) not in (1, self._num_axes):
            raise ValueError(f"{len(plan.positions)} position axes for a decoder of {self._num_axes}")
        if self._graphs is not None and self._graphs.can_run(plan):
            return self._graphs.run(plan)
        positions = torch.from_numpy(plan.positions.astype(np.int64)).to(self._device)
        if len(positions) == 1:
            positions = positions[0]
        return self._decoder.forward(self._embed(plan), positions, self._attention, self._attention.plan(plan))

    def _embed(self, plan: StepPlan) -> torch.Tensor:
        """[T, H]: the table's rows, and the encoders' in the place of media."""
        ids = plan.token_ids.astype(np.int64)
        for media in plan.media:
            ids[media.token_start : media.token_start + media.num_rows] = 0  # whatever stands there is no word
        hidden = self._decoder.embed(torch.from_numpy(ids).to(self._device))
        for media in plan.media:
            rows = tensor_in(self._memory, media.rows)[media.row_start : media.row_start + media.num_rows]
            # Main keeps the rows in place until this step has been answered.
            hidden[media.token_start : media.token_start + media.num_rows].copy_(rows, non_blocking=True)
        return hidden

    def _trial_counts(self) -> list[int]:
        """Prompts, as long as they may be, that fill a step."""
        whole, rest = divmod(self._spec.max_num_batched_tokens, self._max_model_len)
        return [self._max_model_len] * whole + ([rest] if rest else [])

    def _num_trial_blocks(self) -> int:
        return sum(-(-count // self._spec.block_size) for count in self._trial_counts())


def _rows_of(plan: StepPlan, tokens: np.ndarray) -> set[int]:
    """Rows with one of these tokens, be it in the middle of a prompt: its keys must never be shared."""
    return set((np.searchsorted(plan.query_starts, tokens, side="right") - 1).tolist())


def _sampling(plan: StepPlan, row: int) -> RowSampling:
    sampling = plan.sampling[row]
    if sampling is None:
        raise ValueError(f"row {row} wants a token and has no sampling")
    return sampling
