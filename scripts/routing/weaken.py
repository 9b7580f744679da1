"""Copies the bundled model with noise in its small decoder, so that there is something to route: its own two decoders are equally good.

    python -m scripts.routing.weaken --out build/weakened --noise 0.2

The noise is Gaussian, `--noise` times each matrix's own standard deviation, in the layers and not in the embeddings; its seed is fixed.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mmserve.composition import BUNDLED
from mmserve.route_classifier import FILE

SEED = 1


def weaken(target: Path, noise: float) -> None:
    shutil.copytree(BUNDLED, target, ignore=shutil.ignore_patterns(FILE))
    generator = torch.Generator().manual_seed(SEED)
    for file in sorted((target / "small").glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in sorted(tensors.items()):
            if ".layers." in name and tensor.dim() == 2:
                drawn = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (tensor.float() + noise * tensor.float().std() * drawn).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--noise", type=float, default=0.2)
    options = parser.parse_args()
    weaken(options.out, options.noise)


if __name__ == "__main__":
    main()
