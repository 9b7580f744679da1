"""What was used and what it cost, summed up from the ledger: by tenant, day and modality."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlite_utils import Database

from mmserve.modality_router import mix_of

ENCODE_LIMIT = 0.25  # of what a request of text alone takes: encoding should add no more to one with media
_SELECT = """SELECT tenant_id, date(created_at, 'unixepoch') AS day, modality_mask,
    count(*), sum(text_tokens + vision_tokens + audio_tokens),
    sum(image_encode_gpu_s + audio_encode_gpu_s), sum(prefill_gpu_s), sum(decode_gpu_s), sum(usd), sum(saved_usd)
    FROM inference_requests JOIN request_costs USING (request_id) WHERE created_at >= ?
    GROUP BY tenant_id, day, modality_mask ORDER BY tenant_id, day, modality_mask"""


@dataclass(frozen=True, slots=True)
class Sum:
    """Of some requests."""

    num_requests: int = 0
    prompt_tokens: int = 0
    encode_gpu_s: float = 0.0
    prefill_gpu_s: float = 0.0
    decode_gpu_s: float = 0.0
    usd: float = 0.0
    saved_usd: float = 0.0  # an estimate: what it would have cost more without caches

    def __add__(self, other: Sum) -> Sum:
        return Sum(*(getattr(self, name) + getattr(other, name) for name in Sum.__slots__))

    @property
    def gpu_s(self) -> float:
        return self.encode_gpu_s + self.prefill_gpu_s + self.decode_gpu_s

    @property
    def usd_per_1000(self) -> float:
        return 1000 * self.usd / self.num_requests

    def encode_share(self, text: Sum | None) -> float | None:
        """GPU time that encoding adds to a request, as a share of what one of text alone takes; None if there are none of those."""
        if text is None or not text.gpu_s:
            return None
        return (self.encode_gpu_s / self.num_requests) / (text.gpu_s / text.num_requests)


@dataclass(frozen=True, slots=True)
class Used:
    """By tenant, day (UTC) and modality mix at once."""

    tenant: str
    day: str  # 2026-11-30
    modality: str
    sum: Sum


def read_usage(db: Database, since_s: float) -> list[Used]:
    """Requests that began at `since_s` (seconds since the epoch) or later, and of which it is known what they cost."""
    return [Used(tenant, day, mix_of(mask), Sum(*figures)) for tenant, day, mask, *figures in db.execute(_SELECT, [since_s])]


def summed(used: Iterable[Used], key: Callable[[Used], str]) -> dict[str, Sum]:
    """In the order of the keys."""
    sums: defaultdict[str, Sum] = defaultdict(Sum)
    for each in used:
        sums[key(each)] += each.sum
    return dict(sorted(sums.items()))
