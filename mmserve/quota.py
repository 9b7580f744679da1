"""What tenants use and may use: fused tokens in any minute, and requests at a time.

Pure: no clock, no loop, no database.  It asks what a tenant may use whenever that matters, so a quota that changes counts from then on.

A request counts with all the tokens it may come to from its admission to its end, and with those it came to for a minute after that.
Whatever was at work within any 60 seconds is then within the limit together: more than counting tokens when they are admitted would
promise, at the price that a long answer counts for longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mmserve.errors import RateLimited, TooLarge

WINDOW_S = 60.0
SLOT_S = 0.125  # requests that ended within one are remembered together, until the last of them may be forgotten
SOON_S = 1.0  # when to come back if that is up to requests that run


@dataclass(frozen=True, slots=True)
class Quota:
    """0 means no limit."""

    tokens_per_minute: int = 0  # fused tokens, prompt and answers
    concurrent_requests: int = 0


QuotaOf = Callable[[str], Quota | None]
"""By tenant; None for one that nobody has limited or ever will."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for one request, until it is settled.  Written by `QuotaBooks`."""

    tenant: str
    num_tokens: int
    num_answer: int  # most tokens of each of its answers
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Standing:
    """How a tenant stands, as told in headers."""

    quota: Quota
    remaining_requests: int
    remaining_tokens: int
    requests_reset_s: float  # until the next one may come
    tokens_reset_s: float  # until all of the quota is there again, at the latest


class QuotaBooks:
    """One book for each tenant with a quota.  To look and to take is one call: on one loop no other request can come between."""

    def __init__(self, quota_of: QuotaOf) -> None:
        self._quota_of = quota_of
        self._books: dict[str, _Book] = {}

    def check_room(self, tenant: str, now_s: float) -> None:
        """Raises RateLimited if no request of this tenant would be taken now, however small."""
        quota, book = self._quota_of(tenant), self._books.get(tenant)
        if quota is None or book is None:
            return
        book.check_place(quota)
        if quota.tokens_per_minute and book.num_tokens(now_s) >= quota.tokens_per_minute:
            raise RateLimited(f"all {_of_tokens(quota)} are used or reserved", retry_after_s=book.free_after_s(1, quota, now_s))

    def reserve(
        self, tenant: str, *, num_prompt: int, num_answer: int, num_choices: int = 1, may_shorten: bool = False, now_s: float
    ) -> Reservation:
        """Room for a prompt and `num_choices` answers of up to `num_answer` tokens, shorter ones if they may be and a minute has no more.

        Raises TooLarge if it would be more than a whole minute's, else RateLimited if it is too much just now.
        """
        quota = self._quota_of(tenant)
        if quota is None:
            return Reservation(tenant, 0, num_answer, is_open=False)
        limit = quota.tokens_per_minute
        if limit and may_shorten:
            num_answer = max(1, min(num_answer, (limit - num_prompt) // num_choices))
        num_tokens = num_prompt + num_choices * num_answer
        parts = f"{num_tokens} were requested ({num_prompt} in the prompt, {num_choices * num_answer} for the answer)"
        if limit and num_tokens > limit:
            raise TooLarge(f"this key may use {_of_tokens(quota)}, but {parts}", param="messages" if num_prompt >= limit else "max_tokens")
        book = self._books.setdefault(tenant, _Book())
        book.check_place(quota)
        if limit and (num_taken := book.num_tokens(now_s)) + num_tokens > limit:
            raise RateLimited(
                f"{num_taken} of {_of_tokens(quota)} are used or reserved, and {parts}",
                retry_after_s=book.free_after_s(num_tokens, quota, now_s),
            )
        book.num_running += 1
        book.num_reserved += num_tokens
        return Reservation(tenant, num_tokens, num_answer)

    def settle(self, reservation: Reservation, num_used: int, now_s: float) -> None:
        """The request has ended, and came to `num_used` tokens.  Later calls change nothing."""
        if reservation.is_open:
            reservation.is_open = False
            self._books[reservation.tenant].end(reservation.num_tokens, num_used, now_s)

    def standing(self, tenant: str, now_s: float) -> Standing | None:
        """None for a tenant without a quota."""
        quota = self._quota_of(tenant)
        if quota is None:
            return None
        book = self._books.get(tenant, _Book())
        num_places = quota.concurrent_requests - book.num_running
        return Standing(
            quota,
            remaining_requests=max(0, num_places),
            remaining_tokens=max(0, quota.tokens_per_minute - book.num_tokens(now_s)),
            requests_reset_s=0.0 if num_places > 0 else SOON_S,
            tokens_reset_s=book.empty_after_s(now_s),
        )

    def check(self) -> None:
        """Assert that the books add up."""
        for book in self._books.values():
            book.check()


class _Book:
    """What one tenant holds and has used.  At most WINDOW_S / SLOT_S + 2 numbers long, however many requests come."""

    __slots__ = ("_ended", "_num_used", "num_reserved", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        self.num_reserved = 0  # tokens, of those that run
        self._num_used = 0  # tokens, of those that ended within the window
        self._ended: deque[list[int]] = deque()  # [slot, tokens], oldest first

    def check_place(self, quota: Quota) -> None:
        if quota.concurrent_requests and self.num_running >= quota.concurrent_requests:
            raise RateLimited(
                f"{self.num_running} requests with this key are running, of at most {quota.concurrent_requests}", retry_after_s=SOON_S
            )

    def num_tokens(self, now_s: float) -> int:
        """Reserved or used within the window."""
        while self._ended and _expiry_s(self._ended[0][0]) <= now_s:
            self._num_used -= self._ended.popleft()[1]
        return self.num_reserved + self._num_used

    def end(self, num_reserved: int, num_used: int, now_s: float) -> None:
        self.num_running -= 1
        self.num_reserved -= num_reserved
        self.num_tokens(now_s)  # forgets
        slot = int(now_s / SLOT_S)
        if self._ended and self._ended[-1][0] == slot:
            self._ended[-1][1] += num_used
        elif num_used:
            self._ended.append([slot, num_used])
        self._num_used += num_used

    def free_after_s(self, num_tokens: int, quota: Quota, now_s: float) -> float:
        """When so many will be free, if that is a matter of time alone; else soon: those that run seldom use all they reserved."""
        excess = self.num_tokens(now_s) + num_tokens - quota.tokens_per_minute
        for slot, num_used in self._ended:
            excess -= num_used
            if excess <= 0:
                return _expiry_s(slot) - now_s
        return SOON_S

    def empty_after_s(self, now_s: float) -> float:
        if self.num_running:
            return WINDOW_S + SLOT_S
        return _expiry_s(self._ended[-1][0]) - now_s if self.num_tokens(now_s) else 0.0

    def check(self) -> None:
        assert self.num_running >= 0, "settled twice"
        assert self.num_reserved >= 0, "more given back than was reserved"
        assert self._num_used == sum(num_used for _, num_used in self._ended)
        assert len(self._ended) <= WINDOW_S / SLOT_S + 2


def _expiry_s(slot: int) -> float:
    return (slot + 1) * SLOT_S + WINDOW_S


def _of_tokens(quota: Quota) -> str:
    return f"{quota.tokens_per_minute} tokens a minute"
