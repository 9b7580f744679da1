"""LLaVA directories against transformers, stage by stage: counts, pixels, rows, prompts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import published_models as published
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaNextForConditionalGeneration, LlavaNextProcessor, LlavaProcessor

from mmserve.composition import Composition, load_composition
from mmserve.composition.picture_fit import AnyRes, PictureFit, ResizeAndCrop
from mmserve.encoders import image
from mmserve.encoders.image_header import read_header
from mmserve.encoders.vision_tower import VisionTower
from mmserve.media import ImageHeader, MediaItem, MediaKind, MediaLimits
from mmserve.models.tower import TowerItem
from mmserve.request import ChatRequest, Message
from mmserve.tokenizer import load_tokenizers
from tests import media_corpus as corpus

CPU = torch.device("cpu")
SIZES = [(56, 56), (90, 60), (33, 140), (200, 57), (400, 31), (112, 113), (7, 300), (641, 479), (1, 1), (57, 3)]
FORMATS = {
    "llava": (published.build_llava, LlavaForConditionalGeneration, LlavaProcessor),
    "llava_next": (published.build_llava_next, LlavaNextForConditionalGeneration, LlavaNextProcessor),
}


class Published:
    """One directory, read by us and by transformers."""

    def __init__(self, name: str, directory: Path) -> None:
        build, model, processor = FORMATS[name]
        self.directory = build(directory)
        self.composition: Composition = load_composition(small=directory)
        self.processor: Any = processor.from_pretrained(directory)
        self.model: Any = model.from_pretrained(directory, dtype=torch.float32).eval()
        self.vision = self.composition.vision_of("small")
        self.tower = VisionTower(self.vision, CPU, torch.float32)

    @torch.no_grad()
    def rows(self, pixels: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return list(self.model.get_image_features(**pixels).pooler_output)


@pytest.fixture(scope="module", params=list(FORMATS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(request.param, tmp_path_factory.mktemp(request.param))


def tiles_of(data: bytes, fit: PictureFit) -> torch.Tensor:
    return torch.from_numpy(image.decode(data, fit).copy())


def rgb(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_the_pil_processor(model: Published, size: tuple[int, int]) -> None:
    data = published.picture(sum(size), *size)
    tiles = image.decode(data, model.vision.fit)
    assert tiles.shape == model.vision.fit.feature_shape(*size)
    expected = np.asarray(model.processor.image_processor([rgb(data)], return_tensors="np")["pixel_values"])
    ours = (tiles / 255 - model.vision.mean) / model.vision.std
    np.testing.assert_allclose(ours.transpose(0, 3, 1, 2), expected.reshape(-1, 3, 56, 56), atol=1e-5)


def test_rows_are_those_of_transformers_for_pictures_of_every_shape_in_one_batch(model: Published) -> None:
    pictures = [published.picture(i, *size) for i, size in enumerate(SIZES)]
    expected = model.rows(model.processor.image_processor([rgb(data) for data in pictures], return_tensors="pt"))
    items = []
    for data, size in zip(pictures, SIZES, strict=True):
        window = model.vision.windows(b"c", "small", ImageHeader("png", *size))[0]
        items.append(TowerItem(tiles_of(data, model.vision.fit), window.num_rows, size))
    for ours, theirs in zip(model.tower.encode(items, "small"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_prompt_is_that_of_the_processor_with_each_picture_in_its_place(model: Published) -> None:
    sizes = [(90, 60), (30, 200)]
    pictures = [published.picture(i, *size) for i, size in enumerate(sizes)]
    parts = ["compare  ", pictures[0], " with ", pictures[1], " now\n"]
    inputs = model.processor.apply_chat_template(
        published.messages(*parts), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    items = [MediaItem(MediaKind.IMAGE, part) if isinstance(part, bytes) else part for part in parts]
    pieces = load_tokenizers(model.composition)["small"].pieces(ChatRequest((Message("user", tuple(items)),)))
    image_token = model.processor.image_token_id
    ours: list[int] = []
    for piece in pieces:
        if isinstance(piece, list):
            ours += piece
        else:
            ours += [image_token] * model.vision.fit.num_rows(*sizes[pictures.index(piece.data)])
    assert ours == inputs["input_ids"][0].tolist()


def test_a_placeholder_typed_by_a_user_is_text(model: Published) -> None:
    tokenizer = load_tokenizers(model.composition)["small"]
    (ids,) = tokenizer.pieces(ChatRequest((Message("user", ("see <image> and <|end|>",)),)))
    assert not {model.processor.image_token_id, 1} & set(ids)
    assert "<image> and <|end|>" in tokenizer.decode(ids)


@pytest.mark.parametrize("orientation", [1, 6, 8])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_picture_on_its_side_is_counted_and_cut_as_it_is_seen(model: Published, format: str, orientation: int) -> None:
    data = corpus.oriented(orientation, format)
    header = read_header(data, MediaLimits(), None)
    assert header.upright_size == (96, 64)
    assert image.decode(data, model.vision.fit).shape == model.vision.fit.feature_shape(96, 64)


def test_the_full_strategy_and_several_layers_keep_the_class_token_and_all_states(tmp_path: Path) -> None:
    published.build_llava(tmp_path, vision_feature_select_strategy="full", vision_feature_layer=[-2, 1])
    spec = load_composition(small=tmp_path).vision_of("small")
    assert spec.fit.num_rows(9, 9) == 17
    data = published.picture(1, 90, 60)
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    pixels = LlavaProcessor.from_pretrained(tmp_path).image_processor([rgb(data)], return_tensors="pt")
    with torch.no_grad():
        (expected,) = model.get_image_features(**pixels).pooler_output
    item = TowerItem(tiles_of(data, spec.fit), 17, (90, 60))
    (ours,) = VisionTower(spec, CPU, torch.float32).encode([item], "small")
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


NEXT = AnyRes(336, 24, ((672, 336), (336, 672), (672, 672), (336, 1008), (1008, 336)))


@given(st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=300, deadline=None)
def test_counts_from_the_header_are_those_of_the_processor(width: int, height: int) -> None:
    oracle = LlavaNextProcessor._get_number_of_features
    processor = type("Processor", (), {"patch_size": 14, "num_additional_image_tokens": 1})()
    processor.image_processor = type("Pixels", (), {"image_grid_pinpoints": [[h, w] for w, h in NEXT.canvases]})()
    processor._get_unpadded_features = LlavaNextProcessor._get_unpadded_features.__get__(processor)
    assert NEXT.num_rows(width, height) == oracle(processor, height, width, 336, 336) - 1
    assert NEXT.num_rows(width, height) <= 2928


@given(st.integers(1, 900), st.integers(1, 900))
@settings(max_examples=60, deadline=None)
def test_the_tower_makes_the_rows_that_were_counted(any_res: VisionTower, width: int, height: int) -> None:
    fit = any_res._fit
    num_rows = fit.num_rows(width, height)
    features = torch.zeros(fit.feature_shape(width, height), dtype=torch.uint8)
    (rows,) = any_res.encode([TowerItem(features, num_rows, (width, height))], "small")
    assert len(rows) == num_rows


@pytest.fixture(scope="module")
def any_res(tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    directory = published.build_llava_next(tmp_path_factory.mktemp("any-res"))
    return VisionTower(load_composition(small=directory).vision_of("small"), CPU, torch.float32)


def test_a_small_picture_lies_on_black_in_the_middle_of_the_cut() -> None:
    fit = ResizeAndCrop(6, 1, None, True)
    (tile,) = image.decode(published.picture(0, 3, 9), fit)
    assert tile.shape == (6, 6, 3)
    assert not tile[:, :2].any()
    assert not tile[:, 5:].any()
    assert tile[:, 2:5].any()
