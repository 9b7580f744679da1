"""Ultravox: a projector, and little else, beside directories of a Whisper and of a text decoder that its config names.  6.25 rows a second.

The model's own code is never run.  A name such as `meta-llama/Llama-3.1-8B-Instruct` is looked for next to the directory, with and without
its first half; a tower or a decoder that was trained further comes with the projector and goes before the named one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_eos_token_ids, read_json, read_prompt_format
from mmserve.composition.mel_frames import num_frames, read_feature_extractor
from mmserve.composition.model import Directory, Model, require
from mmserve.composition.specs import AudioSpec, DecoderSpec
from mmserve.composition.weights import AS_WRITTEN, BadModel, WeightNames, Weights, tensor_headers

MIN_FRAMES = 2  # shorter clips are padded to it
PLACEHOLDER = "<|audio|>"

_PROJECTOR_NAMES = WeightNames((("multi_modal_projector.", ""),))
_TOWER, _DECODER = "audio_tower.", "language_model."
_WHISPER_NAMES = WeightNames((("model.encoder.", ""), ("encoder.", "")))  # the decoder beside it isn't needed
_WHISPER = {
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "d_model": 384,
    "max_source_positions": 1500,
}


@dataclass(frozen=True, kw_only=True)
class UltravoxSpec(AudioSpec):
    """A clip of any length is one window: its loudest moment sets the scale of all its frames.  The tower hears it chunk by chunk."""

    window_s: None = None
    frames_per_chunk: int
    stack_factor: int = 8  # of the encoder's positions, each two frames, to a row
    inner_size: int  # columns that the projector's first layer gives, the gate's included
    norm_is_mid: bool  # behind the activation; else behind the last layer

    @property
    def rule(self) -> tuple[object, ...]:
        return (*super().rule, self.frames_per_chunk, self.stack_factor, self.inner_size, self.norm_is_mid)

    def chunks(self, num_samples: int) -> list[int]:
        """Frames of each chunk."""
        count = max(num_frames(num_samples), MIN_FRAMES)
        return [min(count - start, self.frames_per_chunk) for start in range(0, count, self.frames_per_chunk)]

    def num_rows(self, num_samples: int) -> int:
        return sum(self.rows_of_chunk(frames) for frames in self.chunks(num_samples))

    def rows_of_chunk(self, frames: int) -> int:
        return -(-frames // (2 * self.stack_factor))


def read_ultravox(directory: Directory) -> Model:
    """Raises BadModel."""
    path, config = directory.path, directory.config
    require(config, "projector_act", ("swiglu",))
    require(config, "audio_latency_block_size", (None,))
    own = tensor_headers(path)
    decoder_weights, text = _decoder(path, config, any(name.startswith(_DECODER) for name in own))
    tower_weights, tower = _tower(path, config, any(name.startswith(_TOWER) for name in own))
    prompt = read_prompt_format(path, directory.chat_template)
    audio = UltravoxSpec(
        format="ultravox",
        weights=tower_weights,
        config=tower,
        projectors={directory.name: Weights(path, _PROJECTOR_NAMES)},
        placeholder=PLACEHOLDER,
        around=("", ""),
        frames_per_chunk=2 * tower["max_source_positions"],
        stack_factor=config.get("stack_factor", 8),
        inner_size=config.get("hidden_size", 4096),
        norm_is_mid=config.get("projector_ln_mid", False),
    )
    eos_from = path if (path / "generation_config.json").exists() else decoder_weights.path
    return Model(DecoderSpec(directory.name, decoder_weights, text, prompt, read_eos_token_ids(eos_from, text)), audio=audio)


def _decoder(path: Path, config: Mapping[str, Any], has_own: bool) -> tuple[Weights, dict[str, Any]]:
    if has_own and "text_config" in config:
        return Weights(path, WeightNames(((_DECODER, ""),))), complete_config(config["text_config"])
    beside = _beside(path, config, "text_model_id")
    weights = Weights(path, WeightNames(((_DECODER, ""),))) if has_own else Weights(beside, AS_WRITTEN)
    return weights, complete_config(read_json(beside / "config.json"))


def _tower(path: Path, config: Mapping[str, Any], has_own: bool) -> tuple[Weights, dict[str, Any]]:
    """A Whisper's encoder.  Its feature extractor's settings are those of Whisper, wherever they are written down."""
    beside = None if has_own and "audio_config" in config else _beside(path, config, "audio_model_id")
    whisper = {**_WHISPER, **(config["audio_config"] if beside is None else read_json(beside / "config.json"))}
    require(whisper, "model_type", ("whisper",))
    if beside is not None:
        read_feature_extractor(beside, whisper["num_mel_bins"])
    if has_own or beside is None:
        return Weights(path, WeightNames(((_TOWER, ""),))), whisper
    return Weights(beside, _WHISPER_NAMES), whisper


def _beside(path: Path, config: Mapping[str, Any], field: str) -> Path:
    """The directory that `field` of the config names."""
    name = config.get(field)
    if not name:
        raise BadModel(f"{path}: config.json has no {field}, and the part it would name is not whole in the directory itself")
    places: list[Path] = [path.parent / name, path.parent / Path(name).name]
    for place in places:
        if (place / "config.json").exists():
            return place
    raise BadModel(f"{path}: {field} is {name!r}, which is neither {' nor '.join(map(str, dict.fromkeys(places)))}")
