"""All replicas of one decoder: places sequences, holds them while no worker lives, carries them over a death."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from mmserve.config import worker_module
from mmserve.errors import MmserveError, Overloaded, WorkerLost
from mmserve.media import MediaSpan
from mmserve.metrics import Metrics
from mmserve.plan import DecoderReady, DecoderWorkerSpec, Rank
from mmserve.replica import Replica, Rows
from mmserve.replica_set import ReplicaSet
from mmserve.scheduler.admission import QueueLimits
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import SharedMemory
from mmserve.supervisor import Supervisor, Worker, alone
from mmserve.transport import Rendezvous

log = logging.getLogger(__name__)

LOADING_RETRY_S = 5.0  # a guess: how long a worker takes to load


class DecoderGroup:
    """Sequences go in by `add` and come out only by finishing, `abort`, or `lost`.  `replicas` gives the ranks of each."""

    def __init__(
        self,
        replicas: tuple[tuple[DecoderWorkerSpec, ...], ...],
        memory: SharedMemory,
        limits: SchedulerLimits,
        rows: Rows,
        metrics: Metrics,
        *,
        queue: QueueLimits,
        enable_prefix_caching: bool,
        deliver: Callable[[list[TokenUpdate]], None],
        want: Callable[[Sequence, MediaSpan], None],
        lost: Callable[[Sequence, MmserveError], None],
        on_restart: Callable[[str], None],
    ) -> None:
        self.name = replicas[0][0].name
        self._limits = limits
        self._rows = rows
        self._metrics = metrics
        self._enable_prefix_caching = enable_prefix_caching
        self._deliver = deliver
        self._want = want
        self._lost = lost
        self._on_restart = on_restart
        self._replicas = ReplicaSet(limits.max_model_len, queue, time.monotonic, num_ranks=len(replicas[0]))
        self._held: dict[int, Sequence] = {}  # sequences that wait for a worker to live
        self._is_closed = False
        self._home: dict[int, Replica] = {}  # seq_id -> where it was placed last
        target = f"{worker_module(replicas[0][0].device)}:run_decoder"
        self._rendezvous: list[Rendezvous] = []
        self.supervisors = [
            Supervisor(f"{self.name}-decoder-{i}", target, self._args_of_ranks(ranks, memory), self._serve, on_restart=self._note_restart)
            for i, ranks in enumerate(replicas)
        ]

    @property
    def alive(self) -> bool:
        return len(self._replicas) > 0

    @property
    def broken(self) -> bool:
        """No worker lives, and none can be expected to."""
        return not self._replicas and all(supervisor.broken for supervisor in self.supervisors)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a first step, for media or for a worker."""
        return len(self._held) + self._replicas.num_waiting

    async def close(self) -> None:
        """Whoever is still there, or comes after all, is told so.  Idempotent."""
        self._is_closed = True
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors))
        for rendezvous in self._rendezvous:
            rendezvous.close()
        self._rendezvous.clear()
        self._lose_held()

    def check_room(self) -> None:
        """Raises Overloaded if it takes nothing just now, whatever it may be."""
        if self.broken:
            raise self._unavailable()
        self._replicas.check_room(num_held=len(self._held))

    def check(self, num_prompt: int, max_tokens: int | None, num_sequences: int, tenant: str, *, has_media: bool) -> int:
        """Most tokens, prompt and answer, that each sequence may reach.  Raises the error of whatever limit it would break."""
        if self.broken or not self._replicas.was_ready:
            raise self._unavailable()
        return self._replicas.check(num_prompt, max_tokens, num_sequences, tenant, has_media=has_media, num_held=len(self._held))

    def retry_after_s(self, num_queued: int) -> float:
        """When `num_queued` sequences will have begun, at the rate of late."""
        return self._replicas.records.drain.retry_after_s(num_queued, time.monotonic())

    def prefill_gpu_s(self, num_tokens: int) -> float:
        """What the first tokens of a prompt take, by the cost model: GPU-seconds."""
        return self._replicas.records.prefill_gpu_s(num_tokens)

    def add(self, sequence: Sequence) -> None:
        if not self._replicas:
            self._held[sequence.seq_id] = sequence
            if self._is_closed:
                asyncio.get_running_loop().call_soon(self._lose_held)  # who adds it has not done with it
            return
        replica = self._replicas.place(sequence)
        self._home[sequence.seq_id] = replica
        replica.add(sequence)

    def abort(self, seq_id: int) -> None:
        """Idempotent: whoever ends a sequence says so, whether it is held, running or gone."""
        self._held.pop(seq_id, None)
        replica = self._home.pop(seq_id, None)
        if replica is not None:
            replica.abort(seq_id)

    def wake(self, seq_id: int) -> None:
        """Rows that this sequence waits for have landed."""
        if seq_id in self._home:
            self._home[seq_id].wake()

    def _args_of_ranks(self, ranks: tuple[DecoderWorkerSpec, ...], memory: SharedMemory) -> Callable[[], SequenceOf[tuple[object, ...]]]:
        if len(ranks) == 1:
            return alone(ranks[0], memory)
        rendezvous = Rendezvous()
        self._rendezvous.append(rendezvous)

        def new_life() -> list[tuple[object, ...]]:
            rendezvous.renew()
            return [(spec, memory, Rank(i, len(ranks), rendezvous)) for i, spec in enumerate(ranks)]

        return new_life

    async def _serve(self, worker: Worker, ready: DecoderReady) -> None:
        """One worker's life, start to WorkerDied."""
        replica = Replica(
            self.name,
            worker,
            ready,
            self._limits,
            self._rows,
            self._metrics,
            self._replicas.records,
            enable_prefix_caching=self._enable_prefix_caching,
            deliver=self._deliver,
            want=self._want,
            now_s=time.monotonic,
        )
        self._replicas.add(replica, ready)
        held, self._held = self._held, {}
        for sequence in held.values():
            self.add(sequence)
        try:
            await replica.run()
        finally:
            self._replicas.remove(replica)
            self._evacuate(replica, worker)

    def _evacuate(self, replica: Replica, worker: Worker) -> None:
        sequences = replica.scheduler.evacuate()
        if sequences:
            log.warning("worker=%s pid=%d evacuated=%d", self.name, worker.pid, len(sequences))
        for sequence in sequences:
            self._home.pop(sequence.seq_id, None)
            if sequence.is_fatal:
                self._lost(sequence, WorkerLost(f"{sequence.num_worker_deaths} workers ended over this request"))
                continue
            self._metrics.stream_recoveries.labels(self.name).inc()
            self.add(sequence)

    def _note_restart(self, role: str) -> None:
        """A life is over.  Those who have waited through many that came to nothing are told so."""
        self._on_restart(role)
        if not self._replicas and all(supervisor.hopeless for supervisor in self.supervisors):
            self._lose_held()

    def _lose_held(self) -> None:
        held, self._held = self._held, {}
        for sequence in held.values():
            self._lost(sequence, self._unavailable())

    def _unavailable(self) -> Overloaded:
        pause_s = min(supervisor.next_start_in_s for supervisor in self.supervisors)
        return Overloaded(f"the {self.name} decoder is starting again", code="decoder_unavailable", retry_after_s=pause_s + LOADING_RETRY_S)
