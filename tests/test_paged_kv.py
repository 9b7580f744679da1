"""Allocator, prefix cache and manager, at block sizes 16 and 256: sharing, copying, growing, evicting, and books that add up."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from kv_world import contents_of, parts_of, sequence

from mmserve.errors import OutOfBlocks
from mmserve.paged_kv.block_allocator import BlockAllocator
from mmserve.paged_kv.block_hash import chain_hashes
from mmserve.paged_kv.kv_cache_manager import BlockTable, KVCacheManager
from mmserve.paged_kv.prefix_cache import PrefixCache
from mmserve.plan import BlockCopy

BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 256])


def names(text: str) -> list[bytes]:
    return [hashlib.sha256(character.encode()).digest() for character in text]


def hashes_of(num_tokens: int, first: int = 0) -> list[bytes]:
    return chain_hashes(array("i", range(first, first + num_tokens)), (), salt=b"")


def written(kv: KVCacheManager, num_tokens: int, *, first: int = 0) -> BlockTable:
    """A table of that many tokens, allocated, computed in one step and published."""
    table, hashes = BlockTable(), hashes_of(num_tokens, first)
    kv.allocate(table, hashes, num_tokens)
    kv.take_copies()
    kv.publish(table, hashes, num_tokens)
    return table


def test_blocks_come_out_in_order_and_the_one_freed_last_comes_first():
    allocator = BlockAllocator(3)
    assert [allocator.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfBlocks):
        allocator.allocate()
    assert [allocator.release(0), allocator.release(2)] == [0, 0]
    assert [allocator.allocate(), allocator.allocate()] == [2, 0]
    allocator.check({0: 1, 1: 1, 2: 1})


def test_releasing_twice_is_noticed_and_does_not_inflate_the_free_count():
    allocator = BlockAllocator(2)
    block_id = allocator.allocate()
    allocator.release(block_id)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(block_id)
    assert allocator.num_free == 2
    allocator.check({})


def test_a_free_block_cannot_be_retained():
    allocator = BlockAllocator(1)
    with pytest.raises(AssertionError):
        allocator.retain(0)


def test_check_notices_a_lost_and_a_foreign_reference():
    allocator = BlockAllocator(2)
    allocator.allocate()
    with pytest.raises(AssertionError):
        allocator.check({})
    with pytest.raises(AssertionError):
        allocator.check({0: 1, 1: 1})


def test_a_chain_is_found_up_to_the_first_stride_that_is_missing():
    cache = PrefixCache(1)
    a, b, c, d = names("abcd")
    for block_id, stride in [(5, a), (6, b), (8, d)]:
        assert cache.publish(stride, block_id)
    assert cache.match([a, b, c, d]) == ([5, 6], 2)
    assert cache.match([c, d]) == ([], 0)
    assert cache.match([]) == ([], 0)


def test_a_block_of_many_strides_is_found_by_its_furthest_one():
    cache = PrefixCache(4)
    chain = names("abcdefgh")
    for i, stride in enumerate(chain[:6]):
        cache.publish(stride, 10 + i // 4)
    assert cache.match(chain) == ([10, 11], 6)
    assert cache.match(chain[:3]) == ([10], 3)
    assert cache.match([*chain[:5], *names("xy")]) == ([10, 11], 5)


def test_a_longer_copy_serves_even_when_the_block_of_its_beginning_was_evicted():
    cache = PrefixCache(4)
    a, b, c, d = names("abcd")
    cache.publish(a, 1)
    cache.publish(b, 1)
    cache.publish(a, 2)  # 2 began as a copy of 1 and went on
    cache.publish(b, 2)
    cache.publish(c, 2)
    cache.publish(d, 2)
    cache.park(1)
    assert cache.evict() == 1
    assert cache.match([a, b, c, d]) == ([2], 4)
    assert cache.match([a, b]) == ([], 0)


def test_whoever_published_a_stride_first_keeps_it():
    cache = PrefixCache(1)
    (a,) = names("a")
    assert cache.publish(a, 3)
    assert not cache.publish(a, 4)
    assert cache.match([a]) == ([3], 1)
    assert not cache.holds(4)


def test_eviction_takes_the_least_recently_used():
    cache = PrefixCache(1)
    for block_id, stride in enumerate(names("abc")):
        cache.publish(stride, block_id)
        cache.park(block_id)
    cache.unpark(0)
    cache.park(0)
    assert [cache.evict(), cache.evict(), cache.evict()] == [1, 2, 0]
    cache.check(set())


@BLOCK_SIZES
def test_a_table_has_just_enough_blocks(block_size: int):
    kv = KVCacheManager(4, block_size)
    table = BlockTable()
    kv.allocate(table, [], 1)
    assert len(table.block_ids) == 1
    kv.grow(table, block_size)
    assert len(table.block_ids) == 1
    kv.grow(table, block_size + 1)
    assert len(table.block_ids) == 2
    kv.check([table])
    kv.release(table)
    assert kv.num_available == 4
    kv.check([])


@pytest.mark.parametrize("block_size", [0, 8, 17, 24])
def test_a_block_must_be_whole_strides(block_size: int):
    with pytest.raises(ValueError, match="multiple of 16"):
        KVCacheManager(4, block_size)


@BLOCK_SIZES
def test_running_out_changes_nothing(block_size: int):
    kv = KVCacheManager(3, block_size)
    table = BlockTable()
    kv.allocate(table, [], 2 * block_size)
    before = list(table.block_ids)
    with pytest.raises(OutOfBlocks):
        kv.grow(table, 3 * block_size + 1)
    other = BlockTable()
    with pytest.raises(OutOfBlocks):
        kv.allocate(other, [], block_size + 1)
    with pytest.raises(OutOfBlocks):
        kv.allocate(other, [], block_size, headroom=1)
    assert (list(table.block_ids), list(other.block_ids), kv.num_available) == (before, [], 1)
    kv.check([table])


@BLOCK_SIZES
def test_whole_blocks_are_shared_by_reference_and_survive_their_first_owner(block_size: int):
    kv = KVCacheManager(8, block_size)
    first = written(kv, 3 * block_size + 1)
    second = BlockTable()
    assert kv.allocate(second, hashes_of(3 * block_size + 1), 3 * block_size + 1) == 3 * block_size
    assert second.block_ids[:3] == first.block_ids[:3]
    assert second.block_ids[3] != first.block_ids[3]
    assert kv.take_copies() == ()
    kv.check([first, second])
    kv.release(first)
    kv.check([second])
    third = BlockTable()
    assert kv.match(hashes_of(3 * block_size + 1), 3 * block_size + 1) == 3 * block_size
    kv.allocate(third, hashes_of(3 * block_size + 1), 3 * block_size + 1)
    kv.check([second, third])


@BLOCK_SIZES
def test_the_last_token_is_never_taken_from_the_cache(block_size: int):
    kv = KVCacheManager(8, block_size)
    written(kv, 2 * block_size)
    again = BlockTable()
    assert kv.allocate(again, hashes_of(2 * block_size), 2 * block_size) == 2 * block_size - 1
    (copy,) = kv.take_copies()
    assert copy == BlockCopy(source=1, target=again.block_ids[1], num_tokens=block_size - 1)
    assert again.block_ids[0] == 0


def test_a_partly_matching_tail_is_copied_into_a_fresh_block():
    kv = KVCacheManager(8, 256)
    first = written(kv, 256 + 100)  # six full strides in the second block
    hashes = hashes_of(256 + 64) + names("xyz")
    second = BlockTable()
    assert kv.allocate(second, hashes, 256 + 120) == 256 + 64
    assert kv.take_copies() == (BlockCopy(source=first.block_ids[1], target=second.block_ids[1], num_tokens=64),)
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] not in first.block_ids
    kv.check([first, second])


def test_the_source_of_a_copy_cannot_be_evicted_before_the_step_is_sent():
    """From then on it can: whoever gets the block writes to it in a later step."""
    kv = KVCacheManager(3, 256)
    source = written(kv, 100)
    (source_id,) = source.block_ids
    kv.release(source)
    table = BlockTable()
    kv.allocate(table, hashes_of(96) + names("x"), 120)
    assert kv.num_available == 1
    kv.grow(table, 2 * 256)
    assert source_id not in table.block_ids
    with pytest.raises(OutOfBlocks):
        kv.grow(table, 2 * 256 + 1)
    (copy,) = kv.take_copies()
    assert copy.source == source_id
    kv.grow(table, 2 * 256 + 1)
    assert table.block_ids[2] == source_id
    kv.check([table])


def test_a_tail_is_computed_again_where_its_copy_would_be_the_one_block_too_many():
    kv = KVCacheManager(2, 256)
    kv.release(written(kv, 256 + 100))
    table = BlockTable()
    assert kv.match(hashes_of(256 + 96), 2 * 256) == 256
    assert kv.allocate(table, hashes_of(256 + 96), 2 * 256) == 256
    assert kv.take_copies() == ()
    kv.check([table])


def test_the_source_of_a_copy_is_not_part_of_the_headroom():
    kv = KVCacheManager(3, 256)
    kv.release(written(kv, 100))
    table = BlockTable()
    with pytest.raises(OutOfBlocks):
        kv.allocate(table, hashes_of(96), 256 + 1, headroom=1)
    assert kv.allocate(table, hashes_of(96), 256 + 1) == 96
    assert kv.num_available == 0


@BLOCK_SIZES
def test_what_was_not_published_is_not_found(block_size: int):
    kv = KVCacheManager(8, block_size)
    table, hashes = BlockTable(), hashes_of(2 * block_size)
    kv.allocate(table, hashes, 2 * block_size)
    assert kv.match(hashes, 2 * block_size) == 0
    kv.publish(table, hashes, block_size + 15)
    assert kv.match(hashes, 2 * block_size) == block_size
    kv.publish(table, hashes, 2 * block_size)
    assert kv.match(hashes, 2 * block_size) == 2 * block_size - 1


@BLOCK_SIZES
def test_without_prefix_caching_nothing_is_shared_and_everything_comes_back(block_size: int):
    kv = KVCacheManager(4, block_size, enable_prefix_caching=False)
    table = written(kv, 2 * block_size)
    assert kv.match(hashes_of(2 * block_size), 2 * block_size) == 0
    kv.release(table)
    assert kv.num_available == 4
    kv.check([])


@BLOCK_SIZES
def test_the_end_of_a_chain_is_evicted_before_its_beginning(block_size: int):
    kv = KVCacheManager(4, block_size)
    kv.release(written(kv, 3 * block_size))
    found = []
    filler = BlockTable()
    for num_blocks in (1, 2, 3, 4):
        kv.grow(filler, num_blocks * block_size)
        found.append(kv.match(hashes_of(3 * block_size + 1), 3 * block_size + 1))
    assert found == [3 * block_size, 2 * block_size, block_size, 0]
    kv.check([filler])


@BLOCK_SIZES
def test_a_chain_used_again_outlives_one_that_was_not(block_size: int):
    kv = KVCacheManager(4, block_size)
    kv.release(written(kv, block_size + 1, first=0))
    kv.release(written(kv, block_size + 1, first=5000))
    again = BlockTable()
    kv.allocate(again, hashes_of(block_size + 1), block_size + 1)
    kv.release(again)
    filler = BlockTable()
    kv.allocate(filler, [], 3 * block_size)
    assert kv.match(hashes_of(block_size + 1), block_size + 1) == block_size
    assert kv.match(hashes_of(block_size + 1, first=5000), block_size + 1) == 0


def test_a_copy_that_was_never_sent_goes_with_its_table():
    kv = KVCacheManager(4, 256)
    kv.release(written(kv, 100))
    table = BlockTable()
    kv.allocate(table, hashes_of(96), 120)
    kv.release(table)
    assert kv.take_copies() == ()
    assert kv.num_available == 4
    kv.check([])


@BLOCK_SIZES
def test_withdrawn_blocks_are_found_by_nobody_and_stay_with_those_who_have_them(block_size: int):
    kv = KVCacheManager(4, block_size)
    table = written(kv, 2 * block_size)
    other = BlockTable()
    kv.allocate(other, hashes_of(2 * block_size), 2 * block_size + 1)
    kv.take_copies()
    kv.withdraw(table)
    assert kv.match(hashes_of(2 * block_size), 2 * block_size) == 0
    kv.check([table, other])
    kv.release(table)
    kv.check([other])
    kv.release(other)
    assert kv.num_available == 4
    kv.check([])


def test_a_picture_in_the_prompt_is_shared_only_with_the_same_picture():
    kv = KVCacheManager(20, 16)
    cat, dog, same = (sequence(i, 20, (picture, 40), 20) for i, picture in enumerate(["cat", "dog", "cat"]))
    kv.allocate(cat.block_table, cat.extend_hashes(), cat.num_tokens)
    kv.publish(cat.block_table, cat.block_hashes, cat.num_tokens)
    assert kv.match(dog.extend_hashes(), dog.num_tokens) == 16
    assert kv.match(same.extend_hashes(), same.num_tokens) == 79
    assert contents_of(parts_of(cat))[15] == contents_of(parts_of(dog))[15]
    assert contents_of(parts_of(cat))[20] != contents_of(parts_of(dog))[20]
