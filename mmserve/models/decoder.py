"""The Llama architecture and its kin over a paged KV cache: one batch of T tokens in, T hidden vectors out.

Plain functions over tensors: sequences, blocks and plans are the runner's and the attention backend's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mmserve.composition.weights import AS_WRITTEN
from mmserve.models.attention import AttentionBackend, P
from mmserve.models.decoder_config import DecoderConfig, parse_config, read_config
from mmserve.models.decoder_layer import load_layer
from mmserve.models.linear import LinearMaker, compute_dtype
from mmserve.models.norm import RmsNorm
from mmserve.models.parallel import WHOLE, Shard
from mmserve.models.rotary import Rotary, rotate
from mmserve.models.weights import META, Checkpoint


class Decoder:
    """Frozen weights of one decoder, or of one rank's part of it, on one device.

    All ranks of a group make the same calls in the same order, and get the same results to the bit.
    """

    def __init__(
        self, config: DecoderConfig, checkpoint: Checkpoint, shard: Shard = WHOLE, *, computes_in: torch.dtype | None = None
    ) -> None:
        """Takes every tensor out of `checkpoint`; whether they fit, its `finish` says.

        `computes_in` is what hidden vectors, keys and values are kept in; None: what suits device and weights.

        Raises ValueError if layers or vocabulary can't be split over the ranks.
        """
        shard.require_even(config.num_heads, "attention heads")
        shard.require_even(config.intermediate_size, "intermediate columns")
        shard.require_part_each(config.vocab_size, "tokens of vocabulary")
        self.config = config
        self.device = checkpoint.device
        self.dtype = computes_in or compute_dtype(checkpoint.device, checkpoint.dtype)  # of hidden vectors, keys and values
        self.num_local_heads = config.num_heads // shard.size
        self.num_local_kv_heads = config.num_kv_heads // shard.of_kv_heads(config.num_kv_heads).size
        self._shard = shard
        vocabulary = (config.vocab_size, config.hidden_size)
        make_linear = LinearMaker(self.device, checkpoint.dtype, computes_in=self.dtype)
        self._embedding = checkpoint.take("model.embed_tokens.weight", *vocabulary, shard=shard)
        # The head before the layers: packing a matrix takes its size again, and this is the largest.
        if config.tie_word_embeddings:
            checkpoint.drop("lm_head.weight")
            self._head = make_linear(self._embedding)
        else:
            self._head = make_linear(checkpoint.take("lm_head.weight", *vocabulary, shard=shard))
        self._layers = [load_layer(config, checkpoint, i, shard, make_linear) for i in range(config.num_layers)]
        self._norm = RmsNorm(checkpoint.take("model.norm.weight", config.hidden_size).to(self.dtype), config.rms_norm_eps)
        self._rotary = Rotary(config.rope, config.head_dim, self.device)

    @classmethod
    def load(
        cls,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        config: Mapping[str, Any] | None = None,
        names: Callable[[str], str | None] = AS_WRITTEN,
        shard: Shard = WHOLE,
        computes_in: torch.dtype | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """Read a `transformers` directory, or the decoder inside a multi-modal one.

        `config` is that decoder's own (default: the directory's `config.json`), `names` turns a tensor's name there into Llama's.
        Raises BadCheckpoint naming everything that doesn't fit, before the first weight is read.
        """
        parsed = read_config(directory) if config is None else parse_config(config)
        checked = Checkpoint(directory, META, dtype, names=names)
        cls(parsed, checked, shard)
        checked.finish()
        return cls(parsed, Checkpoint(directory, device, dtype, names=names, on_progress=on_progress), shard, computes_in=computes_in)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, H]"""
        if self._shard.size == 1:
            return F.embedding(token_ids, self._embedding).to(self.dtype)
        local = token_ids - self._shard.part(self.config.vocab_size).start
        is_elsewhere = (local < 0) | (local >= len(self._embedding))
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self._embedding)
        return self._shard.sum(rows.masked_fill_(is_elsewhere.unsqueeze(-1), 0).to(self.dtype))

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend[P], plan: P) -> torch.Tensor:
        """[T, H] and int [T] (or [P, T], a row for each axis of a multi-axis rotary model) -> [T, H], after the final norm.

        Writes K and V of all T tokens to the slots of `plan`.
        """
        num_q, num_kv, head_dim = self.num_local_heads, self.num_local_kv_heads, self.config.head_dim
        rotations = self._rotary.rotations(positions)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(hidden)).view(-1, num_q + 2 * num_kv, head_dim)
            if layer.query_norm is None or layer.key_norm is None:
                query, key = rotate(qkv[:, : num_q + num_kv], rotations).split_with_sizes((num_q, num_kv), dim=1)
            else:
                query = rotate(layer.query_norm(qkv[:, :num_q]), rotations)
                key = rotate(layer.key_norm(qkv[:, num_q : num_q + num_kv]), rotations)
            attended = attention.forward(index, query, key, qkv[:, num_q + num_kv :], plan)
            hidden = hidden + self._shard.sum(layer.out(attended))
            gate, up = layer.gate_up(layer.post_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + self._shard.sum(layer.down(F.silu(gate).mul_(up)))
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> float32 [R, V]"""
        columns = self._head(hidden).float()
        if self._shard.size == 1:
            return columns
        missing = self._shard.width(self.config.vocab_size) - columns.shape[1]
        return self._shard.join(F.pad(columns, (0, missing)), self.config.vocab_size)
