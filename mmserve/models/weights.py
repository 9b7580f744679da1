"""Reads safetensors and says everything that is wrong with them at once.

Nothing but safetensors is ever opened: no pickle, no code from a model directory.  A tensor goes from the mapped file straight to where
it will stay, only the rows or columns that are wanted, and the file is mapped anew for each: what was read once is nobody's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from mmserve.composition.weights import AS_WRITTEN, BadModel, TensorHeader, tensor_headers
from mmserve.models.parallel import WHOLE, Shard

META = torch.device("meta")  # a checkpoint for it is checked, and not read
_PIECE_BYTES = 16 * 2**20  # read through one mapping
_FLOATING = ("F64", "F32", "F16", "BF16")  # other numbers are quantised and mean nothing without their scales


class BadCheckpoint(ValueError):
    """A model directory lacks something, holds something unknown, or asks for what isn't built.  Names all of it."""


class Checkpoint:
    """The tensors of one part of a model.  `take`, `fill` or `drop` each once, then `finish`."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        names: Callable[[str], str | None] = AS_WRITTEN,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`path` is a file or a directory; `names` turns a name there into the part's own, or None for another part's tensor.

        `on_progress` is told bytes done and bytes in all after each tensor.  Raises BadCheckpoint for files that can't be read.
        """
        self.path = path
        self.device = device
        self.dtype = dtype
        self._stored: dict[str, tuple[str, TensorHeader]] = {}  # by own name: the name in the file, and where that is
        self._problems: list[str] = []
        try:
            headers = tensor_headers(path)
        except BadModel as error:
            raise BadCheckpoint(str(error)) from error
        for written, header in headers.items():
            own = names(written)
            if own in self._stored:
                self._problems.append(f"{own} is there twice, as {self._stored[own][0]} and as {written}")
            elif own is not None:
                self._stored[own] = (written, header)
        self._on_progress = on_progress
        self._num_bytes = sum(header.stop - header.start for _, header in self._stored.values())
        self._num_done = 0

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def take(self, name: str, *shape: int, shard: Shard = WHOLE, dim: int = 0) -> torch.Tensor:
        """This shard's part along `dim` of a tensor of `shape`, in a tensor of its own.  What is wrong with it, `finish` says."""
        part = shard.part(shape[dim]) if shape else slice(0)
        own_shape = [part.stop - part.start if i == dim else count for i, count in enumerate(shape)]
        target = torch.empty(own_shape, device=self.device, dtype=self.dtype)
        self.fill(target, name, *shape, shard=shard, dim=dim)
        return target

    def fill(self, target: torch.Tensor, name: str, *shape: int, shard: Shard = WHOLE, dim: int = 0) -> None:
        """The same into a part or a rearranged view of what is there already: `target` has the elements in the tensor's order."""
        if name not in self._stored:
            self._problems.append(f"missing {name}")
            return
        written, header = self._stored.pop(name)
        if header.shape != shape:
            self._problems.append(f"{name} has shape {list(header.shape)}, expected {list(shape)}")
        elif header.dtype not in _FLOATING:
            self._problems.append(f"{name} holds {header.dtype}, expected one of {', '.join(_FLOATING)}")
        elif not target.is_meta:
            part = tuple(shard.part(count) if i == dim else slice(0, count) for i, count in enumerate(shape))
            _copy(header.file, written, part, target)
            self._advance(header)

    def drop(self, name: str) -> None:
        """Accept a tensor that isn't needed."""
        if name in self._stored:
            self._advance(self._stored.pop(name)[1])

    def finish(self) -> None:
        """Raises BadCheckpoint naming every missing, misshapen and unknown tensor."""
        problems = [*self._problems, *(f"unknown {name}" for name in sorted(self._stored))]
        if problems:
            raise BadCheckpoint(f"{self.path}: {'; '.join(problems)}")

    def _advance(self, header: TensorHeader) -> None:
        self._num_done += header.stop - header.start
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_bytes)


def _copy(file: Path, name: str, part: tuple[slice, ...], target: torch.Tensor) -> None:
    """`part` of a tensor into one of the same elements, whose first dimension divides the part's; piece by piece."""
    if not part:
        with safe_open(str(file), framework="pt") as mapped:
            target.copy_(mapped.get_tensor(name))
        return
    rows, *rest = part
    rows_each = (rows.stop - rows.start) // max(len(target), 1)
    step = max(1, _PIECE_BYTES * len(target) // max(target.nbytes, 1))
    for start in range(0, len(target), step):
        piece = target[start : start + step]
        first = rows.start + start * rows_each
        with safe_open(str(file), framework="pt") as mapped:
            source = mapped.get_slice(name)[(slice(first, first + len(piece) * rows_each), *rest)]
            piece.copy_(source.reshape(piece.shape))
