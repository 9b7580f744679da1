"""Fairness between tenants: counters of GPU-ms used, and a queue that lets those who used more wait for those who used less.

The counters are those of "Fairness in Serving Large Language Models" (Sheng et al., 2024), kept in GPU-ms instead of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import merge

from mmserve.scheduler.policy import Key, SequenceQueue
from mmserve.scheduler.sequence import Sequence

USED_MS_PER_S = 20.0
"""GPU-ms by which a tenant may be ahead of the others for each second that a request of his has waited longer than theirs."""


class TenantUsage:
    """GPU-ms by tenant.  Who comes anew, or back, starts with the least that anybody here has used: nothing is saved up by staying away."""

    def __init__(self) -> None:
        self._used_ms: dict[str, float] = {}
        self._num_sequences: Counter[str] = Counter()  # of tenants who are here
        self._least_ms = 0.0  # of those here, or when there were any; never falls

    def join(self, tenant: str) -> None:
        """A sequence of this tenant has come."""
        self._num_sequences[tenant] += 1
        self._used_ms[tenant] = max(self._used_ms.get(tenant, 0.0), self._least_ms)
        self._raise_least()

    def leave(self, tenant: str) -> None:
        """One of them has gone."""
        self._num_sequences[tenant] -= 1
        if not self._num_sequences[tenant]:
            del self._num_sequences[tenant]
            self._raise_least()

    def charge(self, ms_by_tenant: Mapping[str, float]) -> None:
        """What a step took for each, also for those who left while it ran."""
        for tenant, ms in ms_by_tenant.items():
            self._used_ms[tenant] = self._used_ms.get(tenant, self._least_ms) + ms
        self._raise_least()

    def excess_ms(self, tenant: str) -> float:
        """How much more a tenant has used than the one of those here who used least."""
        return self._used_ms.get(tenant, self._least_ms) - self._least_ms

    def setback_s(self, tenant: str) -> float:
        """By how much later the requests of others may come and yet go first."""
        return self.excess_ms(tenant) / USED_MS_PER_S

    def _raise_least(self) -> None:
        if not self._num_sequences:
            return
        self._least_ms = max(self._least_ms, min(self._used_ms[tenant] for tenant in self._num_sequences))
        gone = [tenant for tenant, ms in self._used_ms.items() if ms <= self._least_ms and tenant not in self._num_sequences]
        for tenant in gone:  # as if they had never been here
            del self._used_ms[tenant]


class FairQueue:
    """A queue for each tenant, read as one: a tenant's sequences keep their order, and all move back by what he used too much."""

    def __init__(self, usage: TenantUsage) -> None:
        self._usage = usage
        self._queues: dict[str, SequenceQueue] = {}

    def add(self, sequence: Sequence, key: Key) -> None:
        self._queues.setdefault(sequence.tenant, SequenceQueue()).add(sequence, key)

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.tenant]

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def num_before(self, tenant: str, key: Key, wanted: Callable[[Sequence], bool]) -> int:
        """How many who are `wanted` would go before one of this tenant with that key."""
        setback_s = self._usage.setback_s
        own_s = setback_s(tenant)
        return sum(queue.num_before(key, setback_s(other) - own_s, wanted) for other, queue in self._queues.items())

    def __iter__(self) -> Iterator[Sequence]:
        """In order as of now.  Whoever joins or leaves meanwhile makes no difference to what is still to come."""
        return self.only(None)

    def only(self, wanted: Callable[[Sequence], bool] | None) -> Iterator[Sequence]:
        """The same, without those who are not `wanted`: they need not be put in order."""
        delayed = [queue.delayed(self._usage.setback_s(tenant), wanted) for tenant, queue in self._queues.items()]
        return (sequence for _, sequence in merge(*delayed))
