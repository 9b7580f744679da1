"""Root-mean-square norm (Zhang and Sennrich, "Root Mean Square Layer Normalization"): values over their RMS, times a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_FEW_ROWS = 4


class RmsNorm:
    """Over the last dimension, in float32 whatever the values are."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight` has the values' dtype."""
        self._weight = weight
        self._eps = eps
        is_half_on_cpu = weight.device.type == "cpu" and weight.dtype.itemsize == 2
        self._twice = torch.cat((weight, weight)) if is_half_on_cpu else None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self._twice is None or len(values) > _FEW_ROWS:
            return F.rms_norm(values, self._weight.shape, self._weight, self._eps)
        # Beside their negatives the values have mean 0, so that layer norm, one kernel, does what rms_norm makes of nine.
        both = torch.cat((values, -values), dim=-1)
        return F.layer_norm(both, self._twice.shape, self._twice, None, self._eps)[..., : values.shape[-1]]
