"""Questions about scenes and utterances, each with its one right answer, as `mmserve-tiny` is trained and scored on them.

Pure and seeded.  An answer follows from the truth with certainty and names kinds in the world's order.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.tiny import smalltalk
from scripts.tiny.smalltalk import article
from scripts.tiny.world import CELLS, COLORS, KINDS, NUMBERS, PLURALS, SOUNDS, SPOKEN_QUESTIONS, SPOKEN_WORDS, Scene, Utterance

KIND_NAMES = tuple(KINDS)
# Kinds that are taken for one another; "is there a ...?" asks for the other one often.
LOOKALIKES = (
    ("dog", "cat", "pig", "frog"), ("apple", "balloon", "heart"), ("star", "flower", "moon"), ("banana", "moon"), ("car", "bus"),
    ("tree", "flower"), ("carrot", "rocket"), ("boat", "umbrella"), ("pizza", "mushroom"), ("key", "guitar"),
    ("fish", "butterfly"), ("crab", "clock"), ("penguin", "dog"), ("house", "clock"),
)  # fmt: skip
_ORDINALS = ("first", "second")

NAME = (
    "What is in the picture?", "What do you see?", "What is this?", "What can you see in the picture?", "What does the picture show?",
    "What is in the image?", "What's in this image?", "What is in the photo?", "What can you see?", "What's in the picture?",
)  # fmt: skip
DESCRIBE = (
    "Describe the picture.", "Describe the image.", "Tell me about the picture.", "Describe this picture.",
    "Describe what you see.",
)  # fmt: skip
BACKGROUND = (
    "What color is the background?", "What colour is the background?", "Which color is the background?", "What is the background color?",
    "What is the color of the background?", "What color is behind it?", "Which color does the background have?",
)  # fmt: skip
COUNT = (
    "How many {kinds} are there?", "How many {kinds} do you see?", "How many {kinds} are in the picture?", "Count the {kinds}.",
    "How many {kinds} can you see?",
)  # fmt: skip
WHERE = (
    "Where is the {kind}?", "Where is the {kind} in the picture?", "In which part of the picture is the {kind}?",
    "Where do you see the {kind}?",
    "Where can you see the {kind}?",
)  # fmt: skip
PRESENCE = (
    "Is there {a_kind}?", "Is there {a_kind} in the picture?", "Do you see {a_kind}?", "Can you see {a_kind}?",
    "Does the picture show {a_kind}?",
    "Is there {a_kind} in the image?",
)  # fmt: skip

WHICH = (
    "Which picture shows {a_kind}?", "Which picture has {a_kind}?", "In which picture is the {kind}?", "Which image shows {a_kind}?",
    "Which of the pictures shows {a_kind}?",
)  # fmt: skip
NAME_NTH = (
    "What is in the {nth} picture?", "What do you see in the {nth} picture?", "What does the {nth} picture show?",
    "What is in the {nth} image?",
)  # fmt: skip
BACKGROUND_NTH = (
    "What color is the background of the {nth} picture?", "What is the background color of the {nth} picture?",
    "Which color is the background in the {nth} picture?", "What color is the background of the {nth} image?",
)  # fmt: skip
COUNT_NTH = (
    "How many {kinds} are in the {nth} picture?", "How many {kinds} does the {nth} picture show?",
    "How many {kinds} are in the {nth} image?",
)  # fmt: skip
WHERE_NTH = (
    "Where is the {kind} in the {nth} picture?", "Where do you see the {kind} in the {nth} picture?",
    "Where is the {kind} in the {nth} image?",
)  # fmt: skip
PRESENCE_NTH = (
    "Is there {a_kind} in the {nth} picture?", "Do you see {a_kind} in the {nth} picture?", "Does the {nth} picture show {a_kind}?",
)  # fmt: skip
NAME_BOTH = (
    "What is in the pictures?", "Describe the pictures.", "What do the pictures show?", "Describe both pictures.",
    "Compare the pictures.",
)  # fmt: skip

HEAR = (
    "What do you hear?", "What can you hear?", "What is in the clip?", "What is in the recording?", "Describe the clip.",
    "Describe the sound.",
)  # fmt: skip
WORD = (
    "What word is spoken?", "Which word is spoken?", "What word do you hear?", "What is said?", "What does the voice say?",
    "Which word is it?",
)  # fmt: skip
SOUND = ("What sound is it?", "What kind of sound is it?", "Which sound do you hear?", "What sound is this?", "What sound do you hear?")
SPOKEN = (
    "", "Answer the spoken question.", "Answer the question.", "Answer the question in the clip.", "Please answer the spoken question.",
    "Please answer.", "Listen and answer.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str
    task: str
    kind: str | None = None  # the kind it asks for
    nth: int | None = None  # the picture it asks for, from 0

    @property
    def facts(self) -> frozenset[str]:
        return facts(self.answer, self.task)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A question as a voice asks it, and the question it stands for."""

    utterance: Utterance
    question: Question


