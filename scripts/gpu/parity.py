"""One script of steps on every way to run it, against fp32 on the CPU.

Half precision is no parity by itself: the yardstick is what bfloat16 costs the reference on the CPU, in the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mmserve.config import FLASH_BLOCK_SIZE, TORCH_BLOCK_SIZE
from mmserve.models.attention import AttentionBackend, AttentionShape
from mmserve.models.attention_choice import flash_obstacle
from mmserve.models.decoder import Decoder
from mmserve.models.flash_attention import FlashAttention
from mmserve.models.torch_attention import TorchAttention
from mmserve.plan import BlockCopy, StepPlan
from mmserve.worker import trial_steps
from mmserve.worker.cuda_graphs import CudaRecorder, DecodeGraphs

NUM_BLOCKS = {TORCH_BLOCK_SIZE: 128, FLASH_BLOCK_SIZE: 12}
LENGTHS = (3, 40, 300, 590)
NUM_DECODES = 6
ALLOWED = 2.0  # times the yardstick
FLOAT32_ERROR = 1e-3


class NoParity(Exception):
    """A backend computes something else."""


def check(directory: Path, device: torch.device) -> dict[str, float | None]:
    """Relative error of all logits, by way; None: it can't run here.  Raises NoParity if one is further off than it may be."""
    cpu = torch.device("cpu")
    expected = _run(directory, cpu, torch.float32, TorchAttention, TORCH_BLOCK_SIZE)
    errors: dict[str, float | None] = {}

    def measure(name: str, logits: torch.Tensor) -> None:
        errors[name] = float((logits - expected).norm() / expected.norm())

    measure("cpu_bfloat16", _run(directory, cpu, torch.bfloat16, TorchAttention, TORCH_BLOCK_SIZE))
    measure("torch_float32", _run(directory, device, torch.float32, TorchAttention, TORCH_BLOCK_SIZE))
    measure("torch_bfloat16", _run(directory, device, torch.bfloat16, TorchAttention, FLASH_BLOCK_SIZE))
    errors |= {"flash_bfloat16": None, "graphs_bfloat16": None}
    if _has_flash(directory, device):
        measure("flash_bfloat16", _run(directory, device, torch.bfloat16, FlashAttention, FLASH_BLOCK_SIZE))
        measure("graphs_bfloat16", _run(directory, device, torch.bfloat16, FlashAttention, FLASH_BLOCK_SIZE, with_graphs=True))
    yardstick = errors["cpu_bfloat16"] or 0.0
    for name, error in errors.items():
        limit = FLOAT32_ERROR if name == "torch_float32" else ALLOWED * yardstick
        if error is not None and not error <= limit:
            raise NoParity(f"{name} is {error:.2e} from the reference, at most {limit:.2e} is rounding")
    return errors


def _has_flash(directory: Path, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    decoder = Decoder.load(directory, torch.device("meta"), torch.bfloat16)
    shape = _shape(decoder, device, torch.bfloat16, FLASH_BLOCK_SIZE)
    return flash_obstacle(shape, torch.cuda.get_device_capability(device)) is None


@torch.inference_mode()
def _run(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    backend: Callable[[AttentionShape], AttentionBackend],
    block_size: int,
    *,
    with_graphs: bool = False,
) -> torch.Tensor:
    """float32 [logits of every row of every step, V], on the CPU."""
    decoder = Decoder.load(directory, device, dtype, computes_in=dtype)
    attention = backend(_shape(decoder, device, dtype, block_size))
    graphs = None
    if with_graphs:
        assert isinstance(attention, FlashAttention)
        graphs = DecodeGraphs(decoder, attention, max_rows=len(LENGTHS) + 1, max_blocks=NUM_BLOCKS[block_size], num_axes=1)
        graphs.record(CudaRecorder(device))
    logits = []
    for plan in steps(block_size, decoder.config.vocab_size):
        attention.copy_blocks(plan.copies)
        if graphs is not None and graphs.can_run(plan):
            hidden = graphs.run(plan)
        else:
            ids = torch.from_numpy(plan.token_ids.astype(np.int64)).to(device)
            positions = torch.from_numpy(plan.positions[0].astype(np.int64)).to(device)
            hidden = decoder.forward(decoder.embed(ids), positions, attention, attention.plan(plan))
        last = torch.from_numpy(plan.query_starts[1:].astype(np.int64) - 1).to(device)
        logits.append(decoder.logits(hidden[last]).cpu())
    return torch.cat(logits)


def _shape(decoder: Decoder, device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionShape:
    return AttentionShape(
        windows=decoder.config.windows,
        num_heads=decoder.num_local_heads,
        num_kv_heads=decoder.num_local_kv_heads,
        head_dim=decoder.config.head_dim,
        num_blocks=NUM_BLOCKS[block_size],
        block_size=block_size,
        device=device,
        dtype=dtype,
    )


def steps(block_size: int, vocab_size: int) -> list[StepPlan]:
    """Prompts whole and in parts, a prefix that another sequence copies and goes on from, then decodes of all rows."""
    rng = np.random.default_rng(0)
    lengths = np.array([*LENGTHS, LENGTHS[-1]])
    tables = _tables(lengths + NUM_DECODES, block_size)
    told = [rng.integers(0, vocab_size, length + NUM_DECODES) for length in lengths]
    shared = LENGTHS[-1] - 70
    told[-1][:shared] = told[-2][:shared]
    plans = []

    def add(rows: list[int], starts: list[int], stops: list[int], copies: tuple[BlockCopy, ...] = ()) -> None:
        counts, contexts = np.subtract(stops, starts).astype(np.int32), np.array(stops, np.int32)
        width = -(-max(stops) // block_size)
        plan = trial_steps.step(counts, contexts, tables[rows, :width], block_size)
        ids = np.concatenate([told[row][start:stop] for row, start, stop in zip(rows, starts, stops, strict=True)])
        plans.append(dataclasses.replace(plan, token_ids=ids.astype(np.int32), copies=copies))

    add([0, 1, 2, 3], [0, 0, 0, 0], [3, 40, 100, LENGTHS[3]])
    # Decodes, a prompt that goes on, and a new sequence behind a copied prefix, in one step
    blocks = -(-shared // block_size)
    copies = tuple(BlockCopy(int(tables[3, i]), int(tables[4, i]), min(block_size, shared - i * block_size)) for i in range(blocks))
    add([0, 2, 4, 3], [3, 100, shared, LENGTHS[3]], [4, 300, LENGTHS[3], LENGTHS[3] + 1], copies)
    done = [4, 40, 300, LENGTHS[3] + 1, LENGTHS[3]]
    for i in range(NUM_DECODES - 1):
        rows = [0, 1, 2, 3, 4] if i % 2 else [4, 1, 2]
        add(rows, [done[row] for row in rows], [done[row] + 1 for row in rows])
        for row in rows:
            done[row] += 1
    return plans


def _tables(lengths: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks in no order, each given once."""
    widths = -(-lengths // block_size)
    blocks = iter(np.random.default_rng(1).permutation(NUM_BLOCKS[block_size]).tolist())
    tables = np.zeros((len(lengths), widths.max()), np.int32)
    for row, width in enumerate(widths.tolist()):
        tables[row, :width] = [next(blocks) for _ in range(width)]
    return tables
