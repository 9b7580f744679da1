"""LLaVA 1.5: a CLIP tower's hidden states through two layers into a Llama-family decoder, one square tile a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.composition.clip_pixels import read_clip_pixels
from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_eos_token_ids, read_optional_json, read_prompt_format
from mmserve.composition.model import Directory, Model, require
from mmserve.composition.picture_fit import TileFit
from mmserve.composition.specs import ClipSpec, DecoderSpec
from mmserve.composition.weights import BadModel, WeightNames, Weights

# As files have spelt them over the years, longest first.
DECODER_NAMES = WeightNames(
    (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("lm_head.", "lm_head."),
    )
)
TOWER_NAMES = WeightNames(
    (
        ("model.vision_tower.vision_model.", ""),
        ("model.vision_tower.", ""),
        ("vision_tower.vision_model.", ""),
        ("vision_tower.", ""),
    )
)
PROJECTOR_NAMES = WeightNames((("model.multi_modal_projector.", ""), ("multi_modal_projector.", "")))

_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
_CLIP_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
# What transformers fills in: CLIP's defaults where fields are missing, ViT-L/14-336 where all of `vision_config` is.


def read_llava(directory: Directory) -> Model:
    """Raises BadModel."""
    side, patches = tile_size(directory)
    keeps_class_token = directory.config.get("vision_feature_select_strategy", "default") == "full"
    pixels = read_clip_pixels(directory.path)
    if pixels.values.get("do_pad") and pixels.values.get("image_processor_type", "").startswith("Llava"):  # CLIP's takes no notice
        raise BadModel("image processor: do_pad is not supported")
    fit = pixels.fit(side, patches**2 + keeps_class_token)
    text = directory.config.get("text_config", {})
    is_tied = directory.config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    return build_llava(directory, fit, PROJECTOR_NAMES, is_tied=is_tied, keeps_class_token=keeps_class_token)


def build_llava(
    directory: Directory, fit: TileFit, projector_names: WeightNames, *, is_tied: bool, keeps_class_token: bool = False
) -> Model:
    """What LLaVA 1.5 and NeXT have in common."""
    path, config = directory.path, directory.config
    require(config, "vision_feature_select_strategy", ("default", "full"))
    text = complete_config(config.get("text_config", {})) | {"tie_word_embeddings": is_tied}
    prompt = read_prompt_format(path, directory.chat_template, adds_bos_to_chats=True)
    if prompt.chat_template is None:
        raise BadModel(f"{path} takes pictures and has no chat template that says where they stand: give one with --chat-template")
    layers = config.get("vision_feature_layer", -2)
    vision = ClipSpec(
        format="clip",
        weights=Weights(path, TOWER_NAMES),
        config=tower_config(config),
        projectors={directory.name: Weights(path, projector_names)},
        placeholder=_image_token(directory),
        around=("", ""),
        fit=fit,
        feature_layers=(layers,) if isinstance(layers, int) else tuple(layers),
        keeps_class_token=keeps_class_token,
        activation=config.get("projector_hidden_act", "gelu"),
        projector_bias=config.get("multimodal_projector_bias", True),
        **read_clip_pixels(path).spec_fields(),
    )
    decoder = DecoderSpec(directory.name, Weights(path, DECODER_NAMES), text, prompt, read_eos_token_ids(path, text))
    return Model(decoder, vision)


def tower_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`vision_config`, completed.  Raises BadModel for a tower that isn't CLIP."""
    tower = config.get("vision_config") or _CLIP_LARGE
    require(tower, "model_type", ("clip_vision_model",))
    return {**_CLIP, **tower}


def tile_size(directory: Directory) -> tuple[int, int]:
    """Pixels and patches of a tile's side."""
    tower = tower_config(directory.config)
    return tower["image_size"], tower["image_size"] // tower["patch_size"]


def _image_token(directory: Directory) -> str:
    for file in ("processor_config.json", "tokenizer_config.json"):
        if token := read_optional_json(directory.path / file).get("image_token"):
            return str(token)
    return "<image>"
