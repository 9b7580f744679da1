"""The judge, against one behind a real socket that follows rules: claims, rulings, retries, the log, and what its errors do to a rate."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from judge_server import JudgeRules, judging

from mmserve.evals.calibration import calibrate, judge_figures, load_labels
from mmserve.evals.endpoint import Endpoint
from mmserve.evals.golden import AnswerKind, BadGoldenSet, Item
from mmserve.evals.judge import Judge, JudgeFailed, judge_all
from mmserve.evals.scoring import Ruling, Scored, failed, score
from mmserve.grounding.vocabulary import Vocabulary

WORDS = Vocabulary({"dog": [], "cat": [], "bird": []})
PARK = Item("park", ("What is there?",), "describe", AnswerKind.OPEN, ("A dog runs.",), objects=frozenset({"dog", "bird"}))


@asynccontextmanager
async def judge_of(rules: JudgeRules, log: Path) -> AsyncIterator[Judge]:
    async with judging(rules), Endpoint(rules.url) as endpoint:
        with Judge(endpoint, log) as judge:
            yield judge


def answered(text: str, name: str = "park") -> Scored:
    return score(PARK, name, text, WORDS)


async def judged(rules: JudgeRules, log: Path, *answers: str) -> list[Scored]:
    async with judge_of(rules, log) as judge:
        return await judge_all(judge, [answered(text) for text in answers], 4, lambda: None)


@pytest.mark.parametrize(
    ("answer", "is_right", "rulings"),
    [
        ("A dog runs. A bird sings.", True, ["yes", "yes"]),
        ("A dog runs. A cat sleeps.", False, ["yes", "no"]),
        ("A dog. Perhaps it is perhaps late.", None, ["yes", "can't tell"]),
        ("", False, []),  # claiming nothing is no way out
    ],
)
async def test_an_answer_is_judged_claim_by_claim(tmp_path: Path, answer: str, is_right: bool | None, rulings: list[str]) -> None:
    [result] = await judged(JudgeRules(), tmp_path / "log", answer)
    assert [claim.ruling for claim in result.claims] == rulings
    assert result.is_right is is_right


async def test_the_judge_reads_question_reference_objects_and_one_claim_at_a_time(tmp_path: Path) -> None:
    rules = JudgeRules()
    await judged(rules, tmp_path / "log", "A dog runs. A cat sleeps.")
    split, *ruled = rules.prompts
    assert split.endswith("Question: What is there?\nAnswer: A dog runs. A cat sleeps.")
    assert {prompt.partition("Question: ")[2] for prompt in ruled} == {
        f"What is there?\nKnown to be right: A dog runs.\nObjects that are there: bird, dog\nClaim: {claim}"
        for claim in ("A dog runs", "A cat sleeps")
    }


async def test_every_prompt_and_reply_is_logged(tmp_path: Path) -> None:
    rules = JudgeRules(num_mumbled=1)
    await judged(rules, tmp_path / "log.jsonl", "A dog runs.")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"], line["reply"], line["read_as"]) for line in lines] == [
        ("split", 1, "Well, that depends.", None),
        ("split", 2, '```json\n["A dog runs"]\n```', ["A dog runs"]),
        ("rule", 1, "yes", "yes"),
    ]
    assert [line["prompt"] for line in lines] == rules.prompts
    assert {(line["item"], line["model"]) for line in lines} == {("park", "rules")}


async def test_a_busy_judge_is_asked_again(tmp_path: Path) -> None:
    rules = JudgeRules(num_busy=2)
    [result] = await judged(rules, tmp_path / "log", "A dog runs.")
    assert result.is_right
    assert rules.num_busy == 0


async def test_an_answer_whose_judge_mumbles_is_unscored_and_says_so(tmp_path: Path) -> None:
    bad, good = await judged(JudgeRules(mumbles=frozenset({"A dog flies"})), tmp_path / "log", "A dog flies.", "A dog runs.")
    assert bad.is_right is None
    assert bad.error == "judge: 3 replies that can't be read, the last of them 'Hm.'"
    assert good.is_right


async def test_a_judge_that_is_gone_scores_nothing(tmp_path: Path) -> None:
    with Judge(Endpoint("http://127.0.0.1:1", model="gone", attempts=1), tmp_path / "log") as judge:
        result = await judge.judge(answered("A dog runs."))
        await judge._endpoint.__aexit__()
    assert result.is_right is None
    assert (result.error or "").startswith("judge: ClientConnectorError")
    assert "error" in json.loads((tmp_path / "log").read_text())


async def test_closed_answers_and_failed_requests_are_not_for_the_judge(tmp_path: Path) -> None:
    rules = JudgeRules()
    closed = Item("closed", ("?",), "c", AnswerKind.SHORT, ("x",))
    answers = [score(closed, "c", "y", WORDS), failed(PARK, "p", "503")]
    async with judge_of(rules, tmp_path / "log") as judge:
        assert await judge_all(judge, answers, 4, lambda: None) == answers
    assert rules.prompts == []


# --- calibration -------------------------------------------------------------------------------------------------------------


def write_labels(path: Path, num_true: int, num_untrue: int) -> Path:
    rows = [(f"The dog is number {n}", "yes") for n in range(num_true)] + [(f"The cat is number {n}", "no") for n in range(num_untrue)]
    path.write_text("".join(json.dumps({"claim": claim, "label": label, "objects": ["dog"]}) + "\n" for claim, label in rows))
    return path


async def test_a_judge_that_errs_at_known_rates_is_found_out_and_corrected_for(tmp_path: Path) -> None:
    """It misses a fifth of what is true and believes three tenths of what isn't; three quarters of the claims are true."""
    labels = load_labels(write_labels(tmp_path / "labels.jsonl", 200, 200))
    rng = random.Random(4)
    answers = [f"The {'dog' if rng.random() < 0.75 else 'cat'} of door {n}." for n in range(400)]
    async with judge_of(JudgeRules(misses=0.2, believes=0.3), tmp_path / "log") as judge:
        calibration = await calibrate(judge, labels, 8, lambda: None)
        scored = await judge_all(judge, [answered(text, str(n)) for n, text in enumerate(answers)], 8, lambda: None)
    assert calibration.sensitivity.value == pytest.approx(0.8, abs=0.06)
    assert calibration.specificity.value == pytest.approx(0.7, abs=0.06)
    assert calibration.kappa == pytest.approx(0.5, abs=0.1)
    figures = judge_figures(scored, calibration)
    truth = sum("dog" in answer for answer in answers) / len(answers)
    assert abs(figures["supported"]["value"] - truth) > 0.05
    assert figures["supported_corrected"]["value"] == pytest.approx(truth, abs=0.05)
    assert figures["supported_corrected"]["lower_95"] < truth < figures["supported_corrected"]["upper_95"]


