"""Is this GPU used rightly and well?  Parity with the CPU, then speed against what the card can do, then a blend of requests.

    python -m scripts.gpu_check                 on the first GPU, in shapes of published models; needs about 20 GB of disk
    python -m scripts.gpu_check --device cpu    every line of it in small shapes: says that the check itself works

Weights are random and made here.  Ends in one JSON line; `docs/gpu.md` says how to read it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mmserve.composition import load_composition
from mmserve.config import has_flash_attn
from mmserve.worker.device import release_memory
from scripts import random_model
from scripts.gpu import blend, parity, speed


@dataclass(frozen=True)
class Plan:
    shapes: random_model.Shapes
    load: speed.Load
    blend: blend.Blend


PLANS = {
    "cuda": Plan(
        random_model.REAL,
        speed.Load(
            copied_bytes=4 * 2**30, matrix_side=8192, batches=(1, 16, 64, 128), context_len=700, prefill_tokens=2048, images=48,
            windows=16, repeats=10,
        ),
        blend.Blend(num_requests=256, num_clients=64, text_tokens=600, answer_tokens=64, picture_side=640, clip_s=12.0),
    ),
    "cpu": Plan(
        random_model.SMALL,
        speed.Load(
            copied_bytes=2**24, matrix_side=256, batches=(1, 4), context_len=100, prefill_tokens=128, images=2, windows=2, repeats=2
        ),
        blend.Blend(num_requests=8, num_clients=4, text_tokens=30, answer_tokens=4, picture_side=64, clip_s=1.5),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Check parity and speed of a GPU with random weights.")
    parser.add_argument("--device", choices=tuple(PLANS), default="cuda")
    parser.add_argument("--work-dir", type=Path, help="where the random model is written; a temporary directory by default")
    arguments = parser.parse_args()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as work_dir:
        report = check(Path(work_dir), device, PLANS[arguments.device])
    report["seconds"] = time.perf_counter() - started
    _show(report)
    print(json.dumps(_rounded(report)))


def check(work_dir: Path, device: torch.device, plan: Plan) -> dict[str, Any]:
    """Everything, in the order in which it is cheapest to fail."""
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "flash_attn": has_flash_attn(),
    }
    random_model.write_decoder(work_dir / "parity", random_model.SMALL.decoder, torch.device("cpu"))
    report["parity"] = parity.check(work_dir / "parity", device)
    report["bandwidth"] = speed.bandwidth(device, plan.load)
    report["matrix_rate"] = speed.matrix_rate(device, plan.load)
    random_model.write_composition(work_dir / "model", plan.shapes, device)
    composition = load_composition(work_dir / "model")
    report |= speed.towers(composition, device, plan.load)
    decoder = composition.decoders["small"]
    runner = speed.make_runner(decoder, str(device), plan.load)
    report["decode"] = speed.decode_steps(runner, decoder, device, plan.load, report["bandwidth"])
    report["prefill"] = speed.prefill_step(runner, decoder, device, plan.load, report["matrix_rate"])
    del runner  # the engine's workers want the memory
    release_memory(device)
    report["blend"] = blend.run(work_dir / "model", work_dir / "data", device.type, plan.blend)
    return report


def _show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['device']}, torch {report['torch']}, flash-attn {'yes' if report['flash_attn'] else 'no'}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, error in report["parity"].items():
        table.add_row(f"parity {name}", "can't run here" if error is None else f"{error:.2e}")
    table.add_row("bandwidth", f"{report['bandwidth'] / 1e9:.0f} GB/s")
    table.add_row("matrix rate, bfloat16", f"{report['matrix_rate'] / 1e12:.1f} TFLOP/s")
    for step in report["decode"]:
        table.add_row(f"decode step, batch {step['batch']}", f"{step['ms']:.2f} ms, {step['of_bandwidth']:.0%} of bandwidth")
    prefill = report["prefill"]
    table.add_row(f"prefill of {prefill['tokens']}", f"{prefill['ms']:.1f} ms, {prefill['of_matrix_rate']:.0%} of matrix rate")
    table.add_row("images", f"{report['images_per_s']:.0f} /s")
    table.add_row("audio", f"{report['audio_seconds_per_s']:.0f} s/s")
    table.add_row("blend", f"{report['blend']['requests_per_s']:.2f} requests/s, {report['blend']['tokens_per_s']:.0f} tokens/s")
    for kind, ttft_ms in report["blend"]["ttft_ms_p50"].items():
        table.add_row(f"time to first token, {kind}", f"{ttft_ms:.0f} ms")
    Console().print(table)


def _rounded(value: Any) -> Any:
    """Four significant digits are more than any of this repeats."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
