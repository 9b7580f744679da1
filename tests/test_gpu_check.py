"""The check of a GPU, run to its end where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmserve.models.torch_attention import TorchAttention
from scripts import random_model
from scripts.gpu import parity


def test_the_check_runs_to_its_end_on_a_cpu_and_says_so_in_one_line(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--work-dir", str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["parity"]["torch_float32"] < 1e-4
    assert report["parity"]["flash_bfloat16"] is None
    assert [step["batch"] for step in report["decode"]] == [1, 4]
    assert report["prefill"]["tokens_per_s"] > 0
    assert report["images_per_s"] > 0
    assert report["audio_seconds_per_s"] > 0
    assert set(report["blend"]["ttft_ms_p50"]) == {"text", "image", "audio", "image and audio"}
    assert not list(tmp_path.iterdir())


def test_a_backend_that_computes_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model.write_decoder(tmp_path / "decoder", random_model.SMALL.decoder, torch.device("cpu"))
    run = parity._run
    forgets = iter([False, False, True, False])

    class Forgetful(TorchAttention):
        def copy_blocks(self, copies: object) -> None:
            """The copied prefix stays empty."""

    def sometimes(directory: Path, device: torch.device, dtype: torch.dtype, backend: object, block_size: int) -> torch.Tensor:
        return run(directory, device, dtype, Forgetful if next(forgets) else TorchAttention, block_size)

    monkeypatch.setattr(parity, "_run", sometimes)
    with pytest.raises(parity.NoParity, match="torch_float32"):
        parity.check(tmp_path / "decoder", torch.device("cpu"))
