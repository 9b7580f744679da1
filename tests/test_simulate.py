"""The simulated box: traffic as it was ordered, books that balance at the end, and the same figures for the same seed."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mmserve.roofline.hardware import A100
from mmserve.scheduler.admission import QueueLimits
from mmserve.scheduler.limits import SchedulerLimits
from mmserve.sim.virtual_time import run_in_virtual_time
from scripts.simulation import report
from scripts.simulation.box import TOPOLOGIES, Box
from scripts.simulation.report import Slo, summarize
from scripts.simulation.traffic import BLEND, POOL_SIZE, Request, Traffic, generate


def run(topology: str, requests: list[Request], *, max_num_queued: int = 512, max_wait_s: float = math.inf) -> Box:
    async def main() -> Box:
        queue = QueueLimits(max_num_queued, max_wait_s)
        box = Box(TOPOLOGIES[topology], A100, SchedulerLimits(8192, 128, 1024, 35.0), queue, large_share=0.15)
        await box.run(requests)
        return box

    return run_in_virtual_time(main())


@pytest.fixture(scope="module")
def minute() -> list[Request]:
    return generate((Traffic(60.0, 0.0, 60.0),), 1)


def test_traffic_offers_the_rate_the_mix_and_the_lengths_it_was_told(minute: list[Request]) -> None:
    shares = Counter(request.modality for request in minute)
    assert len(minute) == pytest.approx(3600, rel=0.01)
    assert {name: shares[name] / len(minute) for name in BLEND} == pytest.approx(BLEND, abs=0.05)
    assert np.mean([request.num_text for request in minute]) == pytest.approx(300, rel=0.05)
    assert np.mean([request.num_answer for request in minute]) == pytest.approx(250, rel=0.05)
    assert [request.arrival_s for request in minute] == sorted(request.arrival_s for request in minute)


def test_four_tenants_of_thirty_send_about_half(minute: list[Request]) -> None:
    by_tenant = Counter(request.tenant for request in minute)
    assert sum(count for _, count in by_tenant.most_common(4)) / len(minute) == pytest.approx(0.5, abs=0.1)


def test_a_fifth_is_about_what_comes_again_and_half_of_that_behind_other_words(minute: list[Request]) -> None:
    again = [request for request in minute if request.subject < POOL_SIZE]
    first_of: dict[int, Request] = {}
    for request in again:
        first = first_of.setdefault(request.subject, request)
        assert (request.modality, request.picture_sizes, request.num_text) == (first.modality, first.picture_sizes, first.num_text)
    assert len(again) / len(minute) == pytest.approx(0.2, abs=0.03)
    assert sum(request.lead is not None for request in again) / len(again) == pytest.approx(0.5, abs=0.1)


def test_an_idle_box_answers_everything_within_its_limits_and_ends_with_nothing_held() -> None:
    requests = generate((Traffic(20.0, 0.0, 2.0, mean_answer=40.0),), 2)
    box = run("7small+1enc", requests)
    assert [outcome.num_tokens for outcome in box.outcomes] == [request.num_answer for request in requests]
    assert all(Slo().holds(outcome) for outcome in box.outcomes)
    assert {outcome.decoder for outcome in box.outcomes} == {"small"}


def test_a_70b_beside_small_ones_is_slower_and_gets_its_share() -> None:
    box = run("3small+70b-tp4+1enc", generate((Traffic(20.0, 0.0, 2.0, mean_answer=40.0),), 3))
    assert all(outcome.finished for outcome in box.outcomes)
    tpot = {name: np.median([each.tpot_s for each in box.outcomes if each.decoder == name]) for name in ("small", "large")}
    assert tpot["large"] > 1.5 * tpot["small"]


def test_a_full_box_refuses_and_serves_the_others() -> None:
    box = run("7small+1enc", generate((Traffic(400.0, 0.0, 0.5, mean_answer=40.0),), 4), max_num_queued=16)
    refused = [outcome for outcome in box.outcomes if outcome.refusal]
    assert {outcome.refusal for outcome in refused} == {"overloaded"}
    assert 0 < len(refused) < len(box.outcomes)
    assert all(outcome.finished or outcome.refusal for outcome in box.outcomes)


def test_a_seed_gives_the_same_figures_twice_and_a_picture_of_them(tmp_path: Path) -> None:
    requests = generate((Traffic(10.0, 0.0, 3.0, mean_answer=20.0),), 5)
    first, second = run("7small+1enc", requests), run("7small+1enc", requests)
    summaries = [summarize(box.outcomes, box.samples, (0.0, 3.0), Slo()) for box in (first, second)]
    assert summaries[0] == summaries[1]
    assert report.table(summaries[0], "twice").row_count == len(summaries[0]["modalities"])
    pytest.importorskip("matplotlib")
    report.plot(first.outcomes, first.samples, Slo(), "twice", tmp_path / "box.png")
    assert (tmp_path / "box.png").read_bytes().startswith(b"\x89PNG")


def test_what_text_noticed_of_a_surge_is_told_by_the_same_requests_without_it() -> None:
    calm = generate((Traffic(30.0, 0.0, 3.0, mean_answer=20.0),), 6)
    surge = generate((Traffic(30.0, 0.0, 3.0, mean_answer=20.0), Traffic(60.0, 1.0, 2.0, mix=(("image", 1.0),), mean_answer=20.0)), 6)
    outcomes = {"no surge": run("7small+1enc", calm).outcomes, "surge": run("7small+1enc", surge).outcomes}
    middle = report.isolation(outcomes, (1.0, 2.0))
    num_texts = sum(request.modality == "text" and 1.0 <= request.arrival_s < 2.0 for request in calm)
    assert [figures["num_answered"] + figures["num_refused"] for figures in middle["runs"].values()] == [num_texts] * 2
    before, after = middle["runs"].values()
    assert middle["ratios"]["no surge"]["tpot_ms_p99"] == after["tpot_ms_p99"] / before["tpot_ms_p99"]
    assert report.isolation_table(middle).row_count == 3


def test_text_does_not_notice_a_surge_of_pictures() -> None:
    """At ten times the pictures two thirds of the text were refused, and the rest came half as fast."""
    calm = Traffic(60.0, 0.0, 7.0, mean_answer=60.0)
    surge = (calm, Traffic(800.0, 3.0, 7.0, mix=(("image", 1.0),), mean_answer=60.0))
    outcomes = {
        name: run("7small+1enc", generate(parts, 7), max_wait_s=0.3).outcomes
        for name, parts in {"no surge": (calm,), "surge": surge}.items()
    }
    middle = report.isolation(outcomes, (4.0, 7.0))
    assert sum(outcome.refusal != "" for outcome in outcomes["surge"]) > 1000
    assert middle["runs"]["surge"]["num_refused"] <= 1
    assert middle["ratios"]["no surge"]["tpot_ms_p50"] < 1.4  # the window begins a second after the surge
    assert middle["runs"]["surge"]["ttft_ms_p50"] < 150.0