async def test_rulings_of_cant_tell_count_against_agreement_and_in_no_rate(tmp_path: Path) -> None:
    path = write_labels(tmp_path / "labels.jsonl", 3, 3)
    path.write_text(path.read_text() + json.dumps({"claim": "perhaps a dog", "label": "yes"}) + "\n")
    async with judge_of(JudgeRules(), tmp_path / "log") as judge:
        calibration = await calibrate(judge, load_labels(path), 8, lambda: None)
    assert (calibration.sensitivity.count, calibration.sensitivity.total) == (3, 3)
    assert (calibration.undecided.count, calibration.undecided.total) == (1, 7)
    assert calibration.kappa is not None
    assert 0.5 < calibration.kappa < 1


async def test_a_judge_that_can_not_rule_on_the_labels_is_an_error(tmp_path: Path) -> None:
    labels = load_labels(write_labels(tmp_path / "labels.jsonl", 1, 1))
    async with judge_of(JudgeRules(mumbles=frozenset({"The dog is number 0"})), tmp_path / "log") as judge:
        with pytest.raises(JudgeFailed, match="can't be read"):
            await calibrate(judge, labels, 8, lambda: None)


def test_labels_need_both_kinds_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(BadGoldenSet, match="needs claims of both labels"):
        load_labels(write_labels(tmp_path / "a", 3, 0))
    (tmp_path / "b").write_text('{"claim": "x", "label": "true"}')
    with pytest.raises(BadGoldenSet, match=r"b:1: label: 'true' is neither yes nor no"):
        load_labels(tmp_path / "b")


def test_rulings_are_words_of_the_report() -> None:
    assert [str(ruling) for ruling in Ruling] == ["yes", "no", "can't tell"]
