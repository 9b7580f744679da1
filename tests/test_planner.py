"""The planner: each formula against an example worked out by hand, what must rise or fall with what, and the simulated box."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.bench.client import Outcome
from mmserve.bench.statistics import summarize
from mmserve.bench.traffic import Modality
from mmserve.composition.decoder_config import complete_config
from mmserve.planner.box import Encoders, Replicas, kinds_of
from mmserve.planner.costs import costs_by_modality, gpu_s
from mmserve.planner.fleet import NUM_RANKS, Box, Demand, Part, Slo, Split, num_boxes, ranked
from mmserve.planner.refit import BENCH_KEYS, refit
from mmserve.planner.replica_load import Decoder, Load, ReplicaModel, wait_of
from mmserve.planner.sheet import plan
from mmserve.planner.workload import BLEND, MODALITIES, Workload, p99_prompt, prompts_of, quantile
from mmserve.roofline.hardware import A100, H200, LLAMA_8B, LLAMA_70B, shape_of_config
from mmserve.roofline.timing import PUBLISHED_FIT
from mmserve.scheduler.scheduler import STEP_SHARE
from scripts.compare_plan import formulas, simulate
from scripts.simulation import traffic

ALIKE = Workload(
    system_tokens=0, text_spread=0.0, answer_spread=0.0, repeat_rate=0.0, picture_counts=(1.0,), median_clip_s=20.0, clip_spread=0.0
)  # 300 tokens of text, a picture of 576, a clip of 500, answers of 250: the figures that the formulas are known by
SMALL = Decoder(LLAMA_8B, A100)


def text_of(num_tokens: float, **changes: float) -> Workload:
    return replace(ALIKE, mean_text=num_tokens, **changes).with_shares({"text": 1.0})  # type: ignore[arg-type]


def model(decoder: Decoder, workload: Workload) -> ReplicaModel:
    return ReplicaModel(decoder, workload, prompts_of(workload))


def box_of(num_replicas: int, num_encoders: int = 1, workload: Workload | None = None) -> Replicas:
    return Replicas(kinds_of(SMALL, workload or Workload()), num_replicas, Encoders(A100, num_encoders))


def demand(workload: Workload | None = None, **decoders: Decoder) -> Demand:
    by_name = {name: {ranks: replace(each, num_ranks=ranks) for ranks in NUM_RANKS} for name, each in decoders.items()}
    shares = {"small": 1.0} if len(by_name) == 1 else {"small": 0.85, "large": 0.15}
    return Demand(workload or Workload(), by_name, shares)


# One replica


def test_an_8b_answers_13_3_requests_a_second_at_35_ms() -> None:
    """605 tokens in, 250 out.  Of 35 ms a step takes 2.7 as such, and a row 0.189 for its 3.4 tokens, 0.063 to read its KV and 0.026 for
    its logits, its place and the attention of its prefill: that makes 116 rows, and 116 / (250 * 0.035)."""
    decoder = replace(SMALL, tpot_target_s=0.035 / STEP_SHARE)
    found = model(decoder, text_of(605))
    assert found.context == 605 + 125
    assert found.max_rate == pytest.approx(13.3, rel=0.01)
    assert found.at(found.max_rate).rows == pytest.approx(116, rel=0.02)


def test_a_70b_answers_4_6_requests_a_second_on_four_cards_at_50_ms_and_cannot_keep_35_on_two() -> None:
    large = Decoder(LLAMA_70B, A100, 4, tpot_target_s=0.05 / STEP_SHARE)
    assert model(large, text_of(605)).max_rate == pytest.approx(4.6, rel=0.02)
    assert model(replace(large, num_ranks=2), text_of(605)).at(0.01).mean_step_s > 0.035
    assert replace(large, num_ranks=2).kv_tokens // (605 + 250) == 28


def test_a_step_with_nobody_to_wait_for_takes_what_its_weights_take() -> None:
    alone = model(SMALL, text_of(300)).at(1e-3)
    assert [alone.mean_step_s, alone.decode_step_s] == pytest.approx([11.36e-3] * 2, rel=0.01)
    assert alone.residual_s == pytest.approx(alone.decode_step_s / 2, rel=0.01)


def test_rows_are_the_rate_times_the_answer_times_the_time_per_token() -> None:
    found = model(SMALL, text_of(605))
    for rate in (1.0, 6.0, 12.0):
        load = found.at(rate)
        assert load.rows == pytest.approx(rate * 250 * load.mean_step_s, rel=0.01)


def test_prefill_takes_the_share_of_the_time_that_its_steps_take() -> None:
    """Beside next to no rows 605 tokens fit one step: of 2.7 ms, and of 33.5 ms at 55 us a token, and some attention."""
    load = model(SMALL, text_of(605)).at(0.1)
    assert load.prefill_s[0] == pytest.approx(36.9e-3, rel=0.03)
    assert load.prefill_share == pytest.approx(0.1 * load.prefill_s[0], rel=0.01)
    assert load.prefill_scv == pytest.approx(0.0, abs=1e-6)


def test_a_long_prompt_is_cut_into_steps_that_keep_the_target() -> None:
    load = model(SMALL, text_of(3000, mean_answer=400.0)).at(0.5)
    assert 3000 / 1024 * 0.0343 < load.prefill_s[0] < 8 * 0.0343


def test_waiting_is_that_of_an_m_d_1_queue_for_one_replica_with_poisson_arrivals() -> None:
    """Half busy with services of 20 ms: it is 10 ms on average, over all."""
    load = Load(25.0, 10.0, 0.015, 0.012, 0.006, 0.5, np.array([0.02]), 0.0)
    wait = wait_of(load, 1, arrival_scv=1.0)
    assert wait.chance == pytest.approx(0.5)
    assert wait.chance * wait.mean_s == pytest.approx(0.010)
    assert wait.quantile_s(0.5) == 0.0
    assert wait.exceeds(wait.quantile_s(0.99)) == pytest.approx(0.01)
    assert wait_of(load, 4, 1.0).chance < 0.25


# What requests carry


def test_the_blend_carries_605_tokens_and_a_p99_prompt_of_two_thousand() -> None:
    prompts = prompts_of(replace(ALIKE, shares={"text": 0.45, "image": 0.40, "audio": 0.15}))
    assert prompts.mean(prompts.num_tokens) == pytest.approx(300 + 0.40 * 576 + 0.15 * 500)
    assert p99_prompt(ALIKE) == 2048
    assert p99_prompt(replace(Workload(), picture_counts=(0.5, 0.0, 0.0, 0.0, 0.5))) > 5 * 576


def test_the_planner_and_the_simulator_think_of_the_same_traffic() -> None:
    workload = Workload()
    requests = traffic.generate((traffic.Traffic(100.0, 0.0, 100.0, repeat_rate=0.0),), seed=3)
    prompts = prompts_of(workload)
    assert workload.shares == traffic.BLEND
    assert workload.picture_counts == traffic.PICTURE_COUNT_SHARES
    sizes = [width * height for width, height in traffic.PICTURE_SIZES]
    assert workload.picture_pixels == dict(zip(sizes, traffic.PICTURE_SIZE_SHARES, strict=True))
    low, high = traffic.BURSTINESS
    assert workload.tenant_scv == pytest.approx((high**3 - low**3) / 3 / (high - low), rel=0.01)
    zipf = 1 / np.arange(1, traffic.NUM_TENANTS + 1)
    assert workload.num_tenants == pytest.approx(zipf.sum() ** 2 / (zipf**2).sum(), rel=0.01)
    tokens = [request.num_text + 576 * len(request.picture_sizes) + 25 * request.clip_s for request in requests]
    assert prompts.mean(prompts.num_tokens) == pytest.approx(48 + np.mean(tokens), rel=0.03)
    assert p99_prompt(workload) == pytest.approx(48 + np.quantile(tokens, 0.99), rel=0.1)
    answers = np.array([request.num_answer for request in requests])
    assert workload.mean_answer_position == pytest.approx((answers**2).sum() / answers.sum() / 2, rel=0.05)


def test_slices_of_a_distribution_have_its_mean_and_its_quantiles() -> None:
    text = prompts_of(replace(Workload(), system_tokens=0, repeat_rate=0.0).with_shares({"text": 1.0}))
    assert text.mean(text.num_tokens) == pytest.approx(300, rel=1e-6)
    assert quantile(text.num_tokens, text.share, 0.5) == pytest.approx(300 * math.exp(-(0.6**2) / 2), rel=0.01)


def test_halves_are_as_many_requests_each_and_together_the_whole() -> None:
    whole = prompts_of(Workload().with_shares({"text": 1.0}))
    short, long = whole.halves()
    assert [half.share.sum() for half in (short, long)] == pytest.approx([1.0, 1.0])
    assert short.num_tokens.max() <= long.num_tokens.min()
    assert (short.mean(short.num_new) + long.mean(long.num_new)) / 2 == pytest.approx(whole.mean(whole.num_new))


def test_a_repeat_is_not_encoded_and_half_of_the_repeats_are_not_prefilled() -> None:
    prompts = prompts_of(replace(ALIKE, repeat_rate=0.4).with_shares({"image": 1.0}))
    assert prompts.mean(prompts.num_encodes) == pytest.approx(0.6)
    assert prompts.mean(prompts.num_new) == pytest.approx(0.8 * 876 + 0.2 * 8)


def test_the_queue_sees_poisson_arrivals_when_it_is_often_empty_and_bursts_when_it_never_is() -> None:
    assert Workload().arrival_scv(1.0, 0.0) == pytest.approx(1 + 7.2 / (1 + 4 * 8.9))
    assert Workload().arrival_scv(1.0, 1.0) == pytest.approx(8.2)
    assert replace(Workload(), tenant_scv=1.0).arrival_scv(0.5, 0.7) == 1.0


def test_shares_must_add_up_and_be_known() -> None:
    with pytest.raises(ValueError, match="must add up to 1"):
        Workload(shares={"text": 0.5})
    with pytest.raises(ValueError, match="must add up to 1"):
        Workload(shares={"video": 1.0})


# A box


def test_an_a100_encodes_384_pictures_or_2058_seconds_of_sound_a_second() -> None:
    pictures, clips = (prompts_of(ALIKE.with_shares({name: 1.0})) for name in ("image", "audio"))
    encoders = Encoders(A100, 2)
    assert encoders.max_rate(pictures) == pytest.approx(768)
    assert encoders.max_rate(clips) == pytest.approx(2 * 2058 / 20)
    assert encoders.delay_s(pictures, 1.0).max() == pytest.approx(12e6 * 12e-9 + 0.012 + 1 / 384, rel=0.01)
    assert encoders.delay_s(prompts_of(text_of(300)), 1.0).max() == 0.0


def test_seven_8b_and_an_encoder_carry_what_was_read_off_the_simulator() -> None:
    """63 to 80 a second inside all limits; 250 offered: text is answered, nine in ten of the media are refused."""
    carried, breaks_first = Box(demand(small=SMALL), Split((Part("small", 7, 1),), 1)).limit
    assert 70 < carried < 85
    assert breaks_first == "small: too many refused"
    outcome = box_of(7).at(250.0)
    assert outcome.carried_of("text") > 0.8 * outcome.offered_of("text")
    assert outcome.carried_of("image") < 0.15 * outcome.offered_of("image")
    assert {pool.kind.name: round(pool.num_replicas, 1) for pool in outcome.pools} == {"short text": 2.2, "long text": 3.8, "media": 1.0}


def test_text_and_media_keep_apart_and_the_median_of_text_comes_first() -> None:
    outcome = box_of(7).at(60.0)
    assert sum(pool.num_replicas for pool in outcome.pools) == pytest.approx(7)
    assert [bool(pool.prompts.of("text").any()) for pool in outcome.pools] == [True, True, False]
    short, long, media = (pool.now.load.rows * pool.kind.weight for pool in outcome.pools)
    assert short == pytest.approx(long, rel=0.02) == pytest.approx(media, rel=0.02)
    p50_s = {name: outcome.ttft_s(name)[0] for name in MODALITIES}
    assert p50_s["text"] < p50_s["audio"] < p50_s["image"] < p50_s["image_audio"]
    assert all(outcome.ttft_s(name)[1] > p50_s[name] for name in MODALITIES)


def test_what_cannot_be_encoded_is_refused() -> None:
    many = replace(Workload(), shares={"text": 0.05, "image": 0.95}, picture_counts=(0.0,) * 9 + (1.0,), mean_answer=2.0, picture_tokens=1)
    outcome = box_of(7, workload=many).at(150.0)
    assert outcome.carried_of("text") == pytest.approx(7.5, rel=0.01)
    assert outcome.carried_of("image") == pytest.approx(384 / 10 / 0.8, rel=0.01)


# A fleet


def test_the_best_split_of_eight_a100s_is_seven_and_one_and_250_a_second_take_24_cards() -> None:
    boxes = ranked(demand(small=SMALL))
    assert str(boxes[0].split) == "7 small + 1 encoder"
    assert all(box.split.num_gpus == 8 for box in boxes)
    assert len({box.split for box in boxes}) == len(boxes)
    assert num_boxes(boxes[0], 250.0) == 4
    sheet = plan(boxes, 250.0, 2.0)
    assert sum(pool["cards"] for pool in sheet["gpus"].values()) == pytest.approx(24, abs=1)
    assert sheet["usd_per_1000"] == pytest.approx(1000 * 4 * 8 * 2.0 / 3600 / 250)


def test_a_70b_needs_four_a100s_a_replica_and_keeps_no_promise_to_pictures_there() -> None:
    large = replace(SMALL, shape=LLAMA_70B)
    needed = demand(small=large)
    assert {num_ranks for _, num_ranks in needed.kinds} == {2, 4, 8}
    assert num_boxes(ranked(needed)[0], 10.0) is None
    on_h200 = ranked(demand(small=replace(large, card=H200)))
    assert on_h200[0].limit[0] > 3.0


def test_a_small_and_a_large_decoder_share_the_encoders() -> None:
    cards = {"small": SMALL, "large": replace(SMALL, shape=LLAMA_70B)}
    for split in demand(**cards).splits():
        assert [part.name for part in split.parts] == ["small", "large"]
        assert split.num_gpus == 8
        assert split.parts[1].num_ranks > 1


def test_a_rate_is_carried_only_if_each_decoder_takes_its_part() -> None:
    """A tenth of the requests goes to a 70B: were 7 % of these refused, that would be less than one in a hundred of all."""
    cards = {"small": replace(SMALL, card=H200), "large": replace(SMALL, card=H200, shape=LLAMA_70B)}
    box = ranked(replace(demand(**cards), shares={"small": 0.9, "large": 0.1}))[0]
    outcomes = box.at(box.limit[0])
    assert all(outcome.carried > 0.985 * outcome.offered for outcome in outcomes.values())
    assert box.limit[1] == "large: too many refused"


def test_text_alone_needs_no_encoder_and_a_card_that_holds_no_weights_no_box() -> None:
    assert {split.num_encoders for split in demand(text_of(300), small=SMALL).splits()} == {0}
    only_one = Demand(Workload(), {"small": {1: replace(SMALL, shape=LLAMA_70B)}}, {"small": 1.0})
    with pytest.raises(ValueError, match="no split"):
        ranked(only_one)


# Money


def test_gpu_time_by_modality_is_what_was_worked_out_by_hand() -> None:
    """Text: 250 rows of 0.115 ms and 300 tokens of 0.057 ms, with their part of the 2.7 ms of each step."""
    mixed = replace(ALIKE, shares=BLEND)
    found = model(replace(SMALL, tpot_target_s=0.035 / STEP_SHARE), mixed)
    gpu_ms = {name: float(1e3 * gpu_s(found)[found.prompts.of(name)][0]) for name in MODALITIES}
    assert gpu_ms == pytest.approx({"text": 49, "image": 99, "audio": 92, "image_audio": 143}, rel=0.01)
    assert found.prompts.mean(gpu_s(found)) * found.max_rate == pytest.approx(1.0)


def test_a_second_of_four_cards_is_four_gpu_seconds() -> None:
    found = model(Decoder(LLAMA_70B, A100, 4, tpot_target_s=0.05), Workload())
    assert found.prompts.mean(gpu_s(found)) * found.max_rate == pytest.approx(4.0)


def test_what_is_left_of_the_kv_cache_has_room_for_the_largest_usual_prompt() -> None:
    """128 rows of 330 tokens and half a block, 2,048 tokens of a prompt; 1,743 blocks of 256 in all."""
    kv = plan(ranked(demand(text_of(205), small=SMALL)), 600.0, 2.0)["kv"]["small"]
    assert kv["blocks"] == 1743
    assert kv["used_tokens"] == pytest.approx(128 * (205 + 125 + 128), rel=0.01)
    assert kv["headroom_blocks"] == 1743 - math.ceil(kv["used_tokens"] / 256) - 2048 // 256
    assert kv["sequences_that_fit"] == 1743 * 256 // (205 + 250 + 128)


def test_the_bill_is_shared_out_to_the_cent() -> None:
    found = model(SMALL, Workload())
    costs = costs_by_modality(found, Encoders(A100, 1), usd_per_gpu_hour=2.0, num_gpus=8, rate=80.0)
    total = sum(BLEND[name] * cost.usd_per_1000 for name, cost in costs.items())
    assert total == pytest.approx(1000 * 16.0 / 3600 / 80)
    assert costs["text"].encoder_gpu_s == 0.0
    assert max(cost.encoder_share for cost in costs.values()) < 0.25


def test_a_clip_padded_to_thirty_seconds_would_break_the_limit_of_encoding() -> None:
    for clip_s, share in ((20.0, 0.20), (30.0, 0.30)):
        workload = replace(ALIKE, median_clip_s=clip_s, clip_spread=0.0, shares=BLEND)
        costs = costs_by_modality(model(SMALL, workload), Encoders(A100, 1), usd_per_gpu_hour=2.0, num_gpus=8, rate=80.0)
        assert costs["audio"].encoder_share == pytest.approx(share, abs=0.015)


# What was measured


def bench_of(decoder: Decoder, rate: float) -> dict[str, float]:
    """What a bench of such a decoder would say."""
    load = model(decoder, text_of(400)).at(rate)
    return {
        "mean_tpot_ms": 1e3 * load.mean_step_s, "output_throughput": 250 * rate, "total_input_tokens": 400_000,
        "total_output_tokens": 250_000, "completed": 1000, "duration": 1000 / rate, "repeat_rate": 0.0,
    }  # fmt: skip


def test_a_bench_of_a_machine_half_as_fast_is_recognised() -> None:
    slow = replace(PUBLISHED_FIT, compute=0.405, weight_read=0.425, kv_read=0.37, prefill_attention=0.2, step_s=5.4e-3, row_s=36e-6)
    fitted = refit(SMALL, [bench_of(replace(SMALL, reached=slow), 4.0)]).reached
    assert fitted.compute == pytest.approx(slow.compute, rel=0.02)
    assert fitted.step_s == pytest.approx(slow.step_s, rel=0.02)


def test_benches_of_a_slow_host_and_of_a_slow_device_look_the_same() -> None:
    """So one factor is all that is asked of them, and the planned time per token is right at each of the rates."""
    machine = replace(SMALL, reached=replace(PUBLISHED_FIT, step_s=3 * PUBLISHED_FIT.step_s, row_s=3 * PUBLISHED_FIT.row_s))
    benches = [bench_of(machine, rate) for rate in (0.5, 3.0, 6.0)]
    fitted = refit(SMALL, benches)
    assert fitted.reached.compute == pytest.approx(PUBLISHED_FIT.compute / 1.48, rel=0.02)
    for rate, bench in zip((0.5, 3.0, 6.0), benches, strict=True):
        assert 1e3 * model(fitted, text_of(400)).at(rate).mean_step_s == pytest.approx(bench["mean_tpot_ms"], rel=0.03)


def test_steps_measured_alone_give_each_efficiency_back() -> None:
    machine = replace(SMALL, reached=replace(PUBLISHED_FIT, compute=0.6, kv_read=0.5, step_s=6e-3))
    read = 2 * (LLAMA_8B.body_params + LLAMA_8B.head_params)
    report = {
        "decode": [
            {"batch": rows, "ms": 1e3 * machine.step_s(rows, 700.0), "gigabytes": (read + rows * 700 * 131072) / 1e9}
            for rows in (1, 16, 64, 128)
        ],
        "prefill": {"tokens": 2048, "ms": 1e3 * machine.step_s(0.0, 0.0, 2048.0, 1024.0)},
        "images_per_s": 300.0,
        "audio_seconds_per_s": 1500.0,
    }
    fitted = refit(SMALL, [report])
    assert fitted.reached.compute == pytest.approx(0.6, rel=0.03)
    assert fitted.reached.kv_read == pytest.approx(0.5, rel=0.03)
    assert fitted.reached.step_s == pytest.approx(6e-3, rel=0.03)
    assert (fitted.card.pictures_per_s, fitted.card.audio_s_per_s) == (300.0, 1500.0)


def test_what_bench_writes_is_what_is_read() -> None:
    answers = [
        Outcome(
            Modality.TEXT,
            None,
            "",
            start_s=i / 4,
            queue_s=0.0,
            ttft_s=0.1,
            itl_s=(0.02,) * 9,
            latency_s=0.28,
            input_tokens=50,
            output_tokens=10,
        )
        for i in range(40)
    ]
    result = summarize(answers, 10.0, percentiles=(99.0,), goodput={}) | {"repeat_rate": 0.0}
    assert set(BENCH_KEYS) <= result.keys()
    fitted = refit(SMALL, [result])
    workload = text_of(50, mean_answer=10.0)
    assert model(fitted, workload).at(4.0).mean_step_s == pytest.approx(0.020, rel=0.02)


def test_a_file_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a result"):
        refit(SMALL, [{"hello": 1}])
    with pytest.raises(ValueError, match="neither a result"):
        refit(SMALL, [bench_of(SMALL, 1.0) | {"completed": 0}])


def test_the_shape_of_a_published_config_is_that_of_the_model() -> None:
    config = {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    shape = shape_of_config(complete_config(config))
    assert shape.kv_bytes_per_token == 128 * 1024 == LLAMA_8B.kv_bytes_per_token
    assert shape.weight_bytes == pytest.approx(LLAMA_8B.weight_bytes, rel=1e-3)
    assert shape_of_config(complete_config(config | {"tie_word_embeddings": True})).weight_bytes < shape.weight_bytes - 1e9


# What must rise or fall with what

RATES = st.floats(1.0, 600.0)
QUICK = settings(max_examples=25, deadline=None)


@QUICK
@given(rate=RATES, num_replicas=st.integers(1, 12))
def test_a_replica_more_never_carries_less(rate: float, num_replicas: int) -> None:
    fewer, more = (box_of(count).at(rate).carried for count in (num_replicas, num_replicas + 1))
    assert more >= fewer * 0.999
    assert fewer <= rate * 1.000001


@QUICK
@given(rate=RATES, more=st.floats(1.0, 4.0))
def test_longer_prompts_and_longer_answers_never_carry_more(rate: float, more: float) -> None:
    carried = box_of(7).at(rate).carried
    for changes in ({"mean_text": 300 * more}, {"mean_answer": 250 * more}):
        assert box_of(7, workload=replace(Workload(), **changes)).at(rate).carried <= carried * 1.005


@QUICK
@given(rate=st.floats(1.0, 80.0), more=st.floats(1.0, 2.0))
def test_as_long_as_nothing_is_refused_more_requests_never_make_anything_faster(rate: float, more: float) -> None:
    calm, busy = box_of(7).at(rate), box_of(7).at(rate * more)
    if busy.carried > 0.99 * busy.offered:
        assert busy.tpot_p50_s >= calm.tpot_p50_s * 0.999
        assert busy.ttft_s("image")[0] >= calm.ttft_s("image")[0] * 0.995


@QUICK
@given(hit=st.floats(0.0, 1.0))
def test_more_repeats_never_carry_less(hit: float) -> None:
    never = kinds_of(SMALL, replace(Workload(), repeat_rate=0.0)).all.model.max_rate
    assert kinds_of(SMALL, replace(Workload(), repeat_rate=hit)).all.model.max_rate >= never * 0.999


def test_stricter_promises_never_carry_more() -> None:
    split = Split((Part("small", 7, 1),), 1)
    loose = demand(small=SMALL)
    strict = replace(loose, slo=Slo(media_ttft_p99_s=0.4))
    assert Box(strict, split).limit[0] < Box(loose, split).limit[0]
    assert Box(strict, split).limit[1].startswith("TTFT p99 of")


def test_a_pool_in_a_burst_is_slower_than_on_average() -> None:
    for pool in box_of(7).at(50.0).pools:
        assert pool.burst.load.mean_step_s > 1.1 * pool.now.load.mean_step_s
        assert pool.burst.wait.mean_s > 1.1 * pool.now.wait.mean_s


def test_formulas_and_the_simulated_box_agree_within_a_fifth() -> None:
    """At 60 a second; `scripts.compare_plan` says the same of 250 and 600, which take minutes."""
    simulated = simulate(60.0, "a100", (10.0, 30.0), seed=0)
    planned = formulas(simulated["offered_rps"], "a100")
    assert planned == pytest.approx({name: simulated[name] for name in planned}, rel=0.2)
