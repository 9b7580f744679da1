"""GPU time by what a request carries, and dollars.

What a full replica takes is shared out over the requests it answers, in proportion to what each adds to the steps that it is in: a row
for every token of its answer, and the tokens of its prompt that are not in the cache.  So the shares sum to the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmserve.planner.box import Encoders
from mmserve.planner.replica_load import ReplicaModel
from mmserve.planner.workload import MODALITIES, Array

SECONDS_PER_HOUR = 3600.0
ENCODER_SHARE_LIMIT = 0.25  # of the GPU time of a text request, that encoding may add at most

USD_PER_GPU_HOUR: Mapping[str, float] = {"a100": 2.0, "h200": 3.8}
"""What a card on demand costs at the cheaper clouds, of the order of; everybody pays another price, so give your own."""


def gpu_s(model: ReplicaModel, rate: float | None = None) -> Array:
    """[N] GPU-seconds of each of the model's prompts, all ranks together, at a replica that takes `rate` a second; full by default."""
    decoder, workload, prompts = model.decoder, model.workload, model.prompts
    rate = model.max_rate if rate is None else rate
    rows, busy = model.rows_at(rate), 1024.0  # beside prefill a step is bound by compute, and each thing adds what it adds

    def seconds(rows: float, context: float, prefill: float, before: float) -> float:
        return decoder.step_s(rows, context, prefill, before)

    row_s = seconds(rows + 1, 0.0, busy, 0.0) - seconds(rows, 0.0, busy, 0.0)
    context_s = seconds(1.0, 1.0, busy, 0.0) - seconds(1.0, 0.0, busy, 0.0)  # a token looked back on
    token_s = (seconds(rows, 0.0, 2 * busy, 0.0) - seconds(rows, 0.0, busy, 0.0)) / busy
    pair_s = (seconds(0.0, 0.0, 1.0, 1e6) - seconds(0.0, 0.0, 1.0, 0.0)) / 1e6  # a token of a prompt and one that it looks back on
    context = prompts.num_tokens + workload.mean_answer_position
    new = prompts.num_new
    adds = workload.mean_answer * (row_s + context_s * context) + new * (token_s + pair_s * (prompts.num_tokens - new / 2))
    return adds / prompts.mean(adds) * decoder.num_ranks / rate


@dataclass(frozen=True, slots=True)
class ModalityCost:
    decoder_gpu_s: float  # a request
    encoder_gpu_s: float
    encoder_share: float  # of the decoder's GPU time of a text request
    usd_per_1000: float


def costs_by_modality(
    model: ReplicaModel, encoders: Encoders, *, usd_per_gpu_hour: float, num_gpus: float, rate: float
) -> dict[str, ModalityCost]:
    """Of a box of so many GPUs that carries `rate` requests a second of all kinds: the bill of its decoders shared out by GPU time, and
    the bill of its encoders by encoder time."""
    prompts = model.prompts
    decoding, encoding = gpu_s(model), encoders.work_s(prompts)
    usd_per_s = usd_per_gpu_hour / SECONDS_PER_HOUR
    decoder_usd = (num_gpus - encoders.num_cards) * usd_per_s / rate / prompts.mean(decoding)  # for a GPU-second of use
    encoder_usd = encoders.num_cards * usd_per_s / rate / prompts.mean(encoding) if encoding.any() else 0.0
    found: dict[str, ModalityCost] = {}
    text_s = 0.0
    for name in MODALITIES:
        chosen = prompts.of(name)
        if not chosen.any():
            continue
        weights = prompts.share[chosen] / prompts.share[chosen].sum()
        decoder_s, encoder_s = float(weights @ decoding[chosen]), float(weights @ encoding[chosen])
        text_s = text_s or decoder_s
        usd = 1000 * (decoder_s * decoder_usd + encoder_s * encoder_usd)
        found[name] = ModalityCost(decoder_s, encoder_s, encoder_s / text_s, usd)
    return found
