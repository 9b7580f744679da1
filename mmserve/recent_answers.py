"""Answers of the last minutes: what was asked, by whom, in what mix of media.  Bounded.  Pure: time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

UNKNOWN = "unknown"  # a mix of media that nobody remembers


@dataclass(slots=True)
class Answered:
    tenant: str
    modality_mix: str
    is_rated: bool = False


class RecentAnswers:
    """The last `max_answers`, by request id, for as long as they are among them; and by question, for `repeat_s`."""

    def __init__(self, *, max_answers: int = 2**13, repeat_s: float = 300.0) -> None:
        self._max_answers = max_answers
        self._repeat_s = repeat_s
        self._by_id: OrderedDict[str, Answered] = OrderedDict()  # oldest first
        self._answered_s: OrderedDict[bytes, float] = OrderedDict()  # by question, oldest first

    def __len__(self) -> int:
        return len(self._by_id)

    def note(self, request_id: str, question: bytes, answered: Answered, now_s: float) -> None:
        """`question` is a digest of everything that was asked: the tenant, the media and the words."""
        self._by_id[request_id] = answered
        self._answered_s[question] = now_s
        self._answered_s.move_to_end(question)
        if len(self._by_id) > self._max_answers:
            self._by_id.popitem(last=False)
        if len(self._answered_s) > self._max_answers:
            self._answered_s.popitem(last=False)

    def is_repeat(self, question: bytes, now_s: float) -> bool:
        """Whether the same question was answered within `repeat_s`: somebody wasn't content."""
        answered_s = self._answered_s.get(question)
        return answered_s is not None and now_s - answered_s <= self._repeat_s

    def rate(self, request_id: str, tenant: str) -> str | None:
        """The mix of the answer that this rating is the first of; None for one that was rated before.

        `UNKNOWN` for one that is forgotten, never was, or is another tenant's.
        """
        answered = self._by_id.get(request_id)
        if answered is None or answered.tenant != tenant:
            return UNKNOWN
        if answered.is_rated:
            return None
        answered.is_rated = True
        return answered.modality_mix
