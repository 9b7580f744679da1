"""Shows what is encoded once and never again: one picture from many clients, behind a system prompt, and after a restart.

    python -m scripts.show_cache [--clients 100]

Starts a server of its own (twice, over the same data directory).  Exit status 1 if something was encoded that should not have been.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console

from scripts.loopback import client, image_part, png, scrape, server, text_part
from scripts.tiny.questions import BACKGROUND, NAME, Question, background_answer, is_right, name_answer
from scripts.tiny.render import render
from scripts.tiny.world import Scene, sample_scene

SEED = 2**30 + 800_000
SYSTEM = "You are a helpful assistant."
OTHER_SYSTEM = "Answer in one sentence."


class Asker:
    """Greedy questions about pictures to the small decoder."""

    def __init__(self, openai: AsyncOpenAI, url: str) -> None:
        self._openai, self._url = openai, url

    async def ask(self, picture: bytes, question: Question, system: str | None = None) -> dict[str, Any]:
        messages: list[Any] = [{"role": "user", "content": [image_part(picture), text_part(question.text)]}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        answer = await self._openai.chat.completions.create(
            model="small", messages=messages, temperature=0, max_tokens=48, extra_body={"explain": True}
        )
        body = answer.model_dump()
        return {
            "source": body["mmserve"]["media"][0]["source"],
            "prompt_tokens": body["usage"]["prompt_tokens"],
            "cached_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"],
            "is_right": is_right(question, body["choices"][0]["message"]["content"]),
        }

    async def num_encoded(self) -> int:
        """Pictures that went through the tower since the server started."""
        return int((await scrape(self._url)).total("encoder_items_per_batch_sum", {"modality": "image"}))


def questions_about(scene: Scene, count: int) -> list[Question]:
    """Different ones, so that every client needs its own answer."""
    forms = [Question(text, name_answer(scene), "name") for text in NAME]
    forms += [Question(text, background_answer(scene), "background") for text in BACKGROUND]
    return [forms[i % len(forms)] for i in range(count)]


async def same_picture_from_many(asker: Asker, num_clients: int) -> dict[str, Any]:
    scene = sample_scene(random.Random(SEED))
    picture = png(render(scene).image)
    before = await asker.num_encoded()
    answers = await asyncio.gather(*(asker.ask(picture, question) for question in questions_about(scene, num_clients)))
    return {
        "clients": num_clients,
        "encoded": await asker.num_encoded() - before,
        "sources": dict(Counter(answer["source"] for answer in answers)),
        "right_answers": sum(answer["is_right"] for answer in answers),
    }


async def same_picture_behind_a_system_prompt(asker: Asker) -> dict[str, Any]:
    """A first question, another one behind the same prefix, and the same picture behind another system prompt."""
    scene = sample_scene(random.Random(SEED + 1))
    picture = png(render(scene).image)
    first, second = questions_about(scene, 2)
    new = await asker.ask(picture, first, SYSTEM)
    before = await asker.num_encoded()
    again = await asker.ask(picture, second, SYSTEM)
    elsewhere = await asker.ask(picture, second, OTHER_SYSTEM)
    return {"new": new, "same_prefix": again, "other_prefix": elsewhere, "encoded_after_the_first": await asker.num_encoded() - before}


async def after_a_restart(asker: Asker) -> dict[str, Any]:
    scene = sample_scene(random.Random(SEED + 1))
    before = await asker.num_encoded()
    (question,) = questions_about(scene, 1)
    answer = await asker.ask(png(render(scene).image), question, SYSTEM)
    return {**answer, "encoded": await asker.num_encoded() - before}


def broken_promises(report: dict[str, Any]) -> Sequence[str]:
    many, prefix, restart = report["same_picture_at_once"], report["behind_a_system_prompt"], report["after_a_restart"]
    again = prefix["same_prefix"]
    promises = {
        "one encode for all who sent the same picture at once": many["encoded"] == 1,
        "no encode behind the same system prompt": prefix["encoded_after_the_first"] == 0,
        "the picture is not prefilled again behind the same system prompt": again["cached_tokens"] >= 576,
        "the picture's rows come out of memory behind another system prompt": prefix["other_prefix"]["source"] == "memory",
        "the picture's rows come from disk after a restart": restart["source"] == "disk" and restart["encoded"] == 0,
    }
    return [promise for promise, was_kept in promises.items() if not was_kept]


async def show(num_clients: int, console: Console) -> dict[str, Any]:
    report: dict[str, Any] = {"script": "show_cache"}

    def note(part: str, figures: dict[str, Any]) -> None:
        report[part] = figures
        console.print(part, figures)

    with tempfile.TemporaryDirectory(prefix="mmserve-cache-") as scratch:
        data_dir = Path(scratch)
        async with server(data_dir) as url, client(url) as openai:
            asker = Asker(openai, url)
            note("same_picture_at_once", await same_picture_from_many(asker, num_clients))
            note("behind_a_system_prompt", await same_picture_behind_a_system_prompt(asker))
        async with server(data_dir) as url, client(url) as openai:
            note("after_a_restart", await after_a_restart(Asker(openai, url)))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    console = Console(width=120, stderr=True)
    report = asyncio.run(show(parser.parse_args().clients, console))
    broken = broken_promises(report)
    for promise in broken:
        console.print(f"not kept: {promise}", style="bold red")
    print(json.dumps({**report, "not_kept": broken}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