# --- answers -----------------------------------------------------------------------------------------------------------------


def place(cell: int) -> str:
    name = CELLS[cell]
    return f"in the {name}" if name == "middle" else f"on the {name}" if name in ("left", "right") else f"at the {name}"


def name_answer(scene: Scene) -> str:
    kinds = [k for k in KIND_NAMES if scene.count(k)]
    if not kinds:
        return "I see nothing that I know."
    return "I see " + " and ".join(article(k) if scene.count(k) == 1 else PLURALS[k] for k in kinds) + "."


def describe_answer(scene: Scene) -> str:
    """Names first and numbers after them: a small decoder counts what it has just named."""
    parts = [name_answer(scene)]
    kinds = [k for k in KIND_NAMES if scene.count(k)]
    parts += [where_answer(scene, kind) if scene.count(kind) == 1 else count_answer(scene, kind) for kind in kinds]
    return " ".join([*parts, background_answer(scene)])


def background_answer(scene: Scene) -> str:
    return f"The background is {scene.background}."


def count_answer(scene: Scene, kind: str) -> str:
    count = scene.count(kind)
    if count == 0:
        return f"There are no {PLURALS[kind]}."
    return f"There is one {kind}." if count == 1 else f"There are {NUMBERS[count - 1]} {PLURALS[kind]}."


def where_answer(scene: Scene, kind: str) -> str:
    """Of a kind that is there once or not at all."""
    cells = [thing.cell for thing in scene.things if thing.kind == kind]
    return f"The {kind} is {place(cells[0])}." if cells else f"There is no {kind}."


def presence_answer(scene: Scene, kind: str) -> str:
    return f"Yes, I see {article(kind)}." if scene.count(kind) else f"No, I see no {kind}."


def which_answer(scenes: Sequence[Scene], kind: str) -> str:
    found = tuple(scene.count(kind) > 0 for scene in scenes)
    return {(True, False): "The first picture.", (False, True): "The second picture.", (True, True): "Both pictures."}.get(
        (found[0], found[1]), "Neither picture."
    )


def hear_answer(clip: Utterance) -> str:
    if clip.sound is not None:
        return f"I hear {sound_name(clip.sound)}."
    return f"I hear the word {clip.words[0]}." if len(clip.words) == 1 else "I hear a question."


def sound_name(sound: str) -> str:
    return sound if sound == "rain" else article(sound)


# --- questions ---------------------------------------------------------------------------------------------------------------


def _fill(rng: random.Random, forms: Sequence[str], kind: str = "apple", nth: int = 0) -> str:
    text = rng.choice(forms).format(kind=kind, kinds=PLURALS[kind], a_kind=article(kind), nth=_ORDINALS[nth])
    dice = rng.random()
    if dice < 0.08:
        return text.lower().rstrip("?.")
    return text.rstrip("?.") if dice < 0.12 else text


def _absent(rng: random.Random, scenes: Sequence[Scene]) -> str:
    """A kind none of the scenes has; half of the time one that looks like one they have."""
    there = {kind for scene in scenes for kind in scene.kinds}
    alike = [k for group in LOOKALIKES if there & set(group) for k in group if k not in there]
    if alike and rng.random() < 0.5:
        return rng.choice(alike)
    return rng.choice([k for k in KIND_NAMES if k not in there])


def _kind_asked(rng: random.Random, scene: Scene, share_present: float, others: Sequence[Scene] = ()) -> str:
    """With `share_present` one of the scene's kinds; otherwise none, and then often one of the other picture's."""
    if scene.kinds and rng.random() < share_present:
        return rng.choice(scene.kinds)
    elsewhere = [k for other in others for k in other.kinds if k not in scene.kinds]
    return rng.choice(elsewhere) if elsewhere and rng.random() < 0.5 else _absent(rng, (scene,))


