"""Decoders alone: `llama`, `mistral`, `qwen2`, `qwen3`, in the layout of `save_pretrained`."""

from __future__ import annotations

from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_eos_token_ids, read_prompt_format
from mmserve.composition.model import Directory, Model
from mmserve.composition.specs import DecoderSpec
from mmserve.composition.weights import Weights


def read_text_model(directory: Directory) -> Model:
    """Raises BadModel."""
    config = complete_config(directory.config)
    prompt = read_prompt_format(directory.path, directory.chat_template)
    return Model(DecoderSpec(directory.name, Weights(directory.path), config, prompt, read_eos_token_ids(directory.path, config)))
