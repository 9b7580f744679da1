"""Golden sets as people write them: what is read, what is refused and how the refusal is worded, and the bundled one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import golden_world as world
import pytest

from mmserve.evals.golden import BUNDLED, MEDIA_SLICES, BadGoldenSet, GoldenSet, load_golden_set
from mmserve.evals.importers import import_chair, import_pope

CLOSED = {"id": "a", "parts": ["Is it?"], "category": "x", "kind": "yes_no", "expected": "yes"}
PAIR = CLOSED | {"parts": [{"image": "red.png"}, {"image": "blue.png"}, "Is it?"]}


@pytest.fixture(scope="module")
def bundled() -> GoldenSet:
    return load_golden_set(BUNDLED)


def test_a_set_is_read_as_it_is_written(tmp_path: Path) -> None:
    golden = world.load(tmp_path / "set")
    by_id = {item.id: item for item in golden.items}
    assert [by_id[name].slice_name for name in ("hello", "dog?", "first", "heard", "both")] == [
        "text", "image", "images", "audio", "image+audio",
    ]  # fmt: skip
    assert by_id["dog?"].objects == {"dog"}  # written as a synonym
    assert by_id["hello"].expected == ("Hello", "Hi")
    assert [media.mime for media in by_id["both"].media] == ["image/png", "audio/wav"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": None}, "items.jsonl:2: id: must be a text that isn't empty"),
        ({"kind": "multiple"}, "kind: 'multiple' is not one of yes_no, choice, short, open"),
        ({"expected": "maybe"}, "expected: 'maybe' is not one of no, yes"),
        ({"expected": []}, "expected: is missing; only an open item may do without"),
        ({"expected": 3}, "expected: must be a text or a list of texts, none of them empty"),
        ({"parts": []}, "parts: must be a list of texts and media"),
        ({"parts": [{"image": "gone.png"}]}, "parts[0]: there is no file"),
        ({"parts": ["x", {"image": "red.tiff"}]}, "parts[1]: must name a file that ends in .jpg, .jpeg, .png, .gif, .webp"),
        ({"parts": [{"video": "red.png"}]}, 'parts[0]: must be a text, {"image": FILE} or {"audio": FILE}'),
        ({"objects": ["unicorn"]}, "objects: 'unicorn' is not in vocabulary.json"),
        ({"asks_for_all": True}, "asks_for_all: needs objects"),
        ({"asks_for_all": "yes"}, "asks_for_all: must be true or false"),
        ({"choices": ["yes", "no"]}, "choices: is for kind choice only"),
        ({"kind": "choice", "choices": ["a cat", "cats"], "expected": "cats"}, "choices: must be two or more that differ in normal form"),
        ({"kind": "choice", "choices": ["cat", "dog"], "expected": "bird"}, "expected: 'bird' is not one of cat, dog"),
        ({"if_swapped": "no"}, "if_swapped: is for closed items about two pictures"),
        ({"asks_about": "dog"}, "asks_about: is for kind yes_no with objects"),
        ({"difficulty": 3}, "difficulty: is not a field of an item"),
    ],
)
def test_what_is_wrong_is_named_with_file_line_and_field(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadGoldenSet) as refusal:
        world.load(tmp_path / "set", [CLOSED | {"id": "before"}, CLOSED | change])
    assert "items.jsonl:2: " in str(refusal.value)
    assert problem in str(refusal.value)


def test_a_missing_field_an_id_used_twice_and_lines_that_are_not_json(tmp_path: Path) -> None:
    with pytest.raises(BadGoldenSet, match=r"items.jsonl:1: category: is missing"):
        world.load(tmp_path / "a", [{key: value for key, value in CLOSED.items() if key != "category"}])
    with pytest.raises(BadGoldenSet, match=r"items.jsonl:2: id: 'a' stands in an earlier line, too"):
        world.load(tmp_path / "b", [CLOSED, CLOSED])
    with pytest.raises(BadGoldenSet, match=r"items.jsonl has no items"):
        world.load(tmp_path / "c", [])
    (tmp_path / "c" / "items.jsonl").write_text('\n{"id": ')
    with pytest.raises(BadGoldenSet, match=r"items.jsonl:2: not JSON"):
        load_golden_set(tmp_path / "c")
    with pytest.raises(BadGoldenSet, match=r"can't read .*items.jsonl: No such file"):
        load_golden_set(tmp_path)


def test_a_vocabulary_with_two_meanings_is_refused(tmp_path: Path) -> None:
    world.write_set(tmp_path / "set")
    (tmp_path / "set" / "vocabulary.json").write_text('{"objects": {"a": ["c"], "b": ["c"]}}')
    with pytest.raises(BadGoldenSet, match=r"vocabulary.json: 'c' stands for 'b' and for something else"):
        load_golden_set(tmp_path / "set")


def test_items_that_share_a_picture_are_one_cluster_within_their_slice(tmp_path: Path) -> None:
    lines = [
        PAIR | {"id": "pair"},
        CLOSED | {"id": "red", "parts": [{"image": "red.png"}, "Is it?"]},
        CLOSED | {"id": "red again", "parts": [{"image": "red.png"}, "Is it not?"]},
        CLOSED | {"id": "blue", "parts": [{"image": "blue.png"}, "Is it?"]},
        CLOSED | {"id": "text"},
        CLOSED | {"id": "other text", "parts": ["Is it so?"]},
    ]
    clusters = world.load(tmp_path / "set", lines).clusters()
    assert clusters["red"] == clusters["red again"]
    assert len(set(clusters.values())) == 5


def test_a_thinned_set_takes_evenly_from_each_slice(tmp_path: Path) -> None:
    lines = [CLOSED | {"id": f"t{i}", "parts": [f"Is it {i}?"]} for i in range(10)] + [PAIR | {"id": "pair"}]
    assert [item.id for item in world.load(tmp_path / "set", lines).thinned(4).items] == ["t0", "t2", "t5", "t7", "pair"]


# --- bundled -----------------------------------------------------------------------------------------------------------------


def test_the_bundled_set_is_large_enough_and_small_enough(bundled: GoldenSet) -> None:
    counts = Counter(item.slice_name for item in bundled.items)
    assert all(counts[name] >= 360 for name in MEDIA_SLICES)
    assert counts["text"] >= 100
    clusters = bundled.clusters()
    independent = Counter({(item.slice_name, clusters[item.id]): item.slice_name for item in bundled.items}.values())
    assert all(independent[name] >= 180 for name in MEDIA_SLICES)
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*")) < 9 * 2**20


def test_every_picture_and_clip_of_the_bundled_set_is_asked_about(bundled: GoldenSet) -> None:
    used = {media.path for item in bundled.items for media in item.media}
    assert used == set((BUNDLED / "media").iterdir())


def test_the_bundled_set_has_as_many_yeses_as_noes_and_probes_order_both_ways(bundled: GoldenSet) -> None:
    answers = Counter(item.expected for item in bundled.items if item.kind == "yes_no")
    assert 0.4 < answers["yes",] / answers.total() < 0.6
    probes = Counter(item.expected for item in bundled.items if item.if_swapped and item.category == "which")
    assert min(probes["first",], probes["second",]) > 40


# --- importers ---------------------------------------------------------------------------------------------------------------


def test_pope_questions_become_a_set_that_counts_a_yes_as_a_mention(tmp_path: Path) -> None:
    pictures = world.write_set(tmp_path / "pictures")
    rows = [
        {"question_id": 1, "image": "red.png", "text": "Is there a snowboard in the image?", "label": "yes"},
        {"question_id": 2, "image": "red.png", "text": "Is there a dining table in the image?", "label": "no"},
    ]
    questions = tmp_path / "pope.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    golden = import_pope(questions, pictures, tmp_path / "set", category="random")
    assert [(item.id, item.expected, item.objects, item.asks_about) for item in golden.items] == [
        ("random-1", ("yes",), {"snowboard"}, "snowboard"),
        ("random-2", ("no",), frozenset(), "dining table"),
    ]
    with pytest.raises(BadGoldenSet, match="is there already"):
        import_pope(questions, pictures, tmp_path / "set", category="random")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"label": "maybe"}, "label: 'maybe' is neither yes nor no"),
        ({"text": "What is it?"}, 'text: is not "Is there a ... in the image?"'),
        ({"image": "../secret.png"}, "leads out of the directory"),
        ({"image": "gone.png"}, "there is no file"),
    ],
)
def test_pope_files_that_are_not_are_refused(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    whole = {"question_id": 1, "image": "red.png", "text": "Is there a dog in the image?", "label": "yes"} | row
    (tmp_path / "pope.jsonl").write_text(json.dumps(whole))
    with pytest.raises(BadGoldenSet) as refusal:
        import_pope(tmp_path / "pope.jsonl", world.write_set(tmp_path / "pictures"), tmp_path / "set", category="x")
    assert problem in str(refusal.value)


def test_coco_instances_and_captions_become_descriptions_to_ask_for(tmp_path: Path) -> None:
    pictures = world.write_set(tmp_path / "pictures")
    instances = {
        "images": [{"id": 7, "file_name": "red.png"}, {"id": 9, "file_name": "blue.png"}],
        "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "dining table"}],
        "annotations": [{"image_id": 7, "category_id": 1}, {"image_id": 7, "category_id": 2}],
    }
    captions = {"annotations": [{"image_id": 7, "caption": "A puppy and a cat, no bird."}]}
    (tmp_path / "instances.json").write_text(json.dumps(instances))
    (tmp_path / "captions.json").write_text(json.dumps(captions))
    (tmp_path / "synonyms.txt").write_text("dog, puppy, cat\ncat, puppy\nbird\ntable, dining table\n")
    golden = import_chair(
        tmp_path / "instances.json", tmp_path / "synonyms.txt", pictures, tmp_path / "set", captions=tmp_path / "captions.json"
    )
    assert [(item.id, item.objects, item.asks_for_all) for item in golden.items] == [
        ("coco-7", {"dog", "table", "cat"}, True),
        ("coco-9", frozenset(), False),
    ]
    (tmp_path / "instances.json").write_text("[]")
    with pytest.raises(BadGoldenSet, match=r"instances.json: not COCO's format"):
        import_chair(tmp_path / "instances.json", tmp_path / "synonyms.txt", pictures, tmp_path / "other")
