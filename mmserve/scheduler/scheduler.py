"""Continuous batching for one replica.  Pure: no torch, no asyncio, no clock.

There are no phases.  A sequence has `num_computed` and `num_tokens`, and every step hands out tokens until the first reaches the
second: a prompt, a chunk of one, the next token, a resumption after preemption or after a dead worker are all the same thing.

The next step may be planned while one is in flight.  A sequence that the latter brings up to date gets a row for the token that it
samples, whichever it will be.  What a step in flight computes for somebody who meanwhile ended, made room or failed is told by its epoch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from mmserve.errors import NumericalError, OutOfBlocks, Overloaded
from mmserve.media import MediaSpan
from mmserve.paged_kv.block_hash import HASH_STRIDE
from mmserve.paged_kv.kv_cache_manager import BlockTable, KVCacheManager
from mmserve.plan import OUT_OF_MEMORY, SampledToken, StepFailed, StepPlan, StepResult
from mmserve.request import FinishReason
from mmserve.scheduler.cost_model import shape_of
from mmserve.scheduler.crowd import Crowd
from mmserve.scheduler.fairness import FairQueue
from mmserve.scheduler.kv_reserve import KVReserve
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.scheduler.placement import Candidate
from mmserve.scheduler.plan_builder import Row, StepInFlight, build_plan
from mmserve.scheduler.policy import SequenceQueue, newcomer_key, running_key, waiting_key
from mmserve.scheduler.records import Records
from mmserve.scheduler.sequence import RowsOf, Sequence, Status
from mmserve.scheduler.step_budget import PrefillRoom, StepBudget
from mmserve.scheduler.trials import Trials, blame

STEP_SHARE = 0.98  # of the target that steps aim at: predictions are as often too low as too high
MAX_STEPS_IN_FLIGHT = 2  # one that runs, and the one that a worker takes up without waiting for us


class TokenUpdate(NamedTuple):
    """What a step did to one sequence.  The token that ended it (an end token, if the reason is STOP) is among its ids."""

    sequence: Sequence
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    error: str | None = None  # code, when the reason is ERROR


class Scheduler:
    """Decides what each step computes, and what its result means.

    `schedule` and send the plan, `apply` the result, again; at most MAX_STEPS_IN_FLIGHT are sent and not yet applied.  A worker runs
    them in order and answers each by a result or a failure.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, rows_of: RowsOf, records: Records) -> None:
        self.kv = kv
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens of first admissions
        self.num_prefix_hits = 0  # of those, found computed
        self.num_late_results = 0
        self._max_num_tokens = min(limits.max_model_len, kv.capacity)
        self._rows_of = rows_of
        self._costs = records.costs
        self._usage = records.usage
        self._records = records
        self._step_ms = STEP_SHARE * limits.tpot_target_ms  # with decodes in it
        self._budget = StepBudget(limits.max_num_batched_tokens, limits.max_num_seqs)
        self._reserve = KVReserve(kv.num_blocks, kv.block_size)
        self._max_num_stalled = limits.max_num_seqs // 4  # the share of the running set that may wait for media
        self._sequences: dict[int, Sequence] = {}
        self._crowd = Crowd(records.haste)
        self._waiting = FairQueue(self._usage)
        self._running = SequenceQueue()
        self._trials = Trials()
        self._pending_ms: float | None = None  # None: to be summed up again
        self._num_steps = 0
        self._steps: deque[StepInFlight] = deque()  # in flight, oldest first
        self._is_emptying = False  # nothing is planned while any is

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def pending_ms(self) -> float:
        """Estimated GPU time before everybody has caught up.  Summed once a step: placement asks at every arrival."""
        if self._pending_ms is None:
            costs, sequences = self._costs, self._sequences.values()
            self._pending_ms = sum(costs.row_ms(sequence.num_computed, len(sequence.token_ids)) for sequence in sequences)
        return self._pending_ms

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def expected_s(self) -> float:
        """How long the step that was planned last should take."""
        return self._costs.step_ms(self._steps[-1].shape) / 1e3

    @property
    def slowest_s(self) -> float:
        """How long it may be thought to take, or one of those before it; infinite if nothing like them was measured."""
        return max(self._costs.slowest_ms(step.shape) for step in self._steps) / 1e3

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, or one evacuated from another replica.  Admission has made sure that it can ever fit."""
        assert sequence.seq_id not in self._sequences, f"sequence {sequence.seq_id} added twice"
        assert 0 < sequence.num_tokens <= self._max_num_tokens, f"{sequence.num_tokens} tokens never fit {self._max_num_tokens}"
        sequence.max_total_tokens = min(sequence.max_total_tokens, self._max_num_tokens)
        sequence.extend_hashes()
        self._reserve.observe(sequence.num_prompt)
        self._sequences[sequence.seq_id] = sequence
        self._trials.join(sequence)
        self._usage.join(sequence.tenant)
        prompt_ms = self._costs.row_ms(0, sequence.num_tokens)
        self._crowd.join(sequence, prompt_ms)
        if self._pending_ms is not None:
            self._pending_ms += prompt_ms
        self._enqueue(sequence)

    def abort(self, seq_id: int) -> None:
        """The client left.  Blocks are free at once; an unknown id is ignored."""
        self.finish(seq_id, FinishReason.CANCELLED)

    def finish(self, seq_id: int, reason: FinishReason) -> None:
        """End a sequence from outside (a stop string was seen), also while a step computes it.  An unknown id is ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._end(sequence, reason)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing that can be computed now."""
        assert len(self._steps) < MAX_STEPS_IN_FLIGHT
        self._is_emptying = self._is_emptying and bool(self._steps)
        if self._is_emptying:
            return None
        self._pending_ms = None
        rows: list[Row] = []
        for is_trial in self._trials.turns():
            if is_trial:
                self._schedule_suspect(rows, now_s)
            else:
                room = self._schedule_running(rows)
                self._schedule_waiting(rows, room, now_s)
            if rows:
                self._trials.took_turn(is_trial=is_trial)
                return self._launch(rows)
        return None

    def apply(self, result: StepResult, now_s: float) -> list[TokenUpdate]:
        """Take in what a step computed.  A late result, of a step nobody waits for, changes nothing."""
        step = self._land(result.step_id)
        if step is None:
            return []
        self._budget.recover()
        self._reserve.relax()
        self._records.account(step.shape, step.rows, result.seconds)
        failed = frozenset(result.failed_rows)
        updates: list[TokenUpdate] = []
        for index, ((sequence, start, stop, epoch), token) in enumerate(zip(step.rows, result.tokens, strict=True)):
            if sequence.epoch != epoch:
                continue  # it ended or made room meanwhile
            assert sequence.num_computed == start, f"sequence {sequence.seq_id} moved from {start} to {sequence.num_computed}"
            wants_token = stop == len(sequence.token_ids)
            if index in failed or (wants_token and token is None):
                self.kv.withdraw(sequence.block_table)
                updates.append(self._fail(sequence, NumericalError.code))
                continue
            sequence.num_computed = stop
            if start < sequence.trial_stop:
                self._trials.landed(sequence)
            reason = None
            if wants_token and token is not None:
                sequence.num_ahead -= 1
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
                reason = sequence.append(token.token_id)
                updates.append(TokenUpdate(sequence, token, reason))
            if stop // HASH_STRIDE > sequence.block_table.num_published:
                self.kv.publish(sequence.block_table, sequence.extend_hashes(), stop)
            if reason is not None:
                self._end(sequence, reason)
        return updates

    def step_failed(self, failure: StepFailed) -> list[TokenUpdate]:
        """The device ran out of memory: try again with less.  Fails a sequence only if a step can't be made any smaller."""
        step = self._land(failure.step_id)
        if step is None:
            return []
        self._is_emptying = True  # a step planned now would build on one that builds on this, and so on for ever
        rows = step.live_rows()
        for row in rows:
            if row.sequence.seq_id in step.copied:
                self._requeue(row.sequence)  # what it shares was to be copied by this step
            else:
                row.sequence.rewind()
        if failure.reason != OUT_OF_MEMORY:
            return []  # it built on one that failed before, and was not tried
        self._reserve.tighten()
        num_tokens = sum(row.stop - row.start for row in step.rows)
        if not self._budget.shrink(num_tokens, len(step.rows)):
            return [self._fail(row.sequence, Overloaded.code) for row in rows]
        while len(self._running) > self._budget.num_rows:
            self._preempt(self._running[-1])
        return []

    def evacuate(self) -> list[Sequence]:
        """The worker is gone, and every byte of KV with it.  Hands over all sequences as if they had never been computed, tokens kept."""
        if self._steps:
            blame(self._steps[0])  # the one that ran: those behind it had not begun
        for step in self._steps:
            step.land()
        self._steps.clear()
        orphans = sorted(self._sequences.values(), key=running_key)
        for sequence in orphans:
            self._trials.leave(sequence)
            self._leave_queue(sequence)
            self._reset(sequence)
            self._usage.leave(sequence.tenant)
            self._crowd.leave(sequence)
        self._sequences.clear()
        self._pending_ms = None
        return orphans

    def wanted_media(self) -> list[tuple[Sequence, MediaSpan]]:
        """Spans that are needed and whose rows are not there, most urgent first.  What a prefix hit covers is not needed."""
        wanted: list[tuple[Sequence, MediaSpan]] = []
        for sequence in self._running:
            if sequence.num_scheduled < sequence.media_stop:
                wanted += sequence.missing_spans(sequence.num_scheduled, self._rows_of)
        for sequence in self._waiting.only(lambda each: bool(each.spans)):
            missing = self._first_missing(sequence)
            if missing is not None:
                wanted += sequence.missing_spans(missing.start, self._rows_of)
        return wanted

    def match(self, sequence: Sequence) -> int:
        """Tokens of a sequence that would be found in this replica's prefix cache just now."""
        return self.kv.match(sequence.extend_hashes(), sequence.num_tokens)

    def candidate(self, sequence: Sequence) -> Candidate:
        """This replica as a place for it."""
        own_ms = self._costs.row_ms(self.match(sequence), sequence.num_tokens)
        saved_ms = self._costs.row_ms(0, sequence.num_tokens) - own_ms
        return Candidate(saved_ms, self.pending_ms, self._crowd.harm_ms(sequence, own_ms))

    def num_before(self, num_prompt: int, tenant: str, now_s: float, *, has_media: bool) -> int:
        """How many of those who wait would go before a prompt that came now, of those with media or of those without."""
        key = newcomer_key(now_s, self._costs.row_ms(0, num_prompt))
        return self._waiting.num_before(tenant, key, lambda each: bool(each.spans) == has_media)

    def check(self) -> None:
        """The books agree with each other: queues, statuses, tables, reference counts."""
        assert len(self._running) + len(self._waiting) == len(self._sequences)
        assert all(self._sequences.get(suspect.seq_id) is suspect for suspect in self._trials)
        for sequence in self._running:
            assert sequence.status is Status.RUNNING
            assert sequence.num_computed < sequence.num_tokens
            assert sequence.num_computed <= sequence.num_scheduled < sequence.num_expected
            held = len(sequence.block_table.block_ids)
            assert held >= self.kv.num_blocks_for(sequence.num_computed), f"sequence {sequence.seq_id} computed beyond its {held} blocks"
        for sequence in self._waiting:
            assert sequence.status is Status.WAITING
            assert sequence.num_computed == sequence.num_scheduled == sequence.num_ahead == 0
            assert not sequence.block_table.block_ids
        self.kv.check(self._tables())

    def _schedule_running(self, rows: list[Row]) -> PrefillRoom:
        """Decodes first: everybody who needs one token gets it.  Then those who have more to catch up on, in order."""
        catching_up: list[Sequence] = []
        index = 0
        while index < len(self._running) and len(rows) < self._budget.num_tokens:  # preemption shortens the queue from its end
            sequence = self._running[index]
            index += 1
            start = sequence.num_scheduled
            if sequence in self._trials:
                continue
            if start + 1 < sequence.num_expected or start < sequence.media_stop:
                catching_up.append(sequence)
            elif sequence.num_ahead and sequence.is_full(sequence.num_expected):
                continue  # it ends with the token in flight
            elif self._grow(sequence):
                rows.append(Row(sequence, start, start + 1, sequence.epoch))
        room = self._room_beside(rows)
        for sequence in catching_up:
            self._add_row(rows, room, sequence)
        return room

    def _schedule_suspect(self, rows: list[Row], now_s: float) -> None:
        """A step for the first suspect that can be computed."""
        room = PrefillRoom(self._costs, self._budget.num_tokens, self._step_ms if len(self._running) > 1 else math.inf)
        for sequence in self._trials:
            if sequence.status is Status.WAITING:
                is_in = self._has_place(room) and self._first_missing(sequence) is None and self._admit(sequence, 0, now_s)
            else:
                is_in = not (sequence.num_ahead and sequence.is_full(sequence.num_expected)) and self._grow(sequence)
            if is_in:
                self._add_row(rows, room, sequence)
            if rows:
                return

    def _room_beside(self, decodes: list[Row]) -> PrefillRoom:
        """What a step may hold besides these single-token rows.  Where nobody waits for the next token, a step may take its time."""
        decode_ms = self._costs.step_ms(shape_of((row.start, row.stop) for row in decodes))
        ms = self._step_ms - decode_ms if decodes else math.inf
        return PrefillRoom(self._costs, self._budget.num_tokens - len(decodes), ms)

    def _add_row(self, rows: list[Row], room: PrefillRoom, sequence: Sequence) -> None:
        """As much of the sequence as can be computed in this step, if anything."""
        start = sequence.num_scheduled
        stop = self._stop_of_range(sequence, room.num_tokens_at(start))
        if stop > start:
            rows.append(Row(sequence, start, stop, sequence.epoch))
            room.take(start, stop)

    def _schedule_waiting(self, rows: list[Row], room: PrefillRoom, now_s: float) -> None:
        """Admit, in order, who can start now.  Who lacks blocks holds up the rest, or small ones would overtake it for ever."""
        if not self._waiting or not self._has_place(room):
            return
        under_way = {self._uncached_stride(sequence, sequence.num_computed) for sequence in self._running}
        num_stalled = sum(sequence.missing_span(sequence.num_scheduled, self._rows_of) is not None for sequence in self._running)
        is_idle = not rows and not self._steps
        growth = self._reserve.num_growth_blocks(self._running)
        for sequence in self._waiting:
            if not self._has_place(room):
                return
            missing = self._first_missing(sequence)
            if sequence in self._trials or self._must_wait(sequence, missing, num_stalled, under_way):
                continue
            if self._admit(sequence, 0 if is_idle else self._headroom(sequence, growth), now_s):
                is_idle = False
                self._add_row(rows, room, sequence)
                under_way.add(self._uncached_stride(sequence, sequence.num_computed))
                num_stalled += missing is not None
                growth += self._reserve.num_growth_blocks((sequence,))
            elif missing is not None:
                continue  # no room to start early; its turn comes with its media
            elif is_idle and self._running:
                # Nobody can run: all who hold blocks wait for media.  The youngest makes room for one that doesn't.
                self._preempt(self._running[-1])
                self._schedule_waiting(rows, room, now_s)
                return
            else:
                return

    def _has_place(self, room: PrefillRoom) -> bool:
        return room.is_open and len(self._running) < self._budget.num_rows

    def _must_wait(self, sequence: Sequence, missing: MediaSpan | None, num_stalled: int, under_way: set[bytes | None]) -> bool:
        """Whether a waiting sequence, `missing` that span, has nothing to compute now or had better not."""
        # What comes before media that aren't there may be computed early, but not so as to keep others from running, and not twice.
        if missing is not None and (num_stalled >= self._max_num_stalled or sequence.num_preemptions > 0):
            return True
        num_cached = self.match(sequence)
        if missing is not None and missing.start <= num_cached:
            return True
        # What a running sequence computes just now will be shared.
        stride = self._uncached_stride(sequence, num_cached)
        return stride is not None and stride in under_way

    def _first_missing(self, sequence: Sequence) -> MediaSpan | None:
        """The first span of a waiting sequence that is needed and whose rows are not there."""
        missing = sequence.missing_span(0, self._rows_of)
        if missing is None or not self._is_cached(sequence, missing.stop - 1):
            return missing
        return sequence.missing_span(self.match(sequence), self._rows_of)

    def _is_cached(self, sequence: Sequence, position: int) -> bool:
        """Whether the stride of that token is in the prefix cache.  If not, no prefix hit reaches beyond it."""
        index = position // HASH_STRIDE
        return index < len(sequence.block_hashes) and self.kv.is_cached(sequence.block_hashes[index])

    def _stop_of_range(self, sequence: Sequence, budget: int) -> int:
        """Where this step must stop: at the budget's end, at media that aren't there, or when it has caught up."""
        start = sequence.num_scheduled
        missing = sequence.missing_span(start, self._rows_of)
        stop = len(sequence.token_ids) if missing is None else max(missing.start, start)
        return min(stop, start + budget)

    def _uncached_stride(self, sequence: Sequence, num_computed: int) -> bytes | None:
        """The stride that comes next, if it is one that could be shared and isn't in the cache."""
        if not self.kv.enable_prefix_caching:
            return None
        index = num_computed // HASH_STRIDE
        if index >= len(sequence.block_hashes) or self.kv.is_cached(sequence.block_hashes[index]):
            return None
        return sequence.block_hashes[index]

    def _headroom(self, sequence: Sequence, growth: int) -> int:
        """Blocks that a new sequence must leave: `growth` for running ones, and room for a large prompt if it isn't one itself."""
        num_prompt_blocks = self._reserve.num_prompt_blocks
        is_small = 2 * self.kv.num_blocks_for(sequence.num_tokens) < num_prompt_blocks
        return growth + (num_prompt_blocks if is_small else 0)

    def _admit(self, sequence: Sequence, headroom: int, now_s: float) -> bool:
        """Blocks for all the tokens it has, or for none: a span that is begun has room to its end."""
        try:
            num_cached = self.kv.allocate(sequence.block_table, sequence.block_hashes, sequence.num_tokens, headroom=headroom)
        except OutOfBlocks:
            return False
        self._waiting.remove(sequence)
        self._running.add(sequence, running_key(sequence))
        sequence.status = Status.RUNNING
        sequence.num_computed = sequence.num_scheduled = num_cached
        if sequence.first_step_s is None:
            sequence.first_step_s = now_s
            has_media = bool(sequence.spans)
            is_empty = not any(bool(each.spans) == has_media for each in self._waiting)
            self._records.note_begun(sequence.arrival_s, now_s, has_media=has_media, is_empty=is_empty, are_all_empty=not self._waiting)
            sequence.num_cached_tokens = num_cached
            self.num_prefix_queries += sequence.num_tokens
            self.num_prefix_hits += num_cached
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Room for all its tokens, if need be by preempting who comes last.  False if that was the sequence itself."""
        while True:
            try:
                self.kv.grow(sequence.block_table, sequence.num_expected)
            except OutOfBlocks:
                assert len(self._running) > 1, f"sequence {sequence.seq_id} is alone and does not fit"
                self._reserve.tighten()
                victim = self._running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                return True

    def _launch(self, rows: list[Row]) -> StepPlan:
        self._num_steps += 1
        copies = self.kv.take_copies()
        targets = {copy.target for copy in copies}
        copied = (row.sequence for row in rows if targets and not targets.isdisjoint(row.sequence.block_table.block_ids))
        before = self._steps[-1].rows if self._steps else ()
        plan = build_plan(self._num_steps, rows, before, self.kv.block_size, copies, self._rows_of)
        for sequence, _, stop, _ in rows:
            sequence.num_scheduled = stop
            sequence.num_ahead += stop == sequence.num_expected
        shape = shape_of((row.start, row.stop) for row in rows)
        self._steps.append(StepInFlight(self._num_steps, tuple(rows), shape, frozenset(sequence.seq_id for sequence in copied)))
        self._steps[-1].take_off()
        return plan

    def _land(self, step_id: int) -> StepInFlight | None:
        if not self._steps or self._steps[0].step_id != step_id:
            self.num_late_results += 1
            return None
        self._pending_ms = None
        self._steps[0].land()
        return self._steps.popleft()

    def _preempt(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._leave_queue(sequence)
        self._reset(sequence)
        self._enqueue(sequence)

    def _fail(self, sequence: Sequence, code: str) -> TokenUpdate:
        self._end(sequence, FinishReason.ERROR)
        return TokenUpdate(sequence, None, FinishReason.ERROR, code)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._leave_queue(sequence)
        self._trials.leave(sequence)
        del self._sequences[sequence.seq_id]
        self._usage.leave(sequence.tenant)
        self._crowd.leave(sequence)
        self._pending_ms = None
        self._reset(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _reset(self, sequence: Sequence) -> None:
        self.kv.release(sequence.block_table)
        sequence.num_computed = 0
        sequence.rewind()
        sequence.status = Status.WAITING

    def _enqueue(self, sequence: Sequence) -> None:
        cost_ms = self._costs.row_ms(self.match(sequence), sequence.num_tokens)
        self._waiting.add(sequence, waiting_key(sequence, cost_ms))

    def _leave_queue(self, sequence: Sequence) -> None:
        (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)

    def _tables(self) -> Iterable[BlockTable]:
        return (sequence.block_table for sequence in self._sequences.values())
