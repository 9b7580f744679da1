"""Greedy answers through the server beside those of transformers in a process of its own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import golden_world as world
import published_models as published
import pytest

from mmserve.cli import eval as command
from mmserve.evals.endpoint import Endpoint
from mmserve.evals.fidelity import FidelityError, compare_with_reference

TINY = Path(command.__file__).parents[1] / "models" / "tiny"
LINES = [line for line in world.LINES if line["id"] in ("hello", "dog?", "first")]


def evaluated(tmp_path: Path, served: Path, reference: Path) -> tuple[int, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    world.write_set(tmp_path / "set", LINES)
    words = "--set", str(tmp_path / "set"), "--serve", str(served), "--reference", str(reference), "--json", str(tmp_path / "r.json")
    status = command.run(parser.parse_args([*words, "--states-per-slice", "0", "--max-tokens", "8"]))
    return status, json.loads((tmp_path / "r.json").read_text()) if status == 0 else {}


def test_a_published_model_answers_as_transformers_does_and_another_does_not(tmp_path: Path) -> None:
    """Text, one picture and two; the weights of the other differ in their seed alone."""
    llava, other = published.build_llava(tmp_path / "llava"), published.build_llava(tmp_path / "other", seed=1)
    status, report = evaluated(tmp_path, llava, llava)
    assert status == 0
    assert report["fidelity"] == {"reference": "llava", "items": 3, "equal": 3, "differing": []}
    status, report = evaluated(tmp_path, llava, other)
    assert (report["fidelity"]["equal"], len(report["fidelity"]["differing"])) == (0, 3)


async def test_the_bundled_model_has_no_reference_and_that_is_said(tmp_path: Path) -> None:
    golden = world.load(tmp_path / "set", LINES)
    endpoint = Endpoint("http://127.0.0.1:1", model="any")
    with pytest.raises(FidelityError, match="is a composition of parts: transformers has no pipeline for it"):
        await compare_with_reference(endpoint, golden, TINY, 3, lambda: None)
    with pytest.raises(FidelityError, match=r"transformers can't run .*nowhere"):
        await compare_with_reference(endpoint, golden, tmp_path / "nowhere", 3, lambda: None)
    await endpoint.__aexit__()
