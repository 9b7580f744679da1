"""What a published directory is read into, and what every reader of one needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.composition.specs import AudioSpec, DecoderSpec, EncoderSpec, VisionSpec
from mmserve.composition.weights import COMPUTED, NOTHING, BadModel, WeightNames, tensor_headers


@dataclass(frozen=True)
class Directory:
    """A published directory, and the part it is to play."""

    path: Path
    config: Mapping[str, Any]  # its config.json
    name: str  # of its decoder: small or large
    chat_template: Path | None = None  # a file that goes before the directory's own


@dataclass(frozen=True)
class Model:
    """One decoder with its own encoders."""

    decoder: DecoderSpec
    vision: VisionSpec | None = None
    audio: AudioSpec | None = None
    unused: WeightNames = NOTHING  # tensors of parts that aren't served

    def check(self) -> None:
        """Every tensor of the decoder's and the projectors' directories belongs to exactly one part.  Raises BadModel naming the others."""
        encoders: list[EncoderSpec] = [encoder for encoder in (self.vision, self.audio) if encoder is not None]
        own = [self.decoder.weights, *(projector for encoder in encoders for projector in encoder.projectors.values())]
        parts = [*own, *(encoder.weights for encoder in encoders)]
        for path in dict.fromkeys(part.path for part in own):
            names = [self.unused, *(part.names for part in parts if part.path == path)]
            problems = []
            for tensor in tensor_headers(path):
                owners = sum(rule(tensor) is not None for rule in names)
                if owners != 1 and not tensor.endswith(COMPUTED):
                    problems.append(f"unknown {tensor}" if owners == 0 else f"{tensor} belongs to several parts")
            if problems:
                raise BadModel(f"{path}: {'; '.join(problems)}")


def require(config: Mapping[str, Any], field: str, allowed: tuple[object, ...]) -> None:
    """Raises BadModel when the field's value isn't built; a field that is not there has its first allowed value."""
    value = config.get(field, allowed[0])
    if value not in allowed:
        raise BadModel(f"config.json: {field} must be {' or '.join(repr(each) for each in allowed)}, got {value!r}")
