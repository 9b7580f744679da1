"""What a server can break though the model is right: the order of pictures, and answers that depend on what a cache holds.

An order probe asks the same of two pictures in either order.  A state probe asks the same three times: cold, with the media's rows in the
embedding cache, with the prompt's keys and values in the prefix cache.  Greedy answers must be equal.  `cache_salt` keeps the states
apart, and the server's `explain` proves which one it was.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mmserve.evals.endpoint import Endpoint, Reply, RequestFailed, user_message
from mmserve.evals.golden import MEDIA_SLICES, Item, Media
from mmserve.evals.intervals import Observation, Share
from mmserve.evals.scoring import matches
from mmserve.evals.wording import normal_form
from mmserve.grounding.vocabulary import Vocabulary

_OTHER_PREFIX = {"role": "system", "content": "."}  # shares no prefix with a question that has none


class OrderResult(StrEnum):
    RIGHT = "right"  # in both orders
    REVERSED = "reversed"  # each order got the other's answer: what a server that swaps the pictures does
    UNMOVED = "unmoved"  # the same answer in both orders
    WRONG = "wrong"  # anything else, a failed request among it


@dataclass(frozen=True, slots=True)
class OrderProbe:
    item: Item
    cluster: str
    answer: str
    swapped_answer: str
    result: OrderResult


@dataclass(frozen=True, slots=True)
class StateProbe:
    """`answers` and `seen` by state; a state is proven where `seen` names it."""

    item: Item
    answers: dict[str, str]
    seen: dict[str, str]  # what `explain` says that it was: cold, embedding hit, kv hit, or mixed
    error: str | None = None

    @property
    def is_equal(self) -> bool:
        return len(set(self.answers.values())) == 1 and self.error is None

    @property
    def is_proven(self) -> bool:
        return bool(self.seen) and all(state == found for state, found in self.seen.items())


# --- order -------------------------------------------------------------------------------------------------------------------


def swapped(item: Item) -> Item:
    """The probe's other half: its pictures in the other order, and the answers that are right then."""
    first, second = item.media
    change = {first: second, second: first}
    parts = tuple(change[part] if isinstance(part, Media) else part for part in item.parts)
    return Item(
        id=f"{item.id}~", parts=parts, category=item.category, kind=item.kind, expected=item.if_swapped, choices=item.choices,
        objects=item.objects, if_swapped=item.expected,
    )  # fmt: skip


def order_probe(item: Item, cluster: str, answer: str, swapped_answer: str, vocabulary: Vocabulary) -> OrderProbe:
    def fits(text: str, expected: Sequence[str]) -> bool:
        return matches(item, text, expected, vocabulary)

    if fits(answer, item.expected) and fits(swapped_answer, item.if_swapped):
        result = OrderResult.RIGHT
    elif fits(answer, item.if_swapped) and fits(swapped_answer, item.expected):
        result = OrderResult.REVERSED
    elif answer and normal_form(answer, vocabulary) == normal_form(swapped_answer, vocabulary):
        result = OrderResult.UNMOVED
    else:
        result = OrderResult.WRONG
    return OrderProbe(item, cluster, answer, swapped_answer, result)


def confused_share(probes: Sequence[OrderProbe]) -> Share:
    """Reversed or unmoved.  What is wrong in another way is the model's fault, and shows in its accuracy."""
    confused = (OrderResult.REVERSED, OrderResult.UNMOVED)
    return Share.of(Observation(probe.result in confused, 1, probe.cluster) for probe in probes)


def order_figures(probes: Sequence[OrderProbe]) -> dict[str, Any]:
    counts = Counter(probe.result for probe in probes)
    return {"probes": len(probes), "confused": confused_share(probes).figures(), **{str(r): counts[r] for r in OrderResult}}


# --- states ------------------------------------------------------------------------------------------------------------------


def state_items(items: Sequence[Item], per_slice: int) -> list[Item]:
    """The first of each media slice that show each medium once."""
    chosen: list[Item] = []
    for name in MEDIA_SLICES:
        alike = [item for item in items if item.slice_name == name and len(set(item.media)) == len(item.media)]
        chosen += alike[:: max(1, len(alike) // per_slice)][:per_slice] if per_slice else []
    return chosen


async def state_probes(
    endpoint: Endpoint, items: Sequence[Item], *, max_tokens: int, concurrency: int, on_done: Callable[[], None]
) -> list[StateProbe]:
    """One for each item.  Needs a server that knows `cache_salt` and `explain`."""
    gate = asyncio.Semaphore(concurrency)

    async def probe(item: Item) -> StateProbe:
        async with gate:
            try:
                result = await _probe_states(endpoint, item, max_tokens)
            except RequestFailed as error:
                result = StateProbe(item, {}, {}, str(error))
            on_done()
            return result

    return list(await asyncio.gather(*(probe(item) for item in items)))


async def explains(endpoint: Endpoint) -> bool:
    """Whether the server says where media came from."""
    try:
        reply = await endpoint.ask(["Hello"], max_tokens=1, explain=True)
    except RequestFailed:  # it may know no such field
        return False
    return "mmserve" in reply.body


async def _probe_states(endpoint: Endpoint, item: Item, max_tokens: int) -> StateProbe:
    question = await asyncio.to_thread(user_message, item.parts)

    async def ask(salt: str, *before: dict[str, Any]) -> Reply:
        return await endpoint.chat([*before, question], max_tokens=max_tokens, explain=True, cache_salt=salt)

    one, other = secrets.token_hex(8), secrets.token_hex(8)
    replies = {"cold": await ask(one), "kv hit": await ask(one)}
    await ask(other, _OTHER_PREFIX)
    replies["embedding hit"] = await ask(other)
    return StateProbe(item, {s: reply.text for s, reply in replies.items()}, {s: _state(reply) for s, reply in replies.items()})


def _state(reply: Reply) -> str:
    """By what the server says: tokens from the prefix cache, and each medium's source."""
    details = (reply.body.get("usage") or {}).get("prompt_tokens_details") or {}
    sources = {medium["source"] for medium in (reply.body.get("mmserve") or {}).get("media", [])}
    if details.get("cached_tokens"):
        return "kv hit"
    if sources <= {"encoded", "joined"}:
        return "cold"
    return "embedding hit" if sources <= {"memory", "disk"} else "mixed"


def state_figures(probes: Sequence[StateProbe]) -> dict[str, Any]:
    return {
        "probes": len(probes),
        "equal": sum(probe.is_equal for probe in probes),
        "proven": sum(probe.is_proven for probe in probes),
        "differing": [{"id": probe.item.id, "answers": probe.answers, "error": probe.error} for probe in probes if not probe.is_equal],
    }
