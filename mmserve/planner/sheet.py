"""A plan as plain figures: the best way to cut a box up for a mix, and what becomes of a rate on it."""

from __future__ import annotations

import math
from typing import Any

from mmserve.planner.box import Encoders, Outcome
from mmserve.planner.costs import ENCODER_SHARE_LIMIT, ModalityCost, costs_by_modality
from mmserve.planner.fleet import Box, num_boxes
from mmserve.planner.replica_load import ReplicaModel
from mmserve.planner.workload import p99_prompt, prompts_of

ENCODER_UTILIZATION = 0.7  # of the encoder cards that a rate is given

Sheet = dict[str, Any]


def plan(boxes: list[Box], rate: float, usd_per_gpu_hour: float) -> Sheet:
    """What `ranked` boxes, the first of them above all, make of `rate` requests a second."""
    best = boxes[0]
    count = num_boxes(best, rate)
    carried, breaks_first = best.limit
    return {
        "rate": rate,
        "shares": dict(best.demand.workload.shares),
        "splits": [_split(box, rate) for box in boxes],
        "best": str(best.split),
        "best_carries": carried,
        "best_breaks_first": breaks_first,
        "one_box": _one_box(best, rate),
        "at_its_limit": _one_box(best, carried) if carried else None,
        "num_boxes": count,
        "usd_per_hour": count * best.split.num_gpus * usd_per_gpu_hour if count else None,
        "usd_per_1000": 1000 * count * best.split.num_gpus * usd_per_gpu_hour / 3600 / rate if count else None,
        "gpus": _gpus(best, rate) if carried else None,
        "kv": {name: _kv(replicas.kinds.all.model, best.at(rate)[name]) for name, replicas in best.replicas.items()},
        "costs": _costs(best, usd_per_gpu_hour) if carried else None,
        "encoder_share_limit": ENCODER_SHARE_LIMIT,
    }


def _split(box: Box, rate: float) -> Sheet:
    carried, breaks_first = box.limit
    return {
        "split": str(box.split),
        "carries": carried,
        "breaks_first": breaks_first,
        "goodput": box.goodput(rate),
        "num_boxes": num_boxes(box, rate),
    }


def _one_box(box: Box, rate: float) -> Sheet:
    """What becomes of a rate on one box, by decoder and modality."""
    outcomes = box.at(rate)
    return {
        "offered": rate,
        "answered": sum(outcome.carried for outcome in outcomes.values()),
        "goodput": box.goodput(rate),
        "breaks": sorted(set(box.broken(outcomes).values())),
        "decoders": {name: _decoder(outcome) for name, outcome in outcomes.items()},
    }


def _decoder(outcome: Outcome) -> Sheet:
    modalities = {}
    for name in outcome.modalities:
        (ttft_p50_s, ttft_p99_s), (tpot_p50_s, tpot_p99_s) = outcome.ttft_s(name), outcome.tpot_s(name)
        modalities[name] = {
            "offered": outcome.offered_of(name),
            "answered": outcome.carried_of(name),
            "ttft_ms_p50": 1e3 * ttft_p50_s,
            "ttft_ms_p99": 1e3 * ttft_p99_s,
            "tpot_ms_p50": 1e3 * tpot_p50_s,
            "tpot_ms_p99": 1e3 * tpot_p99_s,
        }
    return {
        "offered": outcome.offered,
        "answered": outcome.carried,
        "tpot_ms_p50": 1e3 * outcome.tpot_p50_s,
        "tpot_ms_p99": 1e3 * outcome.tpot_p99_s,
        "pools": [
            {
                "kind": pool.kind.name,
                "num_replicas": pool.num_replicas,
                "rows_per_replica": pool.now.load.rows,
                "prefill_share": pool.now.load.prefill_share,
            }
            for pool in outcome.pools
        ],
        "modalities": modalities,
    }


def _gpus(box: Box, rate: float) -> Sheet:
    """Cards that the rate keeps busy, and how many to have, whatever boxes they are in."""
    carried, _ = box.limit
    workload = box.demand.workload
    needed: Sheet = {}
    for part in box.split.parts:
        cards = part.num_replicas * part.num_ranks * rate / carried
        needed[part.name] = {"busy": cards, "cards": part.num_ranks * math.ceil(cards / part.num_ranks - 1e-9)}
    prompts = prompts_of(workload)
    card = next(iter(box.replicas.values())).kinds.all.model.decoder.card
    for name, work_s in (
        ("vision", prompts.mean(prompts.num_encodes) / card.pictures_per_s),
        ("audio", prompts.mean(prompts.encode_audio_s) / card.audio_s_per_s),
    ):
        needed[name] = {"busy": rate * work_s, "cards": math.ceil(rate * work_s / ENCODER_UTILIZATION)}
    return needed


def _kv(model: ReplicaModel, outcome: Outcome) -> Sheet:
    """Of one replica, the fullest.  Headroom is what is left beside the rows and the largest usual prompt."""
    decoder, workload = model.decoder, model.workload
    grown = model.prompts.mean(model.prompts.num_tokens) + workload.mean_answer
    largest = p99_prompt(workload)
    block = decoder.block_size
    used = max(pool.now.load.rows * (pool.kind.model.context + block / 2) for pool in outcome.pools)
    free_blocks = int((decoder.kv_tokens - used) // block) - math.ceil(largest / block)
    return {
        "tokens": decoder.kv_tokens,
        "blocks": decoder.kv_tokens // block,
        "block_size": block,
        "used_tokens": used,
        "p99_prompt": largest,
        "headroom_blocks": free_blocks,
        "headroom_tokens": free_blocks * block,
        "sequences_that_fit": int(decoder.num_rows_that_fit(grown)),
        "max_num_seqs": decoder.max_num_seqs,
    }


def _costs(box: Box, usd_per_gpu_hour: float) -> dict[str, dict[str, Sheet]]:
    """By decoder and modality, at the rate that the box carries."""
    carried, _ = box.limit
    found = {}
    for part in box.split.parts:
        share = box.demand.shares[part.name]
        model = box.replicas[part.name].kinds.all.model
        encoders = Encoders(model.decoder.card, box.split.num_encoders * share)
        num_gpus = part.num_replicas * part.num_ranks + encoders.num_cards
        costs = costs_by_modality(model, encoders, usd_per_gpu_hour=usd_per_gpu_hour, num_gpus=num_gpus, rate=carried * share)
        found[part.name] = {name: _cost(cost) for name, cost in costs.items()}
    return found


def _cost(cost: ModalityCost) -> Sheet:
    return {
        "decoder_gpu_ms": 1e3 * cost.decoder_gpu_s,
        "encoder_gpu_ms": 1e3 * cost.encoder_gpu_s,
        "encoder_share": cost.encoder_share,
        "usd_per_1000": cost.usd_per_1000,
    }
