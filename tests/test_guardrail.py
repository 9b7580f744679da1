"""The guardrail over HTTP: the bundled model on a real engine, whose detector is told never to believe in rockets.

So an answer about the rocket's picture is unsupported, every time it names it, and one about the cat's is supported unless the model
makes something up.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from mmserve.composition import BUNDLED, BadModel, load_composition
from mmserve.config import Config, ConfigError, GuardrailConfig, from_mapping
from mmserve.engine import AsyncEngine
from mmserve.errors import BadRequest, RateLimited
from mmserve.gateway.server import Gateway
from mmserve.grounding.probe import DETECTORS, LinearProbe, float_rows
from mmserve.grounding.verdict import Grounder
from mmserve.grounding.vocabulary import Vocabulary
from mmserve.guardrail import Guardrail, drawn_otherwise, load_judges, own_judges
from mmserve.media import MediaItem, MediaKind
from mmserve.metrics import Metrics
from mmserve.request import ChatRequest, MediaNotice, Message, SamplingParams
from mmserve.shared_buffer import BufferSlice
from scripts.loopback import audio_part, image_part, text_part

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).parent.parent / "examples"
CAT = image_part((EXAMPLES / "cat.jpg").read_bytes(), "image/jpeg")
ROCKET = image_part((EXAMPLES / "rocket.jpg").read_bytes(), "image/jpeg")
GUITAR = audio_part((EXAMPLES / "guitar.wav").read_bytes())
WHAT = text_part("What is in the picture?")
TABLE = f"""
[guardrail]
detector = "linear_probe"
vocabulary = "{BUNDLED / "objects.json"}"
probes = {{ small = "{BUNDLED / "probes/vision-small.safetensors"}", large = "{BUNDLED / "probes/vision-large.safetensors"}" }}
thresholds = {{ rocket = 1.0 }}
"""


@dataclass(frozen=True)
class House:
    engine: AsyncEngine
    url: str
    http: aiohttp.ClientSession

    async def ask(self, *parts: dict, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_tokens": 40, "model": "small", **fields}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def stream(self, *parts: dict, **fields: Any) -> list[dict[str, Any]]:
        body = {
            "messages": [{"role": "user", "content": list(parts)}],
            "temperature": 0,
            "max_tokens": 40,
            "model": "small",
            "stream": True,
        }
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body | fields) as response:
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def feedback(self, request_id: str, rating: str) -> None:
        async with self.http.post(f"{self.url}/v1/feedback", json={"request_id": request_id, "rating": rating}) as response:
            assert response.status == 200

    def reading(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"mmserve:{name}", labels) or 0.0

    async def rows(self, query: str, *values: object) -> list[tuple]:
        assert await asyncio.to_thread(self.engine.ledger.flush)
        with sqlite3.connect(self.engine.ledger.path) as db:
            return db.execute(query, values).fetchall()

    async def idle(self) -> None:
        async with asyncio.timeout(30):
            while self.engine._active or self.engine.guardrail._tasks or self.engine._media.cache.num_pinned:
                await asyncio.sleep(0.01)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def image_request(file: str, text: str, **fields: Any) -> ChatRequest:
    picture = MediaItem(MediaKind.IMAGE, (EXAMPLES / file).read_bytes())
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    return ChatRequest((Message("user", (picture, text)),), sampling, model="small", **fields)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    directory = tmp_path_factory.mktemp("house")
    (directory / "table.toml").write_text(TABLE)
    settings = {"port": 0, "data-dir": directory, "guardrail-table": directory / "table.toml", "grounding-sample": 1.0}
    config: Config = from_mapping(settings)
    async with (
        AsyncEngine(config) as engine,
        Gateway(engine, config) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield House(engine, gateway.url, http)


# --- flag --------------------------------------------------------------------------------------------------------------------


async def test_flag_tells_what_was_seen_and_changes_nothing_of_the_answer(house: House) -> None:
    plain = await house.ask(CAT, WHAT)
    answer = await house.ask(CAT, WHAT, guardrail="flag")
    assert "mmserve" not in plain
    assert text_of(answer) == text_of(plain)
    found = answer["mmserve"]["guardrail"]
    assert (found["mode"], found["outcome"], found["score"], found["draws"]) == ("flag", "supported", 1.0, 1)
    (choice,) = found["choices"]
    (mention,) = choice["mentions"]
    assert (mention["object"], mention["stance"], mention["supported"]) == ("cat", "asserted", True)
    assert text_of(answer)[mention["start"] : mention["stop"]] == mention["text"] == "cat"
    assert mention["score"] > 0.9


async def test_what_the_vision_side_did_not_see_is_named_counted_and_written_down(house: House) -> None:
    flags = {"model_name": "small", "mode": "flag", "outcome": "unsupported"}
    before = house.reading("guardrail_flags_total", **flags)
    answer = await house.ask(ROCKET, WHAT, guardrail="flag")
    assert "rocket" in text_of(answer)
    found = answer["mmserve"]["guardrail"]
    assert (found["outcome"], found["score"]) == ("unsupported", 0.0)
    assert found["choices"][0]["unsupported"] == ["rocket"]
    assert house.reading("guardrail_flags_total", **flags) == before + 1
    query = "SELECT mode, outcome, grounding_score, num_mentions, num_unsupported, num_draws FROM grounding WHERE request_id = ?"
    assert await house.rows(query, answer["id"].removeprefix("chatcmpl-")) == [("flag", "unsupported", 0.0, 1, 1, 1)]


async def test_a_flagged_stream_ends_in_a_chunk_that_tells(house: House) -> None:
    plain = text_of(await house.ask(ROCKET, WHAT))
    chunks = await house.stream(ROCKET, WHAT, guardrail="flag")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == plain
    assert sum(1 for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")) > 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:-1]] == ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["mmserve"]["guardrail"]["choices"][0]["unsupported"] == ["rocket"]


async def test_an_object_in_any_of_the_pictures_is_there_and_explain_tells_beside_it(house: House) -> None:
    question = text_part("What is in the pictures?")
    answer = await house.ask(CAT, ROCKET, question, guardrail="flag", explain=True)
    assert answer["mmserve"]["route"]["model"] == "small"
    (choice,) = answer["mmserve"]["guardrail"]["choices"]
    assert {mention["object"]: mention["supported"] for mention in choice["mentions"]} == {"cat": True, "rocket": False}
    assert choice["score"] == 0.5


async def test_each_choice_has_a_verdict(house: House) -> None:
    answer = await house.ask(ROCKET, WHAT, guardrail="flag", n=2)
    assert [choice["unsupported"] for choice in answer["mmserve"]["guardrail"]["choices"]] == [["rocket"], ["rocket"]]


async def test_a_word_that_was_heard_is_nothing_that_could_be_seen(house: House) -> None:
    answer = await house.ask(CAT, GUITAR, text_part("What word is spoken?"), guardrail="flag")
    assert "guitar" in text_of(answer)
    assert answer["mmserve"]["guardrail"]["outcome"] == "unchecked"
    assert [mention["stance"] for mention in answer["mmserve"]["guardrail"]["choices"][0]["mentions"]] == ["heard"]


async def test_without_a_picture_nothing_is_checked(house: House) -> None:
    answer = await house.ask(text_part("Hello"), guardrail="regenerate")
    assert answer["mmserve"]["guardrail"] == {"mode": "regenerate", "outcome": "unchecked", "score": None, "draws": 1, "choices": []}


async def test_an_answer_that_is_asked_for_again_by_its_key_tells_the_same(house: House) -> None:
    body = {"messages": [{"role": "user", "content": [ROCKET, WHAT]}], "temperature": 0, "model": "small", "guardrail": "flag"}
    answers = []
    for _ in range(2):
        async with house.http.post(f"{house.url}/v1/chat/completions", json=body, headers={"Idempotency-Key": "rocket"}) as response:
            answers.append(await response.json())
    assert answers[0]["mmserve"]["guardrail"]["choices"][0]["unsupported"] == ["rocket"]
    assert answers[0]["mmserve"] == answers[1]["mmserve"]


# --- regenerate --------------------------------------------------------------------------------------------------------------


async def test_a_supported_answer_is_not_drawn_again(house: House) -> None:
    answer = await house.ask(CAT, WHAT, guardrail="regenerate")
    assert text_of(answer) == text_of(await house.ask(CAT, WHAT))
    assert (answer["mmserve"]["guardrail"]["outcome"], answer["mmserve"]["guardrail"]["draws"]) == ("supported", 1)


async def test_what_stays_unsupported_is_flagged_after_a_second_draw_which_is_paid_for(house: House) -> None:
    once = await house.ask(ROCKET, WHAT, guardrail="flag")
    answer = await house.ask(ROCKET, WHAT, guardrail="regenerate", seed=5)
    found = answer["mmserve"]["guardrail"]
    assert (found["outcome"], found["draws"]) == ("unsupported", 2)
    assert answer["usage"]["prompt_tokens"] == once["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] > once["usage"]["completion_tokens"]


async def test_a_second_draw_that_is_supported_takes_the_place_of_the_first(house: House) -> None:
    """At this temperature the model makes things up now and then; which seeds do it is the machine's business."""
    hot = {"temperature": 2.0, "top_k": 40}
    for seed in range(80):
        found = await house.ask(CAT, WHAT, guardrail="regenerate", seed=seed, **hot)
        if found["mmserve"]["guardrail"]["outcome"] == "regenerated":
            break
    assert found["mmserve"]["guardrail"]["draws"] == 2
    first = await house.ask(CAT, WHAT, guardrail="flag", seed=seed, **hot)
    second = await house.ask(CAT, WHAT, seed=seed + 1, **hot)
    assert first["mmserve"]["guardrail"]["outcome"] == "unsupported"
    assert text_of(found) == text_of(second) != text_of(first)


