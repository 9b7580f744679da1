"""Small random models in published formats, written by `save_pretrained` as their publishers did, and what transformers makes of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_model
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

SIDE, PATCH = 56, 14  # pixels; 16 patches a tile
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]  # height, width
BOS, EOS = "<|pad|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content if part.type == 'image' %}<image>\n{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

_DECODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 432, "max_position_embeddings": 2048, "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SIDE, "patch_size": PATCH,
    "initializer_factor": 1.0,
}  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """It begins every prompt with BOS, as Llama's do, and has the placeholder as an added token."""
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=BOS)


def build_text(directory: Path, seed: int = 0, chat_template: str | None = None) -> Path:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = chat_template
    save(directory, seed, lambda: LlamaForCausalLM(LlamaConfig(**_DECODER)))
    tokenizer.save_pretrained(directory)
    return directory


def build_llava(directory: Path, seed: int = 0, **fields: Any) -> Path:
    tokenizer = build_tokenizer()
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_TOWER), text_config=LlamaConfig(**_DECODER), image_token_index=image_token, **fields
    )
    strategy = config.vision_feature_select_strategy
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = LlavaProcessor(pixels, tokenizer, PATCH, strategy, TEMPLATE, num_additional_image_tokens=1)
    save(directory, seed, lambda: LlavaForConditionalGeneration(config))
    processor.save_pretrained(directory)
    return directory


def build_llava_next(directory: Path, seed: int = 0) -> Path:
    tokenizer = build_tokenizer()
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**_TOWER),
        text_config=LlamaConfig(**_DECODER),
        image_token_index=image_token,
        image_grid_pinpoints=PINPOINTS,
    )
    pixels = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS
    )
    processor = LlavaNextProcessor(pixels, tokenizer, PATCH, "default", TEMPLATE, num_additional_image_tokens=1)
    save(directory, seed, lambda: LlavaNextForConditionalGeneration(config))
    processor.save_pretrained(directory)
    return directory


def save(directory: Path, seed: int, make: Any) -> None:
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        if hasattr(model, "model") and hasattr(model.model, "image_newline"):
            torch.nn.init.normal_(model.model.image_newline)
        model.save_pretrained(directory)


def picture(seed: int, width: int, height: int) -> bytes:
    """A PNG of large soft spots: a shift by a pixel shows, and so does another way to resize."""
    spots = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def messages(*parts: str | bytes) -> list[dict[str, Any]]:
    """One user's message as the processors take it."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "image", "image": Image.open(io.BytesIO(part)).convert("RGB")})
    return [{"role": "user", "content": content}]


@torch.no_grad()
def greedy(directory: Path, kind: Any, processor_kind: Any, parts: Sequence[str | bytes], num_tokens: int) -> list[int]:
    """What transformers answers: processor, then `generate`."""
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    inputs = processor_kind.from_pretrained(directory).apply_chat_template(
        messages(*parts), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    ids = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in ids[0, inputs["input_ids"].shape[1] :]]
