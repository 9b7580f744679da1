"""The model card that ships with the weights: what the model is, what it can and can't do, and its measured figures."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.tiny.world import CELLS, COLORS, KINDS, NUMBERS, SOUNDS, SPOKEN_QUESTIONS

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]  # decoder -> "slice" or "slice / task" -> items, accuracy, hallucinated

BAR, MIN_ITEMS = 0.92, 5

_HEAD = """\
# mmserve-tiny

A very small multi-modal model, trained from scratch on two CPU cores by the stages of `scripts/train_tiny.py`, with the shape of the real
thing: a CLIP vision tower (336 px, patch 14, 576 tokens a picture), a Whisper encoder (80 mels, 5 s windows, 25 tokens a second), a
two-layer projector from each tower to each decoder, and two Llama decoders (`small`, {layers[0]} layers; `large`, {layers[1]} layers) over
one byte-level BPE of {vocab} tokens. It exists so that faults of a server in fusing, caching or scheduling can be *heard*: in its small
world its answers are short and, but for the weak spots named below, right. It is not meant for anything else.

## Its world

- **Kinds** ({num_kinds}), drawn from Noto Color Emoji on plain or textured backgrounds, one or two kinds in a picture, up to three of one:
  {kinds}.
- **Backgrounds**: {colors}.
- **Places**, on a grid of three by three: {cells}.
- **Spoken words** (espeak-ng, many voices, speeds and pitches): the kinds, the colors, and {numbers}.
- **Sounds**: {sounds}.
- **Spoken questions** about a picture beside them: {spoken}.

## What to ask

- One picture: what is in it, describe it, its background color, how many ..., where is the ..., is there a ....
- Two pictures: which one shows ..., what is in the first or second one (or in both), its background, how many, where, is there a ... in it.
- A clip: what word is spoken, what sound is it, what do you hear. A clip beside a picture: either of the above, or the clip asks.
- Text: greetings, what it can do, a story about one of its kinds, counting to ten or twenty.

Text may stand before or after the media, a system prompt may be there, and a conversation may go on for a few turns.

## What it can't do

Photographs, other drawings, more than two pictures, more than one clip, natural speech, transcribing sentences, comparing pictures,
free conversation, knowledge of the world. Asked for something outside of its world it is taught to say so ("I can't tell. ..."), and that
a picture or a clip isn't there; it does so for questions that resemble those it was taught to decline, not for all.

## Measured
"""


def card(scores: Scores, layers: tuple[int, int], vocab_size: int) -> str:
    """Markdown; figures are of greedy decoding on held-out scenes, textures and voices."""
    head = _HEAD.format(
        layers=layers,
        vocab=vocab_size,
        num_kinds=len(KINDS),
        kinds=", ".join(KINDS),
        colors=", ".join(COLORS),
        cells=", ".join(CELLS),
        numbers=f"the numbers {NUMBERS[0]} to {NUMBERS[-1]}",
        sounds=", ".join(SOUNDS),
        spoken=", ".join(f'"{question}"' for question in SPOKEN_QUESTIONS),
    )
    if not scores:
        return head + "\nNot yet.\n"
    names = tuple(scores)
    lines = [
        f"The aim is {BAR} in every slice and at most 0.03 hallucinated; few items, so a figure may be some points off.",
        "",
        "Held-out scenes, textures and voices; greedy decoding. An answer is right if all it claims (kinds, number, place, color,",
        "yes or no) is what is there; *hallucinated* is the share of answers that name a kind that isn't there (or wasn't spoken).",
        "",
        "| slice / task | items | " + " | ".join(f"{n} accuracy | {n} hallucinated" for n in names) + " |",
        "|---|---|" + "---|---|" * len(names),
    ]
    for group in scores[names[0]]:
        cells = [f"{scores[n][group]['accuracy']:.3f} | {scores[n][group]['hallucinated']:.3f}" for n in names]
        title = group if "/" in group else f"**{group}**"
        lines.append(f"| {title} | {scores[names[0]][group]['items']:.0f} | " + " | ".join(cells) + " |")
    weak = [
        f"- {name}, {group}: {row['accuracy']:.2f} of {row['items']:.0f}"
        for name in names
        for group, row in scores[name].items()
        if "/" in group and row["accuracy"] < BAR and row["items"] >= MIN_ITEMS
    ]
    if weak:
        lines += ["", "## Weak", "", f"Below {BAR} on {MIN_ITEMS} or more items; don't take these answers for certain:", "", *weak]
    return head + "\n" + "\n".join(lines) + "\n"
