"""From answers to figures, from figures to a decision, and from two runs to a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_world as world
import pytest

from mmserve.evals.compare import BadReport, compare, load_report
from mmserve.evals.figures import Figures, by_slice, macro
from mmserve.evals.gate import Bars, Outcome, decide
from mmserve.evals.golden import AnswerKind, GoldenSet, Item, Media
from mmserve.evals.probes import OrderResult, StateProbe, confused_share, order_probe, swapped
from mmserve.evals.scoring import Claim, Ruling, Scored, failed, judged, score
from mmserve.media import MediaKind

PICTURE = Media(MediaKind.IMAGE, Path("a.png"))
OTHER = Media(MediaKind.IMAGE, Path("b.png"))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenSet:
    return world.load(tmp_path_factory.mktemp("golden") / "set")


def scored(golden: GoldenSet, name: str, answer: str) -> Scored:
    [item] = [item for item in golden.items if item.id == name]
    return score(item, name, answer, golden.vocabulary)


@pytest.mark.parametrize(
    ("name", "answer", "is_right", "is_grounded"),
    [
        ("hello", "hi", True, True),
        ("hello", "Hi there", False, False),
        ("dog?", "Yes.", True, True),
        ("dog?", "Yes, a dog and a cat.", True, False),  # right, and with something beside it that isn't there
        ("dog?", "No, no dog.", False, False),
        ("cat?", "No, I see no cat.", True, True),
        ("color", "Blue", True, True),
        ("color", "blue or red", False, False),
        ("both", "puppies", True, True),
        ("open", "A dog runs.", None, None),
    ],
)
def test_an_answer_is_grounded_if_it_is_right_and_names_nothing_else(
    golden: GoldenSet, name: str, answer: str, is_right: bool | None, is_grounded: bool | None
) -> None:
    result = scored(golden, name, answer)
    assert (result.is_right, result.is_grounded) == (is_right, is_grounded)


def test_figures_of_a_handful(golden: GoldenSet) -> None:
    answers = [
        scored(golden, "dog?", "Yes, a dog."),
        scored(golden, "cat?", "Yes, a cat and a bird."),
        scored(golden, "both", "I can't tell."),
        scored(golden, "open", "A puppy."),
        failed(golden.items[3], "color", "503"),
    ]
    figures = Figures.of(answers)
    assert (figures.items, figures.unscored, figures.failed) == (5, 1, 1)
    assert (figures.accuracy.count, figures.accuracy.total) == (1, 4)  # the open one isn't counted either way
    assert (figures.hallucinated_objects.count, figures.hallucinated_objects.total) == (2, 4)
    assert (figures.hallucinating_answers.count, figures.hallucinating_answers.total) == (1, 4)
    assert (figures.coverage.count, figures.coverage.total) == (1, 2)
    assert (figures.refusals.count, figures.refusals.total) == (1, 5)
    assert figures.yes_bias == 0.5  # yes twice, of one that was right


def test_declining_what_can_not_be_answered_is_no_refusal(golden: GoldenSet) -> None:
    unanswerable = Item("u", ("Who painted this?",), "decline", AnswerKind.SHORT, ("I can't tell.",))
    answers = [score(unanswerable, "u", "I can't tell.", golden.vocabulary), scored(golden, "hello", "I'm sorry, I can't say that.")]
    refusals = Figures.of(answers).refusals
    assert (refusals.count, refusals.total) == (1, 1)


def test_a_yes_names_what_was_asked_about_where_only_that_is_annotated(golden: GoldenSet) -> None:
    item = Item("p", (PICTURE, "Is there a cat?"), "pope", AnswerKind.YES_NO, ("no",), objects=frozenset(), asks_about="cat")
    assert score(item, "p", "Yes.", golden.vocabulary).hallucinated == {"cat"}
    assert score(item, "p", "No, but a dog.", golden.vocabulary).hallucinated == set()


def test_the_macro_average_weighs_each_slice_the_same(golden: GoldenSet) -> None:
    answers = [scored(golden, "dog?", "yes")] * 98 + [scored(golden, "heard", "dog")] * 2
    average = macro(by_slice(answers))
    assert average is not None
    assert average.value == 0.5


def test_an_open_answer_that_nobody_judged_never_passes(golden: GoldenSet) -> None:
    answers = [scored(golden, "open", "A dog.")] * 500
    decision = decide(by_slice(answers), None, (), Bars())
    assert decision.outcome is Outcome.UNDECIDED
    assert "image: grounding accuracy was never tried" in [str(finding) for finding in decision.findings]


@pytest.mark.parametrize(
    ("rulings", "is_right"),
    [(["yes", "yes"], True), (["yes", "no"], False), (["yes", "can't tell"], None), (["no", "can't tell"], False), ([], False)],
)
def test_an_open_answer_is_as_good_as_its_claims(golden: GoldenSet, rulings: list[str], is_right: bool | None) -> None:
    claims = [Claim("it is so", Ruling(ruling)) for ruling in rulings]
    assert judged(scored(golden, "open", "A dog."), claims).is_right is is_right


# --- gate --------------------------------------------------------------------------------------------------------------------


def many(right: int, total: int, *, named: str = "", there: frozenset[str] | None = None) -> list[Scored]:
    item = Item("i", (PICTURE, "?"), "c", AnswerKind.SHORT, ("x",), objects=there)
    return [Scored(item, f"{n}", "x", n < right, frozenset([named] if named else [])) for n in range(total)]


@pytest.mark.parametrize(
    ("right", "total", "outcome", "text"),
    [
        (384, 400, Outcome.PASSED, ""),
        (352, 400, Outcome.BREACHED, "image: grounding accuracy is 0.880 of 400, at least 0.851 (95 %); must be 0.90 or more"),
        (
            46, 50, Outcome.UNDECIDED,
            "image: grounding accuracy is 0.920 of 50, at least 0.833 (95 %); must be 0.90 or more; "
            "too few to be sure: it would take about 609",
        ),
    ],
)  # fmt: skip
def test_the_gate_goes_by_bounds_and_says_what_is_missing(right: int, total: int, outcome: Outcome, text: str) -> None:
    decision = decide(by_slice(many(right, total)), None, (), Bars())
    assert decision.outcome is outcome
    assert [str(finding) for finding in decision.findings] == ([text] if text else [])


def test_hallucination_alone_stops_a_deploy() -> None:
    answers = many(300, 300, named="dog", there=frozenset({"dog"})) + many(20, 20, named="cat", there=frozenset({"dog"}))
    decision = decide(by_slice(answers), None, (), Bars(accuracy=0.5))
    assert [(finding.metric, finding.is_breach) for finding in decision.findings] == [("hallucinated-object rate", True)]


def test_a_few_mentions_prove_no_low_rate() -> None:
    answers = many(400, 400) + many(30, 30, named="dog", there=frozenset({"dog"}))
    decision = decide(by_slice(answers), None, (), Bars())
    assert decision.outcome is Outcome.UNDECIDED
    assert [str(finding) for finding in decision.findings] == [
        "image: hallucinated-object rate is 0.000 of 30, at most 0.083 (95 %); must be less than 0.04; "
        "too few to be sure: it would take about 65"
    ]


def test_answers_that_depend_on_a_cache_stop_a_deploy() -> None:
    [item] = [answer.item for answer in many(1, 1)]
    same = {"cold": "a", "kv hit": "a", "embedding hit": "a"}
    probes = [StateProbe(item, same, {}), StateProbe(replace(item, id="stale"), same | {"kv hit": "b"}, {})]
    decision = decide(by_slice(many(400, 400)), None, probes, Bars())
    assert decision.outcome is Outcome.BREACHED
    assert [str(finding) for finding in decision.findings] == ["image: answers changed between cold, embedding hit and kv hit: stale"]


# --- order -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "swapped_answer", "result"),
    [
        ("the first", "the second", OrderResult.RIGHT),
        ("the second", "the first", OrderResult.REVERSED),
        ("the first", "the first", OrderResult.UNMOVED),
        ("the first", "no idea", OrderResult.WRONG),
        ("", "", OrderResult.WRONG),  # two failed requests agree on nothing
    ],
)
def test_what_an_order_probe_shows(golden: GoldenSet, answer: str, swapped_answer: str, result: OrderResult) -> None:
    [item] = [item for item in golden.items if item.if_swapped]
    probe = order_probe(item, "c", answer, swapped_answer, golden.vocabulary)
    assert probe.result is result
    assert confused_share([probe]).count == (result in (OrderResult.REVERSED, OrderResult.UNMOVED))


def test_the_other_half_of_a_probe_has_its_pictures_and_answers_swapped(golden: GoldenSet) -> None:
    [item] = [item for item in golden.items if item.if_swapped]
    half = swapped(item)
    assert [media.path.name for media in half.media] == ["blue.png", "red.png"]
    assert (half.expected, half.if_swapped) == (("second",), ("first",))
    assert swapped(half).parts == item.parts


# --- comparing ---------------------------------------------------------------------------------------------------------------


def report(**grounded: bool | None) -> dict[str, Any]:
    answers = [{"id": name, "slice": "image", "question": "?", "grounded": value} for name, value in grounded.items()]
    return {"format": "mmserve-eval-1", "answers": answers}


def test_two_runs_are_compared_over_what_both_scored() -> None:
    before = report(a=True, b=False, c=True, only_before=True, unscored=None)
    after = report(a=True, b=True, c=False, only_after=False, unscored=True)
    comparisons = compare(before, after)
    assert set(comparisons) == {"image", "all"}
    assert (comparisons["all"].items, comparisons["all"].better, comparisons["all"].worse) == (3, ("b",), ("c",))
    assert comparisons["all"].p_value == 1.0


def test_a_loss_on_ten_items_and_a_gain_on_none_is_no_chance() -> None:
    names = [f"i{n}" for n in range(10)]
    comparison = compare(report(**dict.fromkeys(names, True)), report(**dict.fromkeys(names, False)))["image"]
    assert comparison.p_value == pytest.approx(2 / 1024)


def test_runs_that_have_nothing_in_common_or_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadReport, match="no scored item in common"):
        compare(report(a=True), report(b=True))
    other = report(a=True)
    other["answers"][0]["question"] = "!"
    with pytest.raises(BadReport, match="different things under one id: a"):
        compare(report(a=True), other)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(BadReport, match="is not a report"):
        load_report(tmp_path / "x.json")
