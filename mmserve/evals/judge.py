"""An LLM as a judge of open answers, through any OpenAI-compatible endpoint, claim by claim.

It first splits an answer into claims, then rules on each by itself: yes, no, can't tell.  It reads the reference and the annotations, not
the media.  Every prompt and reply goes into a log; a reply that can't be read is asked for again, and after that the item is unscored.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import orjson

from mmserve.evals.endpoint import Endpoint, RequestFailed
from mmserve.evals.golden import AnswerKind, Item
from mmserve.evals.scoring import Claim, Ruling, Scored, judged

T = TypeVar("T")

_ATTEMPTS = 3  # at a reply that can be read
_MAX_TOKENS = 1024
_SPLIT = """\
Split the answer below into its claims: short statements that are each true or false by themselves, in its order and in its words. Leave \
out politeness and repetitions. Reply with a JSON list of strings and nothing else; [] if the answer claims nothing.

Question: {question}
Answer: {answer}"""
_RULE = """\
Is the claim supported by what is known about the media? Reply with one line: yes, no, or can't tell. No means that it contradicts \
what is known; can't tell means that nothing that is known speaks for or against it.

Question: {question}
Known to be right: {reference}
Objects that are there: {objects}
Claim: {claim}"""


class JudgeFailed(Exception):
    """The judge could not be reached, or said nothing that can be read; the message says which."""


class Judge:
    """A context manager: it owns the log, a JSONL file of one line for each request to the judge."""

    def __init__(self, endpoint: Endpoint, log: Path) -> None:
        self._endpoint = endpoint
        self._log = log.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    async def judge(self, scored: Scored) -> Scored:
        """The same answer with its claims and what follows from them; with an error and unscored if the judge failed."""
        item, answer = scored.item, scored.answer
        try:
            claims = await self.split(item, answer)
            rulings = await asyncio.gather(*(self.rule(item, claim) for claim in claims))
        except JudgeFailed as problem:
            return Scored(item, scored.cluster, answer, None, scored.named, error=f"judge: {problem}")
        return judged(scored, [Claim(claim, ruling) for claim, ruling in zip(claims, rulings, strict=True)])

    async def split(self, item: Item, answer: str) -> list[str]:
        """Raises JudgeFailed."""
        prompt = _SPLIT.format(question=item.text, answer=answer)
        return await self._ask(prompt, _claims, {"item": item.id, "step": "split"})

    async def rule(self, item: Item, claim: str) -> Ruling:
        """Raises JudgeFailed."""
        objects = "not annotated" if item.objects is None else ", ".join(sorted(item.objects)) or "none"
        reference = " / ".join(item.expected) or "nothing"
        prompt = _RULE.format(question=item.text, reference=reference, objects=objects, claim=claim)
        return await self._ask(prompt, _ruling, {"item": item.id, "step": "rule", "claim": claim})

    async def _ask(self, prompt: str, read: Callable[[str], T | None], context: dict[str, Any]) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            record = context | {"time": time.time(), "model": self._endpoint.model, "attempt": attempt, "prompt": prompt}
            try:
                reply = await self._endpoint.chat([{"role": "user", "content": prompt}], max_tokens=_MAX_TOKENS)
            except RequestFailed as problem:
                self._write(record | {"error": str(problem)})
                raise JudgeFailed(str(problem)) from None
            understood = read(reply.text)
            self._write(record | {"reply": reply.text, "read_as": understood})
            if understood is not None:
                return understood
        raise JudgeFailed(f"{_ATTEMPTS} replies that can't be read, the last of them {reply.text[:100]!r}")

    def _write(self, record: dict[str, Any]) -> None:
        self._log.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self._log.flush()


async def judge_all(judge: Judge, answers: Sequence[Scored], concurrency: int, on_done: Callable[[], None]) -> list[Scored]:
    """Rulings for the open answers; the others as they came."""
    gate = asyncio.Semaphore(concurrency)

    async def one(scored: Scored) -> Scored:
        if not needs_judge(scored):
            return scored
        async with gate:
            result = await judge.judge(scored)
            on_done()
            return result

    return list(await asyncio.gather(*(one(scored) for scored in answers)))


def needs_judge(scored: Scored) -> bool:
    return scored.item.kind is AnswerKind.OPEN and scored.error is None


def _claims(reply: str) -> list[str] | None:
    """The JSON list in a reply, which may stand in a code fence; None if there is none."""
    start, stop = reply.find("["), reply.rfind("]")
    try:
        claims = orjson.loads(reply[start : stop + 1]) if 0 <= start < stop else None
    except orjson.JSONDecodeError:
        return None
    return claims if isinstance(claims, list) and all(isinstance(claim, str) and claim.strip() for claim in claims) else None


def _ruling(reply: str) -> Ruling | None:
    """By how the reply begins; None if it begins with none of the three."""
    word = re.match(r"[\s\"'*`]*(yes|no|can(?:'|\u2019)?t tell|cannot tell)\b", reply.lower())
    if word is None:
        return None
    return {"yes": Ruling.YES, "no": Ruling.NO}.get(word[1], Ruling.CANT_TELL)
