"""The figures of a card, and the shape of the decoder that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Card:
    """Peak figures from the vendor's data sheet, for bf16 without sparsity."""

    flops_per_s: float
    bytes_per_s: float  # of its memory
    memory_bytes: float
    link_bytes_per_s: float  # NVLink, one direction
    pictures_per_s: float  # ViT-L/14-336 at half the peak
    audio_s_per_s: float  # Whisper-large over full 30 s windows at half the peak


A100 = Card(312e12, 2.039e12, 85.06e9, 300e9, pictures_per_s=384, audio_s_per_s=2058)
H200 = Card(989e12, 4.8e12, 150e9, 450e9, pictures_per_s=384 * 989 / 312, audio_s_per_s=2058 * 989 / 312)
CARDS = {"a100": A100, "h200": H200}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A Llama-like decoder in bf16."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    body_params: float  # every weight that each token is multiplied with
    head_params: float  # the output projection: only for tokens that are sampled from; the input embedding is as large
    ties_embeddings: bool = False  # the output projection is the input embedding

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BF16_BYTES

    @property
    def weight_bytes(self) -> float:
        return (self.body_params + (1 if self.ties_embeddings else 2) * self.head_params) * BF16_BYTES


LLAMA_8B = DecoderShape(32, 4096, 32, 8, 128, body_params=6.98e9, head_params=0.525e9)
LLAMA_70B = DecoderShape(80, 8192, 64, 8, 128, body_params=68.45e9, head_params=1.05e9)
SHAPES = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B}


def shape_of_config(config: Mapping[str, Any]) -> DecoderShape:
    """From a decoder's complete config, as `composition.decoder_config` makes it.  Norms and biases are too small to count."""
    hidden, layers, heads, kv_heads, head_dim = (
        int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    gated_mlp = 3 * hidden * int(config["intermediate_size"])
    head = hidden * int(config["vocab_size"])
    body = layers * (attention + gated_mlp)
    return DecoderShape(layers, hidden, heads, kv_heads, head_dim, body, head, ties_embeddings=bool(config["tie_word_embeddings"]))
