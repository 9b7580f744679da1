"""Faults that no error betrays, between the gate and the bundled model: each is stopped, in the slice that it is in.

They are asked only what the honest server got right, so that what stops them is their fault and not the model's.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
import pytest_asyncio

from mmserve.config import from_mapping
from mmserve.engine import AsyncEngine
from mmserve.evals.endpoint import Endpoint
from mmserve.evals.gate import Outcome
from mmserve.evals.golden import BUNDLED, GoldenSet, load_golden_set
from mmserve.evals.probes import OrderResult
from mmserve.evals.session import Evaluation, Settings, evaluate
from mmserve.gateway.server import Gateway
from scripts.show_gate import StaleCache, StaleHits, damage_adapter, faulty, swap_pictures

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with serving(tmp_path_factory.mktemp("honest"), noise=0.0) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(url: str) -> Evaluation:
    """A question about each of 16 pictures, and 8 about pairs whose right answers change with the order of the two."""
    bundled = load_golden_set(BUNDLED)
    alone = [item for item in bundled.items if item.slice_name == "image"][::47][:16]
    pairs = [item for item in bundled.items if item.if_swapped][::50][:8]
    return await asked(url, GoldenSet(bundled.name, (*alone, *pairs), bundled.vocabulary), states_per_slice=2)


@pytest.fixture(scope="module")
def golden(honest: Evaluation) -> GoldenSet:
    confused = {probe.item.id for probe in honest.order if probe.result is not OrderResult.RIGHT}
    right = tuple(answer.item for answer in honest.answers if answer.is_grounded and answer.item.id not in confused)
    return GoldenSet(honest.golden.name, right, honest.golden.vocabulary)


@asynccontextmanager
async def serving(directory: Path, noise: float) -> AsyncIterator[str]:
    """The bundled model's small decoder and vision tower alone: two servers start in the time of one."""
    model = damage_adapter(directory, noise)
    toml = model / "composition.toml"
    with_audio = re.sub(r'large = "large"\n|, large = "[^"]*"', "", toml.read_text())
    toml.write_text(with_audio.partition("[audio]")[0])
    data_dir = directory / "data"
    data_dir.mkdir()
    config = from_mapping({"model": str(model), "data-dir": data_dir, "port": 0, "log-level": "warning"})
    async with AsyncEngine(config) as engine, Gateway(engine, config) as gateway:
        yield gateway.url


async def asked(url: str, golden: GoldenSet, states_per_slice: int = 0) -> Evaluation:
    """One question at a time, so that what a fault makes of the one before is the same in every run."""
    settings = Settings(concurrency=1, states_per_slice=states_per_slice)
    async with Endpoint(url) as endpoint:
        return await evaluate(endpoint, golden, settings, lambda what, total: nullcontext(lambda: None))


def breaches(evaluation: Evaluation) -> set[tuple[str, str]]:
    """Slice and metric of each bar that a value itself is on the wrong side of."""
    return {(finding.slice_name, finding.metric) for finding in evaluation.decision.findings if finding.is_breach}


async def test_the_honest_server_confuses_no_order_and_answers_alike_in_any_state(honest: Evaluation, golden: GoldenSet) -> None:
    assert len(golden.items) >= 20
    assert honest.states is not None
    assert all(probe.is_equal and probe.is_proven for probe in honest.states)
    assert {finding.metric for finding in honest.decision.findings if finding.is_breach} <= {"grounding accuracy"}


async def test_pictures_that_arrive_in_the_other_order_are_caught_in_images(url: str, golden: GoldenSet) -> None:
    async with faulty(url, swap_pictures) as door:
        evaluation = await asked(door, golden)
    assert evaluation.decision.outcome is Outcome.BREACHED
    assert ("images", "order confusion") in breaches(evaluation)
    assert {slice_name for slice_name, _ in breaches(evaluation)} == {"images"}


async def test_every_third_picture_being_the_one_before_is_caught_in_image(url: str, golden: GoldenSet) -> None:
    async with faulty(url, StaleCache(3)) as door:
        evaluation = await asked(door, golden.only({"image"}))
    assert {("image", "grounding accuracy"), ("image", "hallucinated-object rate")} <= breaches(evaluation)


async def test_a_cache_that_only_hits_wrongly_is_caught_in_image_by_asking_again(url: str, golden: GoldenSet) -> None:
    """Whatever is asked once is right; only the states tell."""
    async with faulty(url, StaleHits()) as door:
        evaluation = await asked(door, golden.only({"image"}), states_per_slice=4)
    assert breaches(evaluation) == {("image", "equal answers cold and cached")}


async def test_noise_in_the_vision_adapter_is_caught_in_both_slices_that_show_pictures(golden: GoldenSet, tmp_path: Path) -> None:
    async with serving(tmp_path, noise=1.0) as url:
        evaluation = await asked(url, golden)
    assert {("image", "grounding accuracy"), ("images", "grounding accuracy")} <= breaches(evaluation)
