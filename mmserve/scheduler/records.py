"""What the replicas of one decoder have learnt together, and what outlives their workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmserve.scheduler.cost_model import CostModel
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

    def drain_of(self, *, has_media: bool) -> DrainRate:
        return self.media_drain if has_media else self.text_drain
