"""Rotary positions: how far each pair of elements of a query or a key is turned, for every published way to stretch a context.

A key is rotated once, when it is written, and may serve many sequences of many lengths from then on.  So the angle of a position is a
function of that position and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mmserve.composition.decoder_config import rope_parameters
from mmserve.models.weights import BadCheckpoint

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class Scaling(Protocol):
    """One way to reach beyond the context that a model was first trained for."""

    def frequencies(self, theta: float, exponents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Radians per position, float64: [D/2] if all positions share them, else [T, D/2].  `exponents` is float64 [D/2]."""
        ...


@dataclass(frozen=True, slots=True)
class Unscaled:
    def frequencies(self, theta: float, exponents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return theta**-exponents


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are pressed together by `factor`."""

    factor: float

    def frequencies(self, theta: float, exponents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return theta**-exponents / self.factor


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the length, once that exceeds the `original` one.

    The length here is that of the context up to the token itself.  Token for token this is what transformers computes while it
    generates; a prompt beyond the original length it rotates as a whole by the prompt's length, which no shared key could follow.
    """

    factor: float
    original: int

    def frequencies(self, theta: float, exponents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        num_elements = 2 * len(exponents)
        lengths = (positions.double() + 1).clamp(min=self.original).unsqueeze(-1)
        growth = self.factor * lengths / self.original - (self.factor - 1)
        return (theta * growth ** (num_elements / (num_elements - 2))) ** -exponents


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Wavelengths beyond original / low are stretched, those below original / high are kept, those between are blended.

    From the reference code of Llama 3.1.
    """

    factor: float
    low: float
    high: float
    original: int

    def frequencies(self, theta: float, exponents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        plain = theta**-exponents
        turns = self.original * plain / (2 * math.pi)  # within the original context
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / self.factor


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Elements that turn more than `beta_fast` times within the original context are kept, those below `beta_slow` are stretched.

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", section 3.2.
    """

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    truncate: bool  # round the borders outwards to whole elements

    def frequencies(self, theta: float, exponents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        num_elements = 2 * len(exponents)

        def element_that_turns(times: float) -> float:
            return num_elements * math.log(self.original / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = element_that_turns(self.beta_fast), element_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, num_elements - 1)
        indices = torch.arange(len(exponents), dtype=torch.float64, device=exponents.device)
        stretched = ((indices - low) / max(high - low, 1e-3)).clamp(0, 1)
        plain = theta**-exponents
        return (1 - stretched) * plain + stretched * plain / self.factor


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary part of a decoder's config."""

    theta: float
    scaling: Scaling = Unscaled()
    attention_factor: float = 1.0  # on queries and keys alike: logits get its square
    sections: tuple[int, ...] = ()  # pairs of a head that follow each position axis, in order; empty: there is one axis


class Rotary:
    """Rotations of queries and keys whose pairs of elements lie side by side."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._rope = rope
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        somewhere = rope.scaling.frequencies(rope.theta, exponents, torch.zeros(1))
        self._exponents = exponents.to(device)
        self._frequencies = somewhere.float().to(device) if somewhere.dim() == 1 else None  # None: each position has its own
        self._length = torch.tensor(rope.attention_factor, device=device)
        axes = [axis for axis, count in enumerate(rope.sections) for _ in range(count)]
        self._axes = torch.tensor(axes, dtype=torch.int64, device=device)  # [D/2], the axis that a pair follows

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """int [T], or [P, T] with one row an axis -> complex64 [T, 1, D/2], a factor for each pair of each head.

        Angles are float32, as they were when the published weights were trained.
        """
        frequencies = self._frequencies
        if frequencies is None:
            furthest = positions if positions.dim() == 1 else positions.amax(dim=0)
            frequencies = self._rope.scaling.frequencies(self._rope.theta, self._exponents, furthest).float()
        turned = positions.unsqueeze(-1) if positions.dim() == 1 else positions.t().index_select(1, self._axes)
        return torch.polar(self._length, turned.float() * frequencies).unsqueeze(1)


def rotate(heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] -> the same, each pair of elements turned by its angle: one complex product."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(heads.dtype)


def pairs_of_halves(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A view of [heads * D, ...] as [heads, 2, D/2, ...]: what is written to it by halves of a head lies in pairs.

    Published weights turn element i with element i + D/2.  Queries and keys are reordered alike, so their products don't change.
    """
    return tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:]).transpose(1, 2)


def parse_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """From a decoder's config, in the spelling of transformers 5 (`rope_parameters`) or the one before.

    Raises BadCheckpoint naming what is missing or isn't built.
    """
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in _KINDS or any(isinstance(value, Mapping) for value in rope.values()):
        raise BadCheckpoint(f"config.json: rope_type must be one of {', '.join(_KINDS)}, and the same for all layers, got {kind!r}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1) or rope.get("mrope_interleaved"):
        raise BadCheckpoint("config.json: partial_rotary_factor and mrope_interleaved are not supported")
    sections = tuple(int(count) for count in rope.get("mrope_section") or ())
    if sections and (sum(sections) != head_dim // 2 or len(sections) != 3):
        raise BadCheckpoint(f"config.json: mrope_section {list(sections)} must be three numbers that add up to {head_dim // 2}")
    try:
        scaling = _parse_scaling(kind, rope, config)
    except KeyError as error:
        raise BadCheckpoint(f"config.json: rope_parameters lack {error.args[0]}") from error
    return Rope(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        scaling=scaling,
        attention_factor=_attention_factor(scaling, rope) if isinstance(scaling, YarnScaling) else 1.0,
        sections=sections,
    )


def _parse_scaling(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Scaling:
    if kind == "default":
        return Unscaled()
    if kind == "linear":
        return LinearScaling(float(rope["factor"]))
    longest = int(config["max_position_embeddings"])
    if kind == "dynamic":
        return DynamicScaling(float(rope["factor"]), longest)
    original = int(rope["original_max_position_embeddings"])
    if kind == "llama3":
        return Llama3Scaling(float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), original)
    return YarnScaling(
        factor=float(rope.get("factor") or longest / original),
        original=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
    )


def _attention_factor(scaling: YarnScaling, rope: Mapping[str, Any]) -> float:
    """As the config says, else from `mscale` and `mscale_all_dim` (DeepSeek), else the paper's 0.1 ln(factor) + 1."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return growth(float(mscale)) / growth(float(all_dim)) if mscale and all_dim else growth(1.0)
