"""Requests made to do harm, through the real door to a real engine: each costs its sender one 4xx, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tiny_model
from attacked import Target, attacked, clip_part, picture_part
from gateway_client import raw, serving
from prometheus_client.parser import text_string_to_metric_families
from test_engine import ask, picture, tokens

from tests import media_corpus as corpus

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTRACT_TESTS = ("test_gateway_errors.py", "test_gateway_data_uri.py", "test_gateway_guard.py", "test_image_header.py", "test_audio.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    async with attacked(model, tmp_path_factory.mktemp("data")) as target:
        yield target


# --- decompression bombs


PICTURE_BOMBS = {
    "a canvas of 1.35 GB in 46 bytes of WebP": (corpus.webp_canvas_bomb, 413),
    "a PNG of one bit a pixel, 1.6 GB as RGB": (corpus.png_bomb, 413),
    "a JPEG of a thousand scans": (lambda: corpus.scan_bomb(1000), 413),
    "a GIF frame beyond its screen": (corpus.gif_with_frame_beyond_screen, 413),
    "a PNG of 2**31 rows": (lambda: corpus.png(1, 2**31 - 1, bits=1, colour_type=0, rows=b""), 413),
    "rows that go on for ever behind a small header": (lambda: corpus.png(8, 8, bits=1, colour_type=0, rows=bytes(2**27)), 200),
    "a profile that unpacks to 256 MB": (lambda: corpus.png_with_unpacking_profile(2**28), 422),
    "a text that unpacks to 256 MB": (lambda: corpus.png_with_unpacking_text(2**28), 422),
}
CLIP_BOMBS = {
    "half an hour of silence in 200 KB of OGG": (lambda: corpus.silence_bomb(1800), 413, "too_large"),
    "a megabyte at 1 Hz": (lambda: corpus.raw_wav(bytes(2**20), rate=1), 400, "audio_sample_rate"),
    "a FLAC of 2**36 samples": (lambda: corpus.flac_with_claimed_frames(2**36 - 1), 422, "undecodable_media"),
    "a FLAC at 1 Hz": (lambda: corpus.clip(corpus.tone(160), 1, "FLAC", "PCM_16"), 400, "audio_sample_rate"),
}


@pytest.mark.parametrize("name", PICTURE_BOMBS)
async def test_a_picture_that_would_explode_is_refused_or_harmless_and_the_next_one_is_served(target: Target, name: str) -> None:
    make, status = PICTURE_BOMBS[name]
    data, before = make(), target.num_deaths
    assert len(data) < 2**20
    assert {(await target.ask(picture_part(data))).status, (await target.send_form("image", data)).status} == {status}
    assert target.num_deaths == before
    assert (await target.ask(picture_part(corpus.save(corpus.scene(), "PNG")))).status == 200


@pytest.mark.parametrize("name", CLIP_BOMBS)
async def test_a_clip_that_would_explode_is_refused_and_the_next_one_is_served(target: Target, name: str) -> None:
    make, status, code = CLIP_BOMBS[name]
    data, before = make(), target.num_deaths
    answers = [await target.ask(clip_part(data)), await target.send_form("audio", data)]
    assert [(answer.status, answer.error["code"]) for answer in answers] == [(status, code)] * 2
    assert target.num_deaths == before
    assert (await target.ask(clip_part(corpus.wav(corpus.tone(800))))).status == 200


# --- decoders


async def test_a_decoder_that_is_hit_by_a_signal_of_its_own_costs_one_request_and_its_neighbours_nothing(target: Target) -> None:
    """A real SIGSEGV in the real decode process, with one picture in its hands and others behind it."""
    pid, before = target.decode_pid, target.num_deaths
    os.kill(pid, signal.SIGSTOP)
    hit = asyncio.create_task(target.ask(picture_part(picture(901).data)))
    while not target.engine._media.decode._running:
        await asyncio.sleep(0.01)
    others = [asyncio.create_task(target.ask(picture_part(picture(seed).data))) for seed in range(902, 906)]
    os.kill(pid, signal.SIGSEGV)
    os.kill(pid, signal.SIGCONT)
    refused = await hit
    assert (refused.status, refused.error["code"]) == (422, "undecodable_media")
    assert [answer.status for answer in await asyncio.gather(*others)] == [200] * 4
    assert target.num_deaths == before + 1
    assert target.decode_pid != pid


# --- requests to elsewhere


class Watch:
    """What this process opens and connects to while it is on: an audit hook, which can't be taken off again."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[tuple[str, str]] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and event in ("socket.connect", "socket.getaddrinfo", "open", "subprocess.Popen", "os.posix_spawn"):
            self.seen.append((event, repr(args[1] if event == "socket.connect" else args[0])))


