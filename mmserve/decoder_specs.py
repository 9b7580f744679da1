"""What a decoder is told at its start: a spec for each rank of each replica, and its scheduler's limits, from settings and checkpoint."""

from __future__ import annotations

from mmserve.composition import Composition
from mmserve.config import Config, SchedulerConfig, is_simulated, kv_block_size, max_queue_wait_s, replica_devices, tpot_target_ms
from mmserve.plan import DecoderWorkerSpec, SimulatedModel
from mmserve.scheduler.admission import QueueLimits
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.tokenizer import Tokenizer

NUM_SIMULATED_IDS = 256  # different tokens in answers of simulated devices


def replica_specs(
    name: str,
    config: Config,
    composition: Composition,
    *,
    device: str,
    dtype: str,
    num_threads: int,
    max_model_len: int,
    tokenizer: Tokenizer,
    base: str | None,
) -> tuple[tuple[DecoderWorkerSpec, ...], ...]:
    """Of the decoder `name`; a canary's `base` is the decoder that it stands beside.  Raises ConfigError."""
    model, scheduler, decoder = config.model, config.scheduler, composition.decoders[name]
    is_small = (base or name) == "small"
    num_ranks = model.small_tensor_parallel_size if is_small and "large" in composition.decoders else model.tensor_parallel_size
    devices_text, devices_key = model.small_devices if is_small else model.large_devices, f"{name}-devices"
    if base is not None:
        devices_text, devices_key = config.canary.canary_devices, "canary-devices"
    simulated = None
    if is_simulated(device):
        simulated = SimulatedModel(model.sim_small if is_small else model.sim_large, tokenizer.printable_ids(NUM_SIMULATED_IDS))

    def spec(device: str) -> DecoderWorkerSpec:
        return DecoderWorkerSpec(
            name=name,
            directory=decoder.weights.path,
            device=device,
            dtype=dtype,
            num_threads=num_threads,
            block_size=kv_block_size(scheduler.block_size, device, dtype),
            max_model_len=max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            kv_cache_memory_bytes=scheduler.kv_cache_memory_bytes,
            gpu_memory_utilization=scheduler.gpu_memory_utilization,
            config=decoder.config,
            names=decoder.weights.names,
            simulated=simulated,
        )

    replicas = replica_devices(devices_text, device, num_ranks, devices_key)
    return tuple(tuple(map(spec, ranks)) for ranks in replicas)


def scheduler_limits(config: SchedulerConfig, device: str, max_model_len: int) -> SchedulerLimits:
    target_ms = tpot_target_ms(config.tpot_target_ms, device)
    return SchedulerLimits(max_model_len, config.max_num_seqs, config.max_num_batched_tokens, target_ms)


def queue_limits(config: SchedulerConfig, device: str) -> QueueLimits:
    return QueueLimits(config.max_num_queued_reqs, max_queue_wait_s(config.max_queue_wait_s, device))
