"""What a directory is read into, and what is said when it can't be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import published_models as published
import pytest
import tiny_model
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from mmserve.composition import BadModel, WeightNames, Weights, load_composition
from mmserve.composition.decoder_config import DEFAULTS, complete_config
from mmserve.composition.llava import DECODER_NAMES, PROJECTOR_NAMES, TOWER_NAMES
from mmserve.composition.weights import AS_WRITTEN, weight_files
from mmserve.errors import BadRequest
from mmserve.media import ImageHeader, MediaKind


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.build_llava(tmp_path_factory.mktemp("models") / "llava-tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.build_text(tmp_path_factory.mktemp("models") / "text-tiny")


@pytest.fixture
def copy(llava: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llava, tmp_path / "copy")


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("model_type", list(DEFAULTS))
def test_an_empty_config_is_that_of_transformers(model_type: str) -> None:
    windows = {"use_sliding_window": True} if model_type.startswith("qwen") else {}
    ours, theirs = complete_config({"model_type": model_type} | windows), AutoConfig.for_model(model_type, **windows).to_dict()
    del ours["head_dim"], ours["model_type"]
    assert ours == {field: theirs[field] for field in ours}


def test_a_decoder_alone_is_small_and_takes_text(text: Path) -> None:
    composition = load_composition(small=text)
    assert (composition.name, list(composition.decoders), composition.modalities) == ("text-tiny", ["small"], ("text",))
    assert load_composition(text) == composition
    assert composition.decoders["small"].eos_token_ids == (1,)


def test_only_the_decoder_that_has_a_tower_takes_pictures(llava: Path, text: Path) -> None:
    composition = load_composition(small=llava, large=text)
    assert composition.modalities == ("text", "image")
    assert composition.modalities_of("large") == ("text",)
    assert composition.decoders_taking([MediaKind.IMAGE]) == ("small",)
    with pytest.raises(BadRequest, match="the large model does not take images"):
        composition.vision_of("large", "messages")


def test_our_own_format_is_read_by_either_flag_and_is_not_one_of_two(tmp_path: Path, text: Path) -> None:
    directory = tiny_model.build(tmp_path / "tiny")
    assert load_composition(small=directory) == load_composition(directory)
    with pytest.raises(BadModel, match="can't be one of two"):
        load_composition(small=directory, large=text)
    with pytest.raises(BadModel, match="either model, or small and large"):
        load_composition(directory, large=text)


def test_an_unknown_model_type_is_refused_with_what_is_supported(copy: Path) -> None:
    edit(copy / "config.json", model_type="gpt2")
    with pytest.raises(BadModel, match="'gpt2' are not supported; supported are llama, mistral, qwen2, qwen3, llava, llava_next"):
        load_composition(copy)


@pytest.mark.parametrize(
    ("file", "fields", "match"),
    [
        ("config.json", {"quantization_config": {"bits": 4}}, "quantized"),
        ("config.json", {"vision_config": {"model_type": "siglip_vision_model"}}, "model_type must be 'clip_vision_model'"),
        ("config.json", {"text_config": {"model_type": "phi"}}, "decoders of type 'phi'"),
        ("processor_config.json", {"image_processor": {"crop_size": 48}}, r"come out \(48, 48\), the tower takes 56x56"),
        ("processor_config.json", {"image_processor": None}, "no preprocessor_config.json"),
    ],
)
def test_what_is_not_built_is_named(copy: Path, file: str, fields: dict[str, object], match: str) -> None:
    edit(copy / file, **fields)
    with pytest.raises(BadModel, match=match):
        load_composition(copy)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_missing_file_is_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    with pytest.raises(BadModel, match=r"config\.json|tokenizer\.json|no safetensors|--chat-template"):
        load_composition(copy)


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, (10).to_bytes(8, "little") + b"{broken   ", (2).to_bytes(8, "little") + b"[]"])
def test_a_damaged_weight_file_is_named(copy: Path, content: bytes) -> None:
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(BadModel, match=r"model\.safetensors is cut off or no safetensors file"):
        load_composition(copy)


def test_tensors_that_belong_to_no_part_are_all_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"extra.a": np.zeros(1), "b.position_ids": np.zeros(1), "extra.c": np.zeros(1)}, copy / "model.safetensors")
    with pytest.raises(BadModel, match=r"unknown extra\.a; unknown extra\.c$"):
        load_composition(copy)


@pytest.mark.parametrize(
    ("rule", "name", "own"),
    [
        (DECODER_NAMES, "language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        (DECODER_NAMES, "model.language_model.norm.weight", "model.norm.weight"),
        (DECODER_NAMES, "language_model.lm_head.weight", "lm_head.weight"),
        (DECODER_NAMES, "lm_head.weight", "lm_head.weight"),
        (DECODER_NAMES, "model.vision_tower.post_layernorm.weight", None),
        (DECODER_NAMES, "language_model.model.layers.3.self_attn.rotary_emb.inv_freq", None),
        (TOWER_NAMES, "vision_tower.vision_model.pre_layrnorm.weight", "pre_layrnorm.weight"),
        (TOWER_NAMES, "model.vision_tower.vision_model.pre_layrnorm.weight", "pre_layrnorm.weight"),
        (TOWER_NAMES, "model.vision_tower.pre_layrnorm.weight", "pre_layrnorm.weight"),
        (TOWER_NAMES, "vision_tower.vision_model.embeddings.position_ids", None),
        (PROJECTOR_NAMES, "model.multi_modal_projector.linear_1.bias", "linear_1.bias"),
        (PROJECTOR_NAMES, "multi_modal_projector.linear_1.bias", "linear_1.bias"),
    ],
)
def test_every_spelling_of_a_name_is_known(rule: WeightNames, name: str, own: str | None) -> None:
    assert rule(name) == own


def test_a_digest_covers_a_parts_own_tensors_and_no_other(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tower, projector = Weights(copy, TOWER_NAMES), Weights(copy, PROJECTOR_NAMES)
    before = tower.digest(), projector.digest()
    tensors["multi_modal_projector.linear_1.bias"][0] += 1
    save_file(dict(reversed(tensors.items())), file)
    assert tower.digest() == before[0]
    assert projector.digest() != before[1]


def test_names_are_no_part_of_what_a_digest_must_agree_on(copy: Path) -> None:
    """The same tower in the spelling of another year makes the same rows."""
    before = Weights(copy, TOWER_NAMES).digest()
    file = copy / "model.safetensors"
    save_file({name.replace("vision_tower.", "model.vision_tower.vision_model."): t for name, t in load_file(file).items()}, file)
    assert Weights(copy, TOWER_NAMES).digest() == before


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    save_file({"vision_tower.a": np.zeros(1), "model.vision_tower.a": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"a is there twice, once as (model\.)?vision_tower\.a"):
        Weights(tmp_path, TOWER_NAMES).headers()


def test_what_an_index_does_not_list_is_not_read(tmp_path: Path) -> None:
    """Some publishers keep the same weights a second time beside the shards."""
    save_file({"a": np.zeros(2)}, tmp_path / "part-1.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "part-2.safetensors")
    save_file({"a": np.zeros(2), "b": np.zeros(2)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["part-1.safetensors", "part-2.safetensors"]
    assert set(Weights(tmp_path, AS_WRITTEN).headers()) == {"a", "b"}


def template_of(directory: Path, **kwargs: Path) -> str | None:
    return load_composition(directory, **kwargs).decoders["small"].prompt.chat_template


def test_the_chat_template_is_found_wherever_publishers_put_it(text: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(text, tmp_path / "model")
    assert template_of(directory) is None
    config = directory / "tokenizer_config.json"
    edit(config, chat_template="from the tokenizer")
    assert template_of(directory) == "from the tokenizer"
    edit(config, chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert template_of(directory) == "d"
    edit(config, chat_template=[{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}])
    with pytest.raises(BadModel, match="rag, tool_use and none is the default"):
        template_of(directory)
    (directory / "chat_template.json").write_text('{"chat_template": "from the processor"}')
    assert template_of(directory) == "from the processor"
    (directory / "chat_template.jinja").write_text("from its own file")
    assert template_of(directory) == "from its own file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert template_of(directory, chat_template=tmp_path / "mine.jinja") == "mine"


def test_ids_that_end_an_answer_come_from_the_generation_config_first(text: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(text, tmp_path / "model")
    edit(directory / "generation_config.json", eos_token_id=[1, 7])
    assert load_composition(directory).decoders["small"].eos_token_ids == (1, 7)
    (directory / "generation_config.json").unlink()
    assert load_composition(directory).decoders["small"].eos_token_ids == (1,)


FALLBACK = '[vision.fallback]\nencoder = "vision"\nprojectors = { small = "projectors/vision-small.safetensors" }\n'


def with_fallback(directory: Path, table: str) -> Path:
    tiny_model.build(directory)
    file = directory / "composition.toml"
    file.write_text(file.read_text().replace("[audio]", f"{table}\n[audio]"))
    return directory


def test_a_fallback_encoder_serves_the_decoders_it_has_projectors_for_under_keys_of_its_own(tmp_path: Path) -> None:
    composition = load_composition(with_fallback(tmp_path, FALLBACK + "feature_layer = -2\n"))
    fallback = composition.fallback(MediaKind.IMAGE)
    assert fallback is not None
    assert composition.fallback(MediaKind.AUDIO) is None
    assert (list(composition.vision), list(fallback.vision)) == (["small", "large"], ["small"])
    header = ImageHeader("png", 64, 64)
    first, second = (each.vision["small"].windows(bytes(32), "small", header) for each in (composition, fallback))
    assert [window.num_rows for window in first] == [window.num_rows for window in second]
    assert first[0].key != second[0].key


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (FALLBACK + "tokens_per_item = 4", "tokens_per_item"),
        (FALLBACK + 'placeholder = "<x>"', "placeholder"),
        ("[vision.fallback]\nimage_size = 28", "fallback.encoder"),
    ],
)
def test_a_fallback_that_would_change_the_prompt_is_refused(tmp_path: Path, line: str, named: str) -> None:
    with pytest.raises(BadModel, match=named):
        load_composition(with_fallback(tmp_path, line))
