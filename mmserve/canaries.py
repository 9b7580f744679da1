"""The life of canaries: they come up beside a server that is ready, take their share, are compared, and go when they do worse.

Clients pay for none of it.  What a canary can't do, or begins and can't end, goes on at the decoder beside it; a stream that has said
something goes on with it as long as its worker lives, and else is read to the other decoder, which says the rest.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from mmserve.active_request import ActiveRequest
from mmserve.background import BackgroundTasks
from mmserve.canary import Arm, Breach, Comparison, Metric, Reasked, conversation, slice_of, takes
from mmserve.canary_records import BREACHED, PASSED, ROLLED_BACK, STARTED, CanaryRecord, CanaryRecords
from mmserve.canary_shadows import SHADOW, Shadows
from mmserve.composition import Canary, Composition, read_canary
from mmserve.config import CanaryConfig, Config, ConfigError, chosen_device
from mmserve.decoder_group import DecoderGroup
from mmserve.decoder_groups import DecoderGroups
from mmserve.encoder_lanes import EncoderLane
from mmserve.errors import MmserveError, Overloaded
from mmserve.grounding.refusals import declines
from mmserve.grounding.verdict import Report
from mmserve.ledger import CanaryDecision, CanaryOutcome, Feedback, Ledger
from mmserve.media_service import MediaService
from mmserve.metrics import Metrics
from mmserve.model_router import ModelChoice
from mmserve.request import ChatRequest, FinishReason

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # whether an operator has ended it
MAX_DEATHS = 3  # of its workers, after which it is no longer waited for
MAX_ANSWERS = 2**13  # that may still be rated
_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Host:
    """What canaries need of the engine."""

    is_idle: Callable[[], bool]  # nobody waits for anything
    prove: Callable[[Composition], Awaitable[None]]  # a token, a picture and a clip go through; or MmserveError
    submit: Callable[[ChatRequest, str, Arm], Awaitable[ActiveRequest]]  # for nobody, and why; or MmserveError
    go_back: Callable[[ActiveRequest], Awaitable[None]]  # to the decoder beside its canary; or MmserveError
    fail: Callable[[ActiveRequest, MmserveError], None]
    active: Callable[[], Iterable[ActiveRequest]]
    decode: Callable[[str, Sequence[int]], str]  # (model, token ids)


@dataclass(eq=False)
class Trial:
    """One canary, from its start to its end."""

    canary: Canary
    comparison: Comparison
    fingerprint: str = ""
    has_passed: bool = False
    is_open: bool = False  # can be asked by name
    is_live: bool = False  # takes its share
    group: DecoderGroup | None = None
    lanes: Sequence[EncoderLane] = ()
    num_deaths: int = 0
    why_ended: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # one of its requests has ended, or its worker

    @property
    def name(self) -> str:
        return self.canary.name


def read_canaries(config: Config, stable: Composition) -> dict[str, Canary]:
    """By name.  Raises ConfigError for what can't be tried, or not like this."""
    canary, encoder = config.canary, config.encoder
    directories = {base: path for base, path in (("small", canary.canary_small), ("large", canary.canary_large)) if path is not None}
    if not directories:
        return {}
    if not 0 < canary.canary_share <= 1:
        raise ConfigError(f"canary-share is a share, above 0 and at most 1, got {canary.canary_share}", param="canary-share")
    if not 0 < canary.canary_margin < 1:
        raise ConfigError(f"canary-margin must be above 0 and below 1, got {canary.canary_margin}", param="canary-margin")
    if canary.canary_disagreement > 1:
        raise ConfigError(f"canary-disagreement is a share, at most 1, got {canary.canary_disagreement}", param="canary-disagreement")
    if encoder.vision_url is not None or encoder.audio_url is not None:
        raise ConfigError("a canary can't be tried beside a hosted encoder: nobody here knows whose weights make its rows")
    if chosen_device(config.model.device) == "cuda" and canary.canary_devices is None:
        raise ConfigError("a canary must have devices that nobody else uses: canary-devices names them", param="canary-devices")
    if len(directories) > 1 and canary.canary_devices is not None:
        raise ConfigError("canary-devices are those of one canary: try the other decoder's when it has ended", param="canary-devices")
    read = [read_canary(base, path, stable, chat_template=config.model.chat_template) for base, path in directories.items()]
    return {each.name: each for each in read}


