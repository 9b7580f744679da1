"""Words of an answer: what it names, what it denies, what it chooses, and its normal form."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.evals.wording import Vocabulary, chosen, declines, yes_or_no

KITCHEN = Vocabulary(
    {"dog": ["puppy", "hound"], "cat": [], "bus": ["coach"], "cherry": [], "table": ["dining table"], "tennis racket": ["racquet"],
     "hot dog": ["frankfurter"], "car": [], "person": ["man", "men", "people", "ice-cream vendor"]}
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("A puppy and two CATS.", {"dog", "cat"}),
        ("Three buses, cherries and a dining table", {"bus", "cherry", "table"}),
        ("A hot dog on a table", {"hot dog", "table"}),  # the longest term wins: no dog
        ("carpet, scar, category, doggedly", set()),  # words, not substrings
        ("tennis rackets", {"tennis racket"}),
        ("The ice\u2011cream, and an ice-cream vendor", {"person"}),
        ("ﬁne dining table", {"table"}),
        ("There is no dog, cat or bus.", set()),
        ("There is no dog. There is a cat.", {"cat"}),
        ("No, a cat.", {"cat"}),
        ("No, there is a cat.", {"cat"}),  # the first word answers, it denies nothing that follows
        ("No dogs, but a cat.", {"cat"}),
        ("There isn't a dog, there is a cat", {"cat"}),
        ("I don\u2019t see a dog", set()),
        ("Neither a cat nor a dog; a bus", {"bus"}),
        ("A dog without a cat", {"dog"}),
        ("Not only a dog", {"dog"}),
    ],
)
def test_an_object_is_named_unless_it_is_denied(text: str, named: set[str]) -> None:
    assert KITCHEN.named(text) == named


def test_a_term_may_stand_for_one_object_only() -> None:
    with pytest.raises(ValueError, match="'bank' stands for both 'bench' and 'money'"):
        Vocabulary({"bench": ["bank"], "money": ["bank"]})


def test_a_listed_term_wins_over_the_plural_of_another() -> None:
    assert Vocabulary({"glass": [], "eyewear": ["glasses"]}).named("glasses") == {"eyewear"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("There are two cats.", "there are 2 cat"),
        ("The puppy is at the top left!", "dog is at top left"),
        ("I see AN  apple\n", "i see apple"),
    ],
)
def test_answers_that_differ_in_form_only_have_one_normal_form(one: str, other: str) -> None:
    assert KITCHEN.normal_form(one) == KITCHEN.normal_form(other)


def test_numbers_and_places_are_no_mere_form() -> None:
    assert KITCHEN.normal_form("There are two cats.") != KITCHEN.normal_form("There are three cats.")
    assert KITCHEN.normal_form("at the top") != KITCHEN.normal_form("at the top left")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Yes, there is.", "yes"),
        ("no", "no"),
        ("**Yes**", "yes"),
        ("I think that yes.", "yes"),
        ("There is nothing. No.", None),
        ("None of them", None),
        ("", None),
    ],
)  # fmt: skip
def test_yes_or_no_is_a_word_of_the_first_sentence(text: str, answer: str | None) -> None:
    assert yes_or_no(text) == answer


@pytest.mark.parametrize(
    ("text", "choice"),
    [("It is at the top left.", "top left"), ("left", "left"), ("top left or left", None), ("right here: bottom", "bottom"), ("x", None)],
)
def test_a_choice_must_be_the_only_one_named(text: str, choice: str | None) -> None:
    choices = [tuple(words.split()) for words in ("left", "top left", "bottom")]
    found = chosen(KITCHEN.normal_form(text), choices)
    assert (None if found is None else " ".join(found)) == choice


@pytest.mark.parametrize("text", ["I'm sorry, I can't help.", "I don\u2019t see a picture.", "It is impossible to tell.", "As an AI I"])
def test_declining_is_recognised(text: str) -> None:
    assert declines(text)


@pytest.mark.parametrize("text", ["There is no dog.", "I don't see the dog anywhere else than at the top.", "A can and a tell"])
def test_denying_an_object_is_not_declining(text: str) -> None:
    assert not declines(text)


@given(st.text(alphabet=st.sampled_from("dogcat busno.,'\u2019-\n\u00e9 but")))
def test_whatever_is_named_is_also_mentioned_and_known(text: str) -> None:
    assert KITCHEN.named(text) <= {mention.word for mention in KITCHEN.mentions(text)} <= KITCHEN.words


@pytest.mark.parametrize("unit", ["dog ", "hot ", "no ", "a-", "i am ", "'", "dining ", "i don't "])
def test_a_megabyte_takes_time_in_proportion(unit: str) -> None:
    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        start = time.process_time()
        KITCHEN.mentions(text), KITCHEN.normal_form(text), declines(text), yes_or_no(text)
        return time.process_time() - start

    small = min(seconds(2**16) for _ in range(3))
    assert seconds(2**20) < 16 * small * 4 + 0.5
