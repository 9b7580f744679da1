"""A golden set written by hand, as a user would, and a real gateway over an engine that sees what is in its pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from fake_engine import FakeEngine, parts_of, say_words
from PIL import Image

from mmserve.evals.golden import GoldenSet, load_golden_set
from mmserve.request import ChatRequest
from mmserve.token_stream import Generation

COLORS = {"red": (200, 0, 0), "blue": (0, 0, 200)}
VOCABULARY = {"objects": {"dog": ["puppy"], "cat": [], "bird": []}}
LINES: list[dict[str, Any]] = [
    {"id": "hello", "parts": ["Say hello."], "category": "talk", "kind": "short", "expected": ["Hello", "Hi"]},
    {"id": "dog?", "parts": [{"image": "red.png"}, "Is there a dog?"], "category": "presence", "kind": "yes_no", "expected": "yes",
     "objects": ["puppy"]},
    {"id": "cat?", "parts": [{"image": "red.png"}, "Is there a cat?"], "category": "presence", "kind": "yes_no", "expected": "no",
     "objects": ["dog"]},
    {"id": "color", "parts": [{"image": "blue.png"}, "Which color?"], "category": "color", "kind": "choice", "choices": ["red", "blue"],
     "expected": "blue"},
    {"id": "first", "parts": [{"image": "red.png"}, {"image": "blue.png"}, "Which is red?"], "category": "order", "kind": "choice",
     "choices": ["first", "second"], "expected": "first", "if_swapped": "second"},
    {"id": "heard", "parts": [{"audio": "clip.wav"}, "What word is it?"], "category": "word", "kind": "short", "expected": "bird"},
    {"id": "both", "parts": [{"image": "red.png"}, {"audio": "clip.wav"}, "What do you see?"], "category": "name", "kind": "short",
     "expected": "a dog", "objects": ["dog"], "asks_for_all": True},
    {"id": "open", "parts": [{"image": "red.png"}, "Describe it."], "category": "describe", "kind": "open", "expected": "A dog runs.",
     "objects": ["dog"], "asks_for_all": True},
]  # fmt: skip
RIGHT = {
    "Say hello.": "Hi!", "Is there a dog?": "Yes, a dog.", "Is there a cat?": "No.", "Which color?": "It is blue.",
    "What word is it?": "The bird", "What do you see?": "A puppy.", "Describe it.": "A dog runs. It is red.",
}  # fmt: skip


def write_set(directory: Path, lines: list[dict[str, Any]] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    for name, color in COLORS.items():
        (directory / f"{name}.png").write_bytes(png(color))
    soundfile.write(directory / "clip.wav", np.zeros(8000, np.int16), 16_000)
    (directory / "vocabulary.json").write_text(json.dumps(VOCABULARY))
    (directory / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (LINES if lines is None else lines)))
    return directory


def load(directory: Path, lines: list[dict[str, Any]] | None = None) -> GoldenSet:
    return load_golden_set(write_set(directory, lines))


def png(color: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, "PNG")
    return buffer.getvalue()


def seeing_engine(change: Callable[[str, str], str] = lambda question, answer: answer, *, reverses: bool = False) -> FakeEngine:
    """Gives the right answers, after `change`; one that `reverses` sees pictures in the wrong order."""

    def answer(generation: Generation, request: ChatRequest) -> None:
        parts = parts_of(request)
        question = " ".join(part for part in parts if isinstance(part, str))
        pictures = [part for part in parts if isinstance(part, bytes)]
        if question == "Which is red?":
            is_first = (pictures[0] == png(COLORS["red"])) != reverses
            text = f"The {'first' if is_first else 'second'} one."
        else:
            text = RIGHT[question]
        say_words(generation, request, (change(question, text),))

    return FakeEngine(answer)
