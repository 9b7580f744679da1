"""Writes the model directory that the server loads, in bf16, and checks that what was written computes the same."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import CLIPVisionModel, LlamaForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from scripts.tiny import audio as audio_stage
from scripts.tiny import join
from scripts.tiny import tokenizer as tokens
from scripts.tiny import vision as vision_stage
from scripts.tiny.card import card
from scripts.tiny.decoder import LARGE_LAYERS, SMALL_LAYERS
from scripts.tiny.projector import Projector

DECODERS = ("small", "large")
MAX_BYTES = 15_000_000  # all weights together

COMPOSITION = """\
name = "mmserve-tiny"
tokenizer = "."

[decoders]
small = "small"
large = "large"

[vision]
encoder = "vision"
format = "clip"            # hidden_states[feature_layer], class token dropped
feature_layer = -1         # the encoder's last hidden state, without post-layernorm
image_size = 336
fit = "stretch"            # any aspect is resized (bicubic) to 336 x 336; then / 255, CLIP mean and std
tokens_per_item = 576
placeholder = "<|image|><|/image|>"           # what the chat template writes for a picture
around = ["<|image|>", "<|/image|>"]          # what stays of it, before and after the rows
projectors = { small = "projectors/vision-small.safetensors", large = "projectors/vision-large.safetensors" }

[audio]
encoder = "audio"
format = "whisper"         # WhisperFeatureExtractor(feature_size=80, chunk_length=5) on each window, zero padded
window_s = 5.0             # 250 positions; pairs of the last hidden state are averaged: 125 rows a window
tokens_per_second = 25     # a clip of n samples at 16 kHz gives ceil(n / 640) rows; the last window is cut to that
placeholder = "<|audio|><|/audio|>"
around = ["<|audio|>", "<|/audio|>"]
projectors = { small = "projectors/audio-small.safetensors", large = "projectors/audio-large.safetensors" }

[guardrail]
detector = "linear_probe"  # names the rows of a picture: python -m scripts.tiny.probe
vocabulary = "objects.json"
probes = { small = "probes/vision-small.safetensors", large = "probes/vision-large.safetensors" }
threshold = 0.5
"""


def assemble(directory: Path, vision_dir: Path, audio_dir: Path, small: Path, large: Path, scores: Path | None = None) -> int:
    """`write` from the stages' own outputs; return the bytes of all weights."""
    joined = {"small": join.load(small, SMALL_LAYERS), "large": join.load(large, LARGE_LAYERS)}
    projectors = {f"vision-{name}": one.vision_projector for name, one in joined.items()}
    projectors |= {f"audio-{name}": one.audio_projector for name, one in joined.items()}
    return write(
        directory,
        tokens.train(),
        {name: one.decoder for name, one in joined.items()},
        vision_stage.load(vision_dir),
        audio_stage.load(audio_dir),
        projectors,
        card(json.loads(scores.read_text()) if scores else {}, (SMALL_LAYERS, LARGE_LAYERS), tokens.VOCAB_SIZE),
    )


def write(
    directory: Path,
    tokenizer: Tokenizer,
    decoders: Mapping[str, LlamaForCausalLM],
    vision: CLIPVisionModel,
    audio: WhisperEncoder,
    projectors: Mapping[str, Projector],  # "vision-small", "audio-small", "vision-large", "audio-large"
    card: str,
) -> int:
    """Replace the files of `directory`; return the bytes of all weights.

    Everything is built beside it first, so that a reader sees old files or new ones, never half of one.
    """
    build = directory.with_name(directory.name + ".new")
    shutil.rmtree(build, ignore_errors=True)
    (build / "projectors").mkdir(parents=True)
    tokens.save(tokenizer, build)
    (build / "composition.toml").write_text(COMPOSITION)
    (build / "MODEL_CARD.md").write_text(card)
    for name in DECODERS:
        _save_pretrained(decoders[name], build / name)
    _save_pretrained(vision, build / "vision")
    _save_audio(audio, build / "audio")
    for name, projector in projectors.items():
        save_file(_bf16(projector), build / "projectors" / f"{name}.safetensors")
    num_bytes = sum(path.stat().st_size for path in build.rglob("*.safetensors"))
    if num_bytes > MAX_BYTES:
        raise ValueError(f"weights take {num_bytes} bytes, more than {MAX_BYTES}")
    _check_written(build, decoders, vision, audio)
    for path in sorted(p for p in build.rglob("*") if p.is_file()):
        target = directory / path.relative_to(build)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.chmod(0o644)  # safetensors writes for its owner alone
        os.replace(path, target)
    shutil.rmtree(build)
    return num_bytes


def load_audio(directory: Path) -> WhisperEncoder:
    """A WhisperEncoder from a directory as `write` leaves it, in fp32."""
    encoder = WhisperEncoder(WhisperConfig.from_pretrained(directory))
    encoder.load_state_dict({k: v.float() for k, v in load_file(directory / "model.safetensors").items()})
    return encoder.eval()


def load_projector(path: Path) -> Projector:
    projector = Projector()
    projector.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    return projector.eval()


def _bf16(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()}


def _save_pretrained(model: LlamaForCausalLM | CLIPVisionModel, directory: Path) -> None:
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(directory)


def _save_audio(encoder: WhisperEncoder, directory: Path) -> None:
    directory.mkdir(parents=True)
    config = WhisperConfig.from_dict(encoder.config.to_dict())
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    save_file(_bf16(encoder), directory / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def _check_written(build: Path, decoders: Mapping[str, LlamaForCausalLM], vision: CLIPVisionModel, audio: WhisperEncoder) -> None:
    """Reload in fp32 and compare with the modules in memory; bf16 rounding is all that may differ."""
    generator = torch.Generator().manual_seed(0)
    for name, decoder in decoders.items():
        ids = torch.randint(0, decoder.config.vocab_size, (2, 24), generator=generator)
        read = LlamaForCausalLM.from_pretrained(build / name, dtype=torch.float32).eval()
        _check_close(name, decoder.eval()(ids).logits, read(ids).logits)
    pixels = torch.randn(1, 3, 336, 336, generator=generator)
    read_vision = CLIPVisionModel.from_pretrained(build / "vision", dtype=torch.float32).eval()
    hidden = (model(pixels, output_hidden_states=True).hidden_states[-1] for model in (vision.eval(), read_vision))
    _check_close("vision", *hidden)
    mels = torch.randn(1, 80, 500, generator=generator)
    _check_close("audio", audio.eval()(mels).last_hidden_state, load_audio(build / "audio")(mels).last_hidden_state)


def _check_close(name: str, expected: torch.Tensor, read: torch.Tensor) -> None:
    error = ((expected - read).norm() / expected.norm()).item()
    if not error < 0.05:
        raise ValueError(f"{name} computes something else after it was written: relative error {error:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vision", type=Path, required=True)
    parser.add_argument("--audio", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True, help="joined.pt of the small decoder")
    parser.add_argument("--large", type=Path, required=True, help="of the large one")
    parser.add_argument("--scores", type=Path, help="JSON of scripts.tiny.score for the model card")
    options = parser.parse_args()
    torch.set_num_threads(1)
    assemble(options.directory, options.vision, options.audio, options.small, options.large, options.scores)


if __name__ == "__main__":
    main()