async def test_a_stream_is_held_back_until_it_is_decided(house: House) -> None:
    chunks = await house.stream(ROCKET, WHAT, guardrail="regenerate", stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "rocket" in "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert chunks[-1]["mmserve"]["guardrail"]["outcome"] == "unsupported"
    assert (chunks[-1]["mmserve"]["guardrail"]["draws"], chunks[-1]["usage"]["prompt_tokens"] > 576) == (2, True)
    for mode, is_decided in (("regenerate", True), ("flag", False)):
        generation = await house.engine.submit(image_request("rocket.jpg", "Describe the picture.", guardrail=mode))
        assert await generation.next_batch()
        assert (generation.grounding is not None) is is_decided
        generation.cancel()


async def test_where_no_second_draw_is_admitted_the_first_is_flagged(house: House) -> None:
    async def refuse(request: ChatRequest) -> Any:
        raise RateLimited("no more today")

    active = await house.engine._admit(image_request("rocket.jpg", "What is in the picture?", guardrail="regenerate"))
    generation = house.engine.guardrail.guard(active, refuse)
    assert "rocket" in "".join([delta.text async for delta in generation])
    assert generation.grounding is not None
    assert (generation.grounding.outcome, generation.grounding.num_draws) == ("unsupported", 1)


@pytest.mark.parametrize("mode", ["flag", "regenerate"])
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_client_that_leaves_takes_its_draw_with_it(house: House, mode: str, is_at_once: bool) -> None:
    request = image_request("rocket.jpg", "Describe the picture.", guardrail=mode)
    request = replace(request, sampling=SamplingParams(max_tokens=4000, ignore_eos=True))
    generation = await house.engine.submit(request)
    (active,) = house.engine._active.values()
    async with asyncio.timeout(30):
        while not is_at_once and active.first_token_s is None:
            await asyncio.sleep(0.01)
    generation.cancel()
    await house.idle()
    assert active.generated_tokens < 4000


async def test_a_client_that_leaves_during_the_second_draw_takes_that_with_it(house: House) -> None:
    request = image_request("rocket.jpg", "Describe the picture, all of it.", guardrail="regenerate")
    request = replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    generation = await house.engine.submit(request)
    (first,) = house.engine._active
    async with asyncio.timeout(60):
        while house.engine._active.keys() <= {first}:
            await asyncio.sleep(0.001)
    (second,) = house.engine._active.values()
    generation.cancel()
    await house.idle()
    assert second.generated_tokens < 200


async def test_it_is_a_setting_of_the_server_too_and_a_request_can_say_no(house: House) -> None:
    guardrail = house.engine.guardrail
    guardrail._config, config = replace(guardrail._config, guardrail="flag"), guardrail._config
    try:
        assert "mmserve" in await house.ask(CAT, WHAT)
        assert "mmserve" not in await house.ask(CAT, WHAT, guardrail="off")
    finally:
        guardrail._config = config


# --- pictures that can't be looked at ----------------------------------------------------------------------------------------


async def test_rows_that_are_gone_while_their_prompt_is_cached_are_fetched_again(house: House) -> None:
    question = text_part("Describe the picture, please. What is in it, and where?")  # longer than what a block of the cache leaves out
    first = await house.ask(CAT, question, guardrail="flag", explain=True)
    await house.idle()
    cache = house.engine._media.cache
    await cache.flush()
    house.engine.guardrail._seen.clear()
    for entry in list(cache._entries.values()):
        cache._drop(entry)
    left_out = house.reading("grounding_samples_left_out_total", reason="no_rows")
    await house.ask(CAT, question)  # for a sample nothing is fetched
    assert house.reading("grounding_samples_left_out_total", reason="no_rows") == left_out + 1
    again = await house.ask(CAT, question, guardrail="flag", explain=True)
    assert [item["source"] for item in again["mmserve"]["media"]] == ["kv"]
    assert again["mmserve"]["guardrail"] == first["mmserve"]["guardrail"]
    await house.idle()


async def test_rows_of_another_encoder_are_not_judged_by_a_probe_of_ours(house: House) -> None:
    active = await house.engine._admit(image_request("cat.jpg", "What is in the picture?"))
    async for _ in active.generation:
        pass
    assert await house.engine.guardrail.judge(active, ["I see a dog."]) is not None
    active.generation.fallback = (MediaNotice("image", 0, "encoder_unavailable"),)
    assert await house.engine.guardrail.judge(active, ["I see a dog."]) is None
    active.generation.fallback = (MediaNotice("audio", 0, "encoder_unavailable"),)
    assert await house.engine.guardrail.judge(active, ["I see a dog."]) is not None


# --- online ------------------------------------------------------------------------------------------------------------------


async def test_a_sampled_answer_is_looked_at_afterwards_and_nobody_is_told(house: House) -> None:
    await house.idle()
    labels = {"model_name": "small", "modality_mix": "image", "mode": "sample"}
    count, total = (house.reading(f"grounding_score_{part}", **labels) for part in ("count", "sum"))
    cat, rocket = await house.ask(CAT, WHAT), await house.ask(ROCKET, WHAT)
    await house.idle()
    assert "mmserve" not in cat
    assert house.reading("grounding_score_count", **labels) == count + 2
    assert house.reading("grounding_score_sum", **labels) == total + 1
    await house.ask(CAT, WHAT, guardrail="flag")  # once is enough
    await house.idle()
    assert house.reading("grounding_score_count", **labels) == count + 2
    query = "SELECT mode, outcome FROM grounding WHERE request_id = ?"
    assert await house.rows(query, rocket["id"].removeprefix("chatcmpl-")) == [("sample", "unsupported")]


async def test_looking_counts_as_no_use_of_the_cache(house: House) -> None:
    await house.ask(CAT, WHAT)
    await house.idle()
    house.engine.guardrail._seen.clear()
    before = [house.reading("mm_cache_queries_total", modality="image"), house.reading("cache_unexplained_hits_total")]
    active = await house.engine._admit(image_request("cat.jpg", "What is in the picture?"))
    async for _ in active.generation:
        pass
    await house.idle()
    after = [house.reading("mm_cache_queries_total", modality="image"), house.reading("cache_unexplained_hits_total")]
    assert after == [before[0] + 1, before[1]]


async def test_an_answer_rated_twice_counts_once_in_the_mix_of_its_request(house: House) -> None:
    ups, unknown = {"rating": "up", "modality_mix": "image_audio"}, {"rating": "down", "modality_mix": "unknown"}
    answer = await house.ask(CAT, GUITAR, text_part("What word is spoken?"))
    for _ in range(2):
        await house.feedback(answer["id"], "up")
    await house.feedback("chatcmpl-of-last-year", "down")
    assert house.reading("feedback_ratings_total", **ups) == 1
    assert house.reading("feedback_ratings_total", **unknown) == 1
    (count,) = await house.rows("SELECT count(*) FROM feedback")
    assert count == (2,)


async def test_the_same_question_about_the_same_media_again_is_a_regeneration(house: House) -> None:
    labels = {"modality_mix": "image", "seen_by": "question"}
    question = text_part("Is there a penguin?")
    await house.ask(CAT, question)
    before = house.reading("regenerations_total", **labels)
    await house.ask(ROCKET, question)
    await house.ask(CAT, text_part("Is there a pig?"))
    assert house.reading("regenerations_total", **labels) == before
    await house.ask(CAT, question, temperature=1.0)
    assert house.reading("regenerations_total", **labels) == before + 1


async def test_a_second_draw_of_ours_is_no_regeneration_of_a_client(house: House) -> None:
    labels = {"modality_mix": "image", "seen_by": "question"}
    before = house.reading("regenerations_total", **labels)
    answer = await house.ask(ROCKET, text_part("Describe this picture."), guardrail="regenerate")
    assert answer["mmserve"]["guardrail"]["draws"] == 2
    assert house.reading("regenerations_total", **labels) == before


# --- refusals ----------------------------------------------------------------------------------------------------------------


async def test_a_mode_that_nobody_knows_is_a_400_that_names_the_field(house: House) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "guardrail": "maybe"}
    async with house.http.post(f"{house.url}/v1/chat/completions", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "guardrail"


async def test_a_model_that_brings_no_detector_refuses_what_needs_one(house: House) -> None:
    def guardrail(**settings: Any) -> Guardrail:
        engine = house.engine
        return Guardrail(
            GuardrailConfig(**settings), {}, engine._media, engine.tokenizers, engine._quality, Metrics(), bases={}, on_report=pytest.fail
        )

    blind, request = guardrail(), image_request("cat.jpg", "What is it?")
    assert blind.resolve(request).guardrail == "off"
    with pytest.raises(BadRequest) as refused:
        blind.resolve(replace(request, guardrail="flag"))
    assert refused.value.param == "guardrail"
    with pytest.raises(ConfigError, match="guardrail-table"):
        guardrail(guardrail="flag")
    with pytest.raises(ConfigError, match="grounding-sample"):
        guardrail(grounding_sample=1.5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('detector = "linear_probe"', 'detector = "crystal_ball"'), "no detector 'crystal_ball'"),
        (("small =", "tiny ="), "probes lack small"),
        (("rocket = 1.0", "dragon = 1.0"), "thresholds for dragon"),
        (("rocket = 1.0", "rocket = 2.0"), "rocket must be a number from 0 to 1"),
        (("vocabulary =", "words ="), "has words, which nobody knows"),
        (("vision-small", "vision-large"), "other weights than the small model's"),
        (("objects.json", "composition.toml"), "no vocabulary"),
        (("[guardrail]", "[other]"), r"no table \[guardrail\]"),
    ],
)
async def test_a_table_that_makes_no_sense_is_refused_by_name(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    (tmp_path / "table.toml").write_text(TABLE.replace(*change))
    config: Config = from_mapping({"guardrail-table": tmp_path / "table.toml"})
    with pytest.raises(ConfigError, match=reason):
        own_judges(config, load_composition(), "cpu")


async def test_simulated_and_hosted_encoders_make_rows_that_say_nothing() -> None:
    composition = load_composition()
    assert own_judges(Config(), composition, "cpu").keys() == {"small", "large"}
    assert own_judges(Config(), composition, "sim:a100") == {}
    assert own_judges(from_mapping({"vision-url": "http://localhost:1", "vision-version": "1"}), composition, "cpu") == {}


async def test_a_detector_of_ones_own_is_a_reader_under_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Believer:
        def labels(self) -> tuple[str, ...]:
            return ("rocket",)

        def scores(self, rows: np.ndarray) -> np.ndarray:
            return np.ones(1, np.float32)

    monkeypatch.setitem(DETECTORS, "believer", lambda file, encoder, decoder: Believer())  # type: ignore[arg-type]
    composition = load_composition()
    assert composition.guardrail is not None
    judge = load_judges(replace(composition.guardrail, detector="believer"), composition)["small"]
    verdict = judge.grounder.judge("A rocket and a cat.", [judge.detector.scores(np.zeros((576, 192), np.float32))])
    assert [(f.mention.name, f.is_supported) for f in verdict.findings] == [("rocket", True), ("cat", None)]


# --- parts -------------------------------------------------------------------------------------------------------------------


async def test_mentions_are_supported_by_the_best_picture_and_each_objects_own_threshold() -> None:
    grounder = Grounder(Vocabulary({"cat": [], "dog": [], "fish": []}), ("cat", "dog"), 0.5, {"dog": 0.9})
    scores = [np.array([0.4, 0.8], np.float32), np.array([0.6, 0.1], np.float32)]
    verdict = grounder.judge("Cats, a dog, a dog and a fish. No cat.", scores)
    assert [finding.is_supported for finding in verdict.findings] == [True, False, False, None, None]
    assert (verdict.score, verdict.unsupported) == (pytest.approx(1 / 3), ("dog",))
    assert grounder.judge("a dog", []).score is None


async def test_a_probe_adds_up_what_the_patches_show() -> None:
    weight = np.array([[0, 0], [9, 0], [0, 9]], np.float32)
    probe = LinearProbe(("cat", "dog"), weight, np.array([4.5, 0, 0], np.float32), np.array([2.0, 0.0], np.float32))
    rows = np.array([[1, 0]] * 3 + [[0, 0]] * 5, np.float32)
    assert probe.masses(rows) == pytest.approx([3, 0], abs=0.15)
    cat, dog = probe.scores(rows)
    assert cat == pytest.approx(0.9, abs=0.02)
    assert dog < 0.05


async def test_rows_in_any_dtype_of_the_buffer_are_read() -> None:
    values = np.array([[1.5, -2.0]], np.float32)
    as_bfloat16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert float_rows(as_bfloat16, BufferSlice(0, (1, 2), "bfloat16")).tolist() == values.tolist()
    assert float_rows(values.astype(np.float16), BufferSlice(0, (1, 2), "float16")).tolist() == values.tolist()


async def test_a_second_draw_has_seeds_of_its_own_and_is_never_greedy() -> None:
    greedy = drawn_otherwise(SamplingParams(temperature=0.0, seed=7, n=3))
    assert (greedy.seed, greedy.temperature, greedy.n) == (10, 0.7, 3)
    assert drawn_otherwise(SamplingParams(temperature=1.3)).temperature == 1.3
    assert drawn_otherwise(SamplingParams(seed=2**64 - 1)).seed is not None


async def test_a_probe_that_is_damaged_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "probe.safetensors"
    file.write_bytes(b"not a probe")
    with pytest.raises(BadModel, match="no probe"):
        LinearProbe.read(file, load_composition().vision["small"], "small")
