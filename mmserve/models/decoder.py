"""The Llama architecture over a paged KV cache: one batch of T tokens in, T hidden vectors out.

Plain functions over tensors: sequences, blocks and plans are the runner's and the attention backend's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from mmserve.models.decoder_config import DecoderConfig, inverse_frequencies, read_config
from mmserve.models.paged_attention import AttentionPlan, PagedAttention
from mmserve.models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights are [out, in].  Query, key and value share one matrix, gate and up another."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Decoder:
    """Frozen weights of one decoder on one device."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._embedding = checkpoint.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [_load_layer(config, checkpoint, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            checkpoint.drop("lm_head.weight")
            self._head = self._embedding
        else:
            self._head = checkpoint.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._rotations = _rotations(config).to(device)

    @classmethod
    def load(cls, directory: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
        """Read a `transformers` directory.  Raises BadCheckpoint naming everything that doesn't fit."""
        config = read_config(directory)
        checkpoint = Checkpoint(directory, device, dtype)
        decoder = cls(config, checkpoint, device, dtype)
        checkpoint.finish()
        return decoder

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, H]"""
        return F.embedding(token_ids, self._embedding)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: PagedAttention, plan: AttentionPlan) -> torch.Tensor:
        """[T, H] and int [T] -> [T, H], after the final norm.  Writes K and V of all T tokens to the slots of `plan`."""
        config = self.config
        rotations = self._rotations[positions].unsqueeze(1)  # complex64 [T, 1, head_dim / 2]
        num_rotated = config.num_heads + config.num_kv_heads
        heads = (-1, num_rotated + config.num_kv_heads, config.head_dim)
        for index, layer in enumerate(self._layers):
            qkv = F.linear(self._normed(hidden, layer.input_norm), layer.qkv, layer.qkv_bias).view(heads)
            rotated = _rotate(qkv[:, :num_rotated], rotations)
            query, key = rotated.split((config.num_heads, config.num_kv_heads), dim=1)
            attended = attention.forward(index, query, key, qkv[:, num_rotated:], plan)
            hidden = hidden + F.linear(attended, layer.out, layer.out_bias)
            gate, up = F.linear(self._normed(hidden, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return self._normed(hidden, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> fp32 [R, V]"""
        return F.linear(hidden, self._head).float()

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.rms_norm_eps)


def _rotate(heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Turn each pair of elements by its angle: one complex product.  Loading has put the two halves of a pair side by side."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(heads.dtype)


def _rotations(config: DecoderConfig) -> torch.Tensor:
    """complex64 [max_position_embeddings, head_dim / 2]"""
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float64), inverse_frequencies(config))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _load_layer(config: DecoderConfig, checkpoint: Checkpoint, prefix: str) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def projection(part: str, rows: int, *columns: int) -> torch.Tensor:
        tensor = checkpoint.take(f"{prefix}self_attn.{part}", rows, *columns)
        return tensor if part.startswith("v_proj") else _pairs_adjacent(tensor, config.head_dim)

    def qkv(kind: str, *columns: int) -> torch.Tensor:
        sizes = (("q_proj", num_q), ("k_proj", num_kv), ("v_proj", num_kv))
        return torch.cat([projection(f"{part}.{kind}", rows, *columns) for part, rows in sizes])

    def gate_up(kind: str, *columns: int) -> torch.Tensor:
        return torch.cat([checkpoint.take(f"{prefix}mlp.{part}.{kind}", inner, *columns) for part in ("gate_proj", "up_proj")])

    return Layer(
        input_norm=checkpoint.take(f"{prefix}input_layernorm.weight", hidden),
        qkv=qkv("weight", hidden),
        qkv_bias=qkv("bias") if config.attention_bias else None,
        out=checkpoint.take(f"{prefix}self_attn.o_proj.weight", hidden, num_q),
        out_bias=checkpoint.take(f"{prefix}self_attn.o_proj.bias", hidden) if config.attention_bias else None,
        post_norm=checkpoint.take(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=gate_up("weight", hidden),
        gate_up_bias=gate_up("bias") if config.mlp_bias else None,
        down=checkpoint.take(f"{prefix}mlp.down_proj.weight", hidden, inner),
        down_bias=checkpoint.take(f"{prefix}mlp.down_proj.bias", hidden) if config.mlp_bias else None,
    )


def _pairs_adjacent(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's rows from (0, d/2, ...) halves to pairs.  Queries and keys alike, so that their products don't change."""
    halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
