"""Writes `examples/`: pictures and clips of the world that the bundled model knows, from seeds that no training draws.

    python -m scripts.make_examples

Needs `espeak-ng` and the Noto Color Emoji font.  The same seeds give the same files.  `examples/README.md` says what each of them holds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from scripts.tiny.clips import make_clip
from scripts.tiny.questions import hear_answer
from scripts.tiny.render import render
from scripts.tiny.smalltalk import article
from scripts.tiny.speak import save_wav
from scripts.tiny.world import NUMBERS, PLURALS, Scene, Utterance, sample_scene

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HELD_OUT = 2**30  # no training draws a seed from here on


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    kinds: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Clip:
    name: str
    utterance: Utterance
    seed: int


PICTURES = (
    Picture("cat.jpg", ("cat",), HELD_OUT + 3),
    Picture("boats-and-star.jpg", ("boat", "star"), HELD_OUT + 13),
    Picture("rocket.jpg", ("rocket",), HELD_OUT + 7),
)
CLIPS = (
    Clip("guitar.wav", Utterance(words=("guitar",)), HELD_OUT + 21),
    Clip("bell.wav", Utterance(sound="bell"), HELD_OUT + 22),
    Clip("how-many-boats.wav", Utterance(words=("how", "many", "boats", "are", "there")), HELD_OUT + 23),
)
_README = """\
# Examples

Held-out pictures and clips to try the bundled model with, made by `python -m scripts.make_examples`.

| file | holds |
|---|---|
{rows}

The pictures are drawn with Noto Color Emoji; see `NOTICE` at the top of the repository. The voices are synthetic (espeak-ng).
"""


def described(scene: Scene) -> str:
    """`two boats and a star on blue`."""
    counts = [(kind, scene.count(kind)) for kind in scene.kinds]
    things = [article(kind) if count == 1 else f"{NUMBERS[count - 1]} {PLURALS[kind]}" for kind, count in counts]
    return f"{' and '.join(things)} on {scene.background}"


def heard(utterance: Utterance) -> str:
    if len(utterance.words) > 1:
        return f'a voice asks "{" ".join(utterance.words)}"'
    return hear_answer(utterance).removeprefix("I hear ").removesuffix(".")


def main() -> None:
    EXAMPLES.mkdir(exist_ok=True)
    rows = []
    for picture in PICTURES:
        scene = sample_scene(random.Random(picture.seed), picture.kinds)
        Image.fromarray(render(scene).image).save(EXAMPLES / picture.name, "JPEG", quality=92)
        rows.append(f"| `{picture.name}` | {described(scene)} |")
    for clip in CLIPS:
        save_wav(EXAMPLES / clip.name, make_clip(clip.utterance, random.Random(clip.seed), held_out=True).waveform)
        rows.append(f"| `{clip.name}` | {heard(clip.utterance)} |")
    (EXAMPLES / "README.md").write_text(_README.format(rows="\n".join(rows)))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
