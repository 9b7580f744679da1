"""Small random models that hear, in published formats, and what transformers makes of them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import published_models as published
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    Qwen2VLImageProcessorPil,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmserve.media import MediaItem, MediaKind

SAMPLE_RATE = 16_000  # Hz
LONGEST_S = 2  # of a clip that the small Qwen2-Audio hears
OMNI_LONGEST_S = 70

QWEN2 = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 448, "max_position_embeddings": 4096, "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_ENCODER = {
    "num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32, "initializer_range": 0.1,
}  # fmt: skip
_WHISPER = {
    "num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32, "decoder_layers": 1,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "vocab_size": 8, "max_source_positions": 100, "init_std": 0.1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
_ULTRAVOX_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_OMNI_TOKENS = ("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>")
_OMNI_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_QWEN2_AUDIO_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def clip(seed: int, seconds: float) -> bytes:
    """A WAV of a few gliding tones: each stretch of it sounds different."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = [np.sin(2 * np.pi * (start * time + glide * time**2)) for start, glide in random.uniform((80, 20), (3000, 400), (4, 2))]
    file = io.BytesIO()
    soundfile.write(file, (np.sum(tones, axis=0) * 6000).astype(np.int16), SAMPLE_RATE, format="WAV")
    return file.getvalue()


def samples(data: bytes) -> np.ndarray:
    """float32 [n]"""
    return soundfile.read(io.BytesIO(data), dtype="float32")[0]


def build_qwen2_audio(directory: Path, seed: int = 0) -> Path:
    tokenizer = published.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(**_ENCODER, max_source_positions=50 * LONGEST_S),
        text_config=Qwen2Config(**QWEN2),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    published.save(directory, seed, lambda: Qwen2AudioForConditionalGeneration(config))
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=LONGEST_S)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=_QWEN2_AUDIO_TEMPLATE).save_pretrained(directory)
    return directory


