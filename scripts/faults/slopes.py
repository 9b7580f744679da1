"""Whether something grows: a least-squares slope over the lives of a process, and how far it can be trusted.  Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.96
FEWEST = 10  # points, below which nothing is said


@dataclass(frozen=True, slots=True)
class Slope:
    """Units an hour, with the half-width of its 95 % interval: what is smaller than that, such a run can't tell from nothing."""

    per_hour: float
    half_width: float
    num_points: int
    span_s: float  # all lives together

    @property
    def surely_above(self) -> float:
        return self.per_hour - self.half_width


def slope(lives: Mapping[int, Sequence[tuple[float, float]]]) -> Slope | None:
    """Of (seconds, value) points, one slope for all lives and a level for each.  None where there are too few.

    Neighbouring samples resemble each other, so that n of them say less than n: the interval is widened by what the residuals' correlation
    with their predecessors says.
    """
    lives = {pid: points for pid, points in lives.items() if len(points) > 2}
    num_points = sum(map(len, lives.values()))
    if num_points < FEWEST:
        return None
    hours = [np.array([at_s for at_s, _ in points]) / 3600 for points in lives.values()]
    values = [np.array([value for _, value in points], float) for points in lives.values()]
    span_s = sum(points[-1][0] - points[0][0] for points in lives.values())
    x = np.concatenate([h - h.mean() for h in hours])
    y = np.concatenate([v - v.mean() for v in values])
    spread = float(x @ x)
    if not spread:
        return None
    per_hour = float(x @ y) / spread
    residuals = y - per_hour * x
    freedom = max(num_points - len(lives) - 1, 1)
    error = float(np.sqrt(residuals @ residuals / freedom / spread))
    return Slope(per_hour, Z_95 * error * _inflation(residuals), num_points, span_s)


def _inflation(residuals: np.ndarray) -> float:
    """sqrt((1 + r) / (1 - r)) with r the correlation of neighbours: what an AR(1) process adds to a standard error."""
    total = float(residuals @ residuals)
    if not total:
        return 1.0
    r = float(residuals[1:] @ residuals[:-1]) / total
    r = min(max(r + (1 + 4 * r) / len(residuals), 0.0), 0.99)  # that far an estimate beside a trend falls short (Kendall, 1954)
    return float(np.sqrt((1 + r) / (1 - r)))
