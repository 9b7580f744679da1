"""Block tables of sequences: shared prefixes, growth, publication and release.  One manager per worker life.

Whole blocks are shared by reference.  A prefix that ends inside a block is copied into a fresh one, as the first thing the next step
does, because the rest of that block will be written.

A block that is given up may be given away at once, also while a step in flight still reads or writes it: a worker runs its steps in
order, so whatever the next owner writes comes later.  Only what is published must have landed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mmserve.errors import OutOfBlocks
from mmserve.paged_kv.block_allocator import BlockAllocator
from mmserve.paged_kv.block_hash import HASH_STRIDE
from mmserve.paged_kv.prefix_cache import PrefixCache
from mmserve.plan import BlockCopy


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in order.  Written by KVCacheManager only."""

    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_published: int = 0  # leading strides that were offered to the prefix cache or came from it


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What the cache has of a sequence."""

    block_ids: list[int]  # shared whole
    source: int | None  # block whose first `num_tail` tokens are worth copying
    num_tail: int
    num_tokens: int  # of both together
    num_fresh: int  # blocks that must be allocated for the rest, the copy's target among them
    num_revived: int  # of the blocks above that nobody else holds: no longer available


class KVCacheManager:
    """Books of one KV tensor of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if block_size < HASH_STRIDE or block_size % HASH_STRIDE:
            raise ValueError(f"block_size must be a multiple of {HASH_STRIDE}, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._allocator = BlockAllocator(num_blocks)
        self._cache = PrefixCache(block_size // HASH_STRIDE)
        self._copies: dict[int, BlockCopy] = {}  # by target; for the next step

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and cached ones that nobody uses."""
        return self._allocator.num_free + self._cache.num_idle

    @property
    def capacity(self) -> int:
        """Tokens that fit when nothing else is there."""
        return self.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, 0 to 1."""
        return 1 - self.num_available / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_cached(self, stride_hash: bytes) -> bool:
        return stride_hash in self._cache

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Tokens that `allocate` would find computed just now.  Changes nothing."""
        return self._find(hashes, num_tokens).num_tokens

    def allocate(self, table: BlockTable, hashes: Sequence[bytes], num_tokens: int, *, headroom: int = 0) -> int:
        """Blocks for `num_tokens` tokens, cached ones shared; return the tokens thereby already computed.

        The last token is never taken from the cache: its logits must be computed.  Raises OutOfBlocks, having changed nothing, if
        fewer than `headroom` blocks would be left for others.
        """
        prefix = self._find(hashes, num_tokens)
        num_left = self.num_available - prefix.num_revived - prefix.num_fresh
        if num_left < headroom:
            raise OutOfBlocks(f"{num_tokens} tokens would leave {num_left} of {self.num_blocks} blocks, not {headroom}")
        self._attach(table, prefix)
        self.grow(table, num_tokens)
        return prefix.num_tokens

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Make the table long enough for `num_tokens` tokens.  Raises OutOfBlocks, having changed nothing."""
        num_missing = -(-num_tokens // self.block_size) - len(table.block_ids)
        if num_missing <= 0:
            return
        if num_missing > self.num_available:
            raise OutOfBlocks(f"{num_missing} blocks wanted, {self.num_available} of {self.num_blocks} available")
        for _ in range(num_missing):
            table.block_ids.append(self._take())

    def publish(self, table: BlockTable, hashes: Sequence[bytes], num_computed: int) -> None:
        """Let others share the strides of the first `num_computed` tokens.  Only after the step that wrote them has landed."""
        num_strides = min(num_computed // HASH_STRIDE, len(hashes))
        if not self.enable_prefix_caching or num_strides <= table.num_published:
            return
        strides_per_block = self.block_size // HASH_STRIDE
        for stride in range(table.num_published, num_strides):
            block_id = table.block_ids[stride // strides_per_block]
            if self._cache.publish(hashes[stride], block_id):
                self._allocator.retain(block_id)
        table.num_published = num_strides

    def release(self, table: BlockTable) -> None:
        """Empty the table.  What was published stays until the room is needed."""
        # Tail first: the end of a chain is the least likely to be shared, so it is the first to be evicted.
        block_ids = table.block_ids[::-1]
        table.block_ids = array("i")
        table.num_published = 0
        if self._copies:
            self._drop_copies(block_ids)
        for block_id in block_ids:
            self._release_block(block_id)

    def withdraw(self, table: BlockTable) -> None:
        """Nothing in this table's blocks may be shared from now on: their content is not to be trusted."""
        for block_id in table.block_ids:
            if self._cache.holds(block_id):
                self._cache.forget(block_id)
                self._allocator.release(block_id)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the step about to be sent must make before anything else."""
        copies = tuple(self._copies.values())
        self._copies.clear()
        for copy in copies:
            self._release_block(copy.source)
        return copies

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Every reference is accounted for by `tables`, copies and the cache: none lost, none double."""
        num_refs: Counter[int] = Counter()
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids), f"a block twice in {table.block_ids}"
            num_refs.update(table.block_ids)
        num_refs.update(copy.source for copy in self._copies.values())
        cached = self._cache.block_ids
        self._cache.check({block_id for block_id in cached if block_id not in num_refs})
        num_refs.update(cached)
        self._allocator.check(num_refs)

    def _find(self, hashes: Sequence[bytes], num_tokens: int) -> _Prefix:
        block_ids, num_strides = self._cache.match(hashes)
        num_cached = min(num_strides * HASH_STRIDE, num_tokens - 1)
        num_whole, num_tail = divmod(num_cached, self.block_size)
        whole, source = block_ids[:num_whole], block_ids[num_whole] if num_tail else None
        num_fresh = self.num_blocks_for(num_tokens) - num_whole
        num_revived = sum(map(self._cache.is_idle, whole))
        if source is not None and self._cache.is_idle(source):
            # The source lives beside its copy until the step is sent.  If that one block is what is missing, compute the tail again.
            if num_fresh + num_revived == self.num_available:
                source, num_tail = None, 0
            else:
                num_revived += 1
        return _Prefix(whole, source, num_tail, num_whole * self.block_size + num_tail, num_fresh, num_revived)

    def _attach(self, table: BlockTable, prefix: _Prefix) -> None:
        assert not table.block_ids, "a prefix is attached to an empty table"
        for block_id in prefix.block_ids:
            self._retain(block_id)
        table.block_ids.extend(prefix.block_ids)
        if prefix.source is not None:
            self._retain(prefix.source)
            target = self._take()
            self._copies[target] = BlockCopy(prefix.source, target, prefix.num_tail)
            table.block_ids.append(target)
        table.num_published = prefix.num_tokens // HASH_STRIDE

    def _take(self) -> int:
        if not self._allocator.num_free:
            self._allocator.release(self._cache.evict())
        return self._allocator.allocate()

    def _retain(self, block_id: int) -> None:
        self._allocator.retain(block_id)
        self._cache.unpark(block_id)

    def _release_block(self, block_id: int) -> None:
        if self._allocator.release(block_id) == 1 and self._cache.holds(block_id):
            self._cache.park(block_id)

    def _drop_copies(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            copy = self._copies.pop(block_id, None)
            if copy is not None:
                self._release_block(copy.source)
