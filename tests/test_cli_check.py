"""`check` says what a directory is and what is wrong with it, without loading it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import published_models as published
import pytest
from safetensors.numpy import load_file, save_file

from mmserve.__main__ import main
from mmserve.cli.check import num_sequences, weight_bytes
from mmserve.composition import load_composition


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.usefixtures("wide")
def test_a_good_directory_is_described_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = published.build_llava_next(tmp_path / "next-tiny")
    assert main(["check", str(directory), "--kv-cache-memory-bytes", "1000000"]) == 0
    said = capsys.readouterr().out
    for words in ("next-tiny", "text, image", "2048 tokens", "256 B a token", "3 sequences of 1000 tokens", "336x336: 88", "loads:"):
        assert words in said


@pytest.mark.usefixtures("wide")
def test_every_problem_of_every_part_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = published.build_llava(tmp_path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"], tensors["multi_modal_projector.linear_1.bias"]
    tensors["language_model.model.norm.weight"] = np.zeros(3, np.float32)
    save_file(tensors, file)
    assert main(["check", str(directory)]) == 1
    said = capsys.readouterr().out
    for words in ("missing model.layers.1.mlp.up_proj.weight", "model.norm.weight has shape [3]", "missing linear_1.bias"):
        assert words in said


def test_what_is_no_model_directory_is_one_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().out.replace("\n", "")


def test_capacity_is_what_remains_over_what_a_sequence_takes(tmp_path: Path) -> None:
    composition = load_composition(published.build_text(tmp_path))
    decoder = composition.decoders["small"]
    assert decoder.kv_elements_per_token == 2 * 2 * 2 * 16
    assert num_sequences(decoder, 1000 * 256 * 5 - 1, "bfloat16") == 4
    assert num_sequences(decoder, -1.0, "bfloat16") == 0
    in_file = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < in_file - weight_bytes(composition, "float32")["small decoder"] < 10_000
