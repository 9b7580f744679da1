"""A decoder with a pool of its own, driven by hand: what tests of the decoder share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from step_plans import Row, num_blocks_for, step_plan

from mmserve.models.attention import AttentionShape
from mmserve.models.decoder import Decoder
from mmserve.models.torch_attention import TorchAttention
from mmserve.plan import BlockCopy

CPU = torch.device("cpu")


def torch_attention(decoder: Decoder, num_blocks: int, block_size: int) -> TorchAttention:
    return TorchAttention(
        AttentionShape(
            windows=decoder.config.windows, num_heads=decoder.num_local_heads, num_kv_heads=decoder.num_local_kv_heads,
            head_dim=decoder.config.head_dim, num_blocks=num_blocks, block_size=block_size, device=CPU, dtype=decoder.dtype,
        )
    )  # fmt: skip


class Paged:
    """`run` gives the logits of every token of every row."""

    def __init__(self, decoder: Decoder, block_size: int = 16, num_blocks: int = 40) -> None:
        self.block_size = block_size
        self.decoder = decoder
        self.attention = torch_attention(decoder, num_blocks, block_size)

    @classmethod
    def load(cls, directory: Path, block_size: int = 16, num_blocks: int = 40, dtype: torch.dtype = torch.float32) -> Paged:
        return cls(Decoder.load(directory, CPU, dtype), block_size, num_blocks)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], copies: Sequence[BlockCopy] = (), positions: torch.Tensor | None = None) -> list[torch.Tensor]:
        """`positions`, int [P, T], stand in for those that follow from the rows."""
        plan = step_plan(rows, self.block_size, copies=copies)
        self.attention.copy_blocks(plan.copies)
        hidden = self.decoder.embed(torch.from_numpy(plan.token_ids).long())
        where = torch.from_numpy(plan.positions[0]).long() if positions is None else positions
        hidden = self.decoder.forward(hidden, where, self.attention, self.attention.plan(plan))
        return list(self.decoder.logits(hidden).split(np.diff(plan.query_starts).tolist()))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """The tokens, and the float32 [num_tokens, V] logits that they were taken from."""
        token_ids = list(prompt)
        blocks = range(num_blocks_for(len(prompt) + num_tokens, self.block_size))
        logits = []
        for start in [0, *range(len(prompt), len(prompt) + num_tokens - 1)]:
            logits.append(self.run([Row(token_ids, blocks, start)])[0][-1])
            token_ids.append(int(logits[-1].argmax()))
        return token_ids[len(prompt) :], torch.stack(logits)


def random_ids(count: int, seed: int, vocab_size: int = 424) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
