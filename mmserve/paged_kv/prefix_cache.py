"""Which block holds which stride of which chain, and which blocks could be given up for room.

A hash names a stride together with everything before it, and a block is filled from its first slot on.  So the block that is known
to hold a stride also holds every earlier stride of that chain that falls into it, and the longest usable prefix is found by
looking at the furthest stride of each block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set


class PrefixCache:
    """Hash -> block, and the blocks nobody but the cache holds, least recently used first."""

    def __init__(self, num_strides_per_block: int) -> None:
        self._num_strides_per_block = num_strides_per_block
        self._block_of: dict[bytes, int] = {}
        self._hashes_of: dict[int, list[bytes]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks that `evict` can give back."""
        return len(self._idle)

    def __contains__(self, stride_hash: bytes) -> bool:
        return stride_hash in self._block_of

    def holds(self, block_id: int) -> bool:
        return block_id in self._hashes_of

    def is_idle(self, block_id: int) -> bool:
        return block_id in self._idle

    def match(self, hashes: Sequence[bytes]) -> tuple[list[int], int]:
        """The longest cached prefix of a chain: its blocks in order, and how many strides it has.

        All but the last block are used to their end; the last one up to the stride found there.
        """
        block_of, size, num_hashes = self._block_of, self._num_strides_per_block, len(hashes)
        block_ids: list[int] = []
        for start in range(0, num_hashes, size):
            stop = min(start + size, num_hashes)
            while stop > start and hashes[stop - 1] not in block_of:
                stop -= 1
            if stop == start:
                return block_ids, start
            block_ids.append(block_of[hashes[stop - 1]])
            if stop < start + size:
                return block_ids, stop
        return block_ids, num_hashes

    def publish(self, stride_hash: bytes, block_id: int) -> bool:
        """Make a stride findable; True if the block is thereby new to the cache.  Whoever published a hash first keeps it."""
        if stride_hash in self._block_of:
            return False
        self._block_of[stride_hash] = block_id
        hashes = self._hashes_of.get(block_id)
        if hashes is not None:
            hashes.append(stride_hash)
            return False
        self._hashes_of[block_id] = [stride_hash]
        return True

    def park(self, block_id: int) -> None:
        """Nobody but the cache holds this block any more: the most recently used of those."""
        assert self.holds(block_id), f"block {block_id} is not cached"
        self._idle[block_id] = None
        self._idle.move_to_end(block_id)

    def unpark(self, block_id: int) -> None:
        """Somebody holds this block again, if nobody did."""
        self._idle.pop(block_id, None)

    def evict(self) -> int:
        """Forget the least recently used idle block and return it."""
        block_id, _ = self._idle.popitem(last=False)
        self.forget(block_id)
        return block_id

    def forget(self, block_id: int) -> None:
        """Nothing in this block can be found from now on."""
        self._idle.pop(block_id, None)
        for stride_hash in self._hashes_of.pop(block_id):
            del self._block_of[stride_hash]

    @property
    def block_ids(self) -> Set[int]:
        """Every block the cache holds a reference to."""
        return self._hashes_of.keys()

    def check(self, idle: Set[int]) -> None:
        """Both directions of the index agree, and exactly the blocks in `idle` are evictable."""
        forward = {(stride_hash, block_id) for stride_hash, block_id in self._block_of.items()}
        backward = [(stride_hash, block_id) for block_id, hashes in self._hashes_of.items() for stride_hash in hashes]
        assert len(backward) == len(forward), "a stride is listed twice"
        assert set(backward) == forward, "hash -> block and block -> hashes disagree"
        for block_id, hashes in self._hashes_of.items():
            assert 0 < len(hashes) <= self._num_strides_per_block, f"block {block_id} has {len(hashes)} strides"
        assert self._idle.keys() == idle, f"idle {sorted(self._idle)} should be {sorted(idle)}"
