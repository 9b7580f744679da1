"""Which tensors of a safetensors file or directory belong to a part of a model: read from headers, without torch, nothing loaded."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mmserve.config import ConfigError

COMPUTED = (".rotary_emb.inv_freq", ".position_ids")  # old files carry what is computed
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_READ_BYTES = 2**20


class BadModel(ConfigError):
    """A model directory lacks something, holds something unknown, or asks for what isn't built.  Names all of it."""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """What a part calls the tensors of a file: the first prefix that a name has is replaced.

    Called with the name in the file; None for another part's tensor, and for what nobody takes.
    """

    renames: tuple[tuple[str, str], ...]  # (prefix in the file, what stands in its place)

    def __call__(self, name: str) -> str | None:
        if not name.endswith(COMPUTED):
            for prefix, own in self.renames:
                if name.startswith(prefix):
                    return own + name.removeprefix(prefix)
        return None


AS_WRITTEN = WeightNames((("", ""),))
NOTHING = WeightNames(())


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where a tensor is, and what it is."""

    file: Path
    dtype: str  # BF16, F32, ...: as safetensors spells it
    shape: tuple[int, ...]
    start: int  # bytes [start, stop) of the file
    stop: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one part: those of a file, or of a directory's files, that `names` gives a name."""

    path: Path
    names: WeightNames = AS_WRITTEN

    def headers(self) -> dict[str, TensorHeader]:
        """By the part's own names.  Raises BadModel, also when two tensors get one name."""
        found: dict[str, TensorHeader] = {}
        for name, header in tensor_headers(self.path).items():
            own = self.names(name)
            if own in found:
                raise BadModel(f"{self.path}: {own} is there twice, once as {name}")
            if own is not None:
                found[own] = header
        return found

    def digest(self, between: Callable[[], None] = lambda: None) -> bytes:
        """SHA-256 of names, types, shapes and bytes.  Reads the part's own bytes and no other.

        `between` pieces it may be ended, by raising.
        """
        digest = hashlib.sha256()
        for name, header in sorted(self.headers().items()):
            digest.update(f"{name}\0{header.dtype}\0{header.shape}\0".encode())
            with header.file.open("rb") as file:
                file.seek(header.start)
                for start in range(header.start, header.stop, _READ_BYTES):
                    between()
                    digest.update(file.read(min(_READ_BYTES, header.stop - start)))
        return digest.digest()


def weight_files(path: Path) -> list[Path]:
    """A file itself; of a directory what its index lists, else `model.safetensors`, else every safetensors file there is.

    Raises BadModel when there is none: other formats (.bin, .gguf) are never read.
    """
    if not path.is_dir():
        return [path]
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.exists():
        try:
            return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise BadModel(f"{index} is damaged") from None
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    if not files:
        raise BadModel(f"no safetensors in {path}")
    return files


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Every tensor of a file or directory by its name there.  Raises BadModel naming the file that can't be read."""
    return {name: header for file in weight_files(path) for name, header in _read_header(file)}


def _read_header(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        stat = file.stat()
    except OSError as error:
        raise BadModel(f"{file}: {error.strerror}") from None
    return iter(_parse_header(file, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=256)  # a directory's parts are read one by one; size and time say whether the file is still the same
def _parse_header(file: Path, num_bytes: int, modified_ns: int) -> tuple[tuple[str, TensorHeader], ...]:
    """Eight bytes of length, then JSON, then the tensors (the safetensors format)."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, num_bytes):
                raise ValueError("a header longer than the file")
            entries = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        headers = []
        for name, entry in entries.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            if not 8 + length <= start <= stop <= num_bytes:
                raise ValueError(f"{name} lies outside the file")
            headers.append((name, TensorHeader(file, entry["dtype"], tuple(entry["shape"]), start, stop)))
        return tuple(headers)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadModel(f"{file} is cut off or no safetensors file: {error}") from None
