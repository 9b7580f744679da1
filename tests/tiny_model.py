"""A small random model directory in the format of the bundled one, for tests that need a real worker but no knowledge.

Everything is smaller than life, and the two decoders differ in width, so that rows projected for the wrong one don't fit.  Weights are
drawn wide enough that every token and every media row changes what comes out.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from transformers.utils.logging import disable_progress_bar

from scripts.tiny.tokenizer import CHAT_TEMPLATE, END, SPECIAL

VOCAB_SIZE = 424
EOS_TOKEN_ID = SPECIAL.index(END)
MAX_MODEL_LEN = 2048
IMAGE_SIZE = 56  # pixels
TOKENS_PER_IMAGE = 16
WINDOW_S = 1.0
TOKENS_PER_SECOND = 25
ENCODER_HIDDEN = 32

COMPOSITION = f"""\
name = "random-tiny"
tokenizer = "."

[decoders]
small = "small"
large = "large"

[vision]
encoder = "vision"
format = "clip"
placeholder = "<|image|><|/image|>"
around = ["<|image|>", "<|/image|>"]
feature_layer = -1
image_size = {IMAGE_SIZE}
fit = "stretch"
tokens_per_item = {TOKENS_PER_IMAGE}
projectors = {{ small = "projectors/vision-small.safetensors", large = "projectors/vision-large.safetensors" }}

[audio]
encoder = "audio"
format = "whisper"
placeholder = "<|audio|><|/audio|>"
around = ["<|audio|>", "<|/audio|>"]
window_s = {WINDOW_S}
tokens_per_second = {TOKENS_PER_SECOND}
projectors = {{ small = "projectors/audio-small.safetensors", large = "projectors/audio-large.safetensors" }}
"""

_CORPUS = (
    "What is in the picture? There is a red cat on a blue background in the upper left corner.",
    "How many dogs are there? There are two dogs. Where is the car? The car is at the bottom right.",
    "Compare the first photo to the second. Which one shows a tree? The second one shows a tree.",
    "What is said in the clip? The word is seven. What do you hear? I hear a bell.",
    "Hello, how are you today? Tell me a story about a small robot that wanted to sing.",
)

SHAPES = {
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "large": {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2},
}


def build(directory: Path, seed: int = 0) -> Path:
    """Write the whole model directory; equal seeds give equal files.  Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "composition.toml").write_text(COMPOSITION)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, shape in SHAPES.items():
            build_decoder(directory / name, **shape)
        build_vision(directory / "vision")
        build_audio(directory / "audio")
        for kind in ("vision", "audio"):
            for name, shape in SHAPES.items():
                build_projector(directory / "projectors" / f"{kind}-{name}.safetensors", ENCODER_HIDDEN, shape["hidden_size"])
    return directory


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text survives; the special tokens are the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def build_decoder(directory: Path, **shape: object) -> None:
    """A LlamaForCausalLM as `save_pretrained` writes it, in bf16.  `shape` overrides any field of its config."""
    fields: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "head_dim": 16,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    LlamaForCausalLM(LlamaConfig(**(fields | shape))).to(torch.bfloat16).save_pretrained(directory)


def build_vision(directory: Path) -> None:
    """A CLIPVisionModel with 4 x 4 patches."""
    config = CLIPVisionConfig(
        hidden_size=ENCODER_HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=IMAGE_SIZE, patch_size=14, initializer_factor=1.0, projection_dim=ENCODER_HIDDEN,
    )  # fmt: skip
    CLIPVisionModel(config).to(torch.bfloat16).save_pretrained(directory)


def build_audio(directory: Path) -> None:
    """A WhisperEncoder for windows of one second; the file holds the encoder's own tensors only."""
    config = WhisperConfig(
        d_model=ENCODER_HIDDEN, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=80,
        max_source_positions=int(100 * WINDOW_S) // 2, init_std=0.1, decoder_layers=1, decoder_ffn_dim=32, decoder_attention_heads=2,
        vocab_size=VOCAB_SIZE, pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    encoder = WhisperEncoder(config).to(torch.bfloat16)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    save_file({name: tensor.contiguous() for name, tensor in encoder.state_dict().items()}, directory / "model.safetensors")


def build_projector(file: Path, num_in: int, num_out: int) -> None:
    """The two-layer MLP between a tower and a decoder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "linear_1.weight": torch.randn(num_out, num_in) / num_in**0.5,
        "linear_1.bias": torch.randn(num_out) * 0.1,
        "linear_2.weight": torch.randn(num_out, num_out) / num_out**0.5,
        "linear_2.bias": torch.randn(num_out) * 0.1,
    }
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, file)
