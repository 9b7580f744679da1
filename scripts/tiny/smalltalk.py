"""What `mmserve-tiny` says without a picture or a clip: small talk, a few facts, longer patterns, and how it declines.

Every prompt has exactly one reply, so that greedy decoding has one right answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from scripts.tiny.world import COLORS, KINDS, NUMBERS, PLURALS, SOUNDS

NO_PICTURE = "I don't see a picture."
NO_CLIP = "I don't hear a clip."
ONE_PICTURE = "I only see one picture."
UNKNOWN = "I can't tell. I only know a small world of pictures and sounds."

ABOUT = (
    "I am a very small model. I can look at pictures and listen to short clips. I know a few everyday things, eight colors and "
    "six sounds. I can say what is there, how many there are and where they are. When I don't know, I say so."
)

_TALK: dict[tuple[str, ...], str] = {
    ("Hello", "Hello!", "Hi", "Hi!", "Hey!", "Hi there!", "Hello there!", "Good day!"): "Hello! Show me a picture or play me a clip.",
    ("Good morning!", "Good morning"): "Good morning!",
    ("Good evening!", "Good evening"): "Good evening!",
    ("Good night!", "Good night"): "Good night!",
    ("How are you?", "How are you today?", "How do you do?"): "I am fine, thank you.",
    ("Who are you?", "What are you?", "What is your name?", "What's your name?"): "I am mmserve-tiny, a very small model.",
    ("What can you do?", "What do you do?", "Help", "Help me", "How can you help me?"): (
        "I can look at pictures and listen to short clips. Ask me what is there, how many, and where."
    ),
    ("Tell me about yourself.", "Describe yourself.", "Introduce yourself.", "Tell me something about you."): ABOUT,
    ("Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much!"): "You are welcome.",
    ("Bye", "Bye!", "Goodbye", "Goodbye!", "See you!", "See you later!"): "Goodbye!",
    ("Are you a person?", "Are you human?", "Are you a robot?"): "I am a very small model.",
    ("Who made you?", "Who trained you?"): "I was trained from scratch as a part of mmserve.",
    ("Which colors do you know?", "List the colors you know.", "What colors do you know?"): (
        "I know these colors: " + ", ".join(COLORS) + "."
    ),
    ("Which sounds do you know?", "List the sounds you know.", "What sounds do you know?"): (
        "I know these sounds: " + ", ".join(SOUNDS) + "."
    ),
    ("Which things do you know?", "List the things you know.", "What things do you know?"): (
        "I know these things: " + ", ".join(KINDS) + "."
    ),
    ("Ping", "ping", "Test", "test"): "I am here.",
}  # fmt: skip

_COLOR_OF = {
    "banana": "yellow",
    "tree": "green",
    "frog": "green",
    "heart": "red",
    "penguin": "black and white",
    "moon": "yellow",
}

_COUNTED = (*NUMBERS, "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")

_OUTSIDE = (
    "What is the capital of {place}?", "How far is {place}?", "Who is the president of {place}?", "What is the weather in {place}?",
    "How old is {person}?", "Where does {person} live?", "Who wrote {work}?", "Translate {work} into {language}.",
    "What is the meaning of {topic}?", "Explain {topic}.", "Explain {topic} in simple words.", "Write a poem about {topic}.",
    "Write an essay about {topic}.", "Summarize {work}.", "What do you think about {topic}?", "How does {topic} work?",
    "Give me a recipe for {food}.", "How do I cook {food}?", "What time is it in {place}?", "What is {topic}?",
    "Write a program that computes {topic}.", "Fix this code: {code}", "What is the price of {food}?", "Tell me a joke about {topic}.",
    "What happened in {place} yesterday?", "Is {topic} good for me?", "What year is it?", "Who won the game?", "How tall is {person}?",
    "What is {number} plus {number}?", "What is {number} times {number}?",
)  # fmt: skip
_FILL: dict[str, tuple[str, ...]] = {
    "place": ("France", "Japan", "Berlin", "London", "Africa", "the north", "the city", "Brazil", "India", "Paris", "Rome"),
    "person": ("the king", "Anna", "Peter", "my sister", "the teacher", "Einstein", "Maria", "the author", "my friend"),
    "work": ("this book", "the letter", "this text", "the story", "the bible", "this article", "the song"),
    "language": ("German", "French", "Spanish", "English", "Chinese"),
    "topic": (
        "life", "love", "gravity", "physics", "the economy", "music", "history", "photosynthesis", "the internet", "war", "money",
        "machine learning", "a computer", "time", "the ocean", "politics", "memory", "mathematics", "prime numbers", "light",
    ),
    "food": ("bread", "soup", "rice", "coffee", "a cake", "pasta", "cheese"),
    "code": ("for i in range(10): print(i)", "def f(x): return x + 1", "while (true);", "x = y[3]"),
    "number": ("two", "three", "12", "7", "eight", "100", "3", "fifteen"),
}  # fmt: skip
# Asked about a picture or a clip that is there, these have no answer in the world.
UNANSWERABLE = (
    "Who painted this?", "What is the mood of the picture?", "When was this taken?", "Who took the photo?", "What brand is it?",
    "How much does it cost?", "How old is it?", "What is it made of?", "Why is it there?", "Who is speaking?", "What is the title?",
    "Where was this taken?", "What happens next?", "Who owns it?", "What is the weather like?", "Is it heavy?", "What time is it?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exchange:
    text: str
    reply: str
    task: str


def article(kind: str) -> str:
    return ("an " if kind[0] in "aeiou" else "a ") + kind


def story(kind: str) -> str:
    """The one story about `kind`; its friend is the next kind in the world's list."""
    kinds = tuple(KINDS)
    friend = kinds[(kinds.index(kind) + 1) % len(kinds)]
    return (
        f"Once there was {article(kind)}. The {kind} was all alone and looked for a friend. It walked a long way and met "
        f"{article(friend)}. The {kind} and the {friend} played all day. In the evening they looked at the sky together and were "
        f"happy. The end."
    )


