"""Our own format: a `composition.toml` that names decoders and, per modality, an encoder, its projectors and the rule that counts rows."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_eos_token_ids, read_json, read_prompt_format, read_text
from mmserve.composition.picture_fit import Stretch
from mmserve.composition.specs import ClipSpec, Composition, DecoderSpec, WhisperSpec
from mmserve.composition.weights import BadModel, Weights

FILE = "composition.toml"


def read_composed(directory: Path, template_file: Path | None = None) -> Composition:
    """Raises BadModel naming what is missing or wrong."""
    try:
        data = tomllib.loads(read_text(directory / FILE))
    except tomllib.TOMLDecodeError as error:
        raise BadModel(f"{directory / FILE} is not TOML: {error}") from None
    try:
        return _compose(directory, data, template_file)
    except KeyError as error:
        raise BadModel(f"{directory / FILE} lacks {error.args[0]}") from None


def _compose(directory: Path, data: Mapping[str, Any], template_file: Path | None) -> Composition:
    prompt = read_prompt_format(directory / data["tokenizer"], template_file)
    decoders = {}
    for name, folder in data["decoders"].items():
        path = directory / folder
        config = complete_config(read_json(path / "config.json"))
        decoders[name] = DecoderSpec(name, Weights(path), config, prompt, read_eos_token_ids(path, config))
    vision, audio = {}, {}
    if section := data.get("vision"):
        vision_spec = _vision(directory, section)
        vision = dict.fromkeys(vision_spec.projectors, vision_spec)
    if section := data.get("audio"):
        audio_spec = WhisperSpec(
            **_encoder_fields(directory, section), window_s=section["window_s"], tokens_per_second=section["tokens_per_second"]
        )
        audio = dict.fromkeys(audio_spec.projectors, audio_spec)
    return Composition(data["name"], decoders, vision, audio)


def _vision(directory: Path, section: Mapping[str, Any]) -> ClipSpec:
    if section["fit"] != "stretch":
        raise BadModel(f"{directory / FILE}: fit must be stretch, got {section['fit']!r}")
    fit = Stretch(section["image_size"], section["tokens_per_item"])
    return ClipSpec(**_encoder_fields(directory, section), fit=fit, feature_layers=(section["feature_layer"],))


def _encoder_fields(directory: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    path = directory / section["encoder"]
    return {
        "format": section["format"],
        "weights": Weights(path),
        "config": read_json(path / "config.json"),
        "projectors": {name: Weights(directory / file) for name, file in section["projectors"].items()},
        "placeholder": section["placeholder"],
        "around": tuple(section["around"]),
    }
