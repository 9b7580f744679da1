"""Reads safetensors and says everything that is wrong with them at once.

Nothing but safetensors is ever opened: no pickle, no code from a model directory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # old files carry what is computed


class BadCheckpoint(ValueError):
    """A model directory lacks something, holds something unknown, or asks for what isn't built.  Names all of it."""


class Checkpoint:
    """The tensors of one directory or file.  `take` each once, then `finish`."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise BadCheckpoint(f"no safetensors in {path}")
        self._path = path
        self._device = device
        self._dtype = dtype
        self._file_of = {}
        for name in files:
            file = safe_open(str(name), framework="pt")
            self._file_of.update({key: file for key in file.keys() if not key.endswith(_IGNORED_SUFFIXES)})  # noqa: SIM118
        self._problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, on the device and in the dtype asked for.  What is wrong with it is reported by `finish`."""
        file = self._file_of.pop(name, None)
        if file is None:
            self._problems.append(f"missing {name}")
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            self._problems.append(f"{name} has shape {list(found)}, expected {list(shape)}")
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        return file.get_tensor(name).to(self._device, self._dtype)

    def drop(self, name: str) -> None:
        """Accept a tensor that isn't needed."""
        self._file_of.pop(name, None)

    def finish(self) -> None:
        """Raises BadCheckpoint naming every missing, misshapen and unknown tensor."""
        problems = [*self._problems, *(f"unknown {name}" for name in sorted(self._file_of))]
        if problems:
            raise BadCheckpoint(f"{self._path}: {'; '.join(problems)}")
