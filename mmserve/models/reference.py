"""The plain transformers pipeline, as a program: what a server's greedy answers are compared with.

    python -m mmserve.models.reference DIRECTORY NUM_TOKENS < prompts.json > answers.json

Prompts are lists of texts and {"image": FILE}; each is one user's turn, answered alone, in float32 on the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

Prompt = list[str | dict[str, str]]


class Reference:
    """A directory as transformers writes it: a text model, or one that takes pictures, too."""

    def __init__(self, directory: Path) -> None:
        kind = AutoConfig.from_pretrained(directory, local_files_only=True).model_type
        self._takes_pictures = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        loader = AutoModelForImageTextToText if self._takes_pictures else AutoModelForCausalLM
        self._model = loader.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        reader = AutoProcessor if self._takes_pictures else AutoTokenizer
        self._processor: Any = reader.from_pretrained(directory, local_files_only=True)

    @torch.inference_mode()
    def answer(self, prompt: Prompt, num_tokens: int) -> str:
        messages = [{"role": "user", "content": self._content(prompt)}]
        inputs = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        output = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        text: str = self._processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return text

    def _content(self, prompt: Prompt) -> Any:
        if not self._takes_pictures:
            return "".join(part for part in prompt if isinstance(part, str))
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": _picture(part["image"])}
            for part in prompt
        ]


def _picture(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def main() -> None:
    directory, num_tokens = Path(sys.argv[1]), int(sys.argv[2])
    reference = Reference(directory)
    json.dump([reference.answer(prompt, num_tokens) for prompt in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
