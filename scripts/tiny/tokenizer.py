"""The byte-level BPE of `mmserve-tiny`, its special tokens and its chat template.

Every word of the world is one token (with its leading space); any UTF-8 text survives a round trip.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tiny import questions, smalltalk
from scripts.tiny.world import CELLS, COLORS, KINDS, NUMBERS, PLURALS, SOUNDS, WORDS

VOCAB_SIZE = 1024
PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
IMAGE, IMAGE_END, AUDIO, AUDIO_END = "<|image|>", "<|/image|>", "<|audio|>", "<|/audio|>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT, IMAGE, IMAGE_END, AUDIO, AUDIO_END)

# Content is a string or a list of parts, written in their order; rows of a picture or clip go between its two tokens.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|image|><|/image|>' -}}
{%- elif part['type'] == 'audio' -%}
{{- '<|audio|><|/audio|>' -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def train() -> Tokenizer:
    """The tokenizer, always the same; raises ValueError if a word of the world is more than one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = sorted({*WORDS, *KINDS, *PLURALS.values(), *COLORS, *SOUNDS, *NUMBERS, *" ".join(CELLS).split()})
    corpus = [*questions.every_text(), *smalltalk.every_text(), *(f" {word}" for word in words for _ in range(200))]
    tokenizer.train_from_iterator(corpus, trainer)
    split = [word for word in words if len(tokenizer.encode(f" {word}").ids) != 1]
    if split or tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocabulary of {tokenizer.get_vocab_size()} splits {split}")
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def token_of(tokenizer: Tokenizer, word: str) -> int:
    """The one token of a word of the world, with its leading space."""
    (token,) = tokenizer.encode(f" {word}").ids
    return int(token)
