"""Which objects a text names, and what it says of them: tables of sentences, and properties over words that hypothesis makes up."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.composition import BUNDLED
from mmserve.config import ConfigError
from mmserve.grounding.mentions import Stance, find_mentions
from mmserve.grounding.vocabulary import Vocabulary

OBJECTS = {
    "dog": ["puppy", "golden retriever"], "cat": ["kitty"], "fish": [], "bus": [], "butterfly": [], "knife": [], "potato": [],
    "teddy bear": [], "bear": [], "rocket": ["spaceship"],
}  # fmt: skip
VOCABULARY = Vocabulary(OBJECTS, plurals={"golden retriever": "golden retrievers"}, others=["hot dog", "bus stop"])


def told(text: str) -> list[str]:
    """`dog` for one that is asserted, `-dog` for a negated one, `~dog` for one that was heard and `?dog` for one asked for."""
    marks = {Stance.ASSERTED: "", Stance.NEGATED: "-", Stance.HEARD: "~", Stance.ASKED: "?"}
    return [marks[mention.stance] + mention.name for mention in find_mentions(text, VOCABULARY)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I see a dog and two cats.", ["dog", "cat"]),
        ("A PUPPY, Kitty's toys, a golden retriever", ["dog", "cat", "dog"]),
        ("golden retrievers", ["dog"]),
        ("golden fish", ["fish"]),
        ("butterflies, buses, knives, potatoes, fish", ["butterfly", "bus", "knife", "potato", "fish"]),
        ("a dogma, a scat, busy catfish", []),
        ("underdog dog_house 3dogs", []),
        ("a teddy bear beside a bear", ["teddy bear", "bear"]),
        ("teddy-bears", ["teddy bear"]),
        ("a hot dog at the bus stop", []),
        ("a hot dog and a dog", ["dog"]),
        ("a dog-like thing, a non-cat", []),
        ("the dog\u2019s bowl", ["dog"]),
        ("\uff44\uff4f\uff47", ["dog"]),  # full width
        ("dog\u0301", []),  # another letter, written as two
        ("a\u00e7ai dog\u00e9", []),
        ("", []),
    ],
)
def test_terms_match_whole_words_in_singular_and_plural_and_the_longest_counts(text: str, expected: list[str]) -> None:
    assert told(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There is no dog.", ["-dog"]),
        ("There are no dogs, cats or buses.", ["-dog", "-cat", "-bus"]),
        ("No dog, a cat.", ["-dog", "cat"]),
        ("I see a dog and no cat.", ["dog", "-cat"]),
        ("I see no dog and a cat.", ["-dog", "cat"]),
        ("No, I see a dog.", ["dog"]),
        ("No. It is a dog.", ["dog"]),
        ("No, cats and dogs.", ["cat", "dog"]),
        ("I don't see a dog, a cat or a fish, but there is a bus.", ["-dog", "-cat", "-fish", "bus"]),
        ("I don\u2019t see a dog", ["-dog"]),
        ("I can't see a dog, only a cat.", ["-dog", "cat"]),
        ("It isn't a dog, it is a cat.", ["-dog", "cat"]),
        ("It is a cat, not a dog.", ["cat", "-dog"]),
        ("Not a dog but a cat.", ["-dog", "cat"]),
        ("Not only a dog but also a cat.", ["dog", "cat"]),
        ("There is no doubt that this is a dog.", ["dog"]),
        ("Neither a dog nor a cat.", ["-dog", "-cat"]),
        ("Neither picture shows a dog. There is a cat.", ["-dog", "cat"]),
        ("A room without a dog or a cat, a fish swims.", ["-dog", "-cat", "fish"]),
        ("A cat instead of a dog.", ["cat", "-dog"]),
        ("The dog is not visible, and the cat sleeps.", ["-dog", "cat"]),
        ("A dog cannot be seen.", ["-dog"]),
        ("The dog is missing.", ["-dog"]),
        ("A dog is here, but the cat is missing.", ["dog", "-cat"]),
        ("I can't tell whether it is a dog.", ["-dog"]),
        ("Nothing like a dog, nothing but a cat.", ["-dog", "cat"]),
        ("No dog!\nA cat!", ["-dog", "cat"]),
    ],
)
def test_what_is_denied_is_no_mention_of_its_being_there(text: str, expected: list[str]) -> None:
    assert told(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The word is dog.", ["~dog"]),
        ("I hear the word dog. I see a cat.", ["~dog", "cat"]),
        ("I hear a dog, and the picture shows a cat.", ["~dog", "cat"]),
        ("The sign says bus.", ["~bus"]),
        ("The caption reads: bus.", ["~bus"]),
        ("I don't see: a dog, a cat.", ["-dog", "-cat"]),
        ("Objects: dog, cat; not found: bus.", ["dog", "cat", "-bus"]),
        ("I'd say it is a dog, in other words no cat.", ["dog", "-cat"]),
        ("It sounds like a dog.", ["~dog"]),
        ("Is there a dog? Yes, a cat.", ["?dog", "cat"]),
    ],
)
def test_what_was_heard_read_or_asked_for_is_not_claimed_to_be_seen(text: str, expected: list[str]) -> None:
    assert told(text) == expected


def test_a_mention_says_where_it_stands() -> None:
    text = "No caf\u00e9\u0301 here: two golden\n retrievers\u2019 bowls."
    (mention,) = find_mentions(text, VOCABULARY)
    assert text[mention.start : mention.stop] == "golden\n retrievers"


def test_a_word_list_for_every_kind_of_the_bundled_model_is_there_and_sound() -> None:
    vocabulary = Vocabulary.read(BUNDLED / "objects.json")
    assert len(vocabulary.objects) == 28
    found = find_mentions("I see two butterflies, a sailboat and three fish. There are no mushrooms.", vocabulary)
    assert [(m.name, m.stance.value) for m in found] == [
        ("butterfly", "asserted"), ("boat", "asserted"), ("fish", "asserted"), ("mushroom", "negated"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("[", "no vocabulary"),
        ("[]", "anything but an object"),
        ({"objects": {"dog": []}, "cats": 1}, "not cats"),
        ({"objects": {"dog": "puppy"}}, "lists of their synonyms"),
        ({"objects": {"dog": ["pet"], "cat": ["Pet"]}}, "'pet' stands for 'cat'"),
        ({"objects": {"dog": []}, "not_objects": ["dog"]}, "'dog' stands for 'dog' and for something else"),
        ({"objects": {"?!": []}}, "no letters"),
        ({"objects": {"dog": []}, "plurals": ["dogs"]}, "plurals must be"),
    ],
)
def test_a_vocabulary_that_makes_no_sense_is_refused_by_name(tmp_path: Path, written: object, reason: str) -> None:
    file = tmp_path / "objects.json"
    file.write_text(written if isinstance(written, str) else json.dumps(written))
    with pytest.raises(ConfigError, match=r"objects\.json") as refused:
        Vocabulary.read(file)
    assert reason in refused.value.message


def test_a_listed_term_goes_before_a_guessed_plural() -> None:
    vocabulary = Vocabulary({"glas": [], "glass": ["glass", "glasses"], "spectacles": ["glase"]})
    assert [mention.name for mention in find_mentions("glasses", vocabulary)] == ["glass"]


# --- properties --------------------------------------------------------------------------------------------------------------

NAMES = [*OBJECTS, "puppy", "kitty", "spaceship", "dogs", "buses", "butterflies", "teddy bears"]
FILLER = st.sampled_from(["a", "red", "on", "the", "grass", "sits", "Zeppelin", "caf\u00e9", "\u732b", "\U0001f436", "42"])


@given(words=st.lists(FILLER | st.sampled_from(NAMES), max_size=30))
def test_what_is_put_into_a_plain_list_is_what_comes_out(words: list[str]) -> None:
    text = "; ".join(words)
    assert [text[m.start : m.stop] for m in find_mentions(text, VOCABULARY)] == [word for word in words if word in NAMES]


@given(name=st.sampled_from(NAMES), before=st.text(max_size=3), after=st.text(max_size=3))
def test_letters_or_digits_beside_a_term_make_it_another_word(name: str, before: str, after: str) -> None:
    text = before + name + after
    if before[-1:].isalnum() or after[:1].isalnum():
        spans = [text[m.start : m.stop] for m in find_mentions(text, VOCABULARY)]
        assert name not in spans


@given(st.text(max_size=200))
@settings(max_examples=300)
def test_any_text_at_all_is_read_and_mentions_stand_in_order(text: str) -> None:
    mentions = find_mentions(text, VOCABULARY)
    assert all(0 <= m.start < m.stop <= len(text) for m in mentions)
    assert all(a.stop <= b.start for a, b in pairwise(mentions))


@given(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=6), linking=st.sampled_from([", ", " or ", " nor "]))
def test_a_no_reaches_over_a_whole_bare_list(names: list[str], linking: str) -> None:
    assert all(mention.stance is Stance.NEGATED for mention in find_mentions(f"I see no {linking.join(names)}.", VOCABULARY))


@given(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=6))
def test_a_sentence_denies_nothing_of_the_next(names: list[str]) -> None:
    mentions = find_mentions(f"I see no {names[0]}. " + " ".join(f"I see a {name}." for name in names), VOCABULARY)
    assert [mention.stance for mention in mentions] == [Stance.NEGATED] + [Stance.ASSERTED] * len(names)


HOSTILE = ("dog ", "no,", "a", "dog-", "not there ", "golden ", "n't", "'", ".", "\u0301", "dog is missing ", "teddy-", "3.", "\u00df")


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_megabyte_takes_twice_as_long_as_half_a_megabyte(piece: str) -> None:
    """Not a benchmark: a square would make it four times, and at this length minutes."""

    def seconds(num_characters: int) -> float:
        text = piece * (num_characters // len(piece))
        started = time.process_time()
        find_mentions(text, VOCABULARY)
        return time.process_time() - started

    small = min(seconds(50_000) for _ in range(3))
    large = seconds(1_000_000)
    assert large < 20 * small * 3 + 0.5
