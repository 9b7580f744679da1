"""Hash chains: equal exactly when everything attention could see is equal."""

from __future__ import annotations

import hashlib
import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import media_key, prompt

from mmserve.media import MediaKind, MediaSpan
from mmserve.paged_kv.block_hash import HASH_STRIDE, chain_hashes

CAT, DOG = media_key("cat"), media_key("dog")


def image(key: bytes, start: int, stop: int) -> MediaSpan:
    return MediaSpan(key, MediaKind.IMAGE, start, stop)


def common(a: list[bytes], b: list[bytes]) -> int:
    """How many leading hashes are equal; none may be equal after the first that isn't."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


def test_only_full_strides_are_hashed():
    assert [len(chain_hashes(array("i", range(n)), (), salt=b"")) for n in (0, 15, 16, 31, 32, 33)] == [0, 0, 1, 1, 2, 2]


def test_a_hash_is_the_full_sha256_of_parent_ids_and_media_runs():
    root = hashlib.sha256(b"mmserve-chain-1" + b"tenant").digest()
    ids = array("i", range(16))
    assert chain_hashes(ids, (), salt=b"tenant") == [hashlib.sha256(root + struct.pack("16i", *range(16))).digest()]
    blanked = struct.pack("16i", 0, 1, *([0] * 5), *range(7, 16))
    run = struct.pack("<BB32sQ", 2, 5, CAT, 0)
    assert chain_hashes(ids, [image(CAT, 2, 7)], salt=b"tenant") == [hashlib.sha256(root + blanked + run).digest()]


def test_equal_prompts_with_different_pictures_share_only_the_text_strides():
    ids, spans = prompt(40, ("cat", 60), 60)
    other = (image(DOG, spans[0].start, spans[0].stop),)
    assert common(chain_hashes(ids, spans, salt=b""), chain_hashes(ids, other, salt=b"")) == 2


def test_swapped_pictures_part_where_the_first_one_stands():
    first, spans = prompt(32, ("cat", 32), 32, ("dog", 32), 32)
    second, swapped = prompt(32, ("dog", 32), 32, ("cat", 32), 32)
    assert first == second
    assert common(chain_hashes(first, spans, salt=b""), chain_hashes(second, swapped, salt=b"")) == 2


def test_the_same_picture_shifted_by_a_row_is_not_the_same():
    ids = array("i", [7] * 64)
    assert common(chain_hashes(ids, [image(CAT, 16, 48)], salt=b""), chain_hashes(ids, [image(CAT, 17, 49)], salt=b"")) == 1


def test_two_windows_of_eight_rows_are_not_one_of_sixteen():
    ids = array("i", [7] * 16)
    one = chain_hashes(ids, [image(CAT, 0, 16)], salt=b"")
    two = chain_hashes(ids, [image(CAT, 0, 8), image(CAT, 8, 16)], salt=b"")
    assert common(one, two) == 0


def test_a_picture_is_not_the_text_that_its_placeholders_spell():
    ids = array("i", [0] * 16)
    assert common(chain_hashes(ids, (), salt=b""), chain_hashes(ids, [image(CAT, 0, 16)], salt=b"")) == 0


def test_placeholder_ids_under_a_picture_do_not_matter():
    spans = [image(CAT, 3, 20)]
    a, b = array("i", range(48)), array("i", range(48))
    for position in range(3, 20):
        b[position] = 999
    assert chain_hashes(a, spans, salt=b"") == chain_hashes(b, spans, salt=b"")


def test_salts_share_nothing():
    ids = array("i", range(64))
    assert common(chain_hashes(ids, (), salt=b"a"), chain_hashes(ids, (), salt=b"b")) == 0


def test_negative_and_large_ids_are_told_apart():
    hashes = {chain_hashes(array("i", [token] * 16), (), salt=b"")[0] for token in (0, 1, -1, 256, 65536, 2**31 - 1)}
    assert len(hashes) == 6


@st.composite
def spans_of(draw: st.DrawFn, num_tokens: int) -> list[MediaSpan]:
    spans, position = [], 0
    while position < num_tokens and draw(st.booleans()):
        start = draw(st.integers(position, num_tokens - 1))
        stop = draw(st.integers(start + 1, num_tokens))
        spans.append(image(draw(st.sampled_from([CAT, DOG])), start, stop))
        position = stop
    return spans


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_chain_continued_anywhere_is_the_chain_hashed_at_once(data: st.DataObject):
    ids = array("i", data.draw(st.lists(st.integers(0, 3), max_size=120)))
    spans = data.draw(spans_of(len(ids))) if ids else []
    whole = chain_hashes(ids, spans, salt=b"s")
    done = data.draw(st.integers(0, len(whole)))
    parent = whole[done - 1] if done else None
    assert chain_hashes(ids, spans, salt=b"s", parent=parent, start=done * HASH_STRIDE) == whole[done:]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_strides_are_equal_exactly_while_all_visible_content_is(data: st.DataObject):
    num_tokens = data.draw(st.integers(16, 80))

    def draw_one() -> tuple[array[int], list[MediaSpan], list[object]]:
        ids = array("i", data.draw(st.lists(st.integers(0, 1), min_size=num_tokens, max_size=num_tokens)))
        if data.draw(st.booleans()):  # collide in most of the text
            ids = array("i", [0] * num_tokens)
        spans = data.draw(spans_of(num_tokens))
        seen: list[object] = list(ids)
        for span in spans:
            seen[span.start : span.stop] = [(span.key, row) for row in range(span.stop - span.start)]
        return ids, spans, seen

    (ids_a, spans_a, seen_a), (ids_b, spans_b, seen_b) = draw_one(), draw_one()
    hashes_a, hashes_b = chain_hashes(ids_a, spans_a, salt=b""), chain_hashes(ids_b, spans_b, salt=b"")
    for stride, (a, b) in enumerate(zip(hashes_a, hashes_b, strict=True)):
        stop = (stride + 1) * HASH_STRIDE
        assert (a == b) == (seen_a[:stop] == seen_b[:stop])


@pytest.mark.parametrize("start", [1, 15, 17])
def test_a_chain_cannot_start_inside_a_stride(start: int):
    with pytest.raises(AssertionError):
        chain_hashes(array("i", range(64)), (), salt=b"", parent=bytes(32), start=start)
