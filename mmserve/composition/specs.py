"""What a model is made of: decoders and their prompts, and for each decoder the encoders that make rows for it.

Made by the readers of this package and by tests; knows no file format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mmserve.composition.decoder_config import longest_context
from mmserve.composition.guardrail import GuardrailSpec
from mmserve.composition.picture_fit import PictureFit, TileFit
from mmserve.composition.weights import Weights
from mmserve.errors import BadRequest, TooLarge
from mmserve.media import ImageHeader, MediaKind, MediaWindow, window_key

PREPROCESSING = b"2"  # part of every row's identity; raise it when decoding, resizing or resampling changes


@dataclass(frozen=True)
class PromptFormat:
    """How messages become text, and text ids."""

    tokenizer_file: Path
    chat_template: str | None  # Jinja; None: no chats, raw prompts only
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # what templates see: bos_token, eos_token, ...
    adds_bos_to_chats: bool = False  # where the template doesn't write it: processors do, tokenizers don't


@dataclass(frozen=True)
class DecoderSpec:
    """One decoder.  `config` is complete: what the file leaves out is its model type's default."""

    name: str  # small or large
    weights: Weights
    config: Mapping[str, Any]
    prompt: PromptFormat
    eos_token_ids: tuple[int, ...] = ()

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def max_model_len(self) -> int:
        """Tokens.  Raises BadModel for a config that gives no number."""
        return longest_context(self.config)

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the KV cache keeps of one token: keys and values of every layer."""
        heads = int(self.config["num_key_value_heads"]) * int(self.config["head_dim"])
        return 2 * int(self.config["num_hidden_layers"]) * heads


@dataclass(frozen=True)
class EncoderSpec:
    """What all towers share: where the weights are, and the digest that names the rows they make."""

    format: str  # names the class that runs it, see `worker.encoder_worker`
    weights: Weights
    config: Mapping[str, Any]  # the tower's own
    projectors: Mapping[str, Weights]  # by decoder
    placeholder: str  # what the chat template writes where an item stands
    around: tuple[str, str]  # what is left of it before and after the rows
    hosted: str | None = field(default=None, kw_only=True)  # what names the rows of a hosted encoder; None: weights that are here do

    @cached_property
    def _versions(self) -> Mapping[str, bytes]:
        if self.hosted is not None:
            names = {name: json.dumps(["hosted", self.hosted, name, repr(self.rule)]).encode() for name in self.projectors}
            return {name: hashlib.sha256(said).digest() for name, said in names.items()}
        tower = self.weights.digest() + json.dumps(dict(self.config), sort_keys=True).encode()
        rule = repr(self.rule).encode() + PREPROCESSING
        return {name: hashlib.sha256(tower + part.digest() + rule).digest() for name, part in self.projectors.items()}

    def version(self, decoder: str) -> bytes:
        """32 bytes that change when the tower, this decoder's projector or the preprocessing does.  Slow the first time.

        Of a hosted encoder nothing is seen but what its operator calls it.
        """
        return self._versions[decoder]

    @property
    def rule(self) -> tuple[object, ...]:
        """Whatever, beside weights and the tower's config, shapes the rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class VisionSpec(EncoderSpec):
    """A tower that takes pictures as its `fit` brings them to size."""

    fit: PictureFit

    @property
    def rule(self) -> tuple[object, ...]:
        return (self.format, self.fit)

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Rows down and across where a decoder turns its heads by both; None where a picture's rows follow each other like words."""
        return None

    def windows(
        self, content: bytes, decoder: str, header: ImageHeader, *, detail: str = "auto", salt: bytes = b""
    ) -> tuple[MediaWindow, ...]:
        """The one window of a picture whose bytes have the digest `content`."""
        size = header.upright_size
        num_rows = self.fit.num_rows(*size)
        key = window_key(
            content=content, kind=MediaKind.IMAGE, encoder=self.version(decoder), index=0, start=0, stop=0,
            num_rows=num_rows, detail=detail, salt=salt,
        )  # fmt: skip
        return (MediaWindow(key, MediaKind.IMAGE, num_rows, grid=self.grid(*size)),)


@dataclass(frozen=True)
class ClipSpec(VisionSpec):
    """A CLIP tower and the two-layer projectors behind it.  The defaults are CLIP's and LLaVA's own."""

    fit: TileFit
    feature_layers: tuple[int, ...]  # indices into hidden_states, side by side; -1 is the last, before any post-layernorm
    keeps_class_token: bool = False
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # per channel
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    activation: str = "gelu"  # between the projector's layers
    projector_bias: bool = True

    @property
    def rule(self) -> tuple[object, ...]:
        pixels = (self.rescale, self.mean, self.std)
        return (*super().rule, *pixels, self.feature_layers, self.keeps_class_token, self.activation, self.projector_bias)


