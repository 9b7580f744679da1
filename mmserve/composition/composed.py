"""Our own format: a `composition.toml` that names decoders and, per modality, an encoder, its projectors and the rule that counts rows.

A section's table `fallback` names a smaller encoder for when the first fails.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmserve.composition.decoder_config import complete_config
from mmserve.composition.files import read_eos_token_ids, read_json, read_prompt_format, read_text
from mmserve.composition.guardrail import TABLE, parse_guardrail
from mmserve.composition.picture_fit import Stretch
from mmserve.composition.specs import ClipSpec, Composition, DecoderSpec, EncoderSpec, WhisperSpec
from mmserve.composition.weights import BadModel, Weights

FILE = "composition.toml"
_SAME_ROWS = {"placeholder", "around", "tokens_per_item", "window_s", "tokens_per_second"}  # what decides about rows and their place
S = TypeVar("S", bound=EncoderSpec)


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
    vision, vision_fallback = _with_fallback(data, "vision", lambda section: _vision(directory, section))
    audio, audio_fallback = _with_fallback(data, "audio", lambda section: _audio(directory, section))
    guardrail = parse_guardrail(directory / FILE, data[TABLE]) if TABLE in data else None
    return Composition(data["name"], decoders, vision, audio, vision_fallback, audio_fallback, guardrail)


def _with_fallback(data: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any]], S]) -> tuple[dict[str, S], dict[str, S]]:
    """The encoder of a section and the one of its table `fallback`, each by decoder.

    The fallback has a tower and projectors of its own.  The rest is the encoder's; so is whatever decides how many rows there are.
    """
    section = data.get(name)
    if not section:
        return {}, {}
    first = read(section)
    found = dict.fromkeys(first.projectors, first)
    if not (table := section.get("fallback")):
        return found, {}
    if lacking := {"encoder", "projectors"} - table.keys():
        raise BadModel(f"{FILE} lacks {name}.fallback.{min(lacking)}")
    if changed := sorted(key for key in _SAME_ROWS & table.keys() if table[key] != section.get(key)):
        raise BadModel(
            f"{FILE}: {name}.fallback.{changed[0]} must be as {name}.{changed[0]}: a prompt has as many rows from either encoder"
        )
    second = read({key: value for key, value in section.items() if key != "fallback"} | table)
    return found, dict.fromkeys(second.projectors, second)


def _audio(directory: Path, section: Mapping[str, Any]) -> WhisperSpec:
    return WhisperSpec(**_encoder_fields(directory, section), window_s=section["window_s"], tokens_per_second=section["tokens_per_second"])


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
