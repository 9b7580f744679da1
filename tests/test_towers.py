"""The towers against transformers, item by item."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_model import TOKENS_PER_IMAGE, build
from torch import nn
from transformers import CLIPImageProcessorPil, CLIPVisionModel, WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmserve.composition import ClipSpec, Composition, WhisperSpec, load_composition
from mmserve.composition.picture_fit import Stretch
from mmserve.encoders.audio_tower import AudioTower
from mmserve.encoders.vision_tower import VisionTower
from mmserve.models.tower import TowerItem
from mmserve.models.weights import BadCheckpoint
from mmserve.worker.encoder_worker import load_towers

CPU = torch.device("cpu")
SIDE = 56


@pytest.fixture(scope="module")
def composition(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return load_composition(build(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def vision_spec(composition: Composition) -> ClipSpec:
    spec = composition.vision_of("small")
    assert isinstance(spec, ClipSpec)
    return spec


@pytest.fixture(scope="module")
def audio_spec(composition: Composition) -> WhisperSpec:
    return composition.audio_of("small")


@pytest.fixture(scope="module")
def vision(vision_spec: ClipSpec) -> VisionTower:
    return VisionTower(vision_spec, CPU, torch.float32)


@pytest.fixture(scope="module")
def audio(audio_spec: WhisperSpec) -> AudioTower:
    return AudioTower(audio_spec, CPU, torch.float32)


def picture(seed: int, tiles: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (tiles, SIDE, SIDE, 3), np.uint8))


def sound(seed: int, count: int) -> torch.Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal(count) * 0.1).astype(np.float32))


def encode(tower: VisionTower | AudioTower, items: Sequence[torch.Tensor], counts: Sequence[int], decoder: str) -> list[torch.Tensor]:
    return tower.encode([TowerItem(item, count) for item, count in zip(items, counts, strict=True)], decoder)


def num_rows(window: torch.Tensor) -> int:
    return -(-len(window) // 640)


def projector(file: Path) -> nn.Sequential:
    """As the training code writes it: linear, GELU (erf), linear."""
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    first = nn.Linear(*reversed(tensors["linear_1.weight"].shape))
    second = nn.Linear(*reversed(tensors["linear_2.weight"].shape))
    first.load_state_dict({"weight": tensors["linear_1.weight"], "bias": tensors["linear_1.bias"]})
    second.load_state_dict({"weight": tensors["linear_2.weight"], "bias": tensors["linear_2.bias"]})
    return nn.Sequential(first, nn.GELU(), second)


@torch.no_grad()
def vision_oracle(spec: ClipSpec, tile: torch.Tensor, decoder: str) -> torch.Tensor:
    processor = CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False)
    pixels = processor(Image.fromarray(tile.numpy()), return_tensors="pt")["pixel_values"]
    tower = CLIPVisionModel.from_pretrained(spec.weights.path, dtype=torch.float32).eval()
    hidden = tower(pixels, output_hidden_states=True).hidden_states[spec.feature_layers[0]][0, 1:]
    return projector(spec.projectors[decoder].path)(hidden)


@torch.no_grad()
def audio_oracle(spec: WhisperSpec, samples: torch.Tensor, decoder: str) -> torch.Tensor:
    extract = WhisperFeatureExtractor(feature_size=80, chunk_length=int(spec.window_s))
    mels = extract(samples.numpy(), sampling_rate=16_000, return_tensors="pt").input_features
    encoder = WhisperEncoder(WhisperConfig.from_pretrained(spec.weights.path))
    encoder.load_state_dict({name: tensor.float() for name, tensor in load_file(spec.weights.path / "model.safetensors").items()})
    hidden = encoder.eval()(mels).last_hidden_state[0]
    pooled = (hidden[0::2] + hidden[1::2]) / 2
    return projector(spec.projectors[decoder].path)(pooled[: -(-len(samples) // 640)])


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("decoder", "width"), [("small", 64), ("large", 96)])
def test_a_picture_becomes_the_rows_of_transformers(vision: VisionTower, vision_spec: ClipSpec, decoder: str, width: int) -> None:
    tile = picture(1)
    (rows,) = encode(vision, [tile], [TOKENS_PER_IMAGE], decoder)
    assert rows.shape == (TOKENS_PER_IMAGE, width)
    assert_close(rows, vision_oracle(vision_spec, tile[0], decoder))


def test_an_earlier_layer_can_be_the_feature(vision_spec: ClipSpec) -> None:
    spec = dataclasses.replace(vision_spec, feature_layers=(-2,))
    tile = picture(2)
    (rows,) = encode(VisionTower(spec, CPU, torch.float32), [tile], [TOKENS_PER_IMAGE], "small")
    assert_close(rows, vision_oracle(spec, tile[0], "small"))


def test_neighbours_in_a_batch_change_no_picture(vision: VisionTower) -> None:
    tiles = [picture(i) for i in range(6)]
    together = encode(vision, tiles, [TOKENS_PER_IMAGE] * 6, "small")
    for tile, rows in zip(tiles, together, strict=True):
        (alone,) = encode(vision, [tile], [TOKENS_PER_IMAGE], "small")
        torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-5)


def test_an_item_of_several_tiles_gives_its_tiles_in_order(vision: VisionTower) -> None:
    three = picture(3, tiles=3)
    first, rows = encode(vision, [picture(9), three], [TOKENS_PER_IMAGE, 3 * TOKENS_PER_IMAGE], "small")
    assert len(first) == TOKENS_PER_IMAGE
    single = [encode(vision, [three[i : i + 1]], [TOKENS_PER_IMAGE], "small")[0] for i in range(3)]
    assert_close(rows, torch.cat(single))


def test_a_count_that_does_not_match_is_refused_loudly(vision: VisionTower, audio: AudioTower) -> None:
    with pytest.raises(ValueError, match="reserved"):
        encode(vision, [picture(1)], [TOKENS_PER_IMAGE - 1], "small")
    with pytest.raises(ValueError, match="reserved"):
        encode(audio, [sound(1, 16_000)], [24], "small")
    with pytest.raises(ValueError, match="reserved"):
        encode(audio, [sound(1, 16_001)], [26], "small")


@pytest.mark.parametrize("count", [1, 639, 640, 641, 7_777, 16_000])
@pytest.mark.parametrize("decoder", ["small", "large"])
def test_a_window_becomes_the_rows_of_transformers(audio: AudioTower, audio_spec: WhisperSpec, count: int, decoder: str) -> None:
    samples = sound(count, count)
    (rows,) = encode(audio, [samples], [-(-count // 640)], decoder)
    assert_close(rows, audio_oracle(audio_spec, samples, decoder))


def test_every_length_gives_the_rows_that_the_composition_counts(audio: AudioTower, audio_spec: WhisperSpec) -> None:
    lengths = list(range(1, 16_001, 137 * 9))
    counts = [audio_spec.windows(b"c", "small", length)[0].num_rows for length in lengths]
    encoded = encode(audio, [sound(0, length) for length in lengths], counts, "small")
    assert [len(rows) for rows in encoded] == [-(-length // 640) for length in lengths]


def test_loud_and_short_neighbours_change_no_window(audio: AudioTower) -> None:
    windows = [sound(1, 16_000), sound(2, 16_000) * 30, sound(3, 50), torch.zeros(16_000), sound(4, 9_000)]
    counts = [num_rows(window) for window in windows]
    together = encode(audio, windows, counts, "small")
    for window, count, rows in zip(windows, counts, together, strict=True):
        (alone,) = encode(audio, [window], [count], "small")
        torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-4)


def test_one_bad_sample_spoils_its_own_window_only(audio: AudioTower) -> None:
    bad = sound(5, 16_000)
    bad[100] = float("nan")
    good, spoilt, last = encode(audio, [sound(6, 16_000), bad, sound(7, 16_000)], [25, 25, 25], "small")
    assert good.isfinite().all()
    assert not spoilt.isfinite().all()
    assert last.isfinite().all()


def test_towers_run_in_half_precision(vision_spec: ClipSpec, audio_spec: WhisperSpec) -> None:
    tile, samples = picture(4), sound(8, 16_000)
    (rows,) = encode(VisionTower(vision_spec, CPU, torch.bfloat16), [tile], [TOKENS_PER_IMAGE], "small")
    expected = vision_oracle(vision_spec, tile[0], "small")
    assert rows.dtype == torch.bfloat16
    assert ((rows.float() - expected).norm() / expected.norm()).item() < 0.05
    (heard,) = encode(AudioTower(audio_spec, CPU, torch.bfloat16), [samples], [25], "small")
    expected = audio_oracle(audio_spec, samples, "small")
    assert ((heard.float() - expected).norm() / expected.norm()).item() < 0.05


def test_the_bundled_towers_load_and_make_what_the_composition_counts() -> None:
    composition = load_composition()
    vision_spec = composition.vision_of("large")
    side, width = vision_spec.fit.side, composition.decoders["large"].hidden_size
    tower = VisionTower(vision_spec, CPU, torch.float32)
    (rows,) = encode(tower, [torch.zeros(1, side, side, 3, dtype=torch.uint8)], [vision_spec.fit.rows_per_tile], "large")
    assert rows.shape == (576, width)
    (heard,) = encode(AudioTower(composition.audio_of("large"), CPU, torch.float32), [torch.zeros(80_000)], [125], "large")
    assert heard.shape == (125, width)
    assert rows.isfinite().all()
    assert heard.isfinite().all()


@pytest.fixture
def spoilt(composition: Composition, tmp_path: Path) -> Path:
    return shutil.copytree(composition.decoders["small"].weights.path.parent, tmp_path / "model")


def drop_tensor(file: Path, name: str) -> None:
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_missing_weight_is_named_and_never_made_up(spoilt: Path) -> None:
    drop_tensor(spoilt / "vision" / "model.safetensors", "encoder.layers.1.mlp.fc1.weight")
    drop_tensor(spoilt / "audio" / "model.safetensors", "layers.1.fc1.weight")
    composition = load_composition(spoilt)
    with pytest.raises(BadCheckpoint, match=r"missing encoder\.layers\.1\.mlp\.fc1\.weight"):
        VisionTower(composition.vision_of("small"), CPU, torch.float32)
    with pytest.raises(BadCheckpoint, match=r"missing layers\.1\.fc1\.weight"):
        AudioTower(composition.audio_of("large"), CPU, torch.float32)  # type: ignore[arg-type]


def test_a_projector_that_does_not_fit_is_named(spoilt: Path) -> None:
    save_file({"linear_1.weight": torch.zeros(8, 8)}, spoilt / "projectors" / "vision-small.safetensors")
    with pytest.raises(BadCheckpoint, match=r"vision-small\.safetensors: missing linear_2\.weight"):
        VisionTower(load_composition(spoilt).vision_of("small"), CPU, torch.float32)


def test_a_tower_that_makes_other_counts_than_the_composition_says_is_refused(vision_spec: ClipSpec, audio_spec: WhisperSpec) -> None:
    with pytest.raises(BadCheckpoint, match="16 rows of 56 pixels"):
        VisionTower(dataclasses.replace(vision_spec, fit=Stretch(SIDE, 15)), CPU, torch.float32)
    with pytest.raises(BadCheckpoint, match="50 positions"):
        AudioTower(dataclasses.replace(audio_spec, window_s=1.5), CPU, torch.float32)
    for spec in (vision_spec, audio_spec):
        with pytest.raises(BadCheckpoint, match="format 'siglip' are not supported; supported are clip, whisper"):
            load_towers({"small": dataclasses.replace(spec, format="siglip")}, CPU, torch.float32)
