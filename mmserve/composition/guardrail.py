"""A `[guardrail]` table: what tells from a picture's rows what is in it, and how sure it must be.

    [guardrail]
    detector = "linear_probe"       # one of grounding.probe.DETECTORS
    vocabulary = "objects.json"     # see grounding.vocabulary
    probes = { small = "probes/vision-small.safetensors", large = "probes/vision-large.safetensors" }
    threshold = 0.5                 # least score of an object that is there
    thresholds = { star = 0.7 }     # of objects that need another one

It stands in a `composition.toml`, or in a file of its own for models that bring none.  Paths are relative to the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.composition.weights import BadModel

TABLE = "guardrail"
_KEYS = {"detector", "vocabulary", "probes", "threshold", "thresholds"}


@dataclass(frozen=True)
class GuardrailSpec:
    detector: str
    vocabulary: Path
    probes: Mapping[str, Path]  # by decoder
    threshold: float = 0.5
    thresholds: Mapping[str, float] = field(default_factory=dict)  # by object


def parse_guardrail(file: Path, table: Mapping[str, Any]) -> GuardrailSpec:
    """The table of `file`.  Raises BadModel."""
    where = f"{file}: [{TABLE}]"
    if unknown := set(table) - _KEYS:
        raise BadModel(f"{where} has {', '.join(sorted(unknown))}, which nobody knows")
    if missing := {"detector", "vocabulary", "probes"} - set(table):
        raise BadModel(f"{where} lacks {', '.join(sorted(missing))}")
    thresholds = {"threshold": table.get("threshold", 0.5), **table.get("thresholds", {})}
    for name, value in thresholds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise BadModel(f"{where}: {name} must be a number from 0 to 1, got {value!r}")
    probes = {name: file.parent / path for name, path in table["probes"].items()}
    return GuardrailSpec(table["detector"], file.parent / table["vocabulary"], probes, thresholds.pop("threshold"), thresholds)


def read_guardrail(file: Path) -> GuardrailSpec:
    """A file of its own.  Raises BadModel."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadModel(f"{file} can't be read: {error}") from None
    if TABLE not in data:
        raise BadModel(f"{file} has no table [{TABLE}]")
    return parse_guardrail(file, data[TABLE])
