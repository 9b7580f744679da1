"""What the replicas of one decoder have learnt together, and what outlives their workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.scheduler.cost_model import CostModel, StepShape
from mmserve.scheduler.crowd import MediaHaste
from mmserve.scheduler.drain_rate import DrainRate
from mmserve.scheduler.fairness import TenantUsage


@dataclass(frozen=True, slots=True)
class Records:
    costs: CostModel = field(default_factory=CostModel)  # of any replica: they are alike
    usage: TenantUsage = field(default_factory=TenantUsage)
    haste: MediaHaste = field(default_factory=MediaHaste)
    drain: DrainRate = field(default_factory=DrainRate)  # of all replicas together
    text_drain: DrainRate = field(default_factory=DrainRate)  # the same as if those without media were alone
    media_drain: DrainRate = field(default_factory=DrainRate)  # and those with media

    def note_begun(self, arrival_s: float, now_s: float, *, has_media: bool, is_empty: bool, are_all_empty: bool) -> None:
        """Somebody leaves the queue for a first step, and leaves none of the kind there, or nobody at all."""
        self.drain.left(arrival_s, now_s, is_empty=are_all_empty)
        self.drain_of(has_media=has_media).left(arrival_s, now_s, is_empty=is_empty)

    def account(self, shape: StepShape, rows: Sequence[tuple[str, int, int]], seconds: float) -> None:
        """Learn from how long a step took, and put it down to tenants: each row (tenant, start, stop), and its share of the rest."""
        self.costs.observe(shape, seconds)
        shared_ms = self.costs.coefficients.step / len(rows)
        ms_by_tenant: defaultdict[str, float] = defaultdict(float)
        for tenant, start, stop in rows:
            ms_by_tenant[tenant] += shared_ms + self.costs.row_ms(start, stop)
        self.usage.charge(ms_by_tenant)

    def drain_of(self, *, has_media: bool) -> DrainRate:
        return self.media_drain if has_media else self.text_drain
