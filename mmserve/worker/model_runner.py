"""One step of one decoder: plan in, result out.  Remembers weights and KV bytes, and nothing about requests."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from mmserve.models.decoder import Decoder
from mmserve.models.paged_attention import PagedAttention
from mmserve.plan import DecoderReady, DecoderWorkerSpec, RowSampling, SampledToken, StepFailed, StepPlan, StepResult
from mmserve.shared_buffer import SharedMemory
from mmserve.worker.device import is_out_of_memory, release_memory, tensor_in
from mmserve.worker.sampler import sample

log = logging.getLogger(__name__)

_CUDA_RESERVE_BYTES = 256 * 2**20  # beyond what the warm-up step took: fragmentation, larger graphs of kernels


class ModelRunner:
    """Owns the weights and the KV pool of one decoder worker."""

    def __init__(self, spec: DecoderWorkerSpec, memory: SharedMemory) -> None:
        self._memory = memory
        self._device = torch.device(spec.device)
        self._dtype = getattr(torch, spec.dtype)
        self._decoder = Decoder.load(spec.directory, self._device, self._dtype)
        config = self._decoder.config
        self._max_model_len = min(spec.max_model_len, config.max_position_embeddings)
        self._attention = PagedAttention(
            num_layers=config.num_layers,
            num_blocks=self._count_blocks(spec),
            block_size=spec.block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=self._device,
            dtype=self._dtype,
        )

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
        """A prefill, then a decode of two rows: every kernel of a later step has run.  Raises RuntimeError if a logit isn't finite."""
        block_size = self._attention.block_size
        count = min(block_size, 8)
        prefill = _dummy_plan(np.array([0, count], np.int32), np.array([count], np.int32), np.zeros((1, 1), np.int32), block_size)
        tables = np.array([[0], [min(1, self._attention.num_blocks - 1)]], np.int32)
        decode = _dummy_plan(np.array([0, 1, 2], np.int32), np.array([count, 1], np.int32), tables, block_size)
        for plan in (prefill, decode):
            result = self.run(plan)
            if isinstance(result, StepFailed) or result.failed_rows:
                raise RuntimeError(f"the warm-up step failed: {result}")

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult | StepFailed:
        """Out of memory is a result; any other fault is the end of this worker."""
        started = time.perf_counter()
        try:
            tokens, failed = self._run(plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            release_memory(self._device)
            log.warning("step=%d rows=%d tokens=%d out of memory", plan.step_id, len(plan.seq_ids), len(plan.token_ids))
            return StepFailed(plan.step_id, "out_of_memory")
        return StepResult(plan.step_id, tokens, failed, time.perf_counter() - started)

    def _run(self, plan: StepPlan) -> tuple[tuple[SampledToken | None, ...], tuple[int, ...]]:
        self._attention.copy_blocks(plan.copies)
        attention_plan = self._attention.plan(plan)
        hidden = self._decoder.forward(self._embed(plan), self._positions(plan), self._attention, attention_plan)
        failed = self._failed_rows(plan, hidden)
        if failed:
            self._wipe(plan, failed)
        wanting = np.flatnonzero(plan.wants_token)
        tokens: list[SampledToken | None] = [None] * len(plan.seq_ids)
        if len(wanting):
            last = torch.from_numpy(plan.query_starts[wanting + 1].astype(np.int64) - 1).to(self._device)
            drawn = sample(self._decoder.logits(hidden[last]), [_sampling(plan, row) for row in wanting.tolist()])
            for row, token in zip(wanting.tolist(), drawn, strict=True):
                if token is None:
                    failed.add(row)
                elif row not in failed:
                    tokens[row] = token
        return tuple(tokens), tuple(sorted(failed))

    def _embed(self, plan: StepPlan) -> torch.Tensor:
        """[T, H]: the table's rows, and the encoders' in the place of media."""
        ids = plan.token_ids.astype(np.int64)
        for media in plan.media:
            ids[media.token_start : media.token_start + media.num_rows] = 0  # whatever stands there is no word
        hidden = self._decoder.embed(torch.from_numpy(ids).to(self._device))
        for media in plan.media:
            rows = tensor_in(self._memory, media.rows)[media.row_start : media.row_start + media.num_rows]
            hidden[media.token_start : media.token_start + media.num_rows] = rows.to(self._device, self._dtype)
        return hidden

    def _positions(self, plan: StepPlan) -> torch.Tensor:
        if len(plan.positions) != 1:
            raise ValueError(f"this decoder has one position axis, got {len(plan.positions)}")
        return torch.from_numpy(plan.positions[0].astype(np.int64)).to(self._device)

    def _failed_rows(self, plan: StepPlan, hidden: torch.Tensor) -> set[int]:
        """Rows with a token that isn't finite, be it in the middle of a prompt: its keys must never be shared."""
        is_finite = hidden.isfinite()
        if bool(is_finite.all()):
            return set()
        bad = np.flatnonzero(~is_finite.all(dim=-1).cpu().numpy())
        return set((np.searchsorted(plan.query_starts, bad, side="right") - 1).tolist())

    def _wipe(self, plan: StepPlan, rows: set[int]) -> None:
        for row in rows:
            slots = plan.slot_mapping[plan.query_starts[row] : plan.query_starts[row + 1]]
            self._attention.wipe(torch.from_numpy(slots.astype(np.int64)).to(self._device))

    def _count_blocks(self, spec: DecoderWorkerSpec) -> int:
        block_bytes = self._decoder.config.kv_bytes_per_token * self._dtype.itemsize * spec.block_size
        budget = spec.kv_cache_memory_bytes
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            budget = int(free - total * (1 - spec.gpu_memory_utilization)) - _CUDA_RESERVE_BYTES
        # More than all sequences at full length could never be held.
        useful = spec.max_num_seqs * -(-self._max_model_len // spec.block_size)
        num_blocks = min(budget // block_bytes, useful)
        if num_blocks < 2:
            raise ValueError(f"a KV cache of {budget} bytes has no room for two blocks of {block_bytes} bytes")
        return num_blocks


def _sampling(plan: StepPlan, row: int) -> RowSampling:
    sampling = plan.sampling[row]
    if sampling is None:
        raise ValueError(f"row {row} wants a token and has no sampling")
    return sampling


def _dummy_plan(query_starts: np.ndarray, context_lens: np.ndarray, tables: np.ndarray, block_size: int) -> StepPlan:
    """Rows of token 0 at the end of their contexts."""
    counts = np.diff(query_starts)
    positions = np.concatenate([np.arange(stop - count, stop) for count, stop in zip(counts, context_lens, strict=True)])
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return StepPlan(
        step_id=0,
        seq_ids=tuple(range(len(counts))),
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions[None].astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=tables,
        wants_token=np.ones(len(counts), np.bool_),
        sampling=(RowSampling(),) * len(counts),
    )
