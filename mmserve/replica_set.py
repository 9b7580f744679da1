"""The replicas of one decoder that live just now: whether they take a request, and which of them takes a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mmserve.plan import DecoderReady
from mmserve.replica import Replica
from mmserve.scheduler.admission import Admission, QueueLimits
from mmserve.scheduler.placement import place
from mmserve.scheduler.records import Records
from mmserve.scheduler.sequence import Sequence


class ReplicaSet:
    """Empty until the first worker is ready, and whenever none lives.  What was learnt, in `records`, outlives them all."""

    def __init__(self, max_model_len: int, queue: QueueLimits, now_s: Callable[[], float], *, num_ranks: int = 1) -> None:
        self.records = Records(num_gpus=num_ranks)
        self._max_model_len = max_model_len
        self._queue = queue
        self._now_s = now_s
        self._replicas: list[Replica] = []
        self._admission: Admission | None = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def was_ready(self) -> bool:
        """Whether it is known how much a replica holds, so that requests can be checked: that stays true while none lives."""
        return self._admission is not None

    @property
    def num_waiting(self) -> int:
        return sum(replica.scheduler.num_waiting for replica in self._replicas)

    def add(self, replica: Replica, ready: DecoderReady) -> None:
        self._replicas.append(replica)
        if self._admission is None:
            self._admission = Admission(self._max_model_len, ready.num_blocks, ready.block_size, self._queue, self.records)

    def remove(self, replica: Replica) -> None:
        self._replicas.remove(replica)

    def check_room(self, *, num_held: int = 0) -> None:
        """Raises Overloaded while the queue is full, `num_held` who wait elsewhere counted."""
        if self._admission is not None:
            self._admission.check_room(num_held + self.num_waiting, self._now_s())

    def check(self, num_prompt: int, max_tokens: int | None, num_sequences: int, tenant: str, *, has_media: bool, num_held: int = 0) -> int:
        """Most tokens, prompt and answer, that each sequence may reach, while `num_held` wait elsewhere.  Raises as Admission.check."""
        assert self._admission is not None
        now_s = self._now_s()
        num_before = sum(each.scheduler.num_before(num_prompt, tenant, now_s, has_media=has_media) for each in self._replicas)
        return self._admission.check(
            num_prompt,
            max_tokens,
            num_sequences,
            tenant,
            num_held + self.num_waiting,
            now_s,
            num_before=num_held + num_before,
            has_media=has_media,
        )

    def place(self, sequence: Sequence) -> Replica:
        """The replica that should take it; there must be one."""
        return self._replicas[place([replica.scheduler.candidate(sequence) for replica in self._replicas])]
