"""Whether the beginning of an answer is certain enough to be told, or should come from the large decoder.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmserve.scheduler.scheduler import TokenUpdate


@dataclass(slots=True, eq=False)
class Doubt:
    """About one answer, until it is dispelled."""

    escalate_above: float  # nats
    num_tokens: int  # that are looked at
    held: list[TokenUpdate] = field(default_factory=list)
    is_moving: bool = False  # to the large decoder

    def take(self, update: TokenUpdate) -> bool:
        """Hold it.  Whether it is less certain than it may be."""
        self.held.append(update)
        token = update.token
        return token is not None and token.entropy is not None and token.entropy > self.escalate_above

    @property
    def is_dispelled(self) -> bool:
        """Enough has been seen, or there will be no more."""
        return not self.is_moving and (len(self.held) >= self.num_tokens or self.held[-1].finish_reason is not None)