def about_scene(rng: random.Random, scene: Scene, task: str, scenes: Sequence[Scene] = (), nth: int | None = None) -> Question:
    """One question of `task` about `scene`, which is number `nth` of `scenes` if there are several."""
    several = nth is not None
    others = [s for i, s in enumerate(scenes) if i != nth] if several else []
    kind: str | None = None
    forms: Sequence[str]
    if task == "name":
        forms, answer = (NAME_NTH if several else NAME), name_answer(scene)
    elif task == "describe":
        forms, answer = DESCRIBE, describe_answer(scene)
    elif task == "background":
        forms, answer = (BACKGROUND_NTH if several else BACKGROUND), background_answer(scene)
    elif task == "count":
        kind = _kind_asked(rng, scene, 0.85, others)
        forms, answer = (COUNT_NTH if several else COUNT), count_answer(scene, kind)
    elif task == "where":
        single = [k for k in scene.kinds if scene.count(k) == 1]
        kind = rng.choice(single) if single and rng.random() < 0.88 else _kind_asked(rng, scene, 0.0, others)
        forms, answer = (WHERE_NTH if several else WHERE), where_answer(scene, kind)
    else:
        assert task == "presence", task
        kind = _kind_asked(rng, scene, 0.5, others)
        forms, answer = (PRESENCE_NTH if several else PRESENCE), presence_answer(scene, kind)
    return Question(_fill(rng, forms, kind or "apple", nth or 0), answer, task, kind, nth)


def about_pair(rng: random.Random, scenes: Sequence[Scene]) -> Question:
    """One question about two pictures."""
    dice = rng.random()
    if dice < 0.25:
        have = [k for k in KIND_NAMES if any(scene.count(k) for scene in scenes)]
        kind = rng.choice(have) if have and rng.random() < 0.85 else _absent(rng, scenes)
        return Question(_fill(rng, WHICH, kind), which_answer(scenes, kind), "which", kind)
    if dice < 0.33:
        names = (name_answer(scene).removeprefix("I see ") for scene in scenes)
        answer = " ".join(f"In the {nth} picture I see {name}" for nth, name in zip(_ORDINALS, names, strict=True))
        return Question(_fill(rng, NAME_BOTH), answer, "name both")
    nth = rng.randrange(2)
    task = rng.choices(("name", "background", "count", "where", "presence"), (4, 1.5, 3, 2.5, 3))[0]
    return about_scene(rng, scenes[nth], task, scenes, nth)


def about_clip(rng: random.Random, clip: Utterance) -> Question:
    """One typed question about what a clip holds: a word, a sound, or (only "what do you hear") a question."""
    if len(clip.words) > 1 or rng.random() < 0.3:
        return Question(_fill(rng, HEAR), hear_answer(clip), "hear")
    if clip.sound is not None:
        return Question(_fill(rng, SOUND), f"It is {sound_name(clip.sound)}.", "sound")
    return Question(_fill(rng, WORD), f"The word is {clip.words[0]}.", "word")


def sample_clip(rng: random.Random) -> Utterance:
    """A word or a sound."""
    if rng.random() < 0.3:
        return Utterance(sound=rng.choice(SOUNDS))
    return Utterance(words=(rng.choice(SPOKEN_WORDS),))


def spoken(rng: random.Random, scene: Scene | None) -> Spoken:
    """A spoken question about `scene`; about a picture that isn't there without one."""
    form = rng.choices(SPOKEN_QUESTIONS, (1.0, 0.6, 1.2, 1.2, 1.5))[0]
    task = ("name", "background", "count", "where", "presence")[SPOKEN_QUESTIONS.index(form)]
    if scene is None:
        kind: str | None = rng.choice(KIND_NAMES)
        answer = smalltalk.NO_PICTURE
    else:
        asked = about_scene(rng, scene, task)
        kind, answer = asked.kind, asked.answer
    words = form.format(kind=kind, kinds=PLURALS[kind or "apple"]).split()
    asked_kind = kind if "{" in form else None
    return Spoken(Utterance(words=tuple(words)), Question(rng.choice(SPOKEN), answer, f"spoken {task}", asked_kind))


def about_single(rng: random.Random, scene: Scene) -> Question:
    """One question about a single picture."""
    task = rng.choices(("name", "describe", "background", "count", "where", "presence"), (4, 1.8, 0.8, 4, 2, 2.5))[0]
    return about_scene(rng, scene, task)


