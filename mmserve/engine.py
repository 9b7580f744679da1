"""The engine: owns every sequence, the media on their way, and the workers; outlives all of the latter.

The gateway uses `AsyncEngine` and nothing else; `mmserve.sync_engine.Engine` is the same for plain Python.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
import uuid
from collections.abc import Sequence as SequenceOf
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

from mmserve.active_request import ActiveRequest, Choice, new_choice, record_timings, take_token
from mmserve.answer_quality import AnswerQuality
from mmserve.canaries import Canaries, Host, read_canaries
from mmserve.canary import Arm
from mmserve.canary_shadows import SHADOW
from mmserve.composition import Composition, beside, load_composition
from mmserve.config import Config, chosen_device, device_names
from mmserve.costs import CostBooks, Prices
from mmserve.decoder_groups import DecoderGroups
from mmserve.doubt import Doubt
from mmserve.errors import MmserveError, Overloaded, RateLimited, WorkerLost
from mmserve.escalation import Escalations
from mmserve.guardrail import Guardrail, own_judges
from mmserve.ledger import Feedback, Ledger
from mmserve.loop_lag import watch_lag
from mmserve.media import MediaKind, MediaLimits, MediaSpan
from mmserve.media_fetches import MediaFetches
from mmserve.media_service import MediaService
from mmserve.metrics import Metrics
from mmserve.modality_router import Route, route
from mmserve.model_router import LARGE, ModelChoice, RouteReason
from mmserve.prompt_maker import Prompt, PromptMaker
from mmserve.quarantine import Quarantine, prompt_digest
from mmserve.quota import QuotaBooks, Reservation
from mmserve.readiness import proof_requests
from mmserve.request import ChatRequest, FinishReason, Usage
from mmserve.request_records import RequestRecords
from mmserve.request_router import RequestRouter
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import SharedBuffer
from mmserve.tenants import Tenants
from mmserve.token_stream import Generation
from mmserve.tokenizer import load_tokenizers

log = logging.getLogger(__name__)


class AsyncEngine:
    """Start it, submit requests, close it; an async context manager does the first and the last."""

    def __init__(self, config: Config | None = None, *, metrics: Metrics | None = None, tenants: Tenants | None = None) -> None:
        self.config = config or Config()
        self.metrics = metrics or Metrics()
        self.tenants = tenants or Tenants()  # without any, nobody is limited
        self.quotas = QuotaBooks(self.tenants.quota)
        model = self.config.model
        self.composition = load_composition(model.model, small=model.small, large=model.large, chat_template=model.chat_template)
        self.limits: MediaLimits = self.config.limits
        self._beside = read_canaries(self.config, self.composition)
        self._bases = {name: canary.base for name, canary in self._beside.items()}
        self._decoders = beside(self.composition, self._beside)
        lengths = [decoder.max_model_len for decoder in self.composition.decoders.values()]
        self.max_model_len = min([*lengths, self.config.scheduler.max_model_len or max(lengths)])
        self.tokenizers = load_tokenizers(self.composition)
        self.tokenizers |= {name: self.tokenizers[base] for name, base in self._bases.items()}
        self._router = RequestRouter(model, model.served_model_name or self.composition.name, self.tenants.tier)
        self._seeds = random.Random(self.config.model.seed)
        latency = self.metrics.inter_token_latency_seconds
        self._inter_token_latency = {name: latency.labels(name) for name in self._decoders.decoders}  # looked up for every token
        self._seq_ids = itertools.count(1)
        self._active: dict[str, ActiveRequest] = {}  # by the server's own request id
        self._active_of: dict[int, tuple[ActiveRequest, Choice]] = {}  # by seq_id
        self._num_preparing = 0
        self._quarantine = Quarantine()
        self._proven = False
        self._draining = False
        self._idle = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers and send a real token, image and clip through them.  Raises WorkerFailedToStart."""
        model, encoder = self.config.model, self.config.encoder
        device = chosen_device(model.device)
        dtype = model.dtype if model.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
        num_threads = model.worker_threads or max(1, (os.cpu_count() or 1) // 2)
        async with AsyncExitStack() as stack:
            self.ledger = Ledger(self.config.storage.ledger)
            stack.callback(self.ledger.close)
            self._quality = AnswerQuality(self.ledger, self.metrics)
            self._costs = CostBooks(Prices(self.config.cost), lambda name, num_tokens: self._groups[name].prefill_gpu_s(num_tokens))
            self._records = RequestRecords(self.ledger, self.metrics, self._quality, self._costs)
            stack.callback(self._records.keep_costs, is_last=True)
            buffer = SharedBuffer(encoder.shared_buffer_bytes)
            stack.callback(buffer.memory.close)
            self._media = MediaService(
                self.config,
                self.composition,
                buffer,
                self.metrics,
                cache_dir=self.config.storage.directory / "embeddings",
                rows_dtype=dtype,
                on_restart=self._count_restart,
                on_cache_event=self._records.index_cache,
                canaries=self._beside,
            )
            devices = {
                MediaKind.IMAGE: device_names(model.vision_devices, device),
                MediaKind.AUDIO: device_names(model.audio_devices, device),
            }
            await stack.enter_async_context(self._media.running(devices, num_threads))
            self._prompts = PromptMaker(self._media, self.tokenizers)
            judges = await asyncio.to_thread(own_judges, self.config, self.composition, device)
            texts = self.tokenizers
            self._groups = DecoderGroups(
                self.config, self._decoders, self._bases, texts, self._media.cache, buffer.memory, self.metrics,
                device=device, dtype=dtype, num_threads=num_threads, max_model_len=self.max_model_len,
                deliver=self._deliver, want=self._want, lost=self._lose,
            )  # fmt: skip
            host = Host(
                self._is_idle, self._prove, self._submit, self._go_back, self._fail, self._active.values,
                decode=lambda model, ids: texts[model].decode(ids),
            )  # fmt: skip
            self._canaries = Canaries(self.config.canary, self._beside, host, self._groups, self._media, self.ledger, self.metrics)
            self.guardrail = Guardrail(
                self.config.guardrail, judges, self._media, texts, self._quality, self.metrics,
                bases=self._bases, on_report=self._canaries.note_grounding,
            )  # fmt: skip
            stack.push_async_callback(self.guardrail.close)
            self._escalations = Escalations(self._prompts.make, self._check, self._escalate, self._deliver)
            stack.push_async_callback(self._escalations.close)
            self._fetches = MediaFetches(
                self._media, self._prompts.make, self._check, self._begin, self._fail,
                move=self._canaries.note_failure, landed=self._wake, is_running=lambda active: active.generation.request_id in self._active,
            )  # fmt: skip
            stack.push_async_callback(self._groups.close)
            for name in self.composition.decoders:
                self._groups.open(name, self._count_restart)
            stack.push_async_callback(self._canaries.close)
            stack.push_async_callback(self._end_everything)
            supervisors = [*self._media.supervisors, *(s for group in self._groups.values() for s in group.supervisors)]
            await asyncio.gather(*(supervisor.first_ready() for supervisor in supervisors))
            lag = asyncio.create_task(watch_lag(self.metrics), name="loop-lag")
            stack.callback(lag.cancel)
            await self._prove(self.composition)
            self._proven = True
            self._stack = stack.pop_all()
            self._canaries.start()

    async def close(self) -> None:
        """End what still runs with an error, then the workers.  Idempotent."""
        self._draining = True
        await self._stack.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let accepted ones finish; after `timeout_s` end the rest with `shutdown`."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._active or self._num_preparing:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            await self._end_everything()

    def ready(self, route: str = "all") -> bool:
        """Whether `text`, `image`, `audio` or `all` went through for real and can be done now."""
        if self._draining or not self._proven or not all(group.alive for group in self._groups.stable.values()):
            return False
        kinds = {"text": (), "image": (MediaKind.IMAGE,), "audio": (MediaKind.AUDIO,), "all": self._media.kinds}[route]
        return all(kind in self._media.kinds and self._media.works(kind) for kind in kinds)

    def token_text(self, token_id: int, model: str) -> str:
        return self.tokenizers[model].token_text(token_id)

    def check_room(self, tenant: str) -> None:
        """Raises Overloaded or RateLimited if no request would be taken now, whatever is in it: to be asked before a body is read."""
        if self._draining:
            raise Overloaded("the server is shutting down", code="shutting_down", retry_after_s=5.0)
        try:
            self.quotas.check_room(tenant, time.monotonic())
        except RateLimited as error:
            self.metrics.admission_rejections.labels(error.type).inc()
            raise
        try:
            self._groups.check_room(self._num_preparing)
        except Overloaded:
            self.metrics.admission_rejections.labels("queue_full").inc()
            raise

    async def submit(self, request: ChatRequest) -> Generation:
        """Returns once the request is admitted: counted, within every limit, queued.  Raises MmserveError when refused."""
        active = await self._admit(self.guardrail.resolve(request))
        question = active.question
        self._quality.note_question(question, active.route.modality_mix, active.arrival_s)
        self._canaries.note_question(active, question, active.arrival_s)
        return self.guardrail.guard(active, self._admit)

    def record_feedback(self, feedback: Feedback) -> None:
        self._quality.note_feedback(feedback, time.monotonic())
        self._canaries.note_feedback(feedback)

    async def _admit(self, request: ChatRequest) -> ActiveRequest:
        self.check_room(request.tenant)
        self._num_preparing += 1
        try:
            return await self._submit(request)
        except MmserveError as error:
            self.metrics.admission_rejections.labels(error.type).inc()
            raise
        finally:
            self._num_preparing -= 1
            self._idle.set()

    async def _submit(self, request: ChatRequest, overhead: str | None = None, arm: Arm | None = None) -> ActiveRequest:
        """`overhead` says why it is nobody's; `arm` is a shadow's."""
        arrival_s = time.monotonic()
        routed = route(request.media, has_text=request.num_characters > 0, limits=self.limits)
        choice = self._router.choose(
            request, available=self.composition.decoders, capable=self._groups.capable(routed.pools), waiting=self._groups.num_waiting,
            canaries=self._canaries.names,
        )  # fmt: skip
        if overhead is None and (arm := self._canaries.enrol(request, choice)) is not None and arm.is_canary:
            try:
                return await self._prepare(request, routed, replace(choice, model=arm.canary), arrival_s, overhead, arm)
            except MmserveError as error:
                self._canaries.note_refusal(arm, error)
                arm = None
        return await self._prepare(request, routed, choice, arrival_s, overhead, arm)

    async def _prepare(
        self, request: ChatRequest, routed: Route, choice: ModelChoice, arrival_s: float, overhead: str | None, arm: Arm | None
    ) -> ActiveRequest:
        prompt = await self._prompts.make(request, choice.model, {})
        num_prompt, sampling = len(prompt.fused.token_ids), request.sampling
        reservation = self.quotas.reserve(
            request.tenant,
            num_prompt=num_prompt,
            num_answer=self._check(request, choice.model, prompt) - num_prompt,
            num_choices=sampling.n,
            may_shorten=sampling.max_tokens is None,
            now_s=time.monotonic(),
        )
        doubt = self._router.doubt(choice, request)
        models = [choice.model] if doubt is None else [choice.model, LARGE]
        if choice.model in self._bases:
            models.append(self._bases[choice.model])  # which may have to say the rest
        num_bytes = self._media.num_bytes(prompt.media, models)
        try:
            if overhead == SHADOW and not self._media.room.has(num_bytes):
                raise Overloaded("a shadow doesn't wait for room")
            await self._media.room.take(num_bytes)
        except BaseException:
            self.quotas.settle(reservation, 0, time.monotonic())
            raise
        return self._activate(request, routed, choice, doubt, prompt, reservation, num_bytes, arrival_s, overhead, arm)

    def _check(self, request: ChatRequest, model: str, prompt: Prompt) -> int:
        """Most tokens that each sequence may reach.  Raises the error of whatever limit it would break."""
        fused, sampling = prompt.fused, request.sampling
        if self._quarantine:
            self._quarantine.check(prompt_digest(model, fused.token_ids, fused.spans), time.monotonic(), param="messages")
        group = self._groups[model]
        return group.check(len(fused.token_ids), sampling.max_tokens, sampling.n, request.tenant, has_media=bool(fused.spans))

    def _activate(
        self,
        request: ChatRequest,
        routed: Route,
        choice: ModelChoice,
        doubt: Doubt | None,
        prompt: Prompt,
        reservation: Reservation,
        num_bytes: int,
        arrival_s: float,
        overhead: str | None,
        arm: Arm | None,
    ) -> ActiveRequest:
        """From here on the request ends exactly once, through `_end`."""
        sampling = request.sampling
        generation = Generation(
            request_id=uuid.uuid4().hex,
            model=choice.model,
            route_reason=choice.reason,
            usage=Usage(),
            num_choices=sampling.n,
        )
        active = ActiveRequest(
            request=request,
            route=routed,
            generation=generation,
            seed=sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63),
            arrival_s=arrival_s,
            admitted_s=time.monotonic(),
            reservation=reservation,
            num_media_bytes=num_bytes,
            overhead=overhead,
            bill=self._costs.open(),
            arm=arm,
            doubt=doubt,
        )
        generation.on_cancel = lambda: self._end(active, FinishReason.CANCELLED)
        self._active[generation.request_id] = active
        self._begin(active, prompt, self.max_model_len)
        return active

    def _begin(self, active: ActiveRequest, prompt: Prompt, max_total_tokens: int, said: SequenceOf[Choice] = ()) -> None:
        """Hand the request's sequences to its decoder, in the place of those that it may have there; with room as was reserved, at most.

        `said` is what another decoder has said already: they go on behind that.
        """
        generation, request, fused = active.generation, active.request, prompt.fused
        max_total_tokens = min(max_total_tokens, len(fused.token_ids) + active.reservation.num_answer)
        self._withdraw(active)
        generation.degraded, generation.fallback = prompt.degraded, prompt.fallback
        generation.usage = Usage(
            prompt_tokens=len(fused.token_ids),
            text_tokens=fused.num_text_tokens,
            image_tokens=fused.num_image_tokens,
            audio_tokens=fused.num_audio_tokens,
        )
        active.choices = tuple(
            new_choice(
                index,
                Sequence(
                    seq_id=next(self._seq_ids),
                    token_ids=fused.token_ids[:],
                    spans=fused.spans,
                    sampling=request.sampling,
                    seed=(active.seed + index) % 2**64,
                    eos_token_ids=self._decoders.decoders[generation.model].eos_token_ids,
                    max_total_tokens=max_total_tokens,
                    priority=request.priority,
                    arrival_s=active.arrival_s,
                    salt=request.cache_salt.encode(),
                    tenant=request.tenant,
                    num_judged=0 if active.doubt is None else active.doubt.num_tokens,
                ),
                self.tokenizers[generation.model],
                said[index] if said else None,
            )
            for index in range(request.sampling.n)
        )
        active.bill.add(generation.model, [each.sequence for each in active.choices])
        active.media = prompt.media
        active.windows = {window.key: (item, window) for item in prompt.media for window in item.windows}
        for key, (_, window) in active.windows.items():
            if key not in active.pinned and self._media.acquire(window):
                active.sources[key] = "memory"
                active.pinned.append(key)
        self.metrics.fused_tokens.labels(generation.model, active.route.modality_mix).observe(len(fused.token_ids))
        for each in active.choices:
            self._active_of[each.sequence.seq_id] = (active, each)
            if not each.finished:
                self._groups[generation.model].add(each.sequence)

    def _withdraw(self, active: ActiveRequest) -> None:
        """Its sequences and fetches, wherever they are."""
        for choice in active.choices:
            del self._active_of[choice.sequence.seq_id]
            self._groups[active.generation.model].abort(choice.sequence.seq_id)
        self._fetches.leave(active)

    def _deliver(self, updates: list[TokenUpdate]) -> None:
        now_s = time.monotonic()
        for update in updates:
            found = self._active_of.get(update.sequence.seq_id)
            if found is not None:  # else it ended while this step ran
                self._take(*found, self._escalations.sift(found[0], update), now_s)
        self._records.keep_costs()

    def _take(self, active: ActiveRequest, choice: Choice, updates: SequenceOf[TokenUpdate], now_s: float) -> None:
        for update in itertools.takewhile(lambda _: not choice.finished, updates):  # a stop string may end it within what was held back
            if active.last_token_s and update.token is not None:
                self._inter_token_latency[active.generation.model].observe(now_s - active.last_token_s)
            ending = take_token(active, choice, update, now_s)
            if isinstance(ending, MmserveError):
                self._fail(active, ending)
            elif ending is not None:
                self._groups[active.generation.model].abort(update.sequence.seq_id)
                if all(each.finished for each in active.choices):
                    self._end(active, ending)

    def _want(self, sequence: Sequence, span: MediaSpan) -> None:
        """A sequence waits for a span's rows."""
        found = self._active_of.get(sequence.seq_id)
        if found is not None:
            self._fetches.want(found[0], span.key)

    def _wake(self, active: ActiveRequest) -> None:
        """Rows of it have landed."""
        for choice in active.choices:
            self._groups[active.generation.model].wake(choice.sequence.seq_id)

    def _escalate(self, active: ActiveRequest, prompt: Prompt, max_total_tokens: int) -> None:
        """The large decoder answers in the small one's place."""
        self._canaries.note_escalated(active)
        self._withdraw(active)
        active.choices, active.doubt = (), None
        active.generation.model, active.generation.route_reason = LARGE, RouteReason.ESCALATED
        self._begin(active, prompt, max_total_tokens)

    def _fail(self, active: ActiveRequest, error: MmserveError) -> None:
        if self._canaries.note_failure(active, error):
            return  # it goes on elsewhere
        if self._end(active, FinishReason.ERROR):
            log.info("request=%s failed code=%s", active.generation.request_id, error.code)
            active.generation.fail(error)

    def _end(self, active: ActiveRequest, reason: FinishReason) -> bool:
        """Give everything back and write the row.  Idempotent: the first reason counts.  Returns whether this was the first."""
        generation = active.generation
        if self._active.pop(generation.request_id, None) is None:
            return False
        now_s = time.monotonic()
        generation.usage = active.usage()
        generation.timings = record_timings(active, now_s)
        self._withdraw(active)
        active.doubt = None
        self.guardrail.sample(active, reason)
        self._canaries.note_end(active, reason)
        for key in active.pinned:
            self._media.cache.unpin(key)
        self._media.room.give_back(active.num_media_bytes)
        self.quotas.settle(active.reservation, active.used_tokens, now_s)
        self._idle.set()
        self._records.note_cost(active)
        if active.overhead is None:
            self._records.record_end(active, reason, now_s)
        return True

    async def _prove(self, composition: Composition) -> None:
        """A real token, image and clip, through the real path, on every decoder of it.  Raises MmserveError."""
        for request in proof_requests(composition, [kind for kind in self._media.kinds if self._media.works(kind)]):
            async for _ in (await self._submit(request, "readiness")).generation:
                pass

    async def _end_everything(self) -> None:
        for active in list(self._active.values()):
            self._fail(active, Overloaded("the server is shutting down", code="shutdown"))

    def _lose(self, sequence: Sequence, error: MmserveError) -> None:
        """A sequence that no worker can be found to compute, or that ends those that try."""
        active, _ = self._active_of.get(sequence.seq_id, (None, None))
        if active is None:
            return  # it ended meanwhile
        if isinstance(error, WorkerLost):
            prompt = sequence.token_ids[: sequence.num_prompt]
            self._quarantine.add(prompt_digest(active.generation.model, prompt, sequence.spans), time.monotonic())
        self._fail(active, error)

    def _count_restart(self, role: str) -> None:
        self.metrics.worker_restarts.labels(role).inc()

    # --- canaries ------------------------------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        """Nobody waits for anything, nor goes."""
        return not (self._draining or self._num_preparing or any(self._groups.num_waiting.values()))

    async def _go_back(self, active: ActiveRequest) -> None:
        """From a canary to the decoder beside it, which says the rest of what was begun.  Raises MmserveError."""
        generation = active.generation
        if (base := self._bases.get(generation.model)) is None:
            return  # it was just moved to the large decoder
        prompt = await self._prompts.make(active.request, base, dict(active.left_out))
        if generation.request_id not in self._active or generation.model not in self._bases:
            return  # it ended meanwhile, or was moved
        said = active.choices if active.first_token_s is not None else ()
        self._withdraw(active)
        active.choices, active.doubt, generation.model = (), None, base
        self._begin(active, prompt, self.max_model_len, said)
