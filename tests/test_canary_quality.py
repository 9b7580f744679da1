"""The bundled model beside a copy whose vision adapter is damaged: real questions over HTTP, until the canary is gone by itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from mmserve import AsyncEngine
from mmserve.canary_records import CanaryRecords
from mmserve.config import from_mapping
from mmserve.evals import golden
from mmserve.evals.endpoint import Endpoint
from mmserve.evals.golden import load_golden_set
from mmserve.gateway.server import Gateway
from scripts.show_gate import damage_adapter

NAME = "small-canary"
NOISE = 2.0  # nearly every answer names something that isn't there; scripts.show_canary has finer ones
WAIT_S = 120.0


@pytest.mark.parametrize("mode", ["traffic", "shadow"])
async def test_a_damaged_adapter_is_rolled_back_by_what_it_makes_up(tmp_path: Path, mode: str) -> None:
    canary = damage_adapter(tmp_path, NOISE)
    settings = {"port": 0, "data-dir": tmp_path / "data", "canary-small": canary, "canary-mode": mode, "canary-share": 0.6}
    config = from_mapping(settings | {"canary-disagreement": 1.0})  # that its shadows differ is another story
    items = [item for item in load_golden_set(golden.BUNDLED).items if item.slice_name == "image" and item.category in ("name", "describe")]
    answered: Counter[str] = Counter()
    async with AsyncEngine(config) as engine, Gateway(engine, config) as gateway, Endpoint(gateway.url, model="small") as endpoint:
        trial = engine._canaries._beside["small"]
        async with asyncio.timeout(WAIT_S):
            while not trial.is_live:
                await asyncio.sleep(0.05)
        async with Endpoint(gateway.url, model=NAME) as by_name:
            reply = await by_name.ask(items[-2].parts, max_tokens=40, explain=True)
            assert reply.body["mmserve"]["route"] == {"model": NAME, "reason": "hint"}
        for item in items[:150]:
            reply = await endpoint.ask(item.parts, max_tokens=40, explain=True)
            answered[reply.body["mmserve"]["route"]["model"]] += 1
            while engine._canaries._shadows or engine.guardrail._tasks:
                await asyncio.sleep(0.01)
            if not trial.is_live:
                break
        assert not trial.is_live
        assert (answered[NAME] > 0) is (mode == "traffic")
        reply = await endpoint.ask(items[-1].parts, max_tokens=40, explain=True)
        assert reply.body["mmserve"]["route"]["model"] == "small"
        assert await asyncio.to_thread(engine.ledger.flush)
    with CanaryRecords(tmp_path / "data" / "ledger.db") as records:
        (record,) = records.all()
    started, breached, rolled_back = record.decisions
    assert (started.decision, breached.decision, rolled_back.decision) == ("started", "breached", "rolled_back")
    assert (breached.slice, breached.metric) == ("image", "ungrounded")
    assert breached.canary_hits is not None
    assert breached.stable_hits is not None
    assert breached.canary_hits > 2 * breached.stable_hits
    assert record.end is rolled_back
