"""What is kept of a request once it has ended, and of the cache's comings and goings: metrics, and rows in the ledger."""

from __future__ import annotations

from mmserve.active_request import ActiveRequest
from mmserve.answer_quality import AnswerQuality
from mmserve.costs import CostBooks
from mmserve.encoders.embedding_cache import CacheEvent
from mmserve.ledger import CacheDropped, CacheMoved, CostRow, Ledger, RequestRow
from mmserve.ledger import CacheEvent as CacheRow
from mmserve.metrics import Metrics
from mmserve.request import Cost, FinishReason


class RequestRecords:
    def __init__(self, ledger: Ledger, metrics: Metrics, quality: AnswerQuality, costs: CostBooks) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._quality = quality
        self._costs = costs
        self._ended: list[ActiveRequest] = []  # with a step on its way that had a row of theirs

    def note_cost(self, active: ActiveRequest) -> None:
        """It has ended.  What it has cost so far is said at once, and kept as soon as nothing more can come."""
        active.generation.cost = self._cost(active)
        self._ended.append(active)
        self.keep_costs()

    def keep_costs(self, *, is_last: bool = False) -> None:
        """Of those to whom nothing more can come; at the last of all."""
        ended, self._ended = self._ended, []
        for active in ended:
            if is_last or active.bill.has_landed:
                self._keep_cost(active)
            else:
                self._ended.append(active)

    def _cost(self, active: ActiveRequest) -> Cost:
        has_begun = active.first_token_s is not None  # else there may be media that it never read
        return self._costs.cost(active.bill, [window for _, window in active.windows.values()] if has_begun else ())

    def _keep_cost(self, active: ActiveRequest) -> None:
        cost, metrics, mix = self._cost(active), self._metrics, active.route.modality_mix
        if active.overhead is not None:
            metrics.gpu_overhead_seconds.labels(active.overhead).inc(sum(cost.gpu_seconds.values()))
            return
        metrics.cost_usd.labels(mix).inc(cost.usd)
        metrics.cost_saved_usd.labels(mix).inc(cost.saved_usd)
        by_stage = {f"{stage}_gpu_s": seconds for stage, seconds in cost.gpu_seconds.items()}
        self._ledger.record_cost(CostRow(active.generation.request_id, **by_stage, usd=cost.usd, saved_usd=cost.saved_usd))

    def record_end(self, active: ActiveRequest, reason: FinishReason, now_s: float) -> None:
        """Its usage and timings must have been settled."""
        generation, usage, metrics = active.generation, active.generation.usage, self._metrics
        model, mix = generation.model, active.route.modality_mix
        ttft_s = None if active.first_token_s is None else active.first_token_s - active.arrival_s
        metrics.request_success.labels(model, reason.value).inc()
        metrics.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        metrics.generation_tokens.labels(model).inc(usage.completion_tokens)
        metrics.e2e_request_latency_seconds.labels(model, mix).observe(now_s - active.arrival_s)
        for notice in generation.degraded:
            metrics.degraded_media.labels(notice.kind).inc()
        for notice in generation.fallback:
            metrics.fallback_media.labels(notice.kind).inc()
        metrics.request_queue_time_seconds.labels(model).observe(generation.timings["queue"])
        if ttft_s is not None:
            metrics.request_prefill_time_seconds.labels(model).observe(generation.timings["prefill"])
            metrics.time_to_first_token_seconds.labels(model, mix).observe(ttft_s)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._quality.note_answer(generation.request_id, active.question, active.request.tenant, mix, now_s)
        self._ledger.record_request(
            RequestRow(
                request_id=generation.request_id,
                tenant_id=active.request.tenant,
                modality_mask=active.route.modality_mask,
                text_tokens=usage.text_tokens,
                vision_tokens=usage.image_tokens,
                audio_tokens=usage.audio_tokens,
                ttft_ms=None if ttft_s is None else ttft_s * 1e3,
                total_latency_ms=(now_s - active.arrival_s) * 1e3,
                model_variant=model,
                created_at=float(generation.created),
            )
        )

    def index_cache(self, event: CacheEvent) -> None:
        """Keep the ledger's index of the embedding cache."""
        key = event.key.hex()
        uri = f"{event.tier}:{key}"
        if event.kind is None:
            self._ledger.record_cache_event(CacheMoved(key, uri) if event.what == "moved" else CacheDropped(key, uri))
            return
        now, num_hits = self._ledger.now_s(), int(event.what == "hit")
        self._ledger.record_cache_event(CacheRow(key, event.kind.value, event.num_rows, uri, num_hits, now, now + event.expires_in_s))
