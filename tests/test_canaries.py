"""Canaries beside a real engine: who gets them, what becomes of their requests when they fail, and what is left of them after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import canary_decoder
import pytest
import pytest_asyncio
import tiny_model
from safetensors.torch import load_file, save_file
from test_engine import ask, clip, config, counter, picture, read, settled, tokens

from mmserve import AsyncEngine, ChatRequest
from mmserve.__main__ import main
from mmserve.canaries import MAX_DEATHS
from mmserve.canary import Reasked, conversation, takes
from mmserve.canary_records import CanaryRecord, CanaryRecords
from mmserve.composition import BadModel, load_composition, read_canary
from mmserve.config import CanaryConfig, Config, ConfigError
from mmserve.ledger import CanaryDecision, Feedback, Ledger
from mmserve.ledger_tables import open_ledger
from mmserve.media import MediaKind
from mmserve.prompt_maker import Prompt
from mmserve.token_stream import Generation
from scripts import loopback

IN_TRAFFIC = pytest.mark.asyncio(loop_scope="module")
NAME = "small-canary"
WAIT_S = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def copy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Equal weights in other files."""
    return Path(shutil.copytree(model, tmp_path_factory.mktemp("copy") / "model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Equal but for the vision adapter."""
    target = Path(shutil.copytree(model, tmp_path_factory.mktemp("adapter") / "model"))
    file = target / "projectors" / "vision-small.safetensors"
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file)
    return target


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights everywhere."""
    return tiny_model.build(tmp_path_factory.mktemp("other"), seed=1)


def with_canary(model: Path, data: Path, canary: Path, *, max_num_seqs: int = 128, **settings: object) -> Config:
    return replace(
        config(model, data, max_num_seqs=max_num_seqs), canary=CanaryConfig(canary_small=canary, **({"canary_share": 0.5} | settings))
    )  # type: ignore[arg-type]


@asynccontextmanager
async def engine_with(model: Path, data: Path, canary: Path, *, is_live: bool = True, **settings: object) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(with_canary(model, data, canary, **settings)) as engine:
        if is_live:
            await until(lambda: engine._canaries._beside["small"].is_live)
        yield engine


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.02)


async def record_of(engine: AsyncEngine) -> CanaryRecord:
    assert await asyncio.to_thread(engine.ledger.flush)
    with CanaryRecords(engine.ledger.path) as records:
        return records.all()[-1]


def decisions(record: CanaryRecord) -> list[str]:
    return [decision.decision for decision in record.decisions]


def rows(engine: AsyncEngine, query: str) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(engine.ledger.path)) as db:
        return db.execute(query).fetchall()


async def over(engine: AsyncEngine) -> None:
    """It has gone, and all that it held is free."""
    await until(lambda: not engine._canaries._beside["small"].is_open and not engine._active)
    await settled(engine)


# --- who gets one ------------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traffic(model: Path, copy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    """Half of the conversations go to an equal copy; what is routed and not asked for by name begins uncertainly."""
    directory = tmp_path_factory.mktemp("traffic")
    router = {"weights": {"bias": -9.0}, "threshold": 0.5, "escalate_above": -1.0, "num_judged": 2}
    await asyncio.to_thread((directory / "router.json").write_text, json.dumps(router))
    settings = with_canary(model, directory, copy)
    async with AsyncEngine(replace(settings, model=replace(settings.model, router=directory / "router.json"))) as engine:
        await until(lambda: engine._canaries._beside["small"].is_live)
        yield engine


@IN_TRAFFIC
async def test_a_share_of_the_conversations_goes_to_the_canary_says_so_and_stays_there(traffic: AsyncEngine) -> None:
    engine = traffic
    requests = [ask(f"question {i} about ", picture(i % 3), max_tokens=3) for i in range(16)]
    generations = [await engine.submit(request) for request in requests]
    first = [(await read(generation), generation.model) for generation in generations]
    names = [name for _, name in first]
    assert {"small", NAME} == set(names)
    again = [await engine.submit(request) for request in requests]
    assert [(await read(generation), generation.model) for generation in again] == first  # equal weights say equal things
    await settled(engine)
    assert await asyncio.to_thread(engine.ledger.flush)
    kept = rows(engine, "SELECT model_variant, count(*) FROM inference_requests GROUP BY model_variant ORDER BY 1")
    assert kept == [("small", 2 * names.count("small")), (NAME, 2 * names.count(NAME))]
    assert (await engine.submit(ask("hello", model="large"))).model == "large"
    by_name = await engine.submit(ask("look at ", picture(1), model=NAME))
    assert (by_name.model, by_name.route_reason) == (NAME, "hint")
    await read(by_name)
    assert [media.source for media in by_name.usage.media] == ["memory"]  # equal adapters share their rows
    record = await record_of(engine)
    failed = {is_canary: count for (_, metric, is_canary), count in record.counts.items() if metric == "failed"}
    assert failed == {True: (0, 2 * names.count(NAME)), False: (0, 2 * names.count("small"))}  # who asks by name doesn't count
    assert decisions(record) == ["started"]


@IN_TRAFFIC
async def test_thumbs_and_repeated_questions_count_for_the_arm_that_answered(traffic: AsyncEngine) -> None:
    engine = traffic
    engine._canaries._reasked = Reasked(within_s=0.0)
    arms = set()
    for i in range(8):
        generation = await engine.submit(ask(f"question {i}", max_tokens=2))
        await read(generation)
        arms.add(generation.model == NAME)
        for _ in range(2):  # only the first rating counts, and only its own tenant's
            engine.record_feedback(Feedback(generation.request_id, "someone", "up", False, 0.0))
            engine.record_feedback(Feedback(generation.request_id, "default", "down", False, 0.0))
    assert arms == {True, False}
    counts = (await record_of(engine)).counts
    assert [hits == trials for (_, metric, _), (hits, trials) in counts.items() if metric == "thumbs_down"] == [True, True]
    assert sum(trials for (_, metric, _), (_, trials) in counts.items() if metric == "thumbs_down") == 8
    assert sum(trials for (_, metric, _), (_, trials) in counts.items() if metric == "regenerated") == 7


@IN_TRAFFIC
async def test_an_uncertain_answer_counts_for_the_arm_that_began_it_and_is_the_large_decoders(traffic: AsyncEngine) -> None:
    for i in range(10):
        generation = await traffic.submit(ask(f"uncertain {i}", model="auto"))
        assert await read(generation) == [await tokens(traffic, ask(f"uncertain {i}", model="large"))]
        assert (generation.model, generation.route_reason) == ("large", "escalated")
    await settled(traffic)
    counts = (await record_of(traffic)).counts
    escalated = {is_canary: count for (_, metric, is_canary), count in counts.items() if metric == "escalated"}
    assert set(escalated) == {True, False}
    assert all(hits == trials for hits, trials in escalated.values())
    assert sum(trials for _, trials in escalated.values()) == 10


async def who_comes_late(engine: AsyncEngine) -> tuple[asyncio.Task[Generation], asyncio.Event]:
    """A request that is the canary's, and whose prompt isn't ready before the event is set."""
    make, begun, go_on = engine._prompts.make, asyncio.Event(), asyncio.Event()

    async def make_slowly(request: ChatRequest, name: str, left_out: Mapping[int, str]) -> Prompt:
        if name == NAME and not begun.is_set():
            begun.set()
            await go_on.wait()
        return await make(request, name, left_out)

    engine._prompts.make = make_slowly  # type: ignore[method-assign]
    task = asyncio.create_task(engine.submit(drawn(engine, "late")))
    await begun.wait()
    return task, go_on


def drawn(engine: AsyncEngine, words: str, max_tokens: int = 12) -> ChatRequest:
    """A question that is the canary's."""
    seed = engine._canaries._beside["small"].fingerprint.encode()
    requests = (ask(f"{words} {i}", max_tokens=max_tokens) for i in range(100))
    return next(request for request in requests if takes(0.5, conversation(request), seed))


@IN_TRAFFIC
async def test_the_operator_ends_it_and_streams_that_have_begun_go_on_there(
    traffic: AsyncEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of this engine's canary."""
    engine, data = traffic, traffic.config.storage.directory
    story = drawn(engine, "a long story", max_tokens=1200)
    late, go_on = await who_comes_late(engine)
    expected = await tokens(engine, story)
    begun = await engine.submit(story)
    first = await begun.next_batch()
    assert await asyncio.to_thread(main, ["canary", "abort", NAME, "--data-dir", str(data), "--reason", "I said so"]) == 0
    await until(lambda: not engine._canaries._beside["small"].is_live)
    assert (await engine.submit(drawn(engine, "hello"))).model == "small"
    assert begun.model == NAME
    heard = tuple(token_id for delta in first for token_id in delta.token_ids)
    assert [heard + ids for ids in await read(begun)] == [expected]
    await over(engine)
    assert decisions(await record_of(engine)) == ["started", "aborted", "rolled_back"]
    go_on.set()
    async with asyncio.timeout(WAIT_S):
        assert await read(await late) == [await tokens(engine, drawn(engine, "late"))]
    assert main(["canary", "status", "--data-dir", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "I said so" in shown
    assert "thumbs_down" in shown
    assert main(["canary", "abort", NAME, "--data-dir", str(data)]) == 2
    assert main(["canary", "reset", NAME, "--data-dir", str(data)]) == 0
    assert main(["canary", "status", "--json", "--data-dir", str(data)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["counts"]) == ("reset", [])


async def test_a_canary_with_adapters_of_its_own_reads_its_own_rows_and_shadows_that_differ_end_it(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    """All else is equal: with rows that the other left in the cache it would say the same."""

    def question(name: str, number: int = 0) -> ChatRequest:
        return ask(f"{number} look at ", picture(1), model=name, temperature=0.0)

    async with engine_with(model, tmp_path, adapter, canary_mode="shadow", canary_share=1.0) as engine:
        trial = engine._canaries._beside["small"]
        assert trial.canary.own_kinds == {MediaKind.IMAGE}
        told = await tokens(engine, question("small"))
        assert await tokens(engine, question(NAME)) != told
        heard = [await tokens(engine, ask("hear ", clip(1), model=name)) for name in ("small", NAME)]
        assert heard[0] == heard[1]
        for number in range(40):
            await tokens(engine, question("small", number))
            await until(lambda: not engine._canaries._shadows)
            if not trial.is_live:
                break
        await over(engine)
        record = await record_of(engine)
        assert decisions(record) == ["started", "breached", "rolled_back"]
        assert (record.decisions[1].metric, record.decisions[1].slice) == ("different", "image")


async def test_a_shadow_answers_for_nobody_and_only_when_nobody_waits(model: Path, copy: Path, tmp_path: Path) -> None:
    greedy = [ask(f"question {i} about ", picture(i % 3), max_tokens=3, temperature=0.0) for i in range(12)]
    async with engine_with(model, tmp_path, copy, canary_mode="shadow", canary_share=1.0, max_num_seqs=1) as engine:
        for request in greedy:
            generation = await engine.submit(request)
            await read(generation)
            assert generation.model == "small"
            await until(lambda: not engine._canaries._shadows)
        assert outcome(engine, "equal") == 12
        await settled(engine)
        generations = [await engine.submit(request) for request in greedy]
        for generation in generations:
            await read(generation)
        await until(lambda: not engine._canaries._shadows)
        await settled(engine)
        assert outcome(engine, "equal") + outcome(engine, "busy") == 24
        assert outcome(engine, "busy") >= 10  # one at a time has a place: others wait nearly always
        assert await asyncio.to_thread(engine.ledger.flush)
        assert rows(engine, "SELECT DISTINCT model_variant FROM inference_requests") == [("small",)]
        assert rows(engine, "SELECT count(*) FROM request_costs") == [(24,)]
        assert engine.metrics.registry.get_sample_value("mmserve:gpu_overhead_seconds_total", {"reason": "shadow"})


def outcome(engine: AsyncEngine, name: str) -> float:
    return engine.metrics.registry.get_sample_value("mmserve:canary_shadows_total", {"model_name": NAME, "outcome": name}) or 0.0


# --- faults ------------------------------------------------------------------------------------------------------------------


class Fault:
    """What the canary's worker does wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(canary_decoder.NONE)

    def set(self, kind: str) -> None:
        self.path.write_text(kind)


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fault:
    fault = Fault(tmp_path / "fault")
    monkeypatch.setenv(canary_decoder.FAULT, str(fault.path))
    monkeypatch.setattr("mmserve.decoder_group.worker_module", lambda device: "canary_decoder")
    return fault


def some_requests() -> list[ChatRequest]:
    kinds = [("tell me", " more"), (picture(1), "what is it?"), (picture(2), picture(3), "which?"), (clip(1), "what?")]
    return [ask(f"{i} ", *kinds[i % 4], max_tokens=20, seed=i) for i in range(12)]


async def test_a_canary_that_fails_costs_no_client_a_token(model: Path, copy: Path, tmp_path: Path, fault: Fault) -> None:
    """What it had said is kept, and the other decoder says the rest: with equal weights the same as if nothing had happened."""
    requests = some_requests()
    async with engine_with(model, tmp_path / "data", copy, canary_margin=0.99) as engine:
        trial = engine._canaries._beside["small"]

        async def say() -> list[tuple[int, ...]]:
            generations = [await engine.submit(request) for request in requests]
            names.update(generation.model for generation in generations)
            return [ids for generation in generations for ids in await read(generation)]

        names: set[str] = set()
        expected = await say()
        assert names == {"small", NAME}
        for kind in (canary_decoder.NAN, canary_decoder.CRASH_LATER, *[canary_decoder.CRASH] * MAX_DEATHS):
            fault.set(kind)
            num_before = counter(engine, "canary_returns_total")
            assert await say() == expected
            assert counter(engine, "canary_returns_total") > num_before
            fault.set(canary_decoder.NONE)
            await until(lambda: engine._groups[NAME].alive or not trial.is_live)
            if not trial.is_live:
                break
        await over(engine)
        record = await record_of(engine)
        assert decisions(record) == ["started", "rolled_back"]
        assert record.decisions[-1].reason == f"its worker ended {MAX_DEATHS} times"
        assert sum(hits for (_, metric, is_canary), (hits, _) in record.counts.items() if metric == "failed" and is_canary) > 0
        names.clear()
        assert await say() == expected
        assert names == {"small"}


# --- what can't be tried -----------------------------------------------------------------------------------------------------


def changed(model: Path, target: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(model, target)
    text = (target / file).read_text()
    assert old in text
    (target / file).write_text(text.replace(old, new))
    return target


def test_what_its_requests_could_not_be_carried_over_from_is_refused_and_all_of_it_is_named(model: Path, tmp_path: Path) -> None:
    stable = load_composition(model)
    changes = {
        "chat template": ("chat_template.jinja", "<|", " <|"),
        "image geometry": ("composition.toml", f"tokens_per_item = {tiny_model.TOKENS_PER_IMAGE}", "tokens_per_item = 4"),
        "image placeholder": ("composition.toml", 'around = ["<|image|>", "<|/image|>"]', 'around = ["<|image|>", ""]'),
        "audio geometry": ("composition.toml", "window_s = 1.0", "window_s = 0.5"),
        "vocabulary size": ("small/config.json", f'"vocab_size": {tiny_model.VOCAB_SIZE}', '"vocab_size": 400'),
        "tokenizer": ("tokenizer.json", '"truncation": null', '"truncation":  null'),
    }
    target = tmp_path / "all"
    shutil.copytree(model, target)
    for name, (file, old, new) in changes.items():
        one = changed(model, tmp_path / name.replace(" ", "-"), file, old, new)
        with pytest.raises(BadModel, match=f"it has another {name}$"):
            read_canary("small", one, stable)
        text = (target / file).read_text()
        (target / file).write_text(text.replace(old, new))
    with pytest.raises(BadModel) as error:
        read_canary("small", target, stable)
    assert all(name in str(error.value) for name in changes)


def test_a_canary_needs_a_decoder_to_stand_beside_and_a_share(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share"):
        AsyncEngine(with_canary(model, tmp_path, model, canary_share=1.5))
    with pytest.raises(ConfigError, match="margin"):
        AsyncEngine(with_canary(model, tmp_path, model, canary_margin=0.0))
    single = changed(model, tmp_path / "single", "composition.toml", 'large = "large"\n', "")
    with pytest.raises(BadModel, match="no large decoder"):
        read_canary("large", model, load_composition(single))


def test_the_fingerprint_follows_the_weights_and_not_the_files(model: Path, copy: Path, other: Path, adapter: Path) -> None:
    stable = load_composition(model)

    def fingerprint(directory: Path) -> str:
        return read_canary("small", directory, stable).fingerprint(lambda: None)

    assert fingerprint(copy) == fingerprint(model)
    assert len({fingerprint(directory) for directory in (model, other, adapter)}) == 3
    assert read_canary("small", adapter, stable).own_kinds == {MediaKind.IMAGE}


def test_a_fingerprint_is_given_up_when_the_server_ends(model: Path) -> None:
    """It reads all weights, in a thread that nobody can cancel: a server that was stopped just after its start waited for that."""
    num_asked = 0

    def between() -> None:
        nonlocal num_asked
        num_asked += 1
        raise ShuttingDown

    with pytest.raises(ShuttingDown):
        read_canary("small", model, load_composition(model)).fingerprint(between)
    assert num_asked == 1


class ShuttingDown(Exception):
    """Said between two pieces."""


# --- what is left ------------------------------------------------------------------------------------------------------------


def test_an_older_ledger_gets_the_tables(tmp_path: Path) -> None:
    db = open_ledger(tmp_path / "ledger.db", 1.0)
    db.execute("DROP TABLE canary_decisions")
    db.execute("DROP TABLE canary_counts")
    db.execute("PRAGMA user_version = 4")
    db.close()
    db = open_ledger(tmp_path / "ledger.db", 1.0)
    assert {"canary_decisions", "canary_counts"} <= set(db.table_names())
    db.close()


def test_only_a_reset_lets_what_has_ended_begin_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with contextlib.closing(Ledger(path)) as ledger:
        for decision in ("started", "breached", "rolled_back"):
            ledger.record_canary(CanaryDecision(NAME, "a", decision, "why", 1.0))
        ledger.record_canary(CanaryDecision(NAME, "b", "started", "why", 1.0))
    with CanaryRecords(path) as records:
        assert (end := records.read(NAME, "a").end) is not None
        assert end.decision == "rolled_back"
        assert records.read(NAME, "b").end is None
        assert records.read(NAME, "never").end is None
        with pytest.raises(ConfigError, match="has not ended"):
            records.reset(NAME)
        records.abort(NAME, "enough")
        assert records.read(NAME, "b").end is not None
        records.reset(NAME)
        assert records.read(NAME, "b").end is None
        assert records.read(NAME, "a").end is not None
        with pytest.raises(ConfigError, match="ever tried"):
            records.abort("large-canary", "")


def incomplete(model: Path, target: Path) -> Path:
    """Its worker can't load it."""
    shutil.copytree(model, target)
    file = target / "small" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    return target


async def test_a_canary_that_never_comes_up_is_no_matter_to_the_server_and_the_verdict_outlives_a_kill(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    bad = incomplete(model, tmp_path / "bad")
    flags = ("--model", str(model), "--worker-threads", "1", "--kv-cache-memory-bytes", str(2**23), "--canary-small")

    def states() -> list[str]:
        with CanaryRecords(data / "ledger.db") as records:
            return [record.state for record in records.all()]

    async with loopback.running(data, *flags, str(bad)) as server:
        await until(lambda: states() == ["rolled_back"])
        os.kill(server.process.pid, signal.SIGKILL)
        await server.process.wait()
    log = server.log.read_text()
    assert "it never came up" in log
    assert "is not tried again" not in log
    async with loopback.running(data, *flags, str(bad)) as server:
        await until(lambda: "is not tried again" in server.log.read_text())
        assert (await loopback.scrape(server.url)).total("canary_live") == 0
        os.kill(server.process.pid, signal.SIGKILL)
        await server.process.wait()
    assert states() == ["rolled_back"]
    assert main(["canary", "reset", NAME, "--data-dir", str(data)]) == 0
    with CanaryRecords(data / "ledger.db") as records:
        assert records.all()[-1].end is None
