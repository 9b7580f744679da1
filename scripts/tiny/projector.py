"""The two-layer MLP that carries a tower's features into a decoder's embedding space."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

TOWER_WIDTH = 128
PROJECTOR_WIDTH = 256
DECODER_WIDTH = 192


class Projector(nn.Module):
    """[..., TOWER_WIDTH] -> [..., DECODER_WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TOWER_WIDTH, PROJECTOR_WIDTH)
        self.linear_2 = nn.Linear(PROJECTOR_WIDTH, DECODER_WIDTH)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.linear_2(functional.gelu(self.linear_1(features)))
        return rows