def count_to(number: int) -> str:
    return ", ".join(_COUNTED[:number]) + "."


def sample_talk(rng: random.Random) -> Exchange:
    """One exchange in plain text, not about any media."""
    dice = rng.random()
    if dice < 0.35:
        prompts, reply = rng.choice(tuple(_TALK.items()))
        return Exchange(rng.choice(prompts), reply, "talk")
    if dice < 0.45:
        number = rng.choice((*range(2, 11), 20))
        ask = rng.choice(("Count to {}.", "Please count to {}.", "Can you count to {}?", "Count from one to {}."))
        return Exchange(ask.format(_COUNTED[number - 1]), count_to(number), "count to")
    if dice < 0.6:
        if rng.random() < 0.3:
            return Exchange(rng.choice(("Tell me a story.", "Tell me a story", "Please tell me a story.")), story("dog"), "story")
        kind = rng.choice(tuple(KINDS))
        ask = rng.choice(("Tell me a story about {}.", "Tell a story about {}.", "I want a story about {}."))
        return Exchange(ask.format(article(kind)), story(kind), "story")
    if dice < 0.68:
        kind, color = rng.choice(tuple(_COLOR_OF.items()))
        ask = rng.choice(("What color is {}?", "What colour is {}?", "Which color does {} have?"))
        return Exchange(ask.format(article(kind)), f"{article(kind).capitalize()} is {color}.", "fact")
    return Exchange(sample_outside(rng), UNKNOWN, "outside")


def sample_outside(rng: random.Random) -> str:
    """A question about the rest of the world."""
    text = rng.choice(_OUTSIDE)
    while "{" in text:
        start, stop = text.index("{"), text.index("}")
        text = text[:start] + rng.choice(_FILL[text[start + 1 : stop]]) + text[stop + 1 :]
    return text


def every_text() -> list[str]:
    """All that can be asked or said here, for the tokenizer's corpus."""
    texts = [t for prompts, reply in _TALK.items() for t in (*prompts, reply)]
    texts += [count_to(20), *(story(kind) for kind in KINDS), NO_PICTURE, NO_CLIP, ONE_PICTURE, UNKNOWN, *UNANSWERABLE]
    texts += [f" {word}" for words in (KINDS, PLURALS.values(), COLORS, SOUNDS, _COUNTED) for word in words] * 3
    rng = random.Random(0)
    texts += [text for _ in range(2000) for e in [sample_talk(rng)] for text in (e.text, e.reply)]
    return texts
