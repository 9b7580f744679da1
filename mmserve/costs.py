"""What each request costs: its shares of the steps and encodes it was in, at the price of the GPUs that ran them.  Pure.

A request is charged for each of its tokens once, and for its part of an encode that landed while it waited.  What was computed again,
what failed and what nobody waited for any more is the server's, in `gpu_overhead_seconds`; both together are all that workers measured.
Encoders hosted elsewhere take no GPU of ours, and cost nothing here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mmserve.config import CANARY_SUFFIX, CostConfig
from mmserve.media import MediaKind, MediaWindow
from mmserve.request import Cost
from mmserve.scheduler.sequence import Sequence

PREFILL, DECODE = "prefill", "decode"
ENCODE = {kind: f"{kind.value}_encode" for kind in MediaKind}
STAGES = (*ENCODE.values(), PREFILL, DECODE)
FORGETTING = 0.98  # of what an encode taught, kept at each later one of its kind


class Prices:
    """USD per GPU-second of each pool."""

    def __init__(self, config: CostConfig) -> None:
        default = config.price_per_gpu_hour
        pools = {
            "small": config.small_price_per_gpu_hour,
            "large": config.large_price_per_gpu_hour,
            MediaKind.IMAGE.value: config.vision_price_per_gpu_hour,
            MediaKind.AUDIO.value: config.audio_price_per_gpu_hour,
        }
        self._usd_per_s = {pool: (default if price is None else price) / 3600 for pool, price in pools.items()}
        self._default = default / 3600

    def usd(self, pool: str, gpu_s: float) -> float:
        """Of a decoder by its name, or of a media kind's encoders.  A canary's costs what its base's does."""
        return self._usd_per_s.get(pool.removesuffix(CANARY_SUFFIX), self._default) * gpu_s


class EncodeRates:
    """GPU-seconds a row of an embedding takes, by kind, as encodes of late took: for what a cached one saved."""

    def __init__(self) -> None:
        self._seconds: defaultdict[MediaKind, float] = defaultdict(float)
        self._rows: defaultdict[MediaKind, float] = defaultdict(float)

    def observe(self, kind: MediaKind, num_rows: int, gpu_s: float) -> None:
        self._seconds[kind] = FORGETTING * self._seconds[kind] + gpu_s
        self._rows[kind] = FORGETTING * self._rows[kind] + num_rows

    def estimate(self, kind: MediaKind, num_rows: int) -> float:
        """0 while nothing of the kind was ever encoded."""
        return self._seconds[kind] / self._rows[kind] * num_rows if self._rows[kind] else 0.0


class _Part(NamedTuple):
    """Of an encode."""

    kind: MediaKind
    gpu_s: float
    spared_s: float  # borne by others who waited for the same rows


@dataclass(slots=True, eq=False)
class Bill:
    """Of one request, from its admission until the last step with a row of it has landed."""

    rates: EncodeRates
    sequences: list[tuple[str, Sequence]] = field(default_factory=list)  # with their decoder, also of attempts that were given up
    encodes: dict[bytes, _Part] = field(default_factory=dict)  # by window key

    def add(self, model: str, sequences: Iterable[Sequence]) -> None:
        """An attempt begins."""
        self.sequences += [(model, sequence) for sequence in sequences]

    def payer(self, window: MediaWindow) -> Callable[[float, int], None]:
        """Who pays for the rows of a window, should they be encoded."""

        def pay(gpu_s: float, num_payers: int) -> None:
            self.rates.observe(window.kind, window.num_rows, gpu_s * num_payers)
            self.encodes[window.key] = _Part(window.kind, gpu_s, gpu_s * (num_payers - 1))

        return pay

    @property
    def has_landed(self) -> bool:
        """Whether nothing more will be charged.  A step that ran when the answer ended may still be on its way."""
        return not any(sequence.num_steps for _, sequence in self.sequences)

    @property
    def gpu_seconds(self) -> dict[str, float]:
        """By stage, as far as steps have landed."""
        seconds = dict.fromkeys(STAGES, 0.0)
        for part in self.encodes.values():
            seconds[ENCODE[part.kind]] += part.gpu_s
        for _, sequence in self.sequences:
            seconds[PREFILL] += sequence.prefill_gpu_s
            seconds[DECODE] += sequence.decode_gpu_s
        return seconds


class CostBooks:
    """Makes bills, and sums them up.  `prefill_gpu_s(model, num_tokens)` says what a prefix found in the cache would have taken."""

    def __init__(self, prices: Prices, prefill_gpu_s: Callable[[str, int], float]) -> None:
        self._prices = prices
        self._prefill_gpu_s = prefill_gpu_s
        self._rates = EncodeRates()

    def open(self) -> Bill:
        return Bill(self._rates)

    def cost(self, bill: Bill, windows: Iterable[MediaWindow]) -> Cost:
        """As it stands; final once the bill has landed.  `windows` are those whose rows the request has read, from wherever."""
        usd = sum(self._prices.usd(model, each.prefill_gpu_s + each.decode_gpu_s) for model, each in bill.sequences)
        usd += sum(self._prices.usd(part.kind.value, part.gpu_s) for part in bill.encodes.values())
        return Cost(bill.gpu_seconds, usd, self._saved_usd(bill, windows))

    def _saved_usd(self, bill: Bill, windows: Iterable[MediaWindow]) -> float:
        """Rows that were found or shared, by what such rows took of late; prefixes that were found, by the cost model."""
        saved = 0.0
        for window in windows:
            part = bill.encodes.get(window.key)
            spared_s = self._rates.estimate(window.kind, window.num_rows) if part is None else part.spared_s
            saved += self._prices.usd(window.kind.value, spared_s)
        for model, sequence in bill.sequences:
            saved += self._prices.usd(model, self._prefill_gpu_s(model, sequence.num_cached_tokens))
        return saved
