"""May this be deployed?  Decided by bounds, slice by slice; what fails is named with its number.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mmserve.evals.figures import Figures
from mmserve.evals.golden import SLICES
from mmserve.evals.intervals import Share, trials_needed
from mmserve.evals.probes import StateProbe


@dataclass(frozen=True, slots=True)
class Bars:
    """What the one-sided 95 % bounds must clear."""

    accuracy: float = 0.90  # GA of each slice: its lower bound at least this
    hallucination: float = 0.04  # HOR of each slice: its upper bound below this
    coverage: float = 0.75  # COV of each slice that asks for all: saying nothing is no way out
    order: float = 0.04  # order probes reversed or unmoved: their upper bound below this


class Outcome(IntEnum):
    """Also the exit status."""

    PASSED = 0
    BREACHED = 1  # a value itself is on the wrong side
    UNDECIDED = 3  # values are right, but of too few items to be sure


@dataclass(frozen=True, slots=True)
class Finding:
    """One bar that wasn't cleared."""

    slice_name: str
    metric: str
    share: Share
    bar: float
    side: int  # -1: the lower bound is too low, +1: the upper bound is too high

    @property
    def is_breach(self) -> bool:
        value = self.share.value
        return value is not None and (value < self.bar if self.side < 0 else value >= self.bar)

    @property
    def needed(self) -> int | None:
        """How many trials of the kind there were it would take, at the value seen; None if no number would do."""
        if self.share.value is None:
            return None
        independent = trials_needed(self.share.value, self.bar, self.side)
        return None if independent is None else round(independent * self.share.total / self.share.effective)

    def __str__(self) -> str:
        share = self.share
        if share.value is None:
            return f"{self.slice_name}: {self.metric} was never tried"
        bound = f"at least {share.lower:.3f}" if self.side < 0 else f"at most {share.upper:.3f}"
        wanted = f"{self.bar:.2f} or more" if self.side < 0 else f"less than {self.bar:.2f}"
        text = f"{self.slice_name}: {self.metric} is {share.value:.3f} of {share.total}, {bound} (95 %); must be {wanted}"
        return text if self.is_breach or self.needed is None else f"{text}; too few to be sure: it would take about {self.needed}"


@dataclass(frozen=True, slots=True)
class StatesDiffer:
    """A slice whose answers depend on what a cache held."""

    slice_name: str
    ids: tuple[str, ...]  # of the items
    metric: str = "equal answers cold and cached"
    is_breach: bool = True

    def __str__(self) -> str:
        return f"{self.slice_name}: answers changed between cold, embedding hit and kv hit: {', '.join(self.ids)}"


@dataclass(frozen=True, slots=True)
class Decision:
    outcome: Outcome
    findings: tuple[Finding | StatesDiffer, ...]


def decide(slices: Mapping[str, Figures], order: Share | None, states: Sequence[StateProbe], bars: Bars) -> Decision:
    """`order` is None where nothing probes it."""
    findings: tuple[Finding | StatesDiffer, ...] = (*_findings(slices, order, bars), *_differing(states))
    if not findings:
        return Decision(Outcome.PASSED, ())
    is_breached = any(finding.is_breach for finding in findings)
    return Decision(Outcome.BREACHED if is_breached else Outcome.UNDECIDED, findings)


def _differing(states: Sequence[StateProbe]) -> Iterator[StatesDiffer]:
    for name in SLICES:
        ids = tuple(probe.item.id for probe in states if probe.item.slice_name == name and not probe.is_equal)
        if ids:
            yield StatesDiffer(name, ids)


def _findings(slices: Mapping[str, Figures], order: Share | None, bars: Bars) -> Iterator[Finding]:
    for name, figures in slices.items():
        if figures.accuracy.lower < bars.accuracy:
            yield Finding(name, "grounding accuracy", figures.accuracy, bars.accuracy, -1)
        objects, coverage = figures.hallucinated_objects, figures.coverage
        if objects.total and objects.upper >= bars.hallucination:
            yield Finding(name, "hallucinated-object rate", objects, bars.hallucination, +1)
        if coverage.total and coverage.lower < bars.coverage:
            yield Finding(name, "coverage", coverage, bars.coverage, -1)
    if order is not None and order.total and order.upper >= bars.order:
        yield Finding("images", "order confusion", order, bars.order, +1)