def build_ultravox(directory: Path, seed: int = 0, *, norm_is_mid: bool = True) -> Path:
    """Beside it stand `org/whisper`, by its whole name, and `llama`, by the second half of its."""
    whisper, llama = directory.parent / "org" / "whisper", directory.parent / "llama"
    published.build_text(llama, seed + 1, _ULTRAVOX_TEMPLATE)
    published.save(whisper, seed + 2, lambda: WhisperModel(WhisperConfig(**_WHISPER)))
    WhisperFeatureExtractor(feature_size=80).save_pretrained(whisper)
    directory.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(llama / file, directory)
    config = {
        "model_type": "ultravox", "audio_model_id": "org/whisper", "text_model_id": "org/llama", "stack_factor": 8,
        "hidden_size": 48, "projector_act": "swiglu", "projector_ln_mid": norm_is_mid,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    norm, width = ("ln_mid", 24) if norm_is_mid else ("ln_post", 64)
    shapes = {"ln_pre": (8 * 32,), "linear_1": (48, 8 * 32), "linear_2": (64, 24), norm: (width,)}
    drawn = {f"multi_modal_projector.{name}.weight": torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}
    save_file(drawn, directory / "model.safetensors")
    return directory


class Ultravox:
    """What its publishers describe, in plain PyTorch, one chunk after the other."""

    def __init__(self, directory: Path) -> None:
        tower = WhisperModel.from_pretrained(directory.parent / "org" / "whisper", attn_implementation="eager")
        self.encoder = tower.eval().encoder
        self.decoder = LlamaForCausalLM.from_pretrained(directory.parent / "llama", dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self.weights = {name.split(".", 1)[1]: tensor for name, tensor in load_file(directory / "model.safetensors").items()}

    @torch.no_grad()
    def rows(self, data: bytes) -> torch.Tensor:
        """[rows, H]"""
        sound = np.pad(samples(data), (0, max(0, 320 - len(samples(data)))))
        mels = WhisperFeatureExtractor(feature_size=80)(
            sound, sampling_rate=SAMPLE_RATE, padding="longest", pad_to_multiple_of=160, truncation=False, return_tensors="pt"
        ).input_features
        if mels.shape[2] <= 200:
            return self._project(self._encode(mels, mels.shape[2]))
        rows = []
        for start in range(0, mels.shape[2], 200):
            chunk = mels[:, :, start : start + 200]
            whole = torch.nn.functional.pad(chunk, (0, 200 - chunk.shape[2]))
            rows.append(self._project(self._encode(whole, chunk.shape[2]))[: -(-chunk.shape[2] // 16)])
        return torch.cat(rows)

    def _encode(self, mels: torch.Tensor, num_heard: int) -> torch.Tensor:
        encoder, gelu = self.encoder, torch.nn.functional.gelu
        states = gelu(encoder.conv2(gelu(encoder.conv1(mels)))).transpose(1, 2)
        states = states + encoder.embed_positions.weight[: states.shape[1]]
        mask = torch.zeros(1, 1, 1, states.shape[1])
        mask[..., (num_heard + 1) // 2 :] = torch.finfo(torch.float32).min
        for layer in encoder.layers:
            states = layer(states, mask)
        return encoder.layer_norm(states)[0]

    def _project(self, states: torch.Tensor) -> torch.Tensor:
        stacked = torch.cat([states, torch.zeros(-len(states) % 8, states.shape[1])]).reshape(-1, 8 * states.shape[1])
        inner = self._norm("ln_pre", stacked) @ self.weights["linear_1.weight"].T
        values, gate = inner[:, :24], inner[:, 24:]
        return self._norm("ln_post", self._norm("ln_mid", torch.nn.functional.silu(gate) * values) @ self.weights["linear_2.weight"].T)

    def _norm(self, name: str, states: torch.Tensor) -> torch.Tensor:
        if f"{name}.weight" not in self.weights:
            return states
        norm = LlamaRMSNorm(states.shape[1])
        norm.weight.data = self.weights[f"{name}.weight"]
        return norm(states)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[str | bytes], num_tokens: int) -> list[int]:
        content = "".join(part if isinstance(part, str) else "<|audio|>" for part in prompt)
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
        clips = iter([part for part in prompt if isinstance(part, bytes)])
        pieces = []
        for number, piece in enumerate(text.split("<|audio|>")):
            if number:
                pieces.append(self.rows(next(clips)))
            ids = self.tokenizer(piece, add_special_tokens=False).input_ids
            pieces.append(self.decoder.get_input_embeddings()(torch.tensor(ids, dtype=torch.long)))
        ids = self.decoder.generate(
            inputs_embeds=torch.cat(pieces)[None], max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
        return [int(token) for token in ids[0]]


def build_omni(directory: Path, seed: int = 0) -> Path:
    """The thinker alone, as `save_pretrained` writes it.  Settings of its processor, which needs torchvision, are written by hand."""
    tokenizer = published.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_OMNI_TOKENS)})
    tokens = dict(zip(_OMNI_TOKENS, tokenizer.convert_tokens_to_ids(list(_OMNI_TOKENS)), strict=True))
    config = Qwen2_5OmniThinkerConfig(
        audio_config={**_ENCODER, "max_source_positions": 100, "n_window": 25, "output_dim": QWEN2["hidden_size"]},
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "window_size": 56, "fullatt_block_indexes": [1],
            "out_hidden_size": QWEN2["hidden_size"], "initializer_range": 0.1,
        },
        text_config={**QWEN2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        image_token_index=tokens["<|IMAGE|>"], audio_token_index=tokens["<|AUDIO|>"], video_token_index=tokens["<|VIDEO|>"],
        audio_start_token_id=tokens["<|audio_bos|>"], audio_end_token_id=tokens["<|audio_eos|>"],
        vision_start_token_id=tokens["<|vision_bos|>"], vision_end_token_id=tokens["<|vision_eos|>"],
    )  # fmt: skip
    published.save(directory, seed, lambda: Qwen2_5OmniThinkerForConditionalGeneration(config))
    tokenizer.chat_template = _OMNI_TEMPLATE
    tokenizer.save_pretrained(directory)
    processor = OmniProcessor(directory)
    settings = {"image_processor": processor.pixels.to_dict(), "feature_extractor": processor.sound.to_dict()}
    (directory / "processor_config.json").write_text(json.dumps(settings))
    return directory


class OmniProcessor:
    """What `Qwen2_5OmniProcessor` does with pictures and clips: each placeholder is repeated as often as there are rows."""

    def __init__(self, directory: Path, padding_side: str = "left") -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self.pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 24})
        self.sound = WhisperFeatureExtractor(feature_size=80, chunk_length=OMNI_LONGEST_S, padding_side=padding_side)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(
        self, text: str, return_tensors: str, images: Sequence[Any] = (), audio: Sequence[np.ndarray] = (), sampling_rate: int = 0
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        counts: dict[str, list[int]] = {"<|IMAGE|>": [], "<|AUDIO|>": []}
        if images:
            inputs |= self.pixels(images, return_tensors=return_tensors)
            counts["<|IMAGE|>"] = (inputs["image_grid_thw"].prod(-1) // 4).tolist()
        if audio:
            heard = self.sound(
                audio, sampling_rate=sampling_rate, padding="max_length", return_attention_mask=True, return_tensors=return_tensors
            )
            inputs |= {"input_features": heard.input_features, "feature_attention_mask": heard.attention_mask}
            counts["<|AUDIO|>"] = [((frames - 1) // 2 - 1) // 2 + 1 for frames in heard.attention_mask.sum(-1).tolist()]
        for token, numbers in counts.items():
            first, *rest = text.split(token)
            text = first + "".join(token * number + piece for number, piece in zip(numbers, rest, strict=True))
        return {**inputs, **self.tokenizer(text, return_tensors=return_tensors)}


def split_processor(directory: Path) -> None:
    """As transformers 4 wrote it: the feature extractor's settings in a file of their own."""
    file = directory / "processor_config.json"
    values = json.loads(file.read_text())
    (directory / "preprocessor_config.json").write_text(json.dumps(values.pop("feature_extractor")))
    file.write_text(json.dumps(values))


def kind_of(part: bytes) -> MediaKind:
    return MediaKind.AUDIO if part.startswith(b"RIFF") else MediaKind.IMAGE


def parts_of(prompt: Sequence[str | bytes]) -> tuple[str | MediaItem, ...]:
    return tuple(MediaItem(kind_of(part), part) if isinstance(part, bytes) else part for part in prompt)


def inputs_of(processor: Any, prompt: Sequence[str | bytes]) -> Any:
    """A user's message as transformers' processor prepares it."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part).value} for part in prompt]
    media = [part for part in prompt if isinstance(part, bytes)]
    heard = {"audio": [samples(part) for part in media if kind_of(part) is MediaKind.AUDIO], "sampling_rate": SAMPLE_RATE}
    seen = {"images": [Image.open(io.BytesIO(part)).convert("RGB") for part in media if kind_of(part) is MediaKind.IMAGE]}
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    return processor(text=text, return_tensors="pt", **(heard if heard["audio"] else {}), **(seen if seen["images"] else {}))


@torch.no_grad()
def greedy(model: Any, processor: Any, prompt: Sequence[str | bytes], num_tokens: int) -> list[int]:
    """What transformers answers: processor, then `generate`."""
    inputs = inputs_of(processor, prompt)
    ids = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in ids[0, inputs["input_ids"].shape[1] :]]


@torch.no_grad()
def media_rows(model: Any, inputs: Any, token_id: int) -> torch.Tensor:
    """[rows, H], as transformers' decoder meets them in the place of `token_id`."""
    met: dict[str, torch.Tensor] = {}
    hook = model.model.language_model.register_forward_pre_hook(lambda _, __, kwargs: met.update(kwargs), with_kwargs=True)
    model(**inputs)
    hook.remove()
    return met["inputs_embeds"][inputs["input_ids"] == token_id]
