"""Log-mel frames as `WhisperFeatureExtractor` makes them: which settings of it are built, and how many rows Qwen's towers give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmserve.composition.files import read_optional_json
from mmserve.composition.model import require
from mmserve.composition.weights import BadModel

SAMPLE_RATE = 16_000  # Hz
SAMPLES_PER_FRAME = 160

_CHUNK_S = 30  # the extractor's own default
_BUILT = {"sampling_rate": SAMPLE_RATE, "hop_length": SAMPLES_PER_FRAME, "n_fft": 400, "padding_value": 0.0, "dither": 0.0}


@dataclass(frozen=True, slots=True)
class FeatureExtractor:
    """What of a feature extractor differs between models."""

    longest_s: float  # of a clip
    pads_left: bool  # frames end with the clip, else they begin with it


def num_frames(num_samples: int) -> int:
    """Of a clip with silence behind it."""
    return -(-num_samples // SAMPLES_PER_FRAME)


def num_pooled_rows(num_frames: int) -> int:
    """Two convolutions halve the frames, rounded up; pairs of those are averaged, and a single one at the end is left out."""
    return (num_frames + 1) // 4


def read_feature_extractor(path: Path, num_mel_bins: int, padding_sides: tuple[str, ...] = ("right",)) -> FeatureExtractor:
    """Raises BadModel where the directory's does something that isn't built."""
    values = read_optional_json(path / "processor_config.json").get("feature_extractor")
    values = values or read_optional_json(path / "preprocessor_config.json")
    if not values:
        raise BadModel(f"{path} has no preprocessor_config.json")
    for field, value in {**_BUILT, "feature_size": num_mel_bins}.items():
        require(values, field, (value,))
    require(values, "padding_side", padding_sides)
    return FeatureExtractor(float(values.get("chunk_length", _CHUNK_S)), values.get("padding_side") == "left")
