"""Command line and TOML file to a Config.  The flags are made from its fields, so there is nothing to keep in step."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmserve.config import Config, ConfigError, Flag, flags, from_mapping

_GROUPS = {
    "model": "model and devices", "scheduler": "scheduling and KV cache", "encoder": "encoders", "storage": "what is kept on disk",
    "guardrail": "guardrail and online quality", "canary": "canary", "cost": "prices", "server": "server", "limits": "limits on media",
}  # fmt: skip
_MEDIA_LIMIT = "limit-mm-per-prompt"
_MEDIA_KEYS = {"image": "max-images", "audio": "max-clips"}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Every setting as a flag.  A flag that isn't given leaves no trace, so that the file can decide."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with keys of the same names; flags win")
    groups = {section: parser.add_argument_group(title) for section, title in _GROUPS.items()}
    for flag in flags():
        _add_flag(groups[flag.section], flag)
    groups["limits"].add_argument(f"--{_MEDIA_LIMIT}", metavar="JSON", default=argparse.SUPPRESS, help='such as {"image": 8, "audio": 1}')


def read_settings(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Config:
    """Environment, then file, then flags: the later wins.  Raises ConfigError."""
    values: dict[str, Any] = {}
    if key := environ.get("MMSERVE_API_KEY"):
        values["api-key"] = key
    if args.config is not None:
        values |= _spread(read_toml(args.config))
    names = {flag.field for flag in flags()} | {_MEDIA_LIMIT.replace("-", "_")}
    values |= _spread({name.replace("_", "-"): value for name, value in vars(args).items() if name in names})
    return from_mapping(values)


def read_toml(path: Path) -> dict[str, Any]:
    """A flat table, keys spelt like the flags.  Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", param="config") from None
    return {key.replace("_", "-"): value for key, value in values.items()}


def _add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    default = "" if flag.default is None else f" (default {flag.default})"
    help = (flag.help or flag.key.replace("-", " ")).replace("%", "%%")
    name = f"--{flag.key}"
    if flag.type is bool:
        action: Any = argparse.BooleanOptionalAction if flag.default else "store_true"
        group.add_argument(name, action=action, default=argparse.SUPPRESS, help=help)
    else:
        group.add_argument(
            *filter(None, (flag.short, name)), type=flag.type, choices=flag.choices,
            metavar=None if flag.choices else flag.type.__name__.upper(), default=argparse.SUPPRESS, help=help + default,
        )  # fmt: skip


def _spread(values: Mapping[str, Any]) -> dict[str, Any]:
    """`limit-mm-per-prompt`, as vLLM spells it, is two of our settings."""
    result = dict(values)
    limit = result.pop(_MEDIA_LIMIT, None)
    if limit is None:
        return result
    if isinstance(limit, str):
        try:
            limit = json.loads(limit)
        except ValueError:
            raise ConfigError(f"{_MEDIA_LIMIT} is not JSON", param=_MEDIA_LIMIT) from None
    if not isinstance(limit, dict) or not all(kind in _MEDIA_KEYS and type(count) is int and count >= 0 for kind, count in limit.items()):
        raise ConfigError(f'{_MEDIA_LIMIT} must look like {{"image": 8, "audio": 1}}', param=_MEDIA_LIMIT)
    return result | {_MEDIA_KEYS[kind]: count for kind, count in limit.items()}
