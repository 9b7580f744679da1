"""What a decoder takes out of safetensors files, and what it says of those that don't fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from paged_decoder import CPU, Paged
from safetensors.torch import load_file, save_file
from step_plans import Row
from tiny_model import build_decoder

from mmserve.models import weights
from mmserve.models.decoder import Decoder
from mmserve.models.parallel import Shard
from mmserve.models.weights import META, BadCheckpoint, Checkpoint

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    torch.manual_seed(2)
    build_decoder(directory, **SHAPE)
    return directory


def rewritten(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def logits(decoder: Decoder) -> torch.Tensor:
    return Paged(decoder).run([Row(range(20), [0, 1])])[0]


def test_missing_misshapen_and_unknown_tensors_are_all_named(plain_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(plain_dir / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 95)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.int8)
    tensors["model.layers.7.mlp.down_proj.weight"] = torch.zeros(2)
    with pytest.raises(BadCheckpoint) as caught:
        Decoder.load(rewritten(plain_dir, tmp_path / "bad", tensors), CPU, torch.float32)
    message = str(caught.value)
    assert "missing model.norm.weight" in message
    assert "model.layers.0.mlp.down_proj.weight has shape [64, 95], expected [64, 96]" in message
    assert "model.layers.1.mlp.down_proj.weight holds I8, expected one of F64, F32, F16, BF16" in message
    assert "unknown model.layers.7.mlp.down_proj.weight" in message


def test_nothing_is_read_from_a_checkpoint_that_does_not_fit(plain_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(plain_dir / "model.safetensors")
    tensors["model.stray"] = torch.zeros(1)
    calls: list[tuple[int, int]] = []
    with pytest.raises(BadCheckpoint, match=r"unknown model\.stray"):
        Decoder.load(rewritten(plain_dir, tmp_path / "stray", tensors), CPU, torch.float32, on_progress=lambda *done: calls.append(done))
    assert calls == []


def test_a_directory_without_safetensors_is_refused(plain_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((plain_dir / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle that must not be opened")
    with pytest.raises(BadCheckpoint, match="no safetensors"):
        Decoder.load(tmp_path, CPU, torch.float32)


def test_several_files_and_computed_leftovers_are_read_like_one_file(plain_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(plain_dir / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = torch.zeros(424, 64)  # tied: whatever it holds, the table is the head
    directory = rewritten(plain_dir, tmp_path / "several", {})
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"tok_embeddings.weight": torch.zeros(2)}, directory / "consolidated.safetensors")  # the same weights in another's layout
    assert torch.equal(logits(Decoder.load(directory, CPU, torch.float32)), logits(Decoder.load(plain_dir, CPU, torch.float32)))


def test_a_decoder_inside_a_larger_model_is_found_by_its_names(plain_dir: Path, tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(plain_dir / "model.safetensors").items()}
    tensors["vision_tower.patches.weight"] = torch.zeros(3)
    directory = rewritten(plain_dir, tmp_path / "larger", tensors)
    config = json.loads((plain_dir / "config.json").read_text())
    (directory / "config.json").write_text('{"model_type": "llava"}')

    def names(name: str) -> str | None:
        return name.removeprefix("language_model.") if name.startswith("language_model.") else None

    decoder = Decoder.load(directory, CPU, torch.float32, config=config, names=names)
    assert torch.equal(logits(decoder), logits(Decoder.load(plain_dir, CPU, torch.float32)))
    with pytest.raises(BadCheckpoint, match=r"unknown vision_tower\.patches\.weight"):
        Decoder.load(directory, CPU, torch.float32, config=config, names=lambda name: names(name) or name)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2), "model.a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, CPU, torch.float32, names=lambda name: name.removeprefix("model."))
    checkpoint.take("a.weight", 2)
    with pytest.raises(BadCheckpoint, match=r"a\.weight is there twice, as .*a\.weight and as .*a\.weight"):
        checkpoint.finish()


def test_a_shard_takes_its_rows_or_columns_only(tmp_path: Path) -> None:
    table = torch.arange(35.0).view(5, 7)
    save_file({"rows": table, "columns": table.clone()}, tmp_path / "model.safetensors")
    for rank, (rows, columns) in enumerate([((0, 2), (0, 3)), ((2, 4), (3, 6)), ((4, 5), (6, 7))]):
        checkpoint = Checkpoint(tmp_path, CPU, torch.bfloat16)
        shard = Shard(rank, 3)
        assert torch.equal(checkpoint.take("rows", 5, 7, shard=shard), table[slice(*rows)].bfloat16())
        assert torch.equal(checkpoint.take("columns", 5, 7, shard=shard, dim=1), table[:, slice(*columns)].bfloat16())
        checkpoint.finish()


def test_a_tensor_may_fill_a_rearranged_part_of_another(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "model.safetensors")
    target = torch.full((2, 4), -1.0)
    Checkpoint(tmp_path, CPU, torch.float32).fill(target[1].view(2, 2).t(), "a", 4)
    assert target.tolist() == [[-1, -1, -1, -1], [0, 2, 1, 3]]


@pytest.mark.parametrize("piece_bytes", [1, 600, 10**9])
def test_tensors_read_in_pieces_are_whole(plain_dir: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(Decoder.load(plain_dir, CPU, torch.float32))
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    assert torch.equal(logits(Decoder.load(plain_dir, CPU, torch.float32)), expected)


def test_progress_is_told_in_bytes_up_to_the_last(plain_dir: Path) -> None:
    calls: list[tuple[int, int]] = []
    Decoder.load(plain_dir, CPU, torch.float32, on_progress=lambda done, total: calls.append((done, total)))
    num_bytes = sum(tensor.nbytes for tensor in load_file(plain_dir / "model.safetensors").values())
    assert {total for _, total in calls} == {num_bytes}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (num_bytes, num_bytes)


def test_a_checkpoint_for_no_device_is_checked_without_memory(plain_dir: Path) -> None:
    checkpoint = Checkpoint(plain_dir, META, torch.float32)
    assert checkpoint.take("model.norm.weight", 64).is_meta
    assert "model.norm.weight" not in checkpoint
    with pytest.raises(BadCheckpoint, match=r"unknown model\.embed_tokens\.weight"):
        checkpoint.finish()
