"""Qwen2.5-Omni's thinker: pictures of any size and clips before a Qwen2 decoder that turns its heads by three axes.

What speaks (talker and token2wav) is not served, and videos are not taken.  Nor is a clip longer than the feature extractor takes, 300 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmserve.composition.clip_pixels import ClipPixels, read_clip_pixels
from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_eos_token_ids, read_optional_json, read_prompt_format
from mmserve.composition.mel_frames import SAMPLES_PER_FRAME, num_frames, num_pooled_rows, read_feature_extractor
from mmserve.composition.model import Directory, Model, require
from mmserve.composition.picture_fit import SmartResize
from mmserve.composition.specs import AudioSpec, DecoderSpec, VisionSpec
from mmserve.composition.weights import NOTHING, BadModel, WeightNames, Weights

_DECODER = (
    ("model.language_model.", "model."),
    ("model.layers.", "model.layers."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.norm.", "model.norm."),
    ("lm_head.", "lm_head."),
)
_VISION = (("model.visual.", ""), ("visual.", ""))
_AUDIO = (("model.audio_tower.", ""), ("audio_tower.", ""))
_SPEECH = WeightNames((("talker.", ""), ("token2wav.", "")))

_TEXT_CONFIG = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1_000_000.0,
}
_VISION_CONFIG = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True)
class OmniVisionSpec(VisionSpec):
    """Attention in windows, then four patches to a row."""

    fit: SmartResize
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # per channel
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def rule(self) -> tuple[object, ...]:
        return (*super().rule, self.rescale, self.mean, self.std)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return self.fit.grid(width, height)


@dataclass(frozen=True, kw_only=True)
class OmniAudioSpec(AudioSpec):
    """A clip is one window: its loudest moment sets the scale of all its frames."""

    pads_left: bool

    @property
    def rule(self) -> tuple[object, ...]:
        return (*super().rule, self.pads_left)

    def num_frames(self, num_samples: int) -> int:
        """Silence before a clip leaves out the frame that it would share with the clip's beginning."""
        return num_samples // SAMPLES_PER_FRAME if self.pads_left else num_frames(num_samples)

    def num_rows(self, num_samples: int) -> int:
        return num_pooled_rows(self.num_frames(num_samples))


def read_qwen2_5_omni(directory: Directory) -> Model:
    """The whole model as published.  Raises BadModel."""
    thinker = directory.config.get("thinker_config")
    if not isinstance(thinker, Mapping):
        raise BadModel(f"{directory.path}: config.json has no thinker_config")
    return _build(directory, thinker, "thinker.")


def read_qwen2_5_omni_thinker(directory: Directory) -> Model:
    """The thinker alone.  Raises BadModel."""
    return _build(directory, directory.config, "")


def _build(directory: Directory, config: Mapping[str, Any], prefix: str) -> Model:
    path = directory.path
    prompt = read_prompt_format(path, directory.chat_template, adds_bos_to_chats=True)
    if prompt.chat_template is None:
        raise BadModel(f"{path} has no chat template that says where media stand: give one with --chat-template")
    text = {**_TEXT_CONFIG, **config.get("text_config", {})}
    require(text, "model_type", ("qwen2_5_omni_text",))
    is_tied = bool(config.get("tie_word_embeddings", False))
    text = complete_config(text | {"model_type": "qwen2", "tie_word_embeddings": is_tied})
    audio_config = dict(config.get("audio_config", {}))
    extractor = read_feature_extractor(path, audio_config.get("num_mel_bins", 128), ("right", "left"))
    tokens = read_optional_json(path / "tokenizer_config.json")
    vision = OmniVisionSpec(
        format="qwen2_5_omni_vision",
        weights=Weights(path, _renamed(prefix, _VISION)),
        config=dict(config.get("vision_config", {})),
        projectors={directory.name: Weights(path, NOTHING)},  # the towers end in the decoder's width
        placeholder=str(tokens.get("image_token", "<|IMAGE|>")),
        around=("", ""),
        **_pixels(config, read_clip_pixels(path)),
    )
    audio = OmniAudioSpec(
        format="qwen2_5_omni_audio",
        weights=Weights(path, _renamed(prefix, _AUDIO)),
        config=audio_config,
        projectors={directory.name: Weights(path, NOTHING)},
        placeholder=str(tokens.get("audio_token", "<|AUDIO|>")),
        around=("", ""),
        window_s=extractor.longest_s,
        pads_left=extractor.pads_left,
    )
    decoder = DecoderSpec(directory.name, Weights(path, _renamed(prefix, _DECODER)), text, prompt, read_eos_token_ids(path, text))
    return Model(decoder, vision, audio, unused=_SPEECH if prefix else NOTHING)


def _renamed(prefix: str, renames: tuple[tuple[str, str], ...]) -> WeightNames:
    return WeightNames(tuple((prefix + written, own) for written, own in renames))


def _pixels(config: Mapping[str, Any], pixels: ClipPixels) -> dict[str, Any]:
    """Fit, rescale, mean and std.  Raises BadModel when tower and image processor differ."""
    tower = {**_VISION_CONFIG, **config.get("vision_config", {})}
    values = {**_PIXELS, **pixels.values}
    for ours, theirs in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        require(values, ours, (tower[theirs],))
    require(values, "do_resize", (True,))
    size = values.get("size", {})
    smallest, largest = size.get("shortest_edge", values["min_pixels"]), size.get("longest_edge", values["max_pixels"])
    fit = SmartResize(tower["patch_size"] * tower["spatial_merge_size"], int(smallest), int(largest), pixels.resample)
    return {"fit": fit, **pixels.spec_fields()}
