from mmserve.media import ImageHeader, MediaItem, MediaKind, MediaSpan, MediaWindow, PreparedMedia
from mmserve.token_fuser import fuse


def picture(key: bytes, rows: int) -> PreparedMedia:
    item = MediaItem(MediaKind.IMAGE, key)
    return PreparedMedia(item, key, ImageHeader("png", 1, 1), (MediaWindow(key, MediaKind.IMAGE, rows),))


def clip(*windows: tuple[bytes, int]) -> PreparedMedia:
    item = MediaItem(MediaKind.AUDIO, b"clip")
    cut = tuple(MediaWindow(key, MediaKind.AUDIO, rows, i) for i, (key, rows) in enumerate(windows))
    return PreparedMedia(item, b"clip", ImageHeader("wav", 1, 1), cut)


def test_spans_lie_where_the_parts_were_written():
    a, b = picture(b"A", 3), picture(b"B", 2)
    fused = fuse([[7, 8], a.item, [9], b.item], {id(a.item): a, id(b.item): b})
    assert fused.token_ids.tolist() == [7, 8, 0, 0, 0, 9, 0, 0]
    assert fused.spans == (MediaSpan(b"A", MediaKind.IMAGE, 2, 5), MediaSpan(b"B", MediaKind.IMAGE, 6, 8))
    assert (fused.num_text_tokens, fused.num_image_tokens, fused.num_audio_tokens) == (3, 5, 0)


def test_swapped_pictures_swap_their_spans():
    a, b = picture(b"A", 2), picture(b"B", 2)
    prepared = {id(a.item): a, id(b.item): b}
    assert [span.key for span in fuse([a.item, b.item], prepared).spans] == [b"A", b"B"]
    assert [span.key for span in fuse([b.item, a.item], prepared).spans] == [b"B", b"A"]


def test_the_same_picture_twice_has_two_places():
    a = picture(b"A", 2)
    twin = MediaItem(a.item.kind, a.item.data)
    fused = fuse([a.item, twin], {id(a.item): a, id(twin): a})
    assert [(span.start, span.stop) for span in fused.spans] == [(0, 2), (2, 4)]


def test_a_clip_has_a_span_for_each_window():
    a = clip((b"w0", 125), (b"w1", 40))
    fused = fuse([[1], a.item], {id(a.item): a})
    assert [(span.key, span.start, span.stop) for span in fused.spans] == [(b"w0", 1, 126), (b"w1", 126, 166)]
    assert fused.num_audio_tokens == 165
