"""What `mmserve-tiny` claims to know: kinds, colours, words, sounds, and scenes made of them.

Pure and seeded: no rendering, no torch.  Everything else in this package draws, speaks, asks about or learns a `Scene` or an
`Utterance` made here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

IMAGE_SIZE = 336  # pixels, square
PATCH_SIZE = 14  # pixels; 24 x 24 patches, row-major, are the 576 vision tokens
GRID = IMAGE_SIZE // PATCH_SIZE
SAMPLE_RATE = 16_000  # Hz
TOKENS_PER_SECOND = 25  # audio tokens; one token is 640 samples
WINDOW_S = 5.0  # one audio window; 125 tokens

# kind -> the Noto Color Emoji it is drawn from.
KINDS: dict[str, str] = {
    "apple": "\U0001f34e",
    "banana": "\U0001f34c",
    "carrot": "\U0001f955",
    "pizza": "\U0001f355",
    "mushroom": "\U0001f344",
    "flower": "\U0001f33b",
    "tree": "\U0001f333",
    "star": "\u2b50",
    "moon": "\U0001f319",
    "heart": "\u2764",
    "fish": "\U0001f420",
    "frog": "\U0001f438",
    "pig": "\U0001f437",
    "dog": "\U0001f436",
    "cat": "\U0001f431",
    "penguin": "\U0001f427",
    "butterfly": "\U0001f98b",
    "crab": "\U0001f980",
    "car": "\U0001f697",
    "bus": "\U0001f68c",
    "boat": "\u26f5",
    "rocket": "\U0001f680",
    "balloon": "\U0001f388",
    "house": "\U0001f3e0",
    "key": "\U0001f511",
    "umbrella": "\u2602",
    "clock": "\u23f0",
    "guitar": "\U0001f3b8",
}
PLURALS = {kind: kind + "s" for kind in KINDS} | {
    "fish": "fish",
    "butterfly": "butterflies",
    "bus": "buses",
}

# background colour -> base RGB; a renderer varies it (noise, gradient, stripes of close shades) without leaving the name.
COLORS: dict[str, tuple[int, int, int]] = {
    "white": (245, 245, 245),
    "black": (20, 20, 20),
    "gray": (128, 128, 128),
    "red": (215, 40, 40),
    "green": (50, 160, 70),
    "blue": (50, 90, 210),
    "yellow": (245, 215, 60),
    "purple": (130, 60, 170),
}
# Sprites that all but vanish on a background of the same colour are not drawn there.
CLASHES = {
    ("apple", "red"), ("heart", "red"), ("crab", "red"), ("car", "red"), ("balloon", "red"), ("mushroom", "red"), ("rocket", "red"),
    ("guitar", "red"), ("clock", "red"), ("banana", "yellow"), ("star", "yellow"), ("moon", "yellow"), ("flower", "yellow"),
    ("key", "yellow"), ("tree", "green"), ("frog", "green"), ("umbrella", "purple"), ("butterfly", "blue"), ("fish", "blue"),
    ("penguin", "black"),
}  # fmt: skip

# 3 x 3 cells, row-major, as an answer names them.
CELLS = ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right")

SOUNDS = ("bell", "siren", "whistle", "drum", "rain", "buzzer")  # non-speech clips; names no kind has
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# Spoken alone: "What word is spoken?"
SPOKEN_WORDS = (*KINDS, *COLORS, *NUMBERS)
# Spoken questions about the picture beside them; {kind} and {kinds} range over KINDS and PLURALS.
SPOKEN_QUESTIONS = (
    "what is in the picture",
    "what color is the background",
    "how many {kinds} are there",
    "where is the {kind}",
    "is there a {kind}",
)
# Frame labels of the audio tower: 0 is silence, then every word that can be spoken, then every sound.
_question_words = {w for q in SPOKEN_QUESTIONS for w in q.split() if "{" not in w}
WORDS = tuple(sorted({*SPOKEN_WORDS, *PLURALS.values(), *_question_words}))
FRAME_LABELS = ("<silence>", *WORDS, *SOUNDS)


@dataclass(frozen=True, slots=True)
class Thing:
    """One sprite: `center` and `size` in pixels, `angle` in degrees, `aspect` = width / height of the drawn sprite."""

    kind: str
    cell: int  # index into CELLS of its centre
    center: tuple[float, float]  # x, y
    size: float
    angle: float
    aspect: float
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Scene:
    background: str
    things: tuple[Thing, ...]
    texture_seed: int

    def count(self, kind: str) -> int:
        return sum(thing.kind == kind for thing in self.things)

    @property
    def kinds(self) -> tuple[str, ...]:
        """In order of first appearance."""
        return tuple(dict.fromkeys(thing.kind for thing in self.things))


@dataclass(frozen=True, slots=True)
class Utterance:
    """What a clip holds: words in order, or one sound.  Voice, speed and noise are the speaker's business."""

    words: tuple[str, ...] = ()
    sound: str | None = None


def sample_scene(rng: random.Random, kinds: tuple[str, ...] | None = None) -> Scene:
    """One or two kinds, one to three of the first and one of the second, each in a cell of its own, wholly inside the picture.

    Centres keep clear of the borders between cells, so that "where" has one right answer.  `kinds` fixes which kinds appear.
    """
    if kinds is None:
        kinds = tuple(rng.sample(tuple(KINDS), rng.choice((1, 1, 2))))
    background = rng.choice([c for c in COLORS if all((kind, c) not in CLASHES for kind in kinds)])
    owners = [kinds[0]] * rng.choice((1, 1, 2, 3)) + list(kinds[1:])
    rng.shuffle(owners)
    cells = rng.sample(range(9), len(owners))
    things = tuple(_place(rng, kind, cell, alone=len(owners) == 1) for kind, cell in zip(owners, cells, strict=True))
    return Scene(background, things, rng.randrange(2**31))


def _place(rng: random.Random, kind: str, cell: int, *, alone: bool) -> Thing:
    step = IMAGE_SIZE / 3
    row, column = divmod(cell, 3)
    x, y = ((i + 0.5) * step + rng.uniform(-18, 18) for i in (column, row))
    biggest = 170.0 if alone else 116.0
    size = rng.uniform(92, biggest)
    half = size / 2
    x, y = (min(max(v, half), IMAGE_SIZE - half) for v in (x, y))
    # Clamping must not push a large sprite's centre over a border between cells.
    inside = all(i * step + 14 <= v <= (i + 1) * step - 14 for i, v in ((column, x), (row, y)))
    if not inside:
        return _place(rng, kind, cell, alone=False)
    return Thing(kind, cell, (x, y), size, rng.uniform(-25, 25), rng.uniform(0.85, 1.18), rng.random() < 0.5)
