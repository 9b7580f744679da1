"""What a published image processor does to pixels, read from its config: the fields of `CLIPImageProcessor` and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.composition.files import read_optional_json
from mmserve.composition.picture_fit import ResizeAndCrop
from mmserve.composition.weights import BadModel

_CLIP_SIDE = 224  # the processors' own default


@dataclass(frozen=True)
class ClipPixels:
    """`values` holds what the file says; everything else is CLIP's default."""

    values: Mapping[str, Any]

    def fit(self, side: int, rows_per_tile: int) -> ResizeAndCrop:
        """For a tower of `side` pixels.  Raises BadModel when something of another size would come out."""
        resize = _size(self.values.get("size", {"shortest_edge": _CLIP_SIDE})) if self.values.get("do_resize", True) else None
        crop = _size(self.values.get("crop_size", _CLIP_SIDE), square=True) if self.values.get("do_center_crop", True) else None
        if (crop or resize) != (side, side):
            raise BadModel(f"image processor: pictures come out {crop or resize or 'as they are'}, the tower takes {side}x{side}")
        return ResizeAndCrop(side, rows_per_tile, resize, crop is not None, self.resample)

    @property
    def resample(self) -> int:
        return int(self.values.get("resample", 3))

    def spec_fields(self) -> dict[str, Any]:
        """`rescale`, `mean` and `std` of a ClipSpec."""
        fields: dict[str, Any] = {}
        if not self.values.get("do_rescale", True):
            fields["rescale"] = 1.0
        elif "rescale_factor" in self.values:
            fields["rescale"] = float(self.values["rescale_factor"])
        if not self.values.get("do_normalize", True):
            return fields | {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        for field, name in (("mean", "image_mean"), ("std", "image_std")):
            if name in self.values:
                fields[field] = tuple(map(float, self.values[name]))
        return fields


def read_clip_pixels(directory: Path) -> ClipPixels:
    """From `processor_config.json` if it has them, else from `preprocessor_config.json`.  Raises BadModel when there is neither."""
    nested = read_optional_json(directory / "processor_config.json").get("image_processor")
    values = nested or read_optional_json(directory / "preprocessor_config.json")
    if not values:
        raise BadModel(f"{directory} has no preprocessor_config.json")
    return ClipPixels({key: value for key, value in values.items() if value is not None})


def _size(value: Any, *, square: bool = False) -> int | tuple[int, int]:
    """`336`, `{"shortest_edge": 336}` or `{"height": 336, "width": 336}` -> the shorter edge, or (width, height)."""
    if isinstance(value, int):
        return (value, value) if square else value
    if set(value) == {"shortest_edge"}:
        return int(value["shortest_edge"])
    if set(value) == {"height", "width"}:
        return int(value["width"]), int(value["height"])
    raise BadModel(f"image processor: size {value!r} is not supported")