@dataclass(frozen=True)
class AudioSpec(EncoderSpec):
    """A tower that takes mono samples, a window of a clip at a time."""

    window_s: float | None  # the longest window; None: a clip of any length is one
    sample_rate: int = 16_000  # Hz
    is_cut: bool = False  # a longer clip becomes several windows, else it is refused

    @property
    def rule(self) -> tuple[object, ...]:
        return (self.format, self.window_s, self.sample_rate, self.is_cut)

    def num_rows(self, num_samples: int) -> int:
        """Rows of a window; 0 for one that is too short to give any."""
        raise NotImplementedError

    def num_samples(self, num_frames: int, sample_rate: int) -> int:
        """Samples at the encoder's rate for a clip of `num_frames` at `sample_rate`: never zero."""
        return max(1, -(-num_frames * self.sample_rate // sample_rate))

    def windows(
        self, content: bytes, decoder: str, num_samples: int, *, salt: bytes = b"", param: str | None = None
    ) -> tuple[MediaWindow, ...]:
        """Windows of a clip of `num_samples` at the encoder's rate, in order.

        Raises TooLarge for a clip that the tower can't take whole, BadRequest for one that gives no rows.
        """
        longest = num_samples if self.window_s is None else int(self.window_s * self.sample_rate)
        if num_samples > longest and not self.is_cut:
            raise TooLarge(f"this model takes clips of at most {longest / self.sample_rate:g} s", param=param)
        version = self.version(decoder)
        windows = []
        for index, start in enumerate(range(0, num_samples, longest)):
            stop = min(start + longest, num_samples)
            num_rows = self.num_rows(stop - start)
            if num_rows == 0:
                raise BadRequest("the clip is too short for this model", param=param, code="audio_too_short")
            key = window_key(
                content=content, kind=MediaKind.AUDIO, encoder=version, index=index, start=start, stop=stop, num_rows=num_rows, salt=salt
            )
            windows.append(MediaWindow(key, MediaKind.AUDIO, num_rows, index, start, stop))
        return tuple(windows)


@dataclass(frozen=True, kw_only=True)
class WhisperSpec(AudioSpec):
    """A Whisper encoder whose frames are averaged down to `tokens_per_second` rows; the last window is cut to what the clip fills."""

    window_s: float
    tokens_per_second: int
    is_cut: bool = True

    @property
    def rule(self) -> tuple[object, ...]:
        return (self.format, self.window_s, self.tokens_per_second, self.sample_rate)

    @property
    def samples_per_token(self) -> int:
        return self.sample_rate // self.tokens_per_second

    def num_rows(self, num_samples: int) -> int:
        return -(-num_samples // self.samples_per_token)


@dataclass(frozen=True)
class Composition:
    """Decoders by name.  An encoder that serves two of them is one object under both names."""

    name: str
    decoders: Mapping[str, DecoderSpec]
    vision: Mapping[str, VisionSpec] = field(default_factory=dict)  # by decoder
    audio: Mapping[str, AudioSpec] = field(default_factory=dict)
    vision_fallback: Mapping[str, VisionSpec] = field(default_factory=dict)  # by decoder; for when the encoder fails: as many rows
    audio_fallback: Mapping[str, AudioSpec] = field(default_factory=dict)
    guardrail: GuardrailSpec | None = None

    def fallback(self, kind: MediaKind) -> Composition | None:
        """The same with the fallbacks of this kind as its encoders; None if there are none."""
        if kind is MediaKind.IMAGE:
            return replace(self, vision=self.vision_fallback) if self.vision_fallback else None
        return replace(self, audio=self.audio_fallback) if self.audio_fallback else None

    def hosted(self, kind: MediaKind, version: str) -> Composition:
        """The same with a hosted service making the rows of this kind.  `version` is what its operator calls its weights."""
        named = f"{self.name}/{version}"
        if kind is MediaKind.IMAGE:
            return replace(self, vision={name: replace(spec, hosted=named) for name, spec in self.vision.items()})
        return replace(self, audio={name: replace(spec, hosted=named) for name, spec in self.audio.items()})

    def encoders(self, kind: MediaKind) -> Mapping[str, EncoderSpec]:
        """By decoder; a decoder that takes no such media is not there."""
        return self.vision if kind is MediaKind.IMAGE else self.audio

    @property
    def modalities(self) -> tuple[str, ...]:
        """What at least one decoder takes."""
        return ("text", *(kind.value for kind in MediaKind if self.encoders(kind)))

    def decoders_taking(self, kinds: Collection[MediaKind]) -> tuple[str, ...]:
        return tuple(name for name in self.decoders if all(name in self.encoders(kind) for kind in kinds))

    def modalities_of(self, decoder: str) -> tuple[str, ...]:
        return ("text", *(kind.value for kind in MediaKind if decoder in self.encoders(kind)))

    def vision_of(self, decoder: str, param: str | None = None) -> VisionSpec:
        """Raises BadRequest when this decoder takes no images."""
        if decoder not in self.vision:
            raise BadRequest(f"the {decoder} model does not take images", param=param)
        return self.vision[decoder]

    def audio_of(self, decoder: str, param: str | None = None) -> AudioSpec:
        """Raises BadRequest when this decoder takes no audio."""
        if decoder not in self.audio:
            raise BadRequest(f"the {decoder} model does not take audio", param=param)
        return self.audio[decoder]
