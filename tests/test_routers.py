import pytest

from mmserve.errors import BadRequest, ModelNotFound
from mmserve.media import MediaItem, MediaKind, MediaLimits
from mmserve.modality_router import route
from mmserve.model_router import choose_model

PICTURE, CLIP = MediaItem(MediaKind.IMAGE, b""), MediaItem(MediaKind.AUDIO, b"")


def test_placeholders_count_by_kind_in_the_clients_order():
    """Eleven of a kind: a name cut to a fixed length went wrong from index 10."""
    routed = route([PICTURE] * 11 + [CLIP], has_text=True, limits=MediaLimits(max_images=11))
    assert routed.placeholders[9:] == ("image-9", "image-10", "audio-0")
    assert routed.pools == {MediaKind.IMAGE, MediaKind.AUDIO}
    assert (routed.modality_mask, routed.modality_mix) == (7, "image_audio")


@pytest.mark.parametrize(
    ("items", "has_text", "mask", "mix"),
    [([], True, 1, "text"), ([], False, 1, "text"), ([PICTURE], False, 2, "image"), ([CLIP], True, 5, "audio")],
)
def test_the_mask_says_what_a_request_carries(items, has_text, mask, mix):
    routed = route(items, has_text=has_text, limits=MediaLimits())
    assert (routed.modality_mask, routed.modality_mix) == (mask, mix)


@pytest.mark.parametrize("items", [[PICTURE] * 9, [CLIP] * 2])
def test_more_items_than_allowed_are_refused_with_both_numbers(items):
    with pytest.raises(BadRequest, match=f"at most {len(items) - 1} .* got {len(items)}"):
        route(items, has_text=True, limits=MediaLimits())


def choose(wanted, **load):
    facts = {"capable": ("small", "large"), "num_media": 0, "num_characters": 10} | load
    return choose_model(wanted, served_name="tiny", available=("small", "large"), **facts)


def test_auto_chooses_among_those_that_take_the_media():
    choice = choose("auto", capable=("small",), num_media=3)
    assert (choice.model, choice.reason) == ("small", "only-capable")
    assert choose("large", capable=("small",), num_media=1).model == "large"  # asked for by name, it says itself that it can't
    assert choose("auto", capable=(), num_media=2).model == "large"


def test_a_hint_wins_over_the_rule():
    assert choose("small", num_media=5).model == "small"
    assert choose("large").reason == "hint"


@pytest.mark.parametrize("name", ["auto", "tiny"])
def test_auto_and_the_served_name_follow_the_rule(name):
    assert (choose(name).model, choose(name).reason) == ("small", "simple")
    assert (choose(name, num_media=2).model, choose(name, num_media=2).reason) == ("large", "several-media")
    assert choose(name, num_characters=5_000).reason == "long-prompt"


def test_an_unknown_model_names_the_ones_there_are():
    with pytest.raises(ModelNotFound, match="auto, large, small, tiny"):
        choose("gpt-4o")
