from zlib import crc32

import pytest

from mmserve.config import ConfigError
from mmserve.errors import BadRequest, ModelNotFound
from mmserve.media import MediaItem, MediaKind, MediaLimits
from mmserve.modality_router import route
from mmserve.model_router import ModelChoice, RouteReason, choose_model
from mmserve.route_classifier import NUM_BUCKETS, Asked, RouteClassifier, features

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


SHY = RouteClassifier({"bias": -6.0, str(crc32(b"compare") % NUM_BUCKETS): 20.0}, threshold=0.3)


def choose(wanted, *, text="a question", num_characters=10, num_images=0, num_clips=0, **facts):
    asked = Asked(text, num_characters, num_images, num_clips)
    usual = {
        "available": ("small", "large"),
        "capable": ("small", "large"),
        "classifier": None,
        "tier": "standard",
        "waiting": {},
        "canaries": (),
    }
    return choose_model(wanted, served_name="tiny", asked=asked, **usual | facts)


def test_auto_chooses_among_those_that_take_the_media():
    choice = choose("auto", capable=("small",), num_images=3)
    assert (choice.model, choice.reason) == ("small", "only-capable")
    assert choose("large", capable=("small",), num_images=1).model == "large"  # asked for by name, it says itself that it can't
    assert choose("auto", capable=(), num_images=2).model == "large"


def test_a_hint_wins_over_everything():
    assert choose("small", num_images=5, classifier=SHY, waiting={"small": 100}).model == "small"
    assert choose("large", tier="batch", waiting={"large": 100}) == ModelChoice("large", RouteReason.HINT)


def test_a_canary_is_had_by_name_and_never_by_itself():
    canaries = ("small-canary",)
    assert choose("small-canary", canaries=canaries) == ModelChoice("small-canary", RouteReason.HINT)
    assert choose("auto", canaries=canaries, available=("small",), capable=("small",)) == ModelChoice("small", RouteReason.ONLY_MODEL)
    assert choose("auto", canaries=canaries, capable=()).model == "small"
    with pytest.raises(ModelNotFound, match="small-canary"):
        choose("medium-canary", canaries=canaries)
    with pytest.raises(ModelNotFound):
        choose("small-canary")


@pytest.mark.parametrize("name", ["auto", "tiny"])
def test_auto_and_the_served_name_follow_the_rules_where_nothing_was_learnt(name):
    assert (choose(name).model, choose(name).reason) == ("small", "simple")
    assert (choose(name, num_images=1, num_clips=1).model, choose(name, num_images=2).reason) == ("large", "several-media")
    assert choose(name, num_characters=5_000).reason == "long-prompt"


def test_the_classifier_decides_where_there_is_one():
    assert choose("auto", num_images=2, classifier=SHY) == ModelChoice("small", RouteReason.SIMPLE, may_escalate=True)
    assert choose("auto", text="Compare!", classifier=SHY) == ModelChoice("large", RouteReason.QUESTION)
    assert choose("auto", num_characters=5_000, classifier=SHY).reason == "long-prompt"


def test_a_tier_moves_the_threshold():
    hesitant = RouteClassifier({"bias": -1.5}, threshold=0.3)  # a gain of 0.18
    assert choose("auto", classifier=hesitant).model == "small"
    assert choose("auto", classifier=hesitant, tier="premium") == ModelChoice("large", RouteReason.TIER)
    assert choose("auto", text="compare", classifier=SHY, tier="batch") == ModelChoice("small", RouteReason.TIER)
    assert not choose("auto", classifier=SHY, tier="batch").may_escalate


def test_a_long_queue_is_gone_round():
    def chosen(text, **waiting):
        return choose("auto", text=text, classifier=SHY, waiting=waiting)

    assert chosen("compare", small=0, large=9) == ModelChoice("small", RouteReason.LOAD)
    assert chosen("compare", small=5, large=9).model == "large"
    assert chosen("what?", small=9, large=0) == ModelChoice("large", RouteReason.LOAD)
    assert chosen("what?", small=90, large=1).reason == "simple"  # who waits for the large one has chosen it


def test_an_unknown_model_names_the_ones_there_are():
    with pytest.raises(ModelNotFound, match="auto, large, small, tiny"):
        choose("gpt-4o")


def test_features_are_the_same_in_every_process_and_few_for_a_long_text():
    found = features(Asked("How many dogs? How many cats?", 30, num_images=2))
    assert found[str(crc32(b"how many") % NUM_BUCKETS)] == pytest.approx(8**-0.5)  # four words and four pairs
    assert (found["images"], found["several_images"], found["clips"]) == (2.0, 1.0, 0.0)
    assert len(features(Asked(" ".join(map(str, range(100_000))), 10**6))) < 600


def test_a_file_that_is_no_classifier_is_the_operators_to_mend(tmp_path):
    assert RouteClassifier.read(tmp_path / "router.json") is None
    for text in ("{}", "[]", "no", '{"weights": [1], "threshold": 1, "escalate_above": null, "num_judged": 0}'):
        (tmp_path / "router.json").write_text(text)
        with pytest.raises(ConfigError, match=r"router\.json"):
            RouteClassifier.read(tmp_path / "router.json")
