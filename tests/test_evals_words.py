"""Words of an answer: what it names, what it denies, what it chooses, and its normal form."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.evals.wording import chosen, named, normal_form, object_of, yes_or_no
from mmserve.grounding.refusals import declines
from mmserve.grounding.vocabulary import Vocabulary

KITCHEN = Vocabulary({"dog": ["puppy"], "cat": [], "table": ["dining table"], "person": ["man"]}, others=["hot dog"])


@pytest.mark.parametrize(
    ("text", "objects"),
    [
        ("A puppy and two CATS on a dining table.", {"dog", "cat", "table"}),
        ("There is no dog. Is there a cat? People.", {"person"}),
        ("The word is dog.", {"dog"}),  # what is said to be heard is claimed, too
        ("A hot dog, doggedly", set()),
    ],
)
def test_an_object_is_named_if_it_is_said_to_be_there_or_heard(text: str, objects: set[str]) -> None:
    assert named(text, KITCHEN) == objects


@pytest.mark.parametrize(
    ("term", "name"), [("puppies", "dog"), ("Dining Table", "table"), ("a dog", None), ("dog house", None), ("hot dog", None), ("?", None)]
)
def test_a_term_stands_for_an_object_with_all_its_words(term: str, name: str | None) -> None:
    assert object_of(term, KITCHEN) == name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("There are two cats.", "there are 2 cat"),
        ("The puppy is at the top left!", "dog is at top left"),
        ("I see AN  apple\n", "i see apple"),
    ],
)
def test_answers_that_differ_in_form_only_have_one_normal_form(one: str, other: str) -> None:
    assert normal_form(one, KITCHEN) == normal_form(other, KITCHEN)


def test_numbers_and_places_are_no_mere_form() -> None:
    assert normal_form("There are two cats.", KITCHEN) != normal_form("There are three cats.", KITCHEN)
    assert normal_form("at the top", KITCHEN) != normal_form("at the top left", KITCHEN)


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
    found = chosen(normal_form(text, KITCHEN), choices)
    assert (None if found is None else " ".join(found)) == choice


@pytest.mark.parametrize("text", ["I'm sorry, I can't help.", "I don\u2019t see a picture.", "It is impossible to tell.", "As an AI I"])
def test_declining_is_recognised(text: str) -> None:
    assert declines(text)


@pytest.mark.parametrize("text", ["There is no dog.", "I don't see the dog anywhere else than at the top.", "A can and a tell"])
def test_denying_an_object_is_not_declining(text: str) -> None:
    assert not declines(text)


@given(st.text(alphabet=st.sampled_from("dogcat table.,'\u2019-\n\u00e9")))
def test_a_normal_form_is_its_own_normal_form(text: str) -> None:
    form = normal_form(text, KITCHEN)
    assert normal_form(" ".join(form), KITCHEN) == form


@pytest.mark.parametrize("unit", ["dog ", "hot ", "a-", "i am ", "dining ", "i don't "])
def test_a_megabyte_takes_time_in_proportion(unit: str) -> None:
    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        start = time.process_time()
        named(text, KITCHEN), normal_form(text, KITCHEN), declines(text), yes_or_no(text)
        return time.process_time() - start

    small = min(seconds(2**16) for _ in range(3))
    assert seconds(2**20) < 16 * small * 4 + 0.5
