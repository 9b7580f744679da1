"""A judge that follows rules, behind OpenAI's API on a real socket.  It can err at known rates, mumble, and be busy."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class JudgeRules:
    """Supports a claim that has a word of the reference or of the objects; can't tell one with "perhaps"."""

    misses: float = 0.0  # share of true claims that it calls untrue
    believes: float = 0.0  # share of untrue ones that it calls true
    num_busy: int = 0  # requests to be refused with 503 first
    mumbles: frozenset[str] = frozenset()  # claims that it never rules on in readable words
    num_mumbled: int = 0  # replies to be unreadable first
    url: str = ""
    prompts: list[str] = field(default_factory=list)

    def reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if self.num_mumbled > 0:
            self.num_mumbled -= 1
            return "Well, that depends."
        if answer := re.search(r"^Answer: (.*)", prompt, re.MULTILINE | re.DOTALL):
            claims = [claim.strip() for claim in answer[1].split(".") if claim.strip()]
            return f"```json\n{json.dumps(claims)}\n```"
        claim = _line(prompt, "Claim")
        if claim in self.mumbles:
            return "Hm."
        if "perhaps" in claim:
            return "Can\u2019t tell."
        known = _words(f"{_line(prompt, 'Known to be right')} {_line(prompt, 'Objects that are there')}")
        is_true = bool(known & _words(claim))
        errs = _draw(claim) < (self.misses if is_true else self.believes)
        return "yes" if is_true != errs else "No, it isn't."


@asynccontextmanager
async def judging(rules: JudgeRules) -> AsyncIterator[JudgeRules]:
    async def chat(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        assert body["temperature"] == 0
        if rules.num_busy > 0:
            rules.num_busy -= 1
            return web.json_response({"error": {"message": "busy"}}, status=503, headers={"Retry-After": "0"})
        message = {"role": "assistant", "content": rules.reply(body["messages"][0]["content"])}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "rules"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        rules.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield rules
    finally:
        await runner.cleanup()


def _line(prompt: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", prompt, re.MULTILINE)
    assert found is not None, prompt
    return found[1]


def _words(text: str) -> set[str]:
    """Those that mean something."""
    return {word for word in re.findall(r"\w{3,}", text.lower()) if word != "the"}


def _draw(text: str) -> float:
    """Uniform in [0, 1), the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
