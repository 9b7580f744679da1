"""`mmserve bench` against servers on real sockets."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from gateway_client import serving

from mmserve.cli import bench
from mmserve.errors import TooLarge

GAP_S = 0.05
NUM_TOKENS = 5


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


async def measured(url: str, *words: str, status: int = 0) -> None:
    assert await asyncio.to_thread(bench.run, arguments("--base-url", url, *words)) == status


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "metronome"}]})


async def beat(request: web.Request) -> web.StreamResponse:
    """A token every GAP_S; who brings a picture is turned away."""
    body = await request.json()
    assert body["model"] == "metronome"
    if not isinstance(body["messages"][0]["content"], str):
        return web.json_response({"error": {"message": "no pictures here"}}, status=415)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(NUM_TOKENS):
        await asyncio.sleep(GAP_S)
        await write(response, {"choices": [{"delta": {"content": "tick "}}]})
    await write(response, {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": NUM_TOKENS}})
    await response.write(b"data: [DONE]\n\n")
    return response


async def write(response: web.StreamResponse, event: object) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await write(response, {"choices": [{"delta": {"content": "tick "}}]})
    return response


@asynccontextmanager
async def metronome(handler: object = beat) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**24)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", handler)])  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_known_rhythm_is_measured_and_refusals_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with metronome() as url:
        mix = "--mix", "text=.5,image=.5", "--image-size", "64x48"
        saved = tmp_path / "result.json"
        await measured(
            f"{url}/v1", "--num-prompts", "20", "--request-rate", "40", *mix, "--goodput", "ttft:5000", "--save-result", str(saved)
        )
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "============ Serving Benchmark Result ============"
    assert any(line.startswith("Median TPOT (ms):") for line in shown)
    result = json.loads(shown[-1])
    text, image = result["by_modality"]["text"], result["by_modality"]["image"]
    assert image["failures"] == {"415": image["failed"]}
    assert (text["completed"] + image["failed"], result["failed"]) == (20, image["failed"])
    assert result["total_output_tokens"] == NUM_TOKENS * result["completed"]
    assert result["total_input_tokens"] == 11 * result["completed"]
    # A busy machine is late, never early.
    for figure in ("median_ttft_ms", "median_itl_ms", "median_tpot_ms"):
        assert 0.99 * GAP_S * 1000 <= result[figure] < 10 * GAP_S * 1000
    assert result["request_goodput"] == result["request_throughput"]
    requests = json.loads(saved.read_bytes())
    assert len(requests["ttfts"]) == 20
    assert sum("no pictures here" in error for error in requests["errors"]) == result["failed"]


async def test_requests_are_sent_when_due_though_none_has_been_answered(tmp_path: Path) -> None:
    async with metronome() as url:
        saved = tmp_path / "result.json"
        await measured(url, "--num-prompts", "10", "--request-rate", "100", "--save-result", str(saved))
        result = json.loads(saved.read_bytes())
        assert result["max_concurrent_requests"] > 2
        await measured(url, "--num-prompts", "6", "--max-concurrency", "2", "--save-result", str(saved))
        held_back = json.loads(saved.read_bytes())
    assert held_back["max_concurrent_requests"] <= 2
    assert max(held_back["queue_times"]) >= NUM_TOKENS * GAP_S  # the wait is on record


async def test_streams_that_break_off_are_failures_and_so_is_a_run_of_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    async with metronome(breaks_off) as url:
        await measured(url, "--num-prompts", "3", status=1)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failures"] == {"disconnected": 3}


async def test_isolation_compares_text_alone_with_text_among_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    async with metronome() as url:
        words = "--num-prompts", "8", "--request-rate", "20", "--burst-rate", "30", "--image-size", "64x48"
        await measured(url, "--isolation", *words)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["image_burst"]["image"]["failed"] == 12
    assert set(result["comparison"]) == {"median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms"}
    assert all(0.1 < figures["ratio"] < 10 for figures in result["comparison"].values())


async def test_our_own_gateway_is_measured_and_its_refusals_have_their_status(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as server:
        await measured(server.url, "--num-prompts", "4", "--num-warmups", "1")
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["completed"], result["failed"], result["without_usage"]) == (4, 0, 0)
        server.engine.refusal = TooLarge("too many words")
        await measured(server.url, "--num-prompts", "2", status=1)
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["failures"] == {"413": 2}
        await measured(server.url, "--num-prompts", "2", "--num-warmups", "1", status=1)
        assert "too many words" in capsys.readouterr().err


async def test_nobody_there_and_senseless_flags_are_said_plainly(unused_tcp_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    await measured(f"http://127.0.0.1:{unused_tcp_port}", status=1)
    assert "does not answer" in capsys.readouterr().err
    await measured("http://127.0.0.1:1", "--isolation", status=1)
    assert "finite --request-rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--mix film=1", "--goodput itl:3", "--percentile-metrics speed", "--metric-percentiles 101", "--image-size big",
        "--request-rate 0", "--request-rate nan", "--num-prompts 0", "--num-warmups -1", "--repeat-rate 2",
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(*words.split())
    assert words.split()[0] in capsys.readouterr().err
