"""The scripts that kill servers must themselves be able to fail: what they would let pass, nobody else looks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from mmserve.child_process import shown_name
from mmserve.ledger import Ledger, RequestRow
from scripts.faults import nuisances
from scripts.faults.family import children, gone, is_running
from scripts.faults.journal import Journal
from scripts.faults.mixed_load import KINDS, MODELS, STYLES, mixed_requests
from scripts.faults.nuisances import World
from scripts.faults.outside import Baseline, Readiness, ledger_faults
from scripts.faults.rounds import how_it_differs
from scripts.faults.slopes import slope
from scripts.faults.soak_report import summary
from scripts.faults.steady_load import SteadyLoad, Tally
from scripts.faults.strict_client import Answer, BrokenProtocol, StreamReader, StrictClient
from scripts.loopback import Running

ANSWER = Answer("0123", ("There are two boats.",), ("stop",), prompt_tokens=600, longest_pause_s=0.1)


def chunk(text: str = "", reason: str | None = None, index: int = 0, id: str = "chatcmpl-1") -> str:
    return json.dumps({"id": id, "choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]})


GOOD = [chunk("two "), chunk("boats"), chunk(reason="stop"), "[DONE]"]


def read(events: list[str], num_choices: int = 1) -> StreamReader:
    reader = StreamReader(num_choices)
    for event in events:
        reader.feed(event)
    reader.end()
    return reader


def test_a_sound_stream_is_its_text_and_its_reason() -> None:
    reader = read(GOOD)
    assert (reader.texts, reader.finish_reasons, reader.code) == (["two boats"], ["stop"], None)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (GOOD[:-1], "without .DONE."),
        ([*GOOD, "[DONE]"], "after .DONE."),
        ([*GOOD, chunk("!")], "after .DONE."),
        ([chunk("two"), "[DONE]"], "without a finish_reason"),
        ([chunk("two", "stop"), chunk("boats"), "[DONE]"], "went on after its end"),
        ([chunk("two", "stop"), chunk("", "stop"), "[DONE]"], "went on after its end"),
        ([chunk("two"), chunk("boats", "stop", id="chatcmpl-2"), "[DONE]"], "changed its id"),
        ([json.dumps({"error": {"code": "worker_lost"}}), chunk("two"), "[DONE]"], "after an error"),
    ],
)
def test_a_stream_that_ends_not_at_all_or_twice_is_no_answer(events: list[str], why: str) -> None:
    with pytest.raises(BrokenProtocol, match=why):
        read(events)


def test_a_choice_that_never_ends_is_missed_beside_one_that_does() -> None:
    with pytest.raises(BrokenProtocol, match="without a finish_reason"):
        read([chunk("a", "stop", 0), chunk("b", None, 1), "[DONE]"], num_choices=2)


@pytest.mark.parametrize(
    ("outcome", "difference"),
    [
        (ANSWER, None),
        (replace(ANSWER, request_id="4567", longest_pause_s=9.0), None),
        (replace(ANSWER, texts=("There are two two boats.",)), "character 14"),
        (replace(ANSWER, texts=("There are boats.",)), "character 10"),
        (replace(ANSWER, texts=("There are two",)), "character 13"),
        (replace(ANSWER, finish_reasons=("length",)), "ended with"),
        (replace(ANSWER, status=503, code="overloaded"), "503 overloaded"),
        (BrokenProtocol("a stream ended"), "a stream ended"),
    ],
)
def test_an_answer_with_a_token_too_many_or_too_few_differs(outcome: Answer | BaseException, difference: str | None) -> None:
    found = how_it_differs(outcome, ANSWER)
    assert found is None if difference is None else difference in (found or "")


def test_an_error_of_the_scripts_own_is_no_finding_about_the_server() -> None:
    with pytest.raises(KeyError):
        how_it_differs(KeyError("ours"), ANSWER)


def test_the_load_has_every_kind_for_every_model_and_no_request_twice() -> None:
    requests = mixed_requests(60, seed=1)
    assert {(request.kind, request.model) for request in requests} == {(kind, model) for kind in KINDS for model in MODELS}
    assert {request.name.rpartition(" ")[2] for request in requests} == {style.rpartition(" ")[2] for style in STYLES}
    assert len({json.dumps(request.body) for request in requests}) == 60
    assert mixed_requests(60, seed=1) == requests != mixed_requests(60, seed=2)


def test_readiness_tells_when_it_changed_after_a_kill() -> None:
    readiness = Readiness()
    for at_s, is_ready in ((1.0, True), (2.0, True), (3.0, False), (4.0, False), (5.0, True)):
        readiness.note(is_ready, at_s)
    assert (readiness.since(2.5, is_ready=False), readiness.since(2.5, is_ready=True)) == (0.5, 2.5)
    assert readiness.since(5.5, is_ready=False) is None


async def test_an_answer_without_a_row_in_the_ledger_is_found_and_so_are_other_tokens(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    for request_id, vision_tokens in (("good", 576), ("short", 575)):
        row = RequestRow(request_id, "default", 3, 24, vision_tokens, 0, 1.0, 2.0, "small", 0.0)
        ledger.record_request(row)
    assert await asyncio.to_thread(ledger.flush)
    good, short, missing = (replace(ANSWER, request_id=name) for name in ("good", "short", "missing"))
    assert await ledger_faults(tmp_path, [good], timeout_s=0) == []
    assert await ledger_faults(tmp_path, [good, short, missing], timeout_s=0) == [
        "1 answers without a ledger row",
        "1 ledger rows with other tokens than the client saw",
    ]
    await asyncio.to_thread(ledger.close)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_what_is_left_over_is_found(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    baseline = Baseline(os.getpid())
    assert await baseline.faults(timeout_s=0) == []
    with contextlib.ExitStack() as stack:
        for i in range(4):
            stack.enter_context((tmp_path / f"left-{i}").open("w"))
        (found,) = await baseline.faults(timeout_s=0)
        assert "descriptors" in found
        assert "left-3" in found
        memory = np.ones(60 * 2**20, np.uint8)
        assert any("bytes of memory" in line for line in await baseline.faults(timeout_s=0))
        del memory
    child.kill()
    await gone([child.pid], timeout_s=30)
    assert any("children" in line for line in await baseline.faults(timeout_s=0))


async def test_the_dead_that_nobody_has_reaped_are_gone(child: subprocess.Popen[bytes]) -> None:
    before = {each.pid for each in children(os.getpid())}  # other tests' helpers, too
    assert child.pid in before
    assert (await gone([child.pid], timeout_s=0))[0] == {child.pid}
    child.kill()
    assert (await gone([child.pid], timeout_s=30))[0] == set()
    assert not is_running(child.pid)
    assert {each.pid for each in children(os.getpid())} == before - {child.pid}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("mmserve-decode", "mmserve-decode"),
        ("mmserve-small-decoder-0", "small-decoder-0"),
        ("mmserve-image-encoder-0", "image-encoder-0"),
        ("mmserve-small-decoder-0-rank-1", "small-decoder-0"),
    ],
)
def test_the_kernel_is_told_what_a_child_is_for_in_15_bytes(name: str, shown: str) -> None:
    assert shown_name(name) == shown


def life(num_points: int, per_hour: float, noise: float, level: float, seed: int, correlation: float = 0.0) -> list[tuple[float, float]]:
    """A sample every ten seconds."""
    rng = np.random.default_rng(seed)
    points, error = [], 0.0
    for i in range(num_points):
        error = correlation * error + float(rng.normal(0, noise))
        points.append((10.0 * i, level + per_hour * 10.0 * i / 3600 + error))
    return points


def test_a_slope_is_that_of_all_lives_whatever_the_level_of_each() -> None:
    found = slope({1: life(100, 2.0, 0.01, level=50, seed=1), 2: life(100, 2.0, 0.01, level=500, seed=2)})
    assert found is not None
    assert found.per_hour == pytest.approx(2.0, abs=found.half_width)
    assert found.half_width < 0.1


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_the_interval_holds_the_truth_as_often_as_it_says_also_when_samples_resemble_their_neighbours(correlation: float) -> None:
    found = [slope({1: life(300, 1.0, 0.5, 50, seed, correlation)}) for seed in range(200)]
    assert sum(abs(each.per_hour - 1.0) < each.half_width for each in found if each is not None) >= 180


def test_of_too_few_samples_nothing_is_said() -> None:
    assert slope({1: life(9, 1.0, 0.0, 0, 1)}) is None
    assert slope({pid: life(2, 1.0, 0.0, 0, 1) for pid in range(50)}) is None


def test_a_journal_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.note("life", pid=1)
        journal.note("fault", name="burst")
    written = (tmp_path / "journal.jsonl").read_text()
    (tmp_path / "journal.jsonl").write_text(written + '{"at_s": 7.0, "wh')
    with Journal(tmp_path) as journal:
        assert [entry["what"] for entry in journal.entries] == ["life", "fault"]
        journal.note("quiet", off=[])
    with Journal(tmp_path) as journal:
        assert [entry["what"] for entry in journal.entries] == ["life", "fault", "quiet"]
        assert journal.now_s >= journal.entries[-1]["at_s"]


def sample(at_s: float, megabytes: float, right: int) -> dict:
    processes = {"main": {"pid": 1, "anonymous_bytes": megabytes * 2**20}}
    return {"at_s": at_s, "what": "sample", "processes": processes, "counters": {}, "ends": {"right": right}}


@pytest.mark.parametrize(("per_hour", "num_samples", "ok"), [(0.5, 360, True), (1.5, 360, False), (30.0, 60, True)])
def test_a_soak_of_some_length_fails_if_the_server_surely_grows_once_it_has_warmed_up(per_hour: float, num_samples: int, ok: bool) -> None:
    warming_up = [sample(10.0 * i, 50 + i, i) for i in range(60)]  # 360 MB an hour, and nobody minds
    later = [sample(600.0 + at_s, megabytes, 60) for at_s, megabytes in life(num_samples, per_hour, 0.01, 110, seed=1)]
    report = summary([{"at_s": 0.0, "what": "life", "pid": 1}, *warming_up, *later])
    assert report["memory_mb_per_hour"]["main"]["per_hour"] == pytest.approx(per_hour, abs=0.05)
    assert report["ok"] is ok


def test_a_soaks_counts_are_those_of_all_its_lives() -> None:
    lives = [{"at_s": 0.0, "what": "life"}, sample(10, 50, 3), sample(20, 50, 5), {"at_s": 30.0, "what": "life"}, sample(40, 50, 2)]
    assert summary(lives)["ends"] == {"right": 7}


@pytest.mark.parametrize(
    ("outcome", "end", "num_off"),
    [
        (ANSWER, "right", 0),
        (replace(ANSWER, texts=("two",)), "off", 1),
        (replace(ANSWER, status=503, code="overloaded"), "refused", 0),
        (replace(ANSWER, code="overloaded"), "off", 1),  # it had been accepted
        (replace(ANSWER, status=422, code="undecodable_media"), "media lost", 0),
        (replace(ANSWER, status=500, code="worker_lost"), "off", 1),
        (TimeoutError(), "off", 1),
    ],
)
def test_a_refusal_is_fine_and_a_wrong_answer_is_not(outcome: Answer | BaseException, end: str, num_off: int) -> None:
    off: list[str] = []
    tally = Tally(off.append)
    tally.take("a question", outcome, ANSWER)
    assert (dict(tally.ends), len(off)) == ({end: 1}, num_off)


@pytest_asyncio.fixture
async def careless(tmp_path: Path) -> AsyncIterator[tuple[World, list[str]]]:
    """A server that answers everybody whatever comes, waits for slow clients for ever, and fails at everything it doesn't understand."""

    async def answer(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            text = body["messages"][0]["content"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return web.json_response({"error": {"code": "internal_error"}}, status=500)
        said = {"index": 0, "message": {"content": str(text)[:10]}, "finish_reason": "stop"}
        return web.json_response({"id": "chatcmpl-1", "choices": [said], "usage": {"prompt_tokens": 1}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    off: list[str] = []
    async with TestServer(app) as server, StrictClient(f"http://127.0.0.1:{server.port}", "key") as client:
        tally, rng = Tally(off.append), random.Random(0)
        known = [(replace(request, body=request.body | {"stream": False}), ANSWER) for request in mixed_requests(1, seed=1)]
        load = SteadyLoad(client, known, tally, 1, "0")
        nobody: Any = None  # no process of its own
        yield World(Running(client.url, nobody, tmp_path), "key", client, load, tally, Readiness(), known, rng, patience=0.01), off


@pytest.mark.parametrize(
    ("nuisance", "why"),
    [
        (nuisances.garbage, "got (500|200)"),
        (nuisances.wrong_keys, "a wrong key got 200"),
        (nuisances.hostile_media, "hostile, and got 200"),
        (nuisances.slow_headers, "20 connections without headers were open"),
        (nuisances.slow_body, "5 connections without a body were open"),
        (nuisances.burst, "ended with|differs"),
    ],
)
async def test_a_server_that_lets_everything_pass_does_not_pass(
    careless: tuple[World, list[str]], nuisance: Callable[[World], Awaitable[str]], why: str
) -> None:
    world, off = careless
    await nuisance(world)
    assert off
    assert all(re.search(why, line) for line in off)


def test_a_killed_decoder_costs_no_stream() -> None:
    """The whole script: two real servers, one of which loses its small decoder under eight streams of every kind."""
    began_s = time.monotonic()
    command = (sys.executable, "-m", "scripts.chaos", "--kill", "decoder", "--streams", "8", "--rounds", "1", "--patience", "60")
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["complete"], report["identical"], report["strikes"], report["off"]) == (8, 8, 1, [])
    assert 0 < report["longest_pause_s"] < time.monotonic() - began_s
