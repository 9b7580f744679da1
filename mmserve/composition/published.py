"""Which reader a published directory needs: the table of the formats that are supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mmserve.composition.decoder_config import DEFAULTS
from mmserve.composition.files import read_json
from mmserve.composition.llava import read_llava
from mmserve.composition.llava_next import read_llava_next
from mmserve.composition.model import Directory, Model
from mmserve.composition.qwen2_5_omni import read_qwen2_5_omni, read_qwen2_5_omni_thinker
from mmserve.composition.qwen2_audio import read_qwen2_audio
from mmserve.composition.text import read_text_model
from mmserve.composition.ultravox import read_ultravox
from mmserve.composition.weights import BadModel

READERS: Mapping[str, Callable[[Directory], Model]] = {
    **dict.fromkeys(DEFAULTS, read_text_model),
    "llava": read_llava,
    "llava_next": read_llava_next,
    "qwen2_audio": read_qwen2_audio,
    "ultravox": read_ultravox,
    "qwen2_5_omni": read_qwen2_5_omni,
    "qwen2_5_omni_thinker": read_qwen2_5_omni_thinker,
}
"""By `model_type` of config.json."""


def read_published(name: str, path: Path, chat_template: Path | None = None) -> Model:
    """The decoder `name` and its encoders.  Raises BadModel, for another model type with a list of those that are built."""
    config = read_json(path / "config.json")
    model_type = str(config.get("model_type"))
    if model_type not in READERS:
        raise BadModel(f"{path}: models of type {model_type!r} are not supported; supported are {', '.join(READERS)}")
    if config.get("quantization_config") is not None:
        raise BadModel(f"{path}: quantized weights are not supported")
    model = READERS[model_type](Directory(path, config, name, chat_template))
    model.check()
    return model
