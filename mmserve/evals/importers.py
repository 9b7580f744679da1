"""Published formats to golden sets: POPE's yes/no questions, and COCO's annotations with a list of synonyms, as CHAIR uses them.

The new set holds no copies: its media are links to the files it was made from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from mmserve.config import ConfigError
from mmserve.evals.golden import ITEMS, VOCABULARY, BadGoldenSet, GoldenSet, Record, load_golden_set, read_lines, read_text
from mmserve.evals.wording import named, object_of
from mmserve.grounding.vocabulary import Vocabulary

DESCRIBE = "Please describe this image in detail."
_POPE_OBJECT = re.compile(r"is there (?:an? )?(.+?) in the image", re.IGNORECASE)


def import_pope(questions: Path, pictures: Path, target: Path, *, category: str) -> GoldenSet:
    """POPE (Li et al. 2023): a JSON object a line with question_id, image, text and label.  `category` is its sampling: random, popular ...

    Each item is annotated with the one object that it asks about; a yes counts as naming it.  Raises BadGoldenSet.
    """
    rows = [_pope_row(Record(value, where)) for value, where in read_lines(questions)]
    items = [
        {
            "id": f"{category}-{row['id']}",
            "parts": [{"image": f"media/{row['image']}"}, row["text"]],
            "category": category,
            "kind": "yes_no",
            "expected": row["label"],
            "objects": [row["object"]] if row["label"] == "yes" else [],
            "asks_about": row["object"],
        }
        for row in rows
    ]
    return _write(target, items, {row["object"]: [] for row in rows}, pictures, {row["image"] for row in rows})


def import_chair(
    instances: Path, synonyms: Path, pictures: Path, target: Path, *, captions: Path | None = None, limit: int | None = None
) -> GoldenSet:
    """COCO's `instances_*.json` and CHAIR's synonyms (Rohrbach et al. 2018): a line for each object, its words separated by commas.

    Each picture is asked for a description, an open item; an object is there if an instance is annotated or, with `captions`
    (`captions_*.json`), if one of its captions names it.  Raises BadGoldenSet.
    """
    table = _synonyms(synonyms)
    try:
        vocabulary = Vocabulary(table)
    except ConfigError as error:
        raise BadGoldenSet(f"{synonyms}: {error.message}") from None
    coco = _json(instances)
    try:
        names = {category["id"]: object_of(category["name"], vocabulary) for category in coco["categories"]}
        files = {image["id"]: image["file_name"] for image in coco["images"]}
        there: dict[int, set[str]] = defaultdict(set)
        for annotation in coco["annotations"]:
            if (word := names[annotation["category_id"]]) is not None:
                there[annotation["image_id"]].add(word)
        said: dict[int, list[str]] = defaultdict(list)
        for caption in _json(captions)["annotations"] if captions is not None else ():
            said[caption["image_id"]].append(caption["caption"])
            there[caption["image_id"]] |= named(caption["caption"], vocabulary)
    except (KeyError, TypeError) as error:
        raise BadGoldenSet(f"{instances}: not COCO's format: {error!r}") from None
    items = [
        {
            "id": f"coco-{image_id}",
            "parts": [{"image": f"media/{name}"}, DESCRIBE],
            "category": "describe",
            "kind": "open",
            "expected": said[image_id],
            "objects": sorted(there[image_id]),
            "asks_for_all": bool(there[image_id]),
        }
        for image_id, name in sorted(files.items())[:limit]
    ]
    return _write(target, items, table, pictures, {files[image_id] for image_id, _ in sorted(files.items())[:limit]})


def _pope_row(record: Record) -> dict[str, str]:
    name = str(record.take("question_id"))
    row = {"id": name, "image": record.text("image"), "text": record.text("text"), "label": record.text("label").lower()}
    if row["label"] not in ("yes", "no"):
        raise record.error("label", f"{row['label']!r} is neither yes nor no")
    match = _POPE_OBJECT.search(row["text"])
    if match is None:
        raise record.error("text", 'is not "Is there a ... in the image?"')
    return row | {"object": match[1].strip().lower()}


def _synonyms(path: Path) -> dict[str, list[str]]:
    """A term that is listed for two objects is the one's whose name it is, or the first one's."""
    rows = [[word.strip() for word in line.split(",") if word.strip()] for line in read_text(path).splitlines()]
    table: dict[str, list[str]] = {row[0]: [] for row in rows if row}
    taken = set(table)
    for name, *others in filter(None, rows):
        table[name] += [word for word in dict.fromkeys(others) if word not in taken]
        taken |= set(others)
    return table


def _json(path: Path) -> Any:
    try:
        return orjson.loads(read_text(path))
    except orjson.JSONDecodeError as error:
        raise BadGoldenSet(f"{path}: not JSON: {error}") from None


def _write(
    target: Path, items: list[dict[str, Any]], vocabulary: Mapping[str, list[str]], pictures: Path, names: Iterable[str]
) -> GoldenSet:
    """Raises BadGoldenSet, too, if a picture is missing: the set is read back as anybody else would read it."""
    if target.exists() and any(target.iterdir()):
        raise BadGoldenSet(f"{target} is there already, and not empty")
    media = target.resolve() / "media"
    for name in names:
        link = media / name
        if not link.resolve().is_relative_to(media):
            raise BadGoldenSet(f"the picture's name {name!r} leads out of the directory")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((pictures / name).resolve())
    (target / ITEMS).write_bytes(b"".join(orjson.dumps(item, option=orjson.OPT_APPEND_NEWLINE) for item in items))
    (target / VOCABULARY).write_bytes(orjson.dumps({"objects": vocabulary}, option=orjson.OPT_INDENT_2))
    return load_golden_set(target)