async def test_nothing_a_request_says_opens_a_connection_or_a_file(target: Target, tmp_path: Path) -> None:
    (tmp_path / "canary").write_bytes(corpus.save(corpus.scene(), "PNG"))
    watch = Watch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        port = listener.getsockname()[1]
        urls = [
            f"http://127.0.0.1:{port}/a.png", f"https://localhost:{port}/", f"//127.0.0.1:{port}/a.png", f"ftp://127.0.0.1:{port}/",
            f"HTTP://127.0.0.1:{port}", f"data:http://127.0.0.1:{port}/;base64,", f"file://{tmp_path}/canary", f"{tmp_path}/canary",
            "http://rebinding.example.com/a.png", "http://[::ffff:127.0.0.1]/", "http://169.254.169.254/latest/meta-data/",
        ]  # fmt: skip
        await target.ask()  # the client's own connection
        watch.is_on = True
        for url in urls:
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "audio_url", "audio_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            ):
                assert (await target.ask(part)).status == 400
            assert (await target.ask({"type": "text", "text": f"![a picture]({url}) <img src='{url}'> {url}"})).status == 200
            assert (await target.ask(model=url)).status == 404
            for kind in ("image", "audio"):
                assert (await target.send_form(kind, url.encode())).status == 422
        for data in (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='%s'/></svg>", b"<!DOCTYPE x SYSTEM '%s'><svg/>"):
            assert (await target.ask(picture_part(data % urls[0].encode()))).status in (415, 422)
        watch.is_on = False
        with pytest.raises(BlockingIOError):
            listener.accept()
    host, port = target.server.url.removeprefix("http://").split(":")
    own = ("socket.connect", repr((host, int(port))))  # the client's, if it opened another
    assert [each for each in watch.seen if each != own and (each[0] != "open" or "canary" in each[1])] == []


# --- what stays between requests


async def test_nothing_of_one_request_is_left_in_the_slot_of_the_next(model: Path, tmp_path: Path) -> None:
    """One slot, and requests that leave it with every kind of state: bias, penalties, bans, stop strings, a seed; ended or cancelled."""
    canary = 77
    loud = ask(
        "first", logit_bias={canary: 100.0}, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.9, top_k=1, min_tokens=4,
        logprobs=5, stop=("zz",), stop_token_ids=(3,),
    )  # fmt: skip
    async with attacked(model, tmp_path, max_num_seqs=1) as target:
        quiet = ask("second", picture(950))
        alone = await tokens(target.engine, quiet)
        assert canary not in alone
        assert canary in await tokens(target.engine, loud)
        assert await tokens(target.engine, quiet) == alone
        generation = await target.engine.submit(loud)
        await anext(aiter(generation))
        generation.cancel()
        assert await tokens(target.engine, quiet) == alone
        first, second = await asyncio.gather(tokens(target.engine, loud), tokens(target.engine, quiet))
        assert canary in first
        assert second == alone


async def test_placeholders_typed_by_a_user_are_text_however_many(target: Target) -> None:
    text = "<|image|><|/image|><image-0><|audio|>"
    answer = await target.ask({"type": "text", "text": text})
    assert answer.status == 200
    assert answer.body["usage"]["prompt_tokens_details"]["image_tokens"] == 0
    huge = await target.ask({"type": "text", "text": text * 27_000})
    assert (huge.status, huge.error["code"]) == (400, "context_length_exceeded")


# --- the door


async def test_whatever_is_asked_for_no_metric_gets_a_label_of_it(target: Target) -> None:
    """Each new label value is a time series that is kept for ever."""

    async def noise(rng: random.Random) -> None:
        word = "".join(rng.choices("abcdefghij", k=12))
        await target.ask(model=word)
        await target.ask(cache_salt=word, user=word, priority=rng.randrange(100))
        await target.ask({"type": word, word: word})
        await target.ask(picture_part(word.encode()))
        for method in ("GET", "POST", "PUT", word.upper()):
            for path in (f"/{word}", f"/v1/models/{word}", f"/health?route={word}", f"/v1/chat/completions?{word}"):
                headers = {"x-request-id": word, "User-Agent": word, word: word}
                async with target.server.http.request(method, target.server.url + path, headers=headers) as response:
                    assert response.status < 500 or response.status == 501 or path.startswith("/health")

    async def series() -> set[tuple[str, str]]:
        async with target.server.http.get(f"{target.server.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            return {(sample.name, str(sorted(sample.labels.items()))) for family in families for sample in family.samples}

    rng = random.Random(0)
    await noise(rng)
    before = await series()
    for _ in range(5):
        await noise(rng)
    assert await series() == before


async def test_no_spelling_of_a_route_goes_around_the_key() -> None:
    async with serving(api_key="secret") as server:
        for spelling in (
            "//v1/models", "/v1//models", "/./v1/models", "/health/../v1/models", "/health/%2e%2e/v1/models", "/%76%31/models",
            "/v1/models/", "/v1/models%00", "/V1/MODELS", "/v1/models;/health", "/v1/models?/health", "/v1/models#/health",
            "/health/..%2fmetrics", "http://localhost/v1/models", "http://localhost/health/../metrics", "/health\\..\\metrics", "*",
        ):  # fmt: skip
            answer = await raw(server.url, f"GET {spelling} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert answer.split(b" ", 2)[1] in (b"400", b"401"), (spelling, answer)


async def test_the_contract_holds_where_asserts_are_left_out() -> None:
    """`python -O` removes what an `assert` guards.  (pytest writes a test's own as an `if`.)"""
    here = Path(__file__).parent
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning")
    run = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, *(str(here / name) for name in CONTRACT_TESTS),
        env=os.environ | {"PYTHONOPTIMIZE": "1"}, cwd=here.parent, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await run.communicate()
    assert run.returncode == 0, output.decode()[-3000:]
    assert b" passed" in output
