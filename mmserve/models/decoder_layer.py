"""What one decoder layer holds, and how a rank's part of it gets out of a checkpoint.

Query, key and value share one matrix, gate and up another: allocated once and filled in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmserve.models.decoder_config import DecoderConfig
from mmserve.models.linear import Linear, LinearMaker
from mmserve.models.norm import RmsNorm
from mmserve.models.parallel import Shard
from mmserve.models.rotary import pairs_of_halves
from mmserve.models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: RmsNorm
    qkv: Linear
    query_norm: RmsNorm | None  # over a head, its weight in the order of rotated pairs
    key_norm: RmsNorm | None
    out: Linear  # of this rank's heads: the ranks' results are to be summed
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear  # likewise


def load_layer(config: DecoderConfig, checkpoint: Checkpoint, index: int, shard: Shard, make_linear: LinearMaker) -> Layer:
    """What doesn't fit is reported by `checkpoint.finish`."""
    return _LayerReader(config, checkpoint, f"model.layers.{index}.", shard, make_linear).read()


@dataclass(frozen=True, slots=True)
class _LayerReader:
    config: DecoderConfig
    checkpoint: Checkpoint
    prefix: str
    shard: Shard
    make_linear: LinearMaker

    def read(self) -> Layer:
        config, width = self.config, self.config.num_heads * self.config.head_dim
        return Layer(
            input_norm=self._norm("input_layernorm"),
            qkv=self.make_linear(self._qkv("weight", config.hidden_size), self._qkv("bias") if config.qkv_bias else None),
            query_norm=self._head_norm("q_norm") if config.qk_norm else None,
            key_norm=self._head_norm("k_norm") if config.qk_norm else None,
            out=self._narrowing("self_attn.o_proj", width, has_bias=config.out_bias),
            post_norm=self._norm("post_attention_layernorm"),
            gate_up=self.make_linear(self._gate_up("weight", config.hidden_size), self._gate_up("bias") if config.mlp_bias else None),
            down=self._narrowing("mlp.down_proj", config.intermediate_size, has_bias=config.mlp_bias),
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.checkpoint.device, dtype=self.checkpoint.dtype)

    def _norm(self, name: str) -> RmsNorm:
        return self._rms_norm(self.checkpoint.take(f"{self.prefix}{name}.weight", self.config.hidden_size))

    def _rms_norm(self, weight: torch.Tensor) -> RmsNorm:
        return RmsNorm(weight.to(self.make_linear.computes_in), self.config.rms_norm_eps)

    def _head_norm(self, name: str) -> RmsNorm:
        weight = self._empty(self.config.head_dim)
        halves = pairs_of_halves(weight, self.config.head_dim)
        self.checkpoint.fill(halves, f"{self.prefix}self_attn.{name}.weight", self.config.head_dim)
        return self._rms_norm(weight)

    def _qkv(self, kind: str, *columns: int) -> torch.Tensor:
        config, prefix = self.config, f"{self.prefix}self_attn."
        kv_shard = self.shard.of_kv_heads(config.num_kv_heads)
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        own_q, own_kv = num_q // self.shard.size, num_kv // kv_shard.size
        target = self._empty(own_q + 2 * own_kv, *columns)
        query, key, value = target.split((own_q, own_kv, own_kv))
        query, key = pairs_of_halves(query, config.head_dim), pairs_of_halves(key, config.head_dim)
        self.checkpoint.fill(query, f"{prefix}q_proj.{kind}", num_q, *columns, shard=self.shard)
        self.checkpoint.fill(key, f"{prefix}k_proj.{kind}", num_kv, *columns, shard=kv_shard)
        self.checkpoint.fill(value, f"{prefix}v_proj.{kind}", num_kv, *columns, shard=kv_shard)
        return target

    def _gate_up(self, kind: str, *columns: int) -> torch.Tensor:
        inner = self.config.intermediate_size
        target = self._empty(2 * inner // self.shard.size, *columns)
        for half, name in zip(target.chunk(2), ("gate_proj", "up_proj"), strict=True):
            self.checkpoint.fill(half, f"{self.prefix}mlp.{name}.{kind}", inner, *columns, shard=self.shard)
        return target

    def _narrowing(self, name: str, num_in: int, *, has_bias: bool) -> Linear:
        hidden = self.config.hidden_size
        weight = self.checkpoint.take(f"{self.prefix}{name}.weight", hidden, num_in, shard=self.shard, dim=1)
        bias = self.checkpoint.take(f"{self.prefix}{name}.bias", hidden) if has_bias else None
        # Results are summed over the ranks: one of them brings the bias.
        return self.make_linear(weight, bias if self.shard.rank == 0 else None)
