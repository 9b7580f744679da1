"""Random numbers that anyone can make again: a hash of (seed, position, id), the same on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def uniforms(seeds: Sequence[int], positions: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """float64 [R, N] in (0, 1) for int64 ids [N] or [R, N]: rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014)."""

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([_signed(value) for value in values], dtype=torch.int64, device=ids.device).unsqueeze(1)

    rows = _mix(_mix(column(seeds)) + column(positions))
    mixed = _mix(rows + ids * _GOLDEN)
    return (_shifted(mixed, 11).double() + 0.5) * 2.0**-53


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no uint64 arithmetic, but two's complement wraps the same way."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = value + _GOLDEN
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Right, filling with zeros."""
    return (value >> bits) & (2 ** (64 - bits) - 1)