def declined(rng: random.Random, num_pictures: int, has_clip: bool) -> Question:
    """A question that the media at hand can't answer."""
    kind = rng.choice(KIND_NAMES)
    choices: list[tuple[Sequence[str], str]] = []
    forms: Sequence[str]
    if num_pictures == 0:
        forms = rng.choice((NAME, DESCRIBE, BACKGROUND, COUNT, WHERE, PRESENCE, WHICH, NAME_NTH))
        # "What do you see?" and the like are also asked of a clip alone.
        choices.append((forms, smalltalk.NO_PICTURE))
    if num_pictures == 1:
        forms = rng.choice((NAME_NTH, BACKGROUND_NTH, WHERE_NTH, PRESENCE_NTH))
        text = _fill(rng, forms, kind, 1)
        if rng.random() < 0.4:
            return Question(text, smalltalk.ONE_PICTURE, "decline")
    if not has_clip:
        choices.append((rng.choice((HEAR[:4], WORD, SOUND, SPOKEN[1:5])), smalltalk.NO_CLIP))
    if num_pictures or has_clip:
        text = rng.choice((rng.choice(smalltalk.UNANSWERABLE), smalltalk.sample_outside(rng)))
        choices.append(((text,), smalltalk.UNKNOWN))
    forms, answer = rng.choice(choices)
    return Question(_fill(rng, forms, kind, rng.randrange(2)), answer, "decline")


# --- judging a reply ---------------------------------------------------------------------------------------------------------

_SINGULAR = {plural: kind for kind, plural in PLURALS.items()} | {"grey": "gray", "1": "one", "2": "two", "3": "three"}
_CELL_PATTERN = re.compile("|".join(sorted(CELLS, key=len, reverse=True)))
_VOCABULARY = {*KINDS, *COLORS, *NUMBERS, *SOUNDS, "yes", "no", "first", "second", "both", "neither", "nothing"}
_DECLINES = ("don't", "can't", "only")


def facts(reply: str, task: str) -> frozenset[str]:
    """What a reply claims, as words of the world; two replies with the same facts are equally right."""
    text = reply.lower()
    words = [_SINGULAR.get(w, w) for w in re.findall(r"[\w']+", text)]
    found = {w for w in words if w in _VOCABULARY}
    found |= {f"@{cell}" for cell in _CELL_PATTERN.findall(text)} if "where" in task or task == "describe" else set()
    if task in ("talk", "story", "fact", "count to", "outside", "decline") or any(w in words for w in _DECLINES):
        return frozenset((text.strip(),))
    if task == "name both":
        sentences = [s for s in text.split(".") if s.strip()]
        return frozenset(f"{i} {w}" for i, s in enumerate(sentences) for w in facts(s, "name") if w not in _ORDINALS)
    return frozenset(found)


def is_right(question: Question, reply: str) -> bool:
    return facts(reply, question.task) == question.facts


def affirmed_kinds(reply: str) -> frozenset[str]:
    """The kinds a reply says are there (or were spoken); those in a negated sentence are not."""
    found: set[str] = set()
    for sentence in re.split(r"[.!?]", reply.lower()):
        words = [_SINGULAR.get(w, w) for w in re.findall(r"[\w']+", sentence)]
        if not {"no", "not", "neither"} & set(words):
            found |= {w for w in words if w in KINDS}
    return frozenset(found)


def every_text() -> list[str]:
    """All forms with all kinds, and answers with all their words, for the tokenizer's corpus."""
    rng = random.Random(0)
    forms = [
        *NAME, *DESCRIBE, *BACKGROUND, *COUNT, *WHERE, *PRESENCE, *WHICH, *NAME_NTH, *BACKGROUND_NTH, *COUNT_NTH, *WHERE_NTH,
        *PRESENCE_NTH, *NAME_BOTH, *HEAR, *WORD, *SOUND, *SPOKEN,
    ]  # fmt: skip
    texts = [_fill(rng, (form,), kind, nth) for form in forms for kind in KIND_NAMES for nth in (0, 1)]
    for kind in KIND_NAMES:
        texts += [f"Yes, I see {article(kind)}.", f"No, I see no {kind}.", f"There are no {PLURALS[kind]}.", f"I see {PLURALS[kind]}."]
        texts += [f"There are {n} {PLURALS[kind]}. The {kind} is {place(cell)}." for n in NUMBERS[:3] for cell in range(9)]
    texts += [f"The background is {color}." for color in COLORS for _ in range(20)]
    texts += [f"It is {sound_name(s)}. I hear {sound_name(s)}." for s in SOUNDS for _ in range(20)]
    texts += [f"The word is {w}. I hear the word {w}." for w in SPOKEN_WORDS for _ in range(5)]
    rest = ["In the first picture I see", "In the second picture I see", "Both pictures.", "Neither picture.", "I hear a question."]
    return texts + rest * 20
