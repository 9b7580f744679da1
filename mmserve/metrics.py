"""Prometheus metrics, by vLLM's names under the prefix `mmserve:`.  All label sets are closed: nothing a client says becomes a label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.9, 1.5, 3.0, 6.0, 15.0, 30.0, 60.0, 120.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LAG = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_BATCH = (1, 2, 4, 8, 16, 24, 32, 48)
_SHARE = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
_TOKENS = (16, 64, 256, 600, 1200, 2400, 4800, 9600, 19200)


class Metrics:
    """One registry per server, so that two engines in one process (tests) keep apart."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"mmserve:{name}", help, labels, registry=registry)

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"mmserve:{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"mmserve:{name}", help, labels, buckets=buckets, registry=registry)

        model, mix, modality = ("model_name",), ("model_name", "modality_mix"), ("modality",)
        self.num_requests_running = gauge("num_requests_running", "Sequences in the running set", model)
        self.num_requests_waiting = gauge("num_requests_waiting", "Sequences waiting for a first step or for media", model)
        self.kv_cache_usage_perc = gauge("kv_cache_usage_perc", "Share of KV blocks that are held, 0 to 1", model)
        self.prefix_cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", model)
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found there", model)
        self.mm_cache_queries = counter("mm_cache_queries", "Media windows looked up in the embedding cache", modality)
        self.mm_cache_hits = counter("mm_cache_hits", "Media windows found there, by tier", ("modality", "tier"))
        self.single_flight_joins = counter("single_flight_joins", "Media windows that joined an encode under way", modality)
        self.time_to_first_token_seconds = histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS, mix)
        self.inter_token_latency_seconds = histogram("inter_token_latency_seconds", "Between tokens of a stream", _STEP, model)
        self.e2e_request_latency_seconds = histogram("e2e_request_latency_seconds", "Arrival to last token", _SECONDS, mix)
        self.request_queue_time_seconds = histogram("request_queue_time_seconds", "Arrival to first step", _SECONDS, model)
        self.request_prefill_time_seconds = histogram("request_prefill_time_seconds", "First step to first token", _SECONDS, model)
        self.prompt_tokens = counter("prompt_tokens", "Fused prompt tokens", model)
        self.generation_tokens = counter("generation_tokens", "Tokens generated", model)
        self.num_preemptions = counter("num_preemptions", "Sequences preempted for memory", model)
        self.request_success = counter("request_success", "Requests that ended", ("model_name", "finished_reason"))
        self.fused_tokens = histogram("fused_tokens", "Prompt length after fusion", _TOKENS, mix)
        self.encoder_items_per_batch = histogram("encoder_items_per_batch", "Windows in one encoder forward", _BATCH, modality)
        self.encoder_forward_seconds = histogram("encoder_forward_seconds", "One encoder forward", _STEP, modality)
        self.encoder_queue_wait_seconds = histogram("encoder_queue_wait_seconds", "Decoded to forward", _STEP, modality)
        self.breaker_state = gauge("breaker_state", "Circuit breaker of an encoder: 0 closed, 1 half-open, 2 open", modality)
        self.degraded_media = counter("degraded_media", "Media left out of an answer because their encoder failed", modality)
        self.fallback_media = counter("fallback_media", "Media encoded by a fallback encoder", modality)
        self.admission_rejections = counter("admission_rejections", "Requests refused at the door", ("reason",))
        self.connections = gauge("connections", "Connections that are open")
        self.connections_closed = counter("connections_closed", "Connections that the server refused or cut off", ("reason",))
        self.worker_restarts = counter("worker_restarts", "Worker processes started again", ("role",))
        self.stream_recoveries = counter("stream_recoveries", "Sequences carried over a dead worker", model)
        self.cache_corrupt = counter("cache_corrupt", "Disk cache entries that failed their integrity check")
        self.cache_disk_timeouts = counter("cache_disk_timeouts", "Reads and writes of the disk cache that were not waited for any longer")
        self.cache_unexplained_hits = counter("cache_unexplained_hits", "Embedding cache hits that no earlier request explains")
        self.cache_hit_rate_alarms = counter("cache_hit_rate_alarms", "Times that somebody was told of unexplained hits")
        self.event_loop_lag_seconds = histogram("event_loop_lag_seconds", "How late a timer of the main loop fires", _LAG)
        self.grounding_score = histogram(
            "grounding_score", "Share of an answer's objects that the vision side saw", _SHARE, ("model_name", "modality_mix", "mode")
        )
        self.grounding_samples_left_out = counter("grounding_samples_left_out", "Sampled answers that could not be looked at", ("reason",))
        self.guardrail_flags = counter("guardrail_flags", "Answers that went through the guardrail", ("model_name", "mode", "outcome"))
        self.feedback_ratings = counter("feedback_ratings", "Answers rated, each once", ("rating", "modality_mix"))
        self.regenerations = counter("regenerations", "Answers asked for again within minutes", ("modality_mix", "seen_by"))
        self.quality_alarms = counter("quality_alarms", "Times that somebody was told of a share that rose", ("what", "modality_mix"))
        canary = ("model_name", "slice", "metric", "arm")
        self.canary_answers = counter("canary_answers", "Answers that a canary is judged by", canary)
        self.canary_wrong_answers = counter("canary_wrong_answers", "Of those, what went wrong", canary)
        self.canary_decisions = counter("canary_decisions", "What was decided of a canary", ("model_name", "decision"))
        self.canary_live = gauge("canary_live", "Whether a canary takes its share: 0 or 1", model)
        self.canary_returns = counter("canary_returns", "Requests that went on beside the canary that had begun them", model)
        self.canary_shadows = counter("canary_shadows", "Shadowed requests: equal or other answers, or what they were left out for",
                                      ("model_name", "outcome"))  # fmt: skip
        self.gpu_seconds = counter("gpu_seconds", "Compute seconds by stage, of every GPU that took part", ("stage",))
        self.gpu_overhead_seconds = counter("gpu_overhead_seconds", "Of those, what no request is charged for", ("reason",))
        self.cost_usd = counter("cost_usd", "What requests were charged", ("modality_mix",))
        self.cost_saved_usd = counter("cost_saved_usd", "What caches spared them, by estimate", ("modality_mix",))

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)
