"""What a request costs: every GPU-second that a worker measured is some request's, or overhead with a name; none is counted twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import tiny_model
from fake_engine import FakeEngine, say_words
from gateway_client import serving
from kv_world import sequence
from scheduler_desk import Desk, greedy
from test_engine import ask, clip, config, counter, picture, read, settled

from mmserve import AsyncEngine
from mmserve.__main__ import main
from mmserve.config import CostConfig
from mmserve.costs import CostBooks, Prices
from mmserve.ledger import CostRow, Ledger, RequestRow
from mmserve.ledger_tables import open_ledger
from mmserve.media import MediaKind, MediaWindow
from mmserve.plan import StepResult
from mmserve.request import Cost
from mmserve.scheduler.gpu_time import GpuTime, share_out

IN_ENGINE = pytest.mark.asyncio(loop_scope="module")


def took(desk: Desk, plan, seconds: float) -> None:
    result = desk.worker.run(plan, desk.truth)
    desk.scheduler.apply(StepResult(result.step_id, result.tokens, seconds=seconds), 0.0)


def paid(each) -> float:
    return each.prefill_gpu_s + each.decode_gpu_s


def total(time: GpuTime) -> float:
    return time.prefill_s + time.decode_s + time.recomputed_s


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0, 0.5], [0.0, 0.0, 0.0], [1e-9, 1e9]])
def test_shares_make_up_the_whole(weights: list[float]) -> None:
    shares = share_out(0.7, weights)
    assert sum(shares) == pytest.approx(0.7, rel=1e-12)
    assert [share > 0 for share in shares] == [weight > 0 or not any(weights) for weight in weights]


def test_a_step_is_shared_out_over_its_rows_by_what_each_computes() -> None:
    desk = Desk()
    short, long = sequence(1, 8, "a"), sequence(2, 160, "b")
    desk.add(short, long)
    took(desk, desk.plan(), 0.5)
    assert paid(short) + paid(long) == pytest.approx(0.5, rel=1e-12)
    assert 0 < paid(short) < paid(long)
    assert (short.decode_gpu_s, long.decode_gpu_s) == (0, 0)
    took(desk, desk.plan(), 0.1)
    assert short.decode_gpu_s + long.decode_gpu_s == pytest.approx(0.1, rel=1e-12)
    assert total(desk.records.take_gpu_time()) == pytest.approx(0.6, rel=1e-12)
    assert desk.records.take_gpu_time() == GpuTime()


def test_a_group_of_gpus_is_paid_for_each_of_them() -> None:
    desk = Desk()
    desk.records.num_gpus = 4
    each = sequence(1, 8)
    desk.add(each)
    took(desk, desk.plan(), 0.5)
    assert paid(each) == pytest.approx(2.0)


def test_what_is_computed_again_after_a_death_is_the_servers() -> None:
    desk = Desk()
    each = sequence(1, 40)
    desk.add(each)
    took(desk, desk.plan(), 0.5)
    before = paid(each)
    (orphan,) = desk.scheduler.evacuate()
    desk.records.take_gpu_time()
    again = Desk()
    again.add(orphan)
    took(again, again.plan(), 0.41)  # its 40 tokens of before, and the one it had just drawn
    spent = again.records.take_gpu_time()
    assert spent.recomputed_s == pytest.approx(0.4)
    assert paid(each) - before == pytest.approx(0.01)


def test_a_step_that_runs_when_the_answer_ends_is_still_the_requests() -> None:
    desk = Desk()
    each = sequence(1, 8, sampling=greedy(max_tokens=9))
    desk.add(each)
    first, second = desk.plan(), desk.plan()
    took(desk, first, 0.2)
    desk.scheduler.abort(1)  # a stop string was seen
    assert each.num_steps == 1
    took(desk, second, 0.1)
    assert each.num_steps == 0
    assert paid(each) == pytest.approx(0.3)


def test_a_death_takes_its_steps_with_it() -> None:
    desk = Desk()
    each = sequence(1, 8)
    desk.add(each)
    desk.plan(), desk.plan()
    desk.scheduler.evacuate()
    assert (each.num_steps, paid(each)) == (0, 0)


def window(num_rows: int) -> MediaWindow:
    return MediaWindow(b"key-%d" % num_rows, MediaKind.IMAGE, num_rows)


def test_each_pool_has_its_own_price_and_cached_rows_save_what_such_rows_took() -> None:
    prices = Prices(CostConfig(price_per_gpu_hour=3600.0, large_price_per_gpu_hour=7200.0, vision_price_per_gpu_hour=36.0))
    books = CostBooks(prices, lambda model, num_tokens: num_tokens * 0.001)
    first, second = books.open(), books.open()
    each = sequence(1, 8)
    each.prefill_gpu_s, each.decode_gpu_s, each.num_cached_tokens = 1.0, 2.0, 500
    first.add("large", [each])
    first.payer(window(100))(4.0, 1)
    cost = books.cost(first, [window(100)])
    assert cost.usd == pytest.approx(2 * 3.0 + 0.01 * 4.0)
    assert cost.gpu_seconds == {"image_encode": 4.0, "audio_encode": 0.0, "prefill": 1.0, "decode": 2.0}
    assert cost.saved_usd == pytest.approx(2 * 0.5)  # half a second of prefill; it paid for its picture itself
    assert books.cost(second, [window(50)]).saved_usd == pytest.approx(0.01 * 2.0)


async def test_the_cost_is_in_the_header_and_under_explain() -> None:
    def script(generation, request) -> None:
        generation.cost = Cost({"prefill": 0.5, "decode": 0.25}, usd=0.0001234, saved_usd=0.00001)
        say_words(generation, request)

    body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}], "explain": True}
    async with serving(FakeEngine(script)) as server:
        async with server.http.post(server.url + "/v1/chat/completions", json=body) as response:
            assert response.headers["x-mmserve-cost-usd"] == "0.000123400"
            said = (await response.json())["mmserve"]["cost"]
        events = await server.events("/v1/chat/completions", body | {"stream": True})
    assert said == {"gpu_seconds": {"prefill": 0.5, "decode": 0.25}, "usd": 0.0001234, "saved_usd": 0.00001}
    assert events[-2]["mmserve"]["cost"] == said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    model = tiny_model.build(tmp_path_factory.mktemp("model"))
    async with AsyncEngine(config(model, tmp_path_factory.mktemp("data"))) as engine:
        yield engine


async def kept(engine: AsyncEngine) -> list[tuple[str, float]]:
    """Of the ledger: request ids and their GPU-seconds."""
    await settled(engine)
    assert engine.ledger.flush()
    with sqlite3.connect(engine.config.storage.ledger) as db:
        rows = db.execute(
            "SELECT request_id, image_encode_gpu_s + audio_encode_gpu_s + prefill_gpu_s + decode_gpu_s FROM request_costs"
        ).fetchall()
    db.close()
    return rows


def spent(engine: AsyncEngine) -> float:
    return counter(engine, "gpu_seconds_total") - counter(engine, "gpu_overhead_seconds_total")


@IN_ENGINE
async def test_requests_and_overhead_make_up_all_that_workers_measured(engine: AsyncEngine) -> None:
    asks = [ask("a", picture(1), str(i)) for i in range(4)] + [ask("b", clip(2), model="large"), ask("text", n=3), ask("c", picture(3))]
    generations = await asyncio.gather(*map(engine.submit, asks))
    stopped = await engine.submit(ask("stop ", picture(4), max_tokens=400))
    await stopped.next_batch()
    stopped.cancel()
    await asyncio.gather(*map(read, generations))
    rows = await kept(engine)
    assert {request_id for request_id, _ in rows} == {each.request_id for each in (*generations, stopped)}
    assert sum(gpu_s for _, gpu_s in rows) == pytest.approx(spent(engine), rel=1e-9)
    assert all(gpu_s > 0 for _, gpu_s in rows)
    joined = [each.cost.gpu_seconds["image_encode"] for each in generations[:4] if each.cost is not None]
    assert joined == pytest.approx([joined[0]] * 4)  # one encode, shared by all who waited for it
    assert joined[0] > 0


@IN_ENGINE
async def test_a_request_behind_a_cached_prefix_says_what_that_saved(engine: AsyncEngine) -> None:
    for _ in range(2):
        generation = await engine.submit(ask("the same question about this ", picture(9), " picture, word by word" * 4, seed=5))
        await read(generation)
    assert generation.usage.media[0].source == "kv"
    assert generation.cost is not None
    assert generation.cost.gpu_seconds["image_encode"] == 0
    assert generation.cost.saved_usd > 0


@IN_ENGINE
async def test_a_killed_worker_costs_no_request_anything(engine: AsyncEngine) -> None:
    generation = await engine.submit(ask("a long story", max_tokens=200))
    await generation.next_batch()
    (supervisor,) = engine._groups["small"].supervisors
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    await read(generation)
    rows = await kept(engine)
    assert sum(gpu_s for _, gpu_s in rows) == pytest.approx(spent(engine), rel=1e-9)
    assert counter(engine, "gpu_overhead_seconds_total") > 0


def test_an_older_ledger_gets_the_table(tmp_path: Path) -> None:
    db = open_ledger(tmp_path / "ledger.db", 1.0)
    db.execute("DROP TABLE request_costs")
    db.execute("PRAGMA user_version = 3")
    db.close()
    db = open_ledger(tmp_path / "ledger.db", 1.0)
    assert "request_costs" in db.table_names()
    db.close()


def ledger_with(path: Path) -> Path:
    """Two tenants: texts of one GPU-second each, and a picture of which an encode is 0.3 more."""
    with contextlib.closing(Ledger(path / "ledger.db")) as ledger:
        for i, (tenant, mask, encode_s, day) in enumerate([("acme", 1, 0.0, 1), ("acme", 3, 0.3, 1), ("zoo", 1, 0.0, 2)]):
            ledger.record_request(RequestRow(f"r{i}", tenant, mask, 10, 576 * (mask > 1), 0, 5.0, 9.0, "small", day * 86400.0 + 60))
            ledger.record_cost(CostRow(f"r{i}", encode_s, 0.0, 0.25, 0.75, usd=0.001 * (i + 1), saved_usd=0.0005))
    return path


def usage(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["usage", *words])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_usage_sums_up_by_tenant_day_and_modality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = usage(capsys, "--data-dir", str(ledger_with(tmp_path)), "--since", "1970-01-01", "--json")
    report = json.loads(printed)
    assert status == 0
    assert {name: {key: each["num_requests"] for key, each in sums.items()} for name, sums in report.items()} == {
        "tenant": {"acme": 2, "zoo": 1},
        "day": {"1970-01-02": 2, "1970-01-03": 1},
        "modality": {"image": 1, "text": 2},
    }
    assert report["modality"]["image"]["encode_share_of_text_request"] == pytest.approx(0.3)
    assert report["modality"]["text"]["usd_per_1000"] == pytest.approx(2.0)
    assert report["tenant"]["acme"]["usd"] == pytest.approx(0.003)
    assert report["tenant"]["acme"]["saved_usd_per_1000"] == pytest.approx(0.5)


def test_usage_prints_tables_and_begins_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(ledger_with(tmp_path))
    status, printed = usage(capsys, "--data-dir", folder, "--since", "1970-01-03")
    assert status == 0
    assert "zoo" in printed
    assert "acme" not in printed
    assert usage(capsys, "--data-dir", folder, "--since", "24h") == (0, "no requests\n")


def test_usage_without_a_ledger_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(capsys, "--data-dir", str(tmp_path))[0] == 2
    assert usage(capsys, "--data-dir", str(tmp_path), "--since", "yesterday")[0] == 2
    assert list(tmp_path.iterdir()) == []
