"""Small files of a model directory: JSON, the tokenizer's and the chat template's, the ids that end an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmserve.composition.specs import PromptFormat
from mmserve.composition.weights import BadModel

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(file: Path) -> dict[str, Any]:
    """Raises BadModel naming the file."""
    try:
        value = json.loads(read_text(file))
    except ValueError as error:
        raise BadModel(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadModel(f"{file} is not a JSON object")
    return value


def read_optional_json(file: Path) -> dict[str, Any]:
    """Empty when there is no such file.  Raises BadModel when there is one that can't be read."""
    return read_json(file) if file.exists() else {}


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadModel(f"{file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadModel(f"{file} is not UTF-8") from None


def read_prompt_format(directory: Path, template_file: Path | None = None, *, adds_bos_to_chats: bool = False) -> PromptFormat:
    """Tokenizer and template of a directory; `template_file`, if given, wins.  Raises BadModel.

    A processor's template goes before the tokenizer's, and a file of its own before one inside JSON.
    """
    if not (directory / "tokenizer.json").exists():
        raise BadModel(f"{directory} has no tokenizer.json; other tokenizer files are not read")
    config = read_optional_json(directory / "tokenizer_config.json")
    tokens = {key: _content(config[key]) for key in _SPECIAL_TOKENS if config.get(key)}
    return PromptFormat(directory / "tokenizer.json", _read_template(directory, template_file, config), tokens, adds_bos_to_chats)


def read_eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """`generation_config.json` has the last word, then the decoder's own config."""
    value = read_optional_json(directory / "generation_config.json").get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _read_template(directory: Path, template_file: Path | None, tokenizer_config: Mapping[str, Any]) -> str | None:
    if template_file is not None:
        return read_text(template_file)
    if (directory / "chat_template.jinja").exists():
        return read_text(directory / "chat_template.jinja")
    for owner in (read_optional_json(directory / "chat_template.json"), tokenizer_config):
        template = owner.get("chat_template")
        if isinstance(template, list):
            template = _default_of({entry["name"]: entry["template"] for entry in template})
        if template:
            return str(template)
    return None


def _default_of(templates: Mapping[str, str]) -> str:
    if "default" in templates:
        return templates["default"]
    if len(templates) == 1:
        return next(iter(templates.values()))
    raise BadModel(f"there are chat templates {', '.join(sorted(templates))} and none is the default: choose one with --chat-template")


def _content(token: str | Mapping[str, Any]) -> str:
    """An added token is written as its text or as an object."""
    return token if isinstance(token, str) else str(token["content"])
