"""Host memory that main owns and every worker maps: pixels and samples on their way in, embedding rows on their way out.

Backed by an anonymous memory file, so that it has no name to leak in /dev/shm, isn't bound by a container's 64 MB there, and is gone
with the last process that maps it.  Only the owner allocates; the books are plain Python and can be checked.
"""

from __future__ import annotations

import bisect
import mmap
import os
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np

from mmserve.errors import OutOfBuffer

ALIGNMENT = 256  # bytes; enough for any vector load and any dtype


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """An array in the shared buffer: a plain value that may cross processes.  `dtype` is a torch or numpy name (bfloat16 too)."""

    offset: int  # bytes from the start of the buffer
    shape: tuple[int, ...]
    dtype: str  # uint8, float32, float16 or bfloat16

    @property
    def num_bytes(self) -> int:
        size = ITEM_SIZE[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


ITEM_SIZE = {"uint8": 1, "float32": 4, "float16": 2, "bfloat16": 2}


class SharedMemory:
    """The mapping itself.  Can be passed to a process at spawn; the child maps the same memory and can't allocate."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("mmserve", os.MFD_CLOEXEC)
            os.ftruncate(fd, num_bytes)
        self.num_bytes = num_bytes
        self._fd = fd
        self._map = mmap.mmap(fd, num_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_attach, (self.num_bytes, reduction.DupFd(self._fd)))

    def array(self, where: BufferSlice) -> np.ndarray:
        """A writable view, shape and dtype as `where` says; bfloat16, which numpy lacks, comes as uint16."""
        if where.offset < 0 or where.offset + where.num_bytes > self.num_bytes:
            raise ValueError(f"slice [{where.offset}, +{where.num_bytes}) outside a buffer of {self.num_bytes} bytes")
        dtype = np.dtype(np.uint16 if where.dtype == "bfloat16" else where.dtype)
        return np.frombuffer(self._map, dtype, where.num_bytes // dtype.itemsize, where.offset).reshape(where.shape)

    def close(self) -> None:
        """Forget the file; the mapping lives until the last array over it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _attach(num_bytes: int, fd: Any) -> SharedMemory:
    return SharedMemory(num_bytes, fd.detach())


class SharedBuffer:
    """The owner's side: first-fit extents with coalescing.  Single-threaded, like everything that keeps books."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = SharedMemory(_round_up(num_bytes))
        self._free: list[tuple[int, int]] = [(0, self.memory.num_bytes)]  # (offset, length), sorted, never adjacent
        self._held: dict[int, int] = {}  # offset -> length

    @property
    def num_free_bytes(self) -> int:
        return sum(length for _, length in self._free)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> BufferSlice:
        """Room for one array.  Raises OutOfBuffer; contents are whatever was there before."""
        wanted = _round_up(max(BufferSlice(0, shape, dtype).num_bytes, 1))
        for i, (offset, length) in enumerate(self._free):
            if length >= wanted:
                self._free[i : i + 1] = [(offset + wanted, length - wanted)] if length > wanted else []
                self._held[offset] = wanted
                return BufferSlice(offset, shape, dtype)
        raise OutOfBuffer(f"no {wanted} contiguous bytes among {self.num_free_bytes} free")

    def release(self, where: BufferSlice) -> None:
        length = self._held.pop(where.offset, None)
        assert length is not None, f"slice at {where.offset} released twice"
        start, stop = where.offset, where.offset + length
        i = bisect.bisect(self._free, (start, 0))
        if i < len(self._free) and self._free[i][0] == stop:
            stop += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, stop - start))

    def array(self, where: BufferSlice) -> np.ndarray:
        return self.memory.array(where)

    def check(self) -> None:
        """Free and held extents tile the buffer exactly."""
        extents = sorted([*self._free, *self._held.items()])
        position = 0
        for offset, length in extents:
            assert offset == position, f"extent at {offset} does not follow {position}"
            assert length > 0
            position += length
        assert position == self.memory.num_bytes
        assert all(a + n < b for (a, n), (b, _) in zip(self._free, self._free[1:], strict=False)), "adjacent free extents"


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
