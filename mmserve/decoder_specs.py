"""What a decoder's worker processes are told at their start: a spec for each rank of each replica, from settings and checkpoint."""

from __future__ import annotations

from mmserve.composition import Composition
from mmserve.config import Config, is_simulated, kv_block_size, replica_devices
from mmserve.plan import DecoderWorkerSpec, SimulatedModel
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
) -> tuple[tuple[DecoderWorkerSpec, ...], ...]:
    """Of the decoder `name`.  Raises ConfigError."""
    model, scheduler, decoder = config.model, config.scheduler, composition.decoders[name]
    is_beside_large = name == "small" and "large" in composition.decoders
    num_ranks = model.small_tensor_parallel_size if is_beside_large else model.tensor_parallel_size
    devices_text = model.small_devices if name == "small" else model.large_devices
    simulated = None
    if is_simulated(device):
        simulated = SimulatedModel(model.sim_small if name == "small" else model.sim_large, tokenizer.printable_ids(NUM_SIMULATED_IDS))

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

    replicas = replica_devices(devices_text, device, num_ranks, f"{name}-devices")
    return tuple(tuple(map(spec, ranks)) for ranks in replicas)
