"""A model is a composition: decoders, and per modality an encoder, a projector for each decoder, and a rule that counts rows.

Reads a model directory's `composition.toml` and the `config.json` files it points to, and no weights (they are only hashed, once, so
that cached rows can name the weights that made them).  Knows nothing of torch.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mmserve.errors import BadRequest
from mmserve.media import MediaKind, MediaWindow, window_key

BUNDLED = Path(__file__).parent / "models" / "tiny"
PREPROCESSING = b"1"  # part of every row's identity; raise it when decoding, resizing or resampling changes


@dataclass(frozen=True)
class DecoderSpec:
    """One Llama-family decoder, in the directory layout of `transformers`."""

    name: str  # small or large
    directory: Path
    config: Mapping[str, Any]  # its config.json

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def max_model_len(self) -> int:
        return int(self.config["max_position_embeddings"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.config.get("eos_token_id")
        return () if value is None else (value,) if isinstance(value, int) else tuple(value)


@dataclass(frozen=True)
class EncoderSpec:
    """What both towers share: where the weights are, and the digest that names the rows they make."""

    directory: Path
    format: str
    projectors: Mapping[str, Path]  # decoder name -> safetensors file
    placeholder: str  # what the chat template writes where an item stands
    around: tuple[str, str]  # what is left of it before and after the rows

    @cached_property
    def _versions(self) -> Mapping[str, bytes]:
        tower = _digest_files([self.directory / "config.json", *sorted(self.directory.glob("*.safetensors"))])
        rule = repr(self.rule).encode() + PREPROCESSING
        return {name: hashlib.sha256(tower + _digest_files([path]) + rule).digest() for name, path in self.projectors.items()}

    def version(self, decoder: str) -> bytes:
        """32 bytes that change when the tower, this decoder's projector or the preprocessing does."""
        return self._versions[decoder]

    @property
    def rule(self) -> tuple[object, ...]:
        raise NotImplementedError


@dataclass(frozen=True)
class VisionSpec(EncoderSpec):
    """A tower of fixed input size: every picture becomes `tokens_per_item` rows."""

    image_size: int  # pixels, both sides
    fit: str  # stretch: any aspect is resized to the square
    tokens_per_item: int
    feature_layer: int  # index into hidden_states; -1 is the last, before any post-layernorm

    @property
    def rule(self) -> tuple[object, ...]:
        return (self.format, self.image_size, self.fit, self.tokens_per_item, self.feature_layer)

    def windows(self, content: bytes, decoder: str, *, detail: str = "auto", salt: bytes = b"") -> tuple[MediaWindow, ...]:
        """The one window of a picture whose bytes have the digest `content`."""
        key = window_key(
            content=content, kind=MediaKind.IMAGE, encoder=self.version(decoder), index=0, start=0, stop=0,
            num_rows=self.tokens_per_item, detail=detail, salt=salt,
        )  # fmt: skip
        return (MediaWindow(key, MediaKind.IMAGE, self.tokens_per_item),)


@dataclass(frozen=True)
class AudioSpec(EncoderSpec):
    """A windowed tower: samples at 16 kHz, `tokens_per_second` rows a second, the last window cut to what the clip fills."""

    window_s: float
    tokens_per_second: int
    sample_rate: int = 16_000  # Hz

    @property
    def rule(self) -> tuple[object, ...]:
        return (self.format, self.window_s, self.tokens_per_second, self.sample_rate)

    @property
    def samples_per_token(self) -> int:
        return self.sample_rate // self.tokens_per_second

    def num_samples(self, num_frames: int, sample_rate: int) -> int:
        """Samples at the encoder's rate for a clip of `num_frames` at `sample_rate`: never zero."""
        return max(1, -(-num_frames * self.sample_rate // sample_rate))

    def windows(self, content: bytes, decoder: str, num_samples: int, *, salt: bytes = b"") -> tuple[MediaWindow, ...]:
        """Windows of a clip of `num_samples` at the encoder's rate, in order; together ceil(num_samples / samples_per_token) rows."""
        step = int(self.window_s * self.sample_rate)
        version = self.version(decoder)
        windows = []
        for index, start in enumerate(range(0, num_samples, step)):
            stop = min(start + step, num_samples)
            num_rows = -(-(stop - start) // self.samples_per_token)
            key = window_key(
                content=content, kind=MediaKind.AUDIO, encoder=version, index=index, start=start, stop=stop, num_rows=num_rows, salt=salt
            )
            windows.append(MediaWindow(key, MediaKind.AUDIO, num_rows, index, start, stop))
        return tuple(windows)


@dataclass(frozen=True)
class Composition:
    name: str
    directory: Path
    tokenizer_file: Path
    chat_template: str
    decoders: Mapping[str, DecoderSpec]
    vision: VisionSpec | None
    audio: AudioSpec | None

    @property
    def modalities(self) -> tuple[str, ...]:
        return ("text", *(["image"] if self.vision else []), *(["audio"] if self.audio else []))

    def require_vision(self, param: str | None) -> VisionSpec:
        if self.vision is None:
            raise BadRequest(f"model {self.name} does not take images", param=param)
        return self.vision

    def require_audio(self, param: str | None) -> AudioSpec:
        if self.audio is None:
            raise BadRequest(f"model {self.name} does not take audio", param=param)
        return self.audio


def load_composition(directory: Path = BUNDLED) -> Composition:
    """Read a model directory.  Raises FileNotFoundError or KeyError naming what is missing: the caller is starting up."""
    data = tomllib.loads((directory / "composition.toml").read_text())
    tokenizer_dir = directory / data["tokenizer"]
    decoders = {
        name: DecoderSpec(name, directory / path, json.loads((directory / path / "config.json").read_text()))
        for name, path in data["decoders"].items()
    }
    vision = audio = None
    if section := data.get("vision"):
        vision = VisionSpec(
            **_encoder_fields(directory, section),
            image_size=section["image_size"],
            fit=section["fit"],
            tokens_per_item=section["tokens_per_item"],
            feature_layer=section["feature_layer"],
        )
    if section := data.get("audio"):
        audio = AudioSpec(
            **_encoder_fields(directory, section), window_s=section["window_s"], tokens_per_second=section["tokens_per_second"]
        )
    template = (tokenizer_dir / "chat_template.jinja").read_text()
    return Composition(data["name"], directory, tokenizer_dir / "tokenizer.json", template, decoders, vision, audio)


def _encoder_fields(directory: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    projectors = {name: directory / path for name, path in section["projectors"].items()}
    return {
        "directory": directory / section["encoder"],
        "format": section["format"],
        "projectors": projectors,
        "placeholder": section["placeholder"],
        "around": tuple(section["around"]),
    }


def _digest_files(paths: list[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
