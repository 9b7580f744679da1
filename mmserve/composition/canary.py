"""A second set of weights for one decoder, beside the first: the same prompts and places for media, other numbers in between."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mmserve.composition.composed import FILE
from mmserve.composition.files import read_text
from mmserve.composition.load import load_composition
from mmserve.composition.specs import Composition, DecoderSpec, EncoderSpec, PromptFormat
from mmserve.composition.weights import BadModel
from mmserve.config import CANARY_SUFFIX
from mmserve.media import MediaKind

S = TypeVar("S", bound=EncoderSpec)


@dataclass(frozen=True)
class Canary:
    """`composition` has one decoder, by the canary's own name, with its encoders; those of `own_kinds` make rows of their own."""

    name: str  # small-canary
    base: str  # the decoder beside which it stands: small
    directory: Path
    composition: Composition
    own_kinds: frozenset[MediaKind]

    @property
    def decoder(self) -> DecoderSpec:
        return self.composition.decoders[self.name]

    def fingerprint(self, between: Callable[[], None]) -> str:
        """Hex SHA-256 of whatever shapes its answers: weights of the decoder and of the encoders.  Slow: reads all of them.

        `between` pieces it may be ended, by raising.
        """
        encoders = [encoder.version(self.name) for _, encoder in _encoders(self.composition)]
        config = json.dumps([dict(self.decoder.config), self.decoder.eos_token_ids], sort_keys=True, default=str).encode()
        return hashlib.sha256(b"".join([self.decoder.weights.digest(between), hashlib.sha256(config).digest(), *encoders])).hexdigest()


def read_canary(base: str, directory: Path, stable: Composition, *, chat_template: Path | None = None) -> Canary:
    """Of the decoder `base` of `stable`.  Slow: reads both's encoders, to see whether they are the same.

    Raises BadModel for what can't be read, and where it differs in something that its requests can't be carried over: it names all of that.
    """
    if base not in stable.decoders:
        raise BadModel(f"canary-{base}: this server has no {base} decoder to stand beside")
    if (directory / FILE).exists():
        read = load_composition(directory, chat_template=chat_template)
    elif base == "small":
        read = load_composition(small=directory, chat_template=chat_template)
    else:
        read = load_composition(large=directory, chat_template=chat_template)
    if base not in read.decoders:
        raise BadModel(f"{directory} has no {base} decoder")
    if differing := sorted(set(_differences(read, stable, base))):
        raise BadModel(f"canary-{base}: {directory} can't be tried beside {stable.name}, it has another {', another '.join(differing)}")
    name = base + CANARY_SUFFIX
    alone = Composition(
        f"{stable.name}-{name}",
        {name: replace(read.decoders[base], name=name)},
        _alone(read.vision, base, name),
        _alone(read.audio, base, name),
    )
    versions = {kind: (encoder.version(name), stable.encoders(kind)[base].version(base)) for kind, encoder in _encoders(alone)}
    return Canary(name, base, directory, alone, frozenset(kind for kind, (own, others) in versions.items() if own != others))


def beside(stable: Composition, canaries: Mapping[str, Canary]) -> Composition:
    """The same with the decoders of the canaries, too.  They have no fallback encoders: their requests can go back."""
    added = [canary.composition for canary in canaries.values()]
    return replace(
        stable,
        decoders={**stable.decoders, **{name: each for composition in added for name, each in composition.decoders.items()}},
        vision={**stable.vision, **{name: each for composition in added for name, each in composition.vision.items()}},
        audio={**stable.audio, **{name: each for composition in added for name, each in composition.audio.items()}},
    )


def _differences(canary: Composition, stable: Composition, base: str) -> Iterator[str]:
    """What must be equal so that a prompt, and an answer begun, mean the same to both."""
    ours, theirs = canary.decoders[base], stable.decoders[base]
    yield from _prompt_differences(ours.prompt, theirs.prompt)
    if ours.vocab_size != theirs.vocab_size:
        yield "vocabulary size"
    if ours.max_model_len < theirs.max_model_len:
        yield "context length"
    for kind in MediaKind:
        first, second = canary.encoders(kind).get(base), stable.encoders(kind).get(base)
        if (first is None) != (second is None):
            yield f"set of media ({kind.value})"
        elif first is not None and second is not None:
            if (first.placeholder, first.around) != (second.placeholder, second.around):
                yield f"{kind.value} placeholder"
            if first.rule != second.rule:
                yield f"{kind.value} geometry"


def _prompt_differences(ours: PromptFormat, theirs: PromptFormat) -> Iterator[str]:
    if ours.tokenizer_file != theirs.tokenizer_file and read_text(ours.tokenizer_file) != read_text(theirs.tokenizer_file):
        yield "tokenizer"
    if ours.chat_template != theirs.chat_template:
        yield "chat template"
    if (ours.special_tokens, ours.adds_bos_to_chats) != (theirs.special_tokens, theirs.adds_bos_to_chats):
        yield "set of special tokens"


def _encoders(alone: Composition) -> Iterator[tuple[MediaKind, EncoderSpec]]:
    """Of a composition with one decoder."""
    for kind in MediaKind:
        for encoder in alone.encoders(kind).values():
            yield kind, encoder


def _alone(encoders: Mapping[str, S], base: str, name: str) -> dict[str, S]:
    return {name: replace(encoders[base], projectors={name: encoders[base].projectors[base]})} if base in encoders else {}
