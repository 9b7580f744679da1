"""What those at one replica do to each other: the prefill of each lengthens the steps in which all the others decode."""

from __future__ import annotations

from mmserve.scheduler.sequence import Sequence

HARM = 0.5
"""GPU-ms of waiting for a first token that are as bad as one by which somebody's answer is drawn out: that is spread over many tokens."""

MEDIA_HASTE = 0.5  # while all of it is taken
MIN_MEDIA_HASTE = 0.05  # whatever is refused, so that media still spread over the replicas that they have
NUM_RECENT = 64  # requests with media: a surge is noticed in less than a second


class MediaHaste:
    """How much a GPU-ms matters to an answer about media, if it matters 1 to one about text alone.

    The more requests with media are refused, the less: then it is they who are too many, and text must not notice it.  It goes by the
    square of the share that is taken: where one in ten is refused the box is just full, and keeping kinds apart would waste some of it.
    """

    def __init__(self) -> None:
        self._share_taken = 1.0

    def observe(self, *, is_taken: bool) -> None:
        """A request with media was taken or refused."""
        self._share_taken += (is_taken - self._share_taken) / NUM_RECENT

    @property
    def value(self) -> float:
        return max(MIN_MEDIA_HASTE, MEDIA_HASTE * self._share_taken**2)


class Crowd:
    """All sequences at a replica, waiting or running, by what they bring and by how much they mind what others bring.

    Whoever joins draws out the answers there by his prefill; and what those who are there have brought, others like them will bring while
    his own answer is drawn.  The sum over all pairs is least where the load is even and those who mind most, text, are among themselves:
    both kinds spread over as many replicas as they need, and where a kind needs another one it takes that with the fewest of the other.
    """

    def __init__(self, haste: MediaHaste) -> None:
        self._haste = haste
        self._ms_of: dict[int, float] = {}  # by seq_id: GPU-ms to compute the prompt
        self._ms = 0.0  # sum of these
        self._num_media = 0  # sequences with media

    def join(self, sequence: Sequence, ms: float) -> None:
        self._ms_of[sequence.seq_id] = ms
        self._ms += ms
        self._num_media += bool(sequence.spans)

    def leave(self, sequence: Sequence) -> None:
        self._ms -= self._ms_of.pop(sequence.seq_id)
        self._num_media -= bool(sequence.spans)
        if not self._ms_of:
            self._ms = 0.0  # and not what rounding left

    def harm_ms(self, sequence: Sequence, ms: float) -> float:
        """What it would cost all together if this sequence, which takes `ms` to catch up, were here, too."""
        haste = self._haste.value
        num_in_haste = len(self._ms_of) - (1 - haste) * self._num_media
        return HARM * (ms * num_in_haste + (haste if sequence.spans else 1.0) * self._ms)
