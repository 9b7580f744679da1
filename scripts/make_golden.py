"""Makes the bundled golden set: pictures, clips and questions of mmserve-tiny's small world that no training run and no other score drew.

    python -m scripts.make_golden TARGET             needs espeak-ng and the Noto Color Emoji font, as training does

Questions come from the generators that training uses, with seeds and voices of their own and in about their proportions.  A picture is
shown in several items, which mmserve.evals counts as one cluster.  Pictures are WebP, clips are Opus; ends in one JSON line.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from rich.progress import track

from mmserve.composition import BUNDLED
from mmserve.evals.golden import ITEMS, VOCABULARY, load_golden_set
from scripts.tiny import questions, smalltalk
from scripts.tiny.clips import make_clip
from scripts.tiny.questions import Question
from scripts.tiny.render import render
from scripts.tiny.world import COLORS, KINDS, SAMPLE_RATE, SOUNDS, Scene, Utterance, sample_scene

FIRST_SEED = 2**30 + 2_000_000  # held out from training, and apart from the items other scores use
NUM_PICTURES = 360  # asked about alone
NUM_PAIRS = 275  # each of two pictures; those of the first 180 are asked about alone, too
QUESTIONS_PER_PICTURE = 2
QUESTIONS_PER_PAIR = 4
NUM_CLIPS = 560  # a word or a sound each, heard alone
NUM_BESIDE = 100  # of those, heard again beside a picture
NUM_SPOKEN = 260  # questions asked aloud about a picture
NUM_TEXTS = 120
NUM_OPEN = 40  # descriptions without one right wording
QUALITY = 75  # of WebP
TEXT_FIRST = 0.25  # share of questions that stand before their media
WORN = 0.4  # share of pictures that come blurred, dimmed or resized
DECLINED = 0.06  # share of questions that can't be answered
DESCRIBE_OPENLY = "Tell me everything that you see in the picture."
_ORDINALS = ("first", "second", "both", "neither")

Line = dict[str, Any]


class Maker:
    """Writes media into `target`/media, each once, and hands out the parts that name them."""

    def __init__(self, target: Path, *, lossless: bool) -> None:
        self._target = target
        self._lossless = lossless
        (target / "media").mkdir(parents=True)
        self.num_bytes = 0

    def picture(self, name: str, scene: Scene, rng: random.Random) -> Line:
        buffer = io.BytesIO()
        image = Image.fromarray(render(scene, augment=rng.random() < WORN).image)
        if self._lossless:
            image.save(buffer, "PNG")
            return {"image": self._save(f"media/{name}.png", buffer.getvalue())}
        image.save(buffer, "WEBP", quality=QUALITY, method=6)
        return {"image": self._save(f"media/{name}.webp", buffer.getvalue())}

    def clip(self, name: str, utterance: Utterance, rng: random.Random) -> Line:
        buffer = io.BytesIO()
        waveform = np.clip(make_clip(utterance, rng, held_out=True).waveform, -1, 1)
        if self._lossless:
            soundfile.write(buffer, waveform, SAMPLE_RATE, format="WAV", subtype="PCM_16")
            return {"audio": self._save(f"media/{name}.wav", buffer.getvalue())}
        soundfile.write(buffer, waveform, SAMPLE_RATE, format="OGG", subtype="OPUS")
        return {"audio": self._save(f"media/{name}.ogg", buffer.getvalue())}

    def _save(self, name: str, data: bytes) -> str:
        (self._target / name).write_bytes(data)
        self.num_bytes += len(data)
        return name


# --- items -------------------------------------------------------------------------------------------------------------------


def all_items(maker: Maker) -> Iterator[Line]:
    scenes = [sample_scene(_rng("scene", index)) for index in range(max(NUM_PICTURES, 2 * NUM_PAIRS))]
    pictures = [
        maker.picture(f"p{index:03}", scene, _rng("picture", index)) for index, scene in enumerate(track(scenes, description="pictures"))
    ]
    for index in range(NUM_PICTURES):
        yield from _about_picture(index, scenes[index], pictures[index])
    for index in range(NUM_PAIRS):
        yield from _about_pair(index, scenes[2 * index : 2 * index + 2], pictures[2 * index : 2 * index + 2])
    for index in track(range(NUM_CLIPS), description="clips"):
        utterance = questions.sample_clip(_rng("utterance", index))
        clip = maker.clip(f"c{index:03}", utterance, _rng("voice", index))
        yield _about_clip(index, utterance, clip)
        if index < NUM_BESIDE:
            yield _about_one_of_both(index, scenes[index], pictures[index], utterance, clip)
    for index in track(range(NUM_SPOKEN), description="spoken questions"):
        shown = NUM_BESIDE + index
        yield _spoken(maker, index, scenes[shown], pictures[shown])
    yield from _texts()


def _about_picture(index: int, scene: Scene, picture: Line) -> Iterator[Line]:
    rng = _rng("question", index)
    texts: set[str] = set()
    while len(texts) < QUESTIONS_PER_PICTURE:
        declines = rng.random() < DECLINED
        question = questions.declined(rng, 1, False) if declines else questions.about_single(rng, scene)
        if question.text not in texts:
            texts.add(question.text)
            yield _item(f"image-{index:03}-{len(texts)}", rng, [picture], question, [scene])
    if index < NUM_OPEN:
        reference = questions.describe_answer(scene)
        yield _line(f"image-{index:03}-open", [picture, DESCRIBE_OPENLY], "describe openly", "open", reference) | {
            "objects": sorted(scene.kinds), "asks_for_all": True,
        }  # fmt: skip


def _about_pair(index: int, scenes: Sequence[Scene], pictures: Sequence[Line]) -> Iterator[Line]:
    rng = _rng("pair", index)
    texts: set[str] = set()
    while len(texts) < QUESTIONS_PER_PAIR:
        question = questions.about_pair(rng, scenes)
        if question.text in texts:
            continue
        texts.add(question.text)
        item = _item(f"images-{index:03}-{len(texts)}", rng, list(pictures), question, scenes)
        yield item | _if_swapped(question, scenes)


def _about_clip(index: int, utterance: Utterance, clip: Line) -> Line:
    rng = _rng("heard", index)
    question = questions.declined(rng, 0, True) if rng.random() < DECLINED else questions.about_clip(rng, utterance)
    return _item(f"audio-{index:03}", rng, [clip], question, [], utterance)


def _about_one_of_both(index: int, scene: Scene, picture: Line, utterance: Utterance, clip: Line) -> Line:
    rng = _rng("both", index)
    question = questions.about_single(rng, scene) if rng.random() < 0.5 else questions.about_clip(rng, utterance)
    media = [picture, clip] if rng.random() < 0.5 else [clip, picture]
    return _item(f"both-{index:03}", rng, media, question, [scene], utterance)


def _spoken(maker: Maker, index: int, scene: Scene, picture: Line) -> Line:
    rng = _rng("spoken", index)
    said = questions.spoken(rng, scene)
    clip = maker.clip(f"q{index:03}", said.utterance, _rng("asking", index))
    media = [picture, clip] if rng.random() < 0.5 else [clip, picture]
    return _item(f"spoken-{index:03}", rng, media, said.question, [scene])


def _texts() -> Iterator[Line]:
    rng = _rng("text", 0)
    texts: set[str] = set()
    while len(texts) < NUM_TEXTS:
        talk = smalltalk.sample_talk(rng)
        question = questions.declined(rng, 0, False) if rng.random() < 0.35 else Question(talk.text, talk.reply, talk.task)
        if question.text not in texts:
            texts.add(question.text)
            yield _line(f"text-{len(texts):03}", [question.text], question.task, "short", question.answer)


# --- lines -------------------------------------------------------------------------------------------------------------------


def _item(
    name: str, rng: random.Random, media: list[Line], question: Question, scenes: Sequence[Scene], heard: Utterance | None = None
) -> Line:
    text = [question.text] if question.text else []
    parts = [*text, *media] if rng.random() < TEXT_FIRST else [*media, *text]
    task = question.task.removeprefix("spoken ")
    line = _line(name, parts, question.task, *_closed(task, question.answer))
    there = {kind for scene in scenes for kind in scene.kinds}
    shown = there if question.nth is None else set(scenes[question.nth].kinds)
    said = {word for word in heard.words if word in KINDS} if heard is not None and len(heard.words) == 1 else set()
    line["objects"] = sorted(there | said)
    if task in ("name", "describe", "name both"):
        # What was heard, and what the other picture shows, may be named but needn't.
        line |= {"asks_for_all": True} if shown == there | said else {}
    return line


def _closed(task: str, answer: str) -> tuple[str, str, list[str]]:
    """Kind of answer, the right one, and the choices there are."""
    said = answer.rstrip(".").lower()
    if task == "presence" and said.startswith(("yes", "no")):
        return "yes_no", "yes" if said.startswith("yes") else "no", []
    if task == "background" and said.split()[-1] in COLORS:
        return "choice", said.split()[-1], list(COLORS)
    if task == "which":
        return "choice", said.split()[0 if said.startswith(("both", "neither")) else 1], list(_ORDINALS)
    if task == "sound":
        return "choice", said.split()[-1], list(SOUNDS)
    return "short", answer, []


def _line(name: str, parts: list[Any], category: str, kind: str, expected: str, choices: Sequence[str] = ()) -> Line:
    line: Line = {"id": name, "parts": parts, "category": category, "kind": kind, "expected": expected}
    return line | ({"choices": list(choices)} if choices else {})


def _if_swapped(question: Question, scenes: Sequence[Scene]) -> Line:
    """For a question whose right answer changes with the order of the pictures: that answer."""
    back = list(reversed(scenes))
    if question.task == "which":
        assert question.kind is not None
        before, after = (_closed("which", questions.which_answer(order, question.kind))[1] for order in (scenes, back))
    elif question.task == "name" and question.nth is not None:
        before, after = (questions.name_answer(order[question.nth]) for order in (scenes, back))
        if _closed("name", before)[1] != question.answer:
            return {}
    else:
        return {}
    return {"if_swapped": after} if after != before else {}


def _rng(purpose: str, index: int) -> random.Random:
    """Each use draws its own seed from the range that belongs to this set."""
    purposes = ("scene", "picture", "question", "pair", "utterance", "voice", "heard", "both", "spoken", "asking", "text")
    return random.Random(FIRST_SEED + purposes.index(purpose) * 10_000 + index)


def make(target: Path, *, lossless: bool) -> dict[str, Any]:
    maker = Maker(target, lossless=lossless)
    lines = list(all_items(maker))
    (target / ITEMS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(BUNDLED / "objects.json", target / VOCABULARY)  # what the guardrail looks for, too
    golden = load_golden_set(target)
    clusters = golden.clusters()
    return {
        "script": "make_golden",
        "items": dict(Counter(item.slice_name for item in golden.items)),
        "clusters": dict(Counter({(item.slice_name, clusters[item.id]): item.slice_name for item in golden.items}.values())),
        "order_probes": sum(bool(item.if_swapped) for item in golden.items),
        "megabytes": round(maker.num_bytes / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a directory that isn't there yet")
    parser.add_argument("--lossless", action="store_true", help="PNG and WAV: to see what compression costs")
    options = parser.parse_args()
    print(json.dumps(make(options.target, lossless=options.lossless)))


if __name__ == "__main__":
    main()
