"""Greedy answers of a text model through the engine, beside those of `transformers`, in float32.  Ends in one JSON line.

    python -m scripts.check_fidelity models/smollm2

The oracle takes each prompt alone through `generate`; the engine gets all of them at once.  Exit status 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console
from rich.progress import track

from mmserve import AsyncEngine, ChatRequest, Message, SamplingParams
from mmserve.config import from_mapping

PROMPTS = (
    "What is the capital of France?", "Write a haiku about the sea.", "Explain what a hash table is.", "Who wrote Hamlet?",
    "Give me three names for a cat.", "Count from one to ten.", "Translate 'good morning' into German.", "What is 17 + 25?",
    "Why is the sky blue?", "Write a short story about a lighthouse.", "List the planets of the solar system.",
    "How do I boil an egg?", "Write a Python function that reverses a string.", "What is a prime number?", "Tell me a joke.",
    "Describe a forest in autumn.", "What does HTTP stand for?", "Name a fruit that is yellow.", "Wie heißt die Hauptstadt von Österreich?",
    "Summarise in one sentence: the early bird catches the worm, but the second mouse gets the cheese.",
)  # fmt: skip


async def ours(model: Path, prompts: Sequence[str], num_tokens: int, device: str) -> list[str]:
    """Answers through the engine, all under way together."""

    async def ask(engine: AsyncEngine, prompt: str) -> str:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        generation = await engine.submit(ChatRequest((Message("user", (prompt,)),), sampling))
        return "".join([delta.text async for delta in generation])

    with tempfile.TemporaryDirectory() as scratch:
        values = {"small": str(model), "dtype": "float32", "device": device, "data-dir": scratch, "max-model-len": 2048}
        engine = AsyncEngine(from_mapping(values))
        await engine.start()
        try:
            return list(await asyncio.gather(*(ask(engine, prompt) for prompt in prompts)))
        finally:
            await engine.close()


def theirs(model: Path, prompts: Sequence[str], num_tokens: int, device: str) -> list[str]:
    """Answers of transformers, one at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).to(device).eval()
    answers = []
    for prompt in track(prompts, description="transformers"):
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(device)
        with torch.inference_mode():
            output = decoder.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    console = Console()
    with console.status("mmserve"):
        mine = asyncio.run(ours(options.model, PROMPTS, options.num_tokens, options.device))
    oracle = theirs(options.model, PROMPTS, options.num_tokens, options.device)
    differing = [(prompt, a, b) for prompt, a, b in zip(PROMPTS, mine, oracle, strict=True) if a != b]
    for prompt, a, b in differing:
        console.print(f"[bold]{prompt}[/]\n  mmserve:      {a!r}\n  transformers: {b!r}")
    print(json.dumps({"script": "check_fidelity", "prompts": len(PROMPTS), "equal": len(PROMPTS) - len(differing)}))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
