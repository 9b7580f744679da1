"""Loads a `transformers` module strictly: from a directory, without a connection, and never with a weight made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from mmserve.models.weights import BadCheckpoint


def load_module(kind: Any, directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """An instance ready to run.  Raises BadCheckpoint naming what is missing, misshapen or unknown."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        module, report = kind.from_pretrained(
            directory, dtype=dtype, local_files_only=True, use_safetensors=True, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, RuntimeError) as error:
        raise BadCheckpoint(f"{directory}: {error}") from error
    problems = [
        *(f"missing {name}" for name in sorted(report["missing_keys"])),
        *(f"misshapen {name}" for name, *_ in sorted(report["mismatched_keys"])),
        *(f"unknown {name}" for name in sorted(report["unexpected_keys"])),
    ]
    if problems:
        raise BadCheckpoint(f"{directory}: {'; '.join(problems)}")
    return module.to(device).eval().requires_grad_(False)