class Canaries:
    """Owned by the event loop.  `canaries` by name."""

    def __init__(
        self,
        config: CanaryConfig,
        canaries: Mapping[str, Canary],
        host: Host,
        groups: DecoderGroups,
        media: MediaService,
        ledger: Ledger,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._host = host
        self._groups = groups
        self._media = media
        self._ledger = ledger
        self._metrics = metrics
        self._trials = {name: Trial(canary, self._comparison(None)) for name, canary in canaries.items()}
        self._beside = {trial.canary.base: trial for trial in self._trials.values()}
        self._lot = random.Random(0)
        self._reasked = Reasked()
        self._rateable: OrderedDict[str, tuple[str, Arm]] = OrderedDict()  # request id -> tenant and arm, oldest first
        self._tasks = BackgroundTasks()
        self._closing = threading.Event()
        self._shadows = Shadows(host.is_idle, host.submit, self._note_shadow, metrics)
        self._returning: set[str] = set()  # request ids

    def start(self) -> None:
        """When all else is ready.  Returns at once: whether a canary comes up is nobody's business but its own."""
        for trial in self._trials.values():
            self._tasks.start(self._run(trial), f"canary-{trial.name}")

    async def close(self) -> None:
        self._closing.set()
        await self._shadows.close()
        await self._tasks.close()

    @property
    def names(self) -> Sequence[str]:
        """Of those that can be asked by name now."""
        return [name for name, trial in self._trials.items() if trial.is_open]

    # --- requests ------------------------------------------------------------------------------------------------------------

    def enrol(self, request: ChatRequest, choice: ModelChoice) -> Arm | None:
        """For a request that the router gives to a decoder: whether its canary gets it, or whether it counts beside it."""
        trial = self._beside.get(choice.model)
        if trial is None or not trial.is_live:
            return None
        share, slice_name = self._config.canary_share, slice_of(request.media)
        is_drawn = takes(share, conversation(request), trial.fingerprint.encode())
        if self._config.canary_mode == SHADOW:
            return Arm(trial.name, slice_name, is_canary=False, is_watched=True) if is_drawn else None
        # As many of the others are looked at as of the canary's.
        is_watched = is_drawn or self._lot.random() * (1 - share) < share
        return Arm(trial.name, slice_name, is_canary=is_drawn, is_watched=is_watched)

    def note_refusal(self, arm: Arm, error: MmserveError) -> None:
        """The canary didn't take a request, which goes to the other decoder.  It may be busy; its circuit may be open."""
        if error.status >= 500:
            self._metrics.canary_returns.labels(arm.canary).inc()
            self._check_circuits(self._trials[arm.canary])

    def note_failure(self, active: ActiveRequest, error: MmserveError) -> bool:
        """A request is about to fail.  Whether it goes on instead."""
        arm = active.arm
        if active.generation.request_id in self._returning:
            return error.code != "shutdown"
        if arm is None or error.status < 500 or error.code in ("shutdown", "shutting_down"):
            return False
        self._count(arm, Metric.FAILED, is_hit=True)
        active.arm = None
        if not arm.is_canary:
            return False
        self._check_circuits(self._trials[arm.canary])
        if active.overhead is not None:
            return False
        log.info("request=%s goes on beside %s code=%s", active.generation.request_id, arm.canary, error.code)
        self._return(active, self._trials[arm.canary])
        return True

    def note_death(self, name: str, role: str) -> None:
        """A worker of its decoder has ended, and is started again."""
        self._metrics.worker_restarts.labels(role).inc()
        trial = self._trials[name]
        trial.num_deaths += 1
        if trial.num_deaths >= MAX_DEATHS or (trial.group is not None and trial.group.broken):
            self._end(trial, f"its worker ended {trial.num_deaths} times")
        if trial.group is not None and not trial.group.alive:
            for active in self._active_at(name):
                if active.overhead is None and active.arm is not None:
                    self._return(active, trial)
        trial.changed.set()

    def note_question(self, active: ActiveRequest, question: bytes, now_s: float) -> None:
        """It was accepted."""
        if active.arm is not None and self._config.canary_mode != SHADOW:
            for arm, is_again in self._reasked.note(question, active.arm, now_s):
                self._count(arm, Metric.REGENERATED, is_hit=is_again)

    def note_feedback(self, feedback: Feedback) -> None:
        tenant, arm = self._rateable.get(feedback.request_id, (None, None))
        if arm is not None and tenant == feedback.tenant_id:
            del self._rateable[feedback.request_id]
            self._count(arm, Metric.THUMBS_DOWN, is_hit=feedback.rating == "down")

    def note_escalated(self, active: ActiveRequest) -> None:
        """The large decoder answers: nothing more is learnt of the small one."""
        if active.arm is not None:
            self._count(active.arm, Metric.ESCALATED, is_hit=True)
            active.arm = None

    def note_grounding(self, active: ActiveRequest, report: Report) -> None:
        if active.arm is not None and active.arm.is_watched and report.num_checked:
            self._count(active.arm, Metric.UNGROUNDED, is_hit=report.num_unsupported > 0 or report.num_draws > 1)

    def note_end(self, active: ActiveRequest, reason: FinishReason) -> None:
        arm, generation = active.arm, active.generation
        if (trial := self._trials.get(generation.model)) is not None:
            trial.changed.set()
        if arm is None or reason not in _ANSWERED:
            return
        sequences = [choice.sequence for choice in active.choices]
        texts = [self._host.decode(generation.model, each.token_ids[each.num_prompt :]) for each in sequences]
        self._count(arm, Metric.FAILED, is_hit=False)
        self._count(arm, Metric.EMPTY, is_hit=any(not text.strip() or declines(text) for text in texts))
        if sequences[0].num_judged:
            self._count(arm, Metric.ESCALATED, is_hit=False)
        if self._config.canary_mode != SHADOW:
            self._rateable[generation.request_id] = (active.request.tenant, arm)
            if len(self._rateable) > MAX_ANSWERS:
                self._rateable.popitem(last=False)
        elif not arm.is_canary and (trial := self._trials[arm.canary]).is_live:
            self._shadows.offer(active, arm, texts, is_free=trial.group is not None and not trial.group.num_waiting)

    def _note_shadow(self, arm: Arm, is_equal: bool) -> None:
        """A short greedy answer, beside the one that the client got."""
        self._count(arm, Metric.DIFFERENT, is_hit=not is_equal)

    # --- a trial -------------------------------------------------------------------------------------------------------------

    async def _run(self, trial: Trial) -> None:
        try:
            record = await asyncio.to_thread(self._remember, trial)
        except (sqlite3.DatabaseError, ConfigError) as error:
            log.error("canary=%s is not tried, what was decided of it before can't be read: %s", trial.name, error)
            return
        if record.end is not None:
            log.warning(
                "canary=%s fingerprint=%s is not tried again: %s (%s); `mmserve canary reset` forgets that",
                trial.name, trial.fingerprint[:12], record.end.decision, record.end.reason,
            )  # fmt: skip
            return
        trial.comparison = self._comparison(record)
        trial.has_passed = record.has_passed
        try:
            async with self._opened(trial):
                trial.is_open = True
                await self._host.prove(trial.canary.composition)
                share = f"{self._config.canary_mode} share={self._config.canary_share:g}"
                num_before = sum(pair.canary.trials for (_, metric), pair in trial.comparison.pairs.items() if metric is Metric.FAILED)
                self._decide(trial, STARTED, f"{share} answers_before={num_before}")
                self._go_live(trial, is_live=True)
                await self._until_ended(trial)
                await self._retire(trial)
        except MmserveError as error:
            if trial.why_ended is not None:
                raise
            self._decide(trial, ROLLED_BACK, f"it never came up: {error.message}")
        finally:
            trial.is_open = False
            self._go_live(trial, is_live=False)

    @asynccontextmanager
    async def _opened(self, trial: Trial) -> AsyncIterator[None]:
        """Its workers, and the encoders that are its own, are ready inside.  Raises WorkerFailedToStart."""
        async with self._media.running_beside(trial.canary) as trial.lanes:
            trial.group = self._groups.open(trial.name, partial(self.note_death, trial.name))
            try:
                await asyncio.gather(*(supervisor.first_ready() for supervisor in trial.group.supervisors))
                yield
            finally:
                await trial.group.close()

    def _remember(self, trial: Trial) -> CanaryRecord:
        """What happened to these weights before.  In a thread: it reads them all.  Raises ConfigError, sqlite3.DatabaseError."""
        trial.fingerprint = trial.canary.fingerprint(self._check_open)
        if not self._ledger.flush():
            raise ConfigError("the database can't be written")  # the last decisions may lie in the spool
        return self._read(trial)

    def _check_open(self) -> None:
        """A thread that reads gigabytes must not keep the process from its end."""
        if self._closing.is_set():
            raise Overloaded("the server is shutting down", code="shutting_down")

    def _read(self, trial: Trial) -> CanaryRecord:
        with CanaryRecords(self._ledger.path) as records:
            return records.read(trial.name, trial.fingerprint)

    def _comparison(self, record: CanaryRecord | None) -> Comparison:
        counts = None if record is None else record.counts
        return Comparison(self._config.canary_margin, counts, disagreement=self._config.canary_disagreement)

    async def _until_ended(self, trial: Trial) -> None:
        """A breach, deaths, or the operator."""
        while not trial.ended.is_set():
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await trial.ended.wait()
            except TimeoutError:
                await self._look(trial)

    async def _look(self, trial: Trial) -> None:
        try:
            record = await asyncio.to_thread(self._read, trial)
        except (sqlite3.DatabaseError, ConfigError) as error:
            log.warning("canary=%s records can't be read: %s", trial.name, error)
            return
        if record.end is not None:
            self._end(trial, f"{record.end.decision}: {record.end.reason}")

    async def _retire(self, trial: Trial) -> None:
        """Who has heard nothing yet is answered by the other decoder; whoever has, by this one to the end, if it lives."""
        self._shadows.cancel()
        group = trial.group
        while group is not None and group.alive and (left := self._active_at(trial.name)):
            trial.changed.clear()
            for active in left:
                if active.first_token_s is None and active.arm is not None:
                    self._return(active, trial)
            await trial.changed.wait()

    def _active_at(self, name: str) -> list[ActiveRequest]:
        return [active for active in self._host.active() if active.generation.model == name]

    def _return(self, active: ActiveRequest, trial: Trial) -> None:
        if active.generation.request_id in self._returning:
            return
        active.arm = None  # whatever comes is not the canary's doing alone
        self._returning.add(active.generation.request_id)
        self._metrics.canary_returns.labels(trial.name).inc()
        self._tasks.start(self._go_back(active, trial), f"return-{active.generation.request_id}")

    async def _go_back(self, active: ActiveRequest, trial: Trial) -> None:
        error: MmserveError | None = None
        try:
            await self._host.go_back(active)
        except MmserveError as failure:
            error = failure
        except Exception:  # a mistake of ours: nobody must wait for it for ever
            log.exception("request=%s could not go on beside %s", active.generation.request_id, trial.name)
            error = MmserveError("internal error")
        finally:
            self._returning.discard(active.generation.request_id)
            trial.changed.set()
        if error is not None:
            self._host.fail(active, error)

    # --- books ---------------------------------------------------------------------------------------------------------------

    def _count(self, arm: Arm, metric: Metric, *, is_hit: bool) -> None:
        trial = self._trials[arm.canary]
        if not trial.is_live:
            return
        labels = (arm.canary, arm.slice_name, metric.value, "canary" if arm.is_canary else "stable")
        self._metrics.canary_answers.labels(*labels).inc()
        self._metrics.canary_wrong_answers.labels(*labels).inc(is_hit)
        self._ledger.record_canary(CanaryOutcome(arm.canary, trial.fingerprint, arm.slice_name, metric.value, arm.is_canary, is_hit))
        breach = trial.comparison.note(arm, metric, is_hit)
        if breach is not None:
            self._decide(trial, BREACHED, str(breach), breach)
            self._end(trial, f"{breach.metric} in slice {breach.slice_name}")
        elif trial.comparison.has_passed and not trial.has_passed:
            trial.has_passed = True
            figures = ", ".join(
                f"{name} {key} {pair.canary} against {pair.stable}" for (name, key), pair in trial.comparison.needed().items()
            )
            self._decide(trial, PASSED, f"within {self._config.canary_margin:g} everywhere: {figures}")

    def _check_circuits(self, trial: Trial) -> None:
        if open_lanes := [lane.pool.health.name for lane in trial.lanes if not lane.pool.health.is_closed]:
            self._end(trial, f"the circuit of its encoder opened: {', '.join(open_lanes)}")
        elif trial.group is not None and trial.group.broken:
            self._end(trial, "its worker does not live")

    def _end(self, trial: Trial, reason: str) -> None:
        """No new requests, from now on."""
        if trial.why_ended is None and trial.is_live:
            self._go_live(trial, is_live=False)
            trial.why_ended = reason
            self._decide(trial, ROLLED_BACK, reason)
            trial.ended.set()

    def _go_live(self, trial: Trial, *, is_live: bool) -> None:
        trial.is_live = is_live
        self._metrics.canary_live.labels(trial.name).set(is_live)

    def _decide(self, trial: Trial, decision: str, reason: str, breach: Breach | None = None) -> None:
        level = logging.INFO if decision in (STARTED, PASSED) else logging.WARNING
        where = "" if breach is None else f" slice={breach.slice_name} metric={breach.metric}"
        log.log(level, "canary=%s fingerprint=%s %s%s: %s", trial.name, trial.fingerprint[:12], decision, where, reason)
        self._metrics.canary_decisions.labels(trial.name, decision).inc()
        row = CanaryDecision(trial.name, trial.fingerprint, decision, reason, self._ledger.now_s())
        if breach is not None:
            ours, others = breach.canary, breach.stable
            row = replace(row, slice=breach.slice_name, metric=breach.metric.value, canary_hits=ours.hits, canary_trials=ours.trials)
            row = replace(row, stable_hits=others.hits, stable_trials=others.trials)
        self._ledger.record_canary(row)
