"""Does the embedding cache find more than the traffic explains?  Pure: time is an argument.

An honest hit has a cause that can be named: the same bytes came before, or an earlier life of the server left them on disk.  So there is
no noise to allow for.  A key that two different contents share has none, and neither has an entry that nobody made.
Knows keys and contents, not how one is made from the other: it would share the mistake.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HitAlarm:
    """What the last `span_s` seconds looked like."""

    span_s: float
    num_lookups: int
    num_hits: int
    num_unexplained: int


@dataclass(slots=True)
class _Asked:
    content: bytes
    num_times: int = 0
    is_shared: bool = False  # by different contents


class HitWatch:
    """`asked` at the door, for each window; `hit` when the cache had it.  Both return whether that is more than traffic explains.

    Remembers the last `max_windows` windows.  `num_inherited` entries were there before anybody asked, None: nobody knows how many.  Each
    of them, and each window that is forgotten here and may live on there, excuses one hit at first sight.
    """

    def __init__(self, num_inherited: int | None, *, max_windows: int = 2**13, span_s: float = 300.0, alarm_every_s: float = 60.0) -> None:
        self._num_excuses = math.inf if num_inherited is None else num_inherited
        self._max_windows = max_windows
        self._span_s = span_s
        self._alarm_every_s = alarm_every_s
        self._asked: OrderedDict[bytes, _Asked] = OrderedDict()  # by key, asked for longest ago first
        self._counts: deque[tuple[float, list[int]]] = deque()  # since when: lookups, hits, unexplained; a second each
        self._alarmed_s = -math.inf

    def asked(self, key: bytes, content: bytes, now_s: float) -> bool:
        asked = self._asked.setdefault(key, _Asked(content))
        self._asked.move_to_end(key)
        asked.num_times += 1
        is_stranger = asked.content != content
        asked.is_shared |= is_stranger
        if len(self._asked) > self._max_windows:
            self._asked.popitem(last=False)
            self._num_excuses += 1
        return self._count(now_s, lookups=1, unexplained=int(is_stranger))

    def hit(self, key: bytes, now_s: float) -> bool:
        asked = self._asked.get(key)
        is_explained = asked is not None and asked.num_times > 1
        if not is_explained and self._num_excuses > 0:
            self._num_excuses -= 1
            is_explained = True
        if asked is not None and asked.is_shared:
            is_explained = False
        return self._count(now_s, hits=1, unexplained=int(not is_explained))

    def alarm(self, now_s: float) -> HitAlarm | None:
        """Something to tell the person on call: not more often than every `alarm_every_s`."""
        while self._counts and self._counts[0][0] <= now_s - self._span_s:
            self._counts.popleft()
        lookups, hits, unexplained = (sum(counts[i] for _, counts in self._counts) for i in range(3))
        if not unexplained or now_s - self._alarmed_s < self._alarm_every_s:
            return None
        self._alarmed_s = now_s
        return HitAlarm(self._span_s, lookups, hits, unexplained)

    def _count(self, now_s: float, *, lookups: int = 0, hits: int = 0, unexplained: int = 0) -> bool:
        if not self._counts or now_s - self._counts[-1][0] >= 1.0:
            self._counts.append((now_s, [0, 0, 0]))
            while self._counts[0][0] <= now_s - self._span_s:
                self._counts.popleft()
        for i, number in enumerate((lookups, hits, unexplained)):
            self._counts[-1][1][i] += number
        return unexplained > 0
