"""Qwen2-Audio: a Whisper encoder with a pooling layer, one linear map, a Qwen2 decoder.  25 rows a second.

The tower hears 30 s at once, and the model was trained on no more.  A longer clip is refused: transformers' processor would drop what
lies beyond without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_eos_token_ids, read_optional_json, read_prompt_format
from mmserve.composition.mel_frames import SAMPLE_RATE, SAMPLES_PER_FRAME, num_frames, num_pooled_rows, read_feature_extractor
from mmserve.composition.model import Directory, Model, require
from mmserve.composition.specs import AudioSpec, DecoderSpec
from mmserve.composition.weights import BadModel, WeightNames, Weights

DECODER_NAMES = WeightNames(
    (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("lm_head.", "lm_head."),
    )
)
TOWER_NAMES = WeightNames((("model.audio_tower.", ""), ("audio_tower.", "")))
PROJECTOR_NAMES = WeightNames((("model.multi_modal_projector.", ""), ("multi_modal_projector.", "")))

_ENCODER = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
}


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioSpec(AudioSpec):
    """One window a clip."""

    window_s: float

    def num_rows(self, num_samples: int) -> int:
        return num_pooled_rows(num_frames(num_samples))


def read_qwen2_audio(directory: Directory) -> Model:
    """Raises BadModel."""
    path, config = directory.path, directory.config
    encoder = {**_ENCODER, **config.get("audio_config", {})}
    require(encoder, "model_type", ("qwen2_audio_encoder",))
    text = complete_config({"model_type": "qwen2", **config.get("text_config", {})}) | {"tie_word_embeddings": False}
    prompt = read_prompt_format(path, directory.chat_template, adds_bos_to_chats=True)
    if prompt.chat_template is None:
        raise BadModel(f"{path} takes clips and has no chat template that says where they stand: give one with --chat-template")
    audio = Qwen2AudioSpec(
        format="qwen2_audio",
        weights=Weights(path, TOWER_NAMES),
        config=encoder,
        projectors={directory.name: Weights(path, PROJECTOR_NAMES)},
        placeholder=str(read_optional_json(path / "processor_config.json").get("audio_token", "<|AUDIO|>")),
        around=("", ""),
        window_s=_window_s(path, encoder["num_mel_bins"], encoder["max_source_positions"]),
    )
    decoder = DecoderSpec(directory.name, Weights(path, DECODER_NAMES), text, prompt, read_eos_token_ids(path, text))
    return Model(decoder, audio=audio)


def _window_s(path: Path, num_mel_bins: int, num_positions: int) -> float:
    longest_s = read_feature_extractor(path, num_mel_bins).longest_s
    heard_s = 2 * num_positions * SAMPLES_PER_FRAME / SAMPLE_RATE
    if longest_s != heard_s:
        raise BadModel(f"feature extractor: clips come out {longest_s:g} s long, the tower takes {heard_s:g} s")
    return longest_s
