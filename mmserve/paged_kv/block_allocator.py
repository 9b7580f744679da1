"""Physical blocks by number: free or held, and held by how many.  Knows nothing of what is in them."""

from __future__ import annotations

from collections.abc import Mapping

from mmserve.errors import OutOfBlocks


class BlockAllocator:
    """Counts references to `num_blocks` blocks.  A block whose count falls to zero is free again."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the likeliest to be warm
        self._num_refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A free block, held once.  Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are held")
        block_id = self._free.pop()
        self._num_refs[block_id] = 1
        return block_id

    def retain(self, block_id: int) -> None:
        """Hold a block that is held already."""
        assert self._num_refs[block_id] > 0, f"block {block_id} retained while free"
        self._num_refs[block_id] += 1

    def release(self, block_id: int) -> int:
        """Give up one reference; return how many are left."""
        num_refs = self._num_refs[block_id] - 1
        assert num_refs >= 0, f"block {block_id} released twice"
        self._num_refs[block_id] = num_refs
        if num_refs == 0:
            self._free.append(block_id)
        return num_refs

    def check(self, num_refs: Mapping[int, int]) -> None:
        """Books equal `num_refs` (blocks not in it: none), and exactly the others are free, once each."""
        expected = [0] * len(self._num_refs)
        for block_id, count in num_refs.items():
            expected[block_id] = count
        if self._num_refs != expected:  # compared whole first: tens of thousands of blocks are looked at whenever a replica is idle
            wrong = next(i for i, count in enumerate(self._num_refs) if count != expected[i])
            raise AssertionError(f"block {wrong} has {self._num_refs[wrong]} references, expected {expected[wrong]}")
        num_free = expected.count(0)
        assert len(self._free) == num_free, f"{len(self._free)} entries in the free list for {num_free} free blocks"
        assert len(set(self._free)) == num_free, "a block is free twice"
        assert not any(map(expected.__getitem__, self._free)), "a block is free and held"
