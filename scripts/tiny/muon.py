"""Muon: momentum whose update for a weight matrix is made orthogonal (Jordan et al. 2024, github.com/KellerJordan/Muon).

In fp32 and batched over matrices of one shape, since CPUs without bf16 arithmetic are slow at anything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Muon(torch.optim.Optimizer):
    """For 2-d hidden weights only; embeddings, gains and heads belong to AdamW."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    rows, columns = param.shape
                    by_shape[min(rows, columns), max(rows, columns)].append(param)
            for params in by_shape.values():
                self._step_shape(params, group)

    def _step_shape(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = []
        for param in params:
            grad = param.grad
            assert grad is not None
            state = self.state[param]
            if not state:
                state["momentum"] = torch.zeros_like(param)
            momentum = state["momentum"]
            momentum.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(momentum, group["momentum"])
            updates.append(update if update.shape[0] <= update.shape[1] else update.T)
        for param, update in zip(params, _orthogonal(torch.stack(updates)), strict=True):
            tall = param.shape[0] > param.shape[1]
            scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update.T if tall else update, alpha=-group["lr"] * scale)


def _orthogonal(matrices: torch.Tensor, num_steps: int = 4) -> torch.Tensor:
    """Newton-Schulz towards the nearest matrices with singular values near one; [N, rows <= columns, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: torch.Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
