"""Scores an exported model directory on held-out pictures and voices, through plain transformers modules and its chat template."""

from __future__ import annotations

import argparse
import json
import os
import random
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jinja2
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from transformers import CLIPVisionModel, LlamaForCausalLM

from scripts.tiny import audio, questions, smalltalk, vision
from scripts.tiny import tokenizer as tokens
from scripts.tiny.clips import make_clip
from scripts.tiny.export import load_audio, load_projector
from scripts.tiny.questions import Question, affirmed_kinds, is_right
from scripts.tiny.render import render
from scripts.tiny.world import Scene, Utterance, sample_scene

FIRST_SEED = 2**30 + 400_000  # no training and no other scoring draws these
BATCH = 12
MAX_NEW_TOKENS = 80
_MIX = ("image", "images", "image", "audio", "spoken", "both", "images", "audio", "spoken", "text")
_MEDIA_SLICES = ("image", "images", "audio", "image+audio")


@dataclass(frozen=True, slots=True)
class Item:
    """One conversation: `parts` in the client's order, where a Scene is a picture, an Utterance a clip and a str text."""

    parts: tuple[Scene | Utterance | str, ...]
    seed: int  # of the clip's voice
    question: Question
    slice_name: str

    @property
    def kinds(self) -> frozenset[str]:
        """What a reply may say is there: kinds in the pictures, and a word that was spoken alone."""
        said = {w for part in self.parts if isinstance(part, Utterance) and len(part.words) == 1 for w in part.words}
        return frozenset({kind for part in self.parts if isinstance(part, Scene) for kind in part.kinds} | said)


@dataclass(frozen=True, slots=True)
class Verdict:
    item: Item
    reply: str

    @property
    def is_right(self) -> bool:
        return is_right(self.item.question, self.reply)

    @property
    def is_hallucinated(self) -> bool:
        return self.item.slice_name in _MEDIA_SLICES and bool(affirmed_kinds(self.reply) - self.item.kinds)


# --- items -------------------------------------------------------------------------------------------------------------------


def sample_items(num_items: int, first_seed: int = FIRST_SEED) -> list[Item]:
    """One in ten about plain text, the rest about media; a quarter has its text before the media."""
    return [_sample_item(first_seed + index, _MIX[index % len(_MIX)]) for index in range(num_items)]


def _sample_item(seed: int, what: str) -> Item:
    rng = random.Random(seed)
    declines = rng.random() < 0.06
    media: list[Scene | Utterance] = []
    if what in ("image", "both"):
        scene = sample_scene(rng)
        media = [scene]
        if what == "image":
            question, slice_name = (questions.declined(rng, 1, False) if declines else questions.about_single(rng, scene)), "image"
        else:
            clip = questions.sample_clip(rng)
            media.append(clip)
            question = questions.about_single(rng, scene) if rng.random() < 0.5 else questions.about_clip(rng, clip)
            slice_name = "image+audio"
    elif what == "images":
        media = [sample_scene(rng), sample_scene(rng)]
        question, slice_name = questions.about_pair(rng, [m for m in media if isinstance(m, Scene)]), "images"
    elif what == "audio":
        clip = questions.sample_clip(rng)
        media = [clip]
        question, slice_name = (questions.declined(rng, 0, True) if declines else questions.about_clip(rng, clip)), "audio"
    elif what == "spoken":
        scene = sample_scene(rng)
        said = questions.spoken(rng, scene)
        media, question, slice_name = [scene, said.utterance], said.question, "image+audio"
    else:
        talk = smalltalk.sample_talk(rng)
        asked = Question(talk.text, talk.reply, talk.task)
        question, slice_name = (questions.declined(rng, 0, False) if rng.random() < 0.35 else asked), "text"
    if what in ("both", "spoken") and rng.random() < 0.5:
        media.reverse()
    parts = (question.text, *media) if rng.random() < 0.25 else (*media, question.text)
    return Item(parts, seed, question, slice_name)


# --- the exported model ------------------------------------------------------------------------------------------------------


