"""`mmserve eval` against a real gateway whose engine sees what is in its pictures, and against the bundled model."""

from __future__ import annotations

import argparse
import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import golden_world as world
import pytest
from fake_engine import FakeEngine
from gateway_client import serving
from judge_server import JudgeRules, judging

from mmserve.cli import eval as command
from mmserve.errors import TooLarge


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


async def evaluated(
    tmp_path: Path, engine: FakeEngine, *words: str, status: int = 0, lines: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The JSON report of a run over the hand-written set, or over `lines` of one."""
    world.write_set(tmp_path / "set", lines)
    reports = ("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"), "--markdown", str(tmp_path / "r.md"))
    async with serving(engine) as server:
        args = arguments("--url", server.url, "--set", str(tmp_path / "set"), "--states-per-slice", "0", *reports, *words)
        assert await asyncio.to_thread(command.run, args) == status
    report: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return report


async def test_right_answers_are_found_right_and_the_open_one_unscored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = await evaluated(tmp_path, world.seeing_engine())
    assert [(answer["id"], answer["grounded"]) for answer in report["answers"]] == [
        ("hello", True), ("dog?", True), ("cat?", True), ("color", True), ("first", True), ("heard", True), ("both", True), ("open", None),
    ]  # fmt: skip
    assert report["order"] | {"confused": None} == {
        "probes": 1, "confused": None, "right": 1, "reversed": 0, "unmoved": 0, "wrong": 0,
    }  # fmt: skip
    assert report["macro"]["value"] == 1
    assert "Open answers that are unscored: 1; nobody judged them." in capsys.readouterr().out


async def test_a_server_that_reverses_pictures_is_found_out_by_its_slice(tmp_path: Path) -> None:
    report = await evaluated(tmp_path, world.seeing_engine(reverses=True), "--gate", status=1)
    assert report["order"]["reversed"] == 1
    assert {finding["slice"] for finding in report["gate"]["findings"] if finding["breach"]} == {"images"}
    page = (tmp_path / "r.html").read_text()
    assert "reversed; in the other order it said &#39;The second one.&#39;, where &#39;first&#39; is right" in page
    assert [Page(page).cards[i]["data-fault"] for i in range(2)] == ["wrong", "order"]


async def test_an_order_probe_is_shown_as_it_was_asked_the_second_time_unless_only_the_first_was_wrong(tmp_path: Path) -> None:
    red, blue = ({"image": f"{name}.png"} for name in ("red", "blue"))
    shown = {"category": "order", "kind": "choice", "choices": ["first", "second"], "expected": "first", "if_swapped": "second"}
    lines = [
        {"id": "before", "parts": ["Which is red?", red, blue]} | shown,
        {"id": "after", "parts": [red, blue, "Which is red?"]} | shown,
    ]
    asked = iter(["The first one.", "Neither.", "Neither.", "The second one."])  # in order: before, after, and both swapped
    engine = world.seeing_engine(lambda question, answer: next(asked))
    await evaluated(tmp_path, engine, "--concurrency", "1", lines=lines)
    page = (tmp_path / "r.html").read_text()
    assert [(card["data-fault"], card["data-id"]) for card in Page(page).cards] == [("wrong", "after"), ("order", "before~")]
    assert page.count("(before the media)") == 1


async def test_too_few_items_pass_no_gate_but_are_no_breach(tmp_path: Path) -> None:
    report = await evaluated(tmp_path, world.seeing_engine(), "--gate", status=3)
    assert report["gate"]["outcome"] == "undecided"
    assert not any(finding["breach"] for finding in report["gate"]["findings"])


async def test_bars_can_be_lowered_until_anything_passes(tmp_path: Path) -> None:
    bars = "--bar-accuracy", "0", "--bar-hallucination", "1", "--bar-coverage", "0"
    await evaluated(tmp_path, world.seeing_engine(), "--gate", *bars, "--slices", "image", status=0)


async def test_what_is_not_there_is_counted_and_shown_with_its_picture(tmp_path: Path) -> None:
    engine = world.seeing_engine(lambda question, answer: "Yes, a dog and a <cat>." if question == "Is there a dog?" else answer)
    report = await evaluated(tmp_path, engine)
    objects = report["slices"]["image"]["hallucinated_object_rate"]
    assert (objects["count"], objects["total"]) == (1, 3)
    page = Page((tmp_path / "r.html").read_text())
    [card] = [card for card in page.cards if card["data-fault"] == "hallucinated"]
    assert card["data-slice"] == "image"
    assert "Yes, a dog and a &lt;cat&gt;." in page.source
    assert page.outside == []
    assert "| image | 4 |" in (tmp_path / "r.md").read_text()


async def test_refused_requests_are_wrong_and_counted(tmp_path: Path) -> None:
    engine = world.seeing_engine()
    engine.refusal = TooLarge("not today")
    report = await evaluated(tmp_path, engine)
    assert report["all_media"]["failed"] == 7
    assert report["macro"]["value"] == 0
    assert report["answers"][0]["error"].startswith("413: ")


async def test_a_judge_scores_the_open_answers(tmp_path: Path) -> None:
    async with judging(JudgeRules()) as rules:
        words = "--judge-url", rules.url, "--judge-log", str(tmp_path / "log.jsonl")
        report = await evaluated(tmp_path, world.seeing_engine(), *words)
    [answer] = [answer for answer in report["answers"] if answer["id"] == "open"]
    assert (answer["claims"], answer["grounded"]) == (
        [{"text": "A dog runs", "ruling": "yes"}, {"text": "It is red", "ruling": "no"}],
        False,
    )
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 3


async def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await evaluated(tmp_path, world.seeing_engine())
    (tmp_path / "r.json").rename(tmp_path / "before.json")
    await evaluated(tmp_path, world.seeing_engine(lambda question, answer: answer.replace("blue", "red")))
    out = tmp_path / "compared.json"
    args = arguments("compare", str(tmp_path / "before.json"), str(tmp_path / "r.json"), "--json", str(out))
    assert command.run(args) == 0
    assert json.loads(out.read_text())["image"] == {
        "items": 3, "before": 1.0, "after": 0.66667, "better": [], "worse": ["color"], "p_value": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--set", "nowhere"), "can't read nowhere/items.jsonl"),
        (("--judge-model", "x"), "a judge needs --judge-url"),
        (("--url", "http://127.0.0.1:1"), "http://127.0.0.1:1/v1/models does not answer"),
        (("compare", "nowhere.json", "nowhere.json"), "can't read nowhere.json"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_line(words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments(*words)) == 1
    assert problem in capsys.readouterr().err


def test_the_bundled_model_answers_alike_whatever_its_caches_hold(tmp_path: Path) -> None:
    """Started in this process, as the command does by default; the server itself confirms the three states."""
    args = arguments("--per-slice", "4", "--states-per-slice", "1", "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    assert command.run(args) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["states"] == {"probes": 4, "equal": 4, "proven": 4, "differing": []}
    assert report["all_media"]["failed"] == 0
    assert report["macro"]["value"] >= 0.5


class Page(HTMLParser):
    """The cards of a report, and whatever it would load from elsewhere."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.cards: list[dict[str, str | None]] = []
        self.outside: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "article":
            self.cards.append(dict(attrs))
        self.outside += [value for name, value in attrs if name in ("src", "href") and value and not value.startswith("data:")]
