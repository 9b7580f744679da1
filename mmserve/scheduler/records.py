"""What the replicas of one decoder have learnt together, and what outlives their workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmserve.scheduler.cost_model import CostModel, StepShape
from mmserve.scheduler.crowd import MediaHaste
from mmserve.scheduler.drain_rate import DrainRate
from mmserve.scheduler.fairness import TenantUsage
from mmserve.scheduler.gpu_time import GpuTime, charge
from mmserve.scheduler.plan_builder import Row


@dataclass(slots=True)
class Records:
    costs: CostModel = field(default_factory=CostModel)  # of any replica: they are alike
    usage: TenantUsage = field(default_factory=TenantUsage)
    haste: MediaHaste = field(default_factory=MediaHaste)
    drain: DrainRate = field(default_factory=DrainRate)  # of all replicas together
    text_drain: DrainRate = field(default_factory=DrainRate)  # the same as if those without media were alone
    media_drain: DrainRate = field(default_factory=DrainRate)  # and those with media
    num_gpus: int = 1  # that compute a step together
    gpu_time: GpuTime = field(default_factory=GpuTime)  # since it was taken last

    def note_begun(self, arrival_s: float, now_s: float, *, has_media: bool, is_empty: bool, are_all_empty: bool) -> None:
        """Somebody leaves the queue for a first step, and leaves none of the kind there, or nobody at all."""
        self.drain.left(arrival_s, now_s, is_empty=are_all_empty)
        self.drain_of(has_media=has_media).left(arrival_s, now_s, is_empty=is_empty)

    def account(self, shape: StepShape, rows: Sequence[Row], seconds: float) -> None:
        """Learn from how long a step took, and put it down to those in it: each row by itself, and its share of the rest.

        Sequences are charged what was measured.  Tenants are charged what was predicted, in the same proportions: a step that took far
        too long must not hold a tenant's next requests up for minutes.
        """
        self.costs.observe(shape, seconds)
        shared_ms = self.costs.coefficients.step / len(rows)
        row_ms = [shared_ms + self.costs.row_ms(row.start, row.stop) for row in rows]
        ms_by_tenant: defaultdict[str, float] = defaultdict(float)
        for row, ms in zip(rows, row_ms, strict=True):
            ms_by_tenant[row.sequence.tenant] += ms
        self.usage.charge(ms_by_tenant)
        self.gpu_time += charge(rows, row_ms, seconds * self.num_gpus)

    def take_gpu_time(self) -> GpuTime:
        """What has been accounted since the last time, for whoever counts it."""
        taken, self.gpu_time = self.gpu_time, GpuTime()
        return taken

    def prefill_gpu_s(self, num_tokens: int) -> float:
        """What the first tokens of a prompt take, in a step that is run anyway."""
        return self.costs.row_ms(0, num_tokens) / 1e3 * self.num_gpus

    def drain_of(self, *, has_media: bool) -> DrainRate:
        return self.media_drain if has_media else self.text_drain