class Exported:
    """What a server does with the directory, one thing after the other."""

    def __init__(self, directory: Path) -> None:
        self.composition: dict[str, Any] = tomllib.loads((directory / "composition.toml").read_text())
        self._directory = directory
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._template = jinja2.Environment(autoescape=False).from_string((directory / "chat_template.jinja").read_text())
        self._vision = CLIPVisionModel.from_pretrained(directory / "vision", dtype=torch.float32).eval()
        self._audio = load_audio(directory / "audio")
        self._end = self._tokenizer.token_to_id(tokens.END)

    @torch.inference_mode()
    def features(self, item: Item) -> list[tuple[str, torch.Tensor]]:
        """("vision" or "audio", rows before projection) of each medium, in order."""
        found = []
        for index, part in enumerate(item.parts):
            if isinstance(part, Scene):
                image = render(part, augment=random.Random(item.seed + index).random() < 0.4).image
                found.append(("vision", vision.features(self._vision, image[None])[0]))
            elif isinstance(part, Utterance):
                clip = make_clip(part, random.Random(item.seed), held_out=True)
                found.append(("audio", audio.features(self._audio, [clip.waveform])[0]))
        return found

    @torch.inference_mode()
    def answer(self, decoder_name: str, items: Sequence[Item], features: Sequence[list[tuple[str, torch.Tensor]]]) -> list[str]:
        """Greedy replies."""
        decoder = LlamaForCausalLM.from_pretrained(self._directory / self.composition["decoders"][decoder_name], dtype=torch.float32).eval()
        projectors = {
            kind: load_projector(self._directory / self.composition[kind]["projectors"][decoder_name]) for kind in ("vision", "audio")
        }
        prompts = []
        for item, media in zip(items, features, strict=True):
            rows = iter(projectors[kind](feature) for kind, feature in media)
            prompts.append(self._embed(decoder, item, rows))
        replies = [""] * len(items)
        order = sorted(range(len(items)), key=lambda i: len(prompts[i]))
        for start in track(range(0, len(order), BATCH), description=f"answers of {decoder_name}"):
            some = order[start : start + BATCH]
            for index, reply in zip(some, self._generate(decoder, [prompts[i] for i in some]), strict=True):
                replies[index] = reply
        return replies

    def _embed(self, decoder: LlamaForCausalLM, item: Item, rows: Any) -> torch.Tensor:
        names = {Scene: "image", Utterance: "audio"}
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": names[type(p)]} for p in item.parts]
        text = self._template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
        ids = self._tokenizer.encode(text).ids
        opening = {self._tokenizer.token_to_id(token) for token in (tokens.IMAGE, tokens.AUDIO)}
        words = decoder.model.embed_tokens.weight
        pieces = []
        for token in ids:
            pieces.append(words[token : token + 1])
            if token in opening:
                pieces.append(next(rows))
        return torch.cat(pieces)

    def _generate(self, decoder: LlamaForCausalLM, prompts: Sequence[torch.Tensor]) -> list[str]:
        longest = max(len(prompt) for prompt in prompts)
        embeds = torch.zeros(len(prompts), longest, prompts[0].shape[1])
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for index, prompt in enumerate(prompts):
            embeds[index, longest - len(prompt) :] = prompt
            mask[index, longest - len(prompt) :] = 1
        out = decoder.generate(
            inputs_embeds=embeds, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=self._end
        )
        return [self._tokenizer.decode([t for t in ids if t != self._end]) for ids in np.asarray(out).tolist()]


# --- tables ------------------------------------------------------------------------------------------------------------------


def summary(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """By "slice" and "slice / task": items, accuracy, hallucinated."""
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.item.slice_name].append(verdict)
        groups[f"{verdict.item.slice_name} / {verdict.item.question.task}"].append(verdict)
    return {
        name: {
            "items": len(some),
            "accuracy": round(sum(v.is_right for v in some) / len(some), 4),
            "hallucinated": round(sum(v.is_hallucinated for v in some) / len(some), 4),
        }
        for name, some in sorted(groups.items())
    }


def score(directory: Path, num_items: int, decoders: Sequence[str] = ("small", "large")) -> dict[str, dict[str, dict[str, float]]]:
    """Of each decoder, `summary`."""
    exported, items = Exported(directory), sample_items(num_items)
    features = [exported.features(item) for item in track(items, description="towers")]
    scores = {}
    for name in decoders:
        verdicts = [Verdict(item, reply) for item, reply in zip(items, exported.answer(name, items, features), strict=True)]
        scores[name] = summary(verdicts)
        _show(name, scores[name], [v for v in verdicts if not v.is_right])
    return scores


def _show(name: str, rows: dict[str, dict[str, float]], wrong: Sequence[Verdict]) -> None:
    table = Table(title=name)
    for column in ("slice / task", "items", "accuracy", "hallucinated"):
        table.add_column(column)
    for group, row in rows.items():
        table.add_row(group, f"{row['items']:.0f}", f"{row['accuracy']:.3f}", f"{row['hallucinated']:.3f}")
    console = Console(width=110)
    console.print(table)
    for verdict in wrong[:25]:
        question = verdict.item.question
        console.print(f"{verdict.item.slice_name}: {question.text!r} -> {verdict.reply!r}, right is {question.answer!r}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--decoders", nargs="+", default=["small", "large"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scores = score(options.directory, options.items, options.decoders)
    if options.json:
        options.json.write_text(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
