"""The decoders of a server by name: those on which it relies, and canaries beside them, which come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping

from mmserve.composition import Composition
from mmserve.config import Config
from mmserve.decoder_group import DecoderGroup
from mmserve.decoder_specs import queue_limits, replica_specs, scheduler_limits
from mmserve.errors import MmserveError, Overloaded
from mmserve.media import MediaKind, MediaSpan
from mmserve.metrics import Metrics
from mmserve.replica import Rows
from mmserve.scheduler.scheduler import TokenUpdate
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import SharedMemory
from mmserve.tokenizer import Tokenizer


class DecoderGroups(Mapping[str, DecoderGroup]):
    """Owned by the event loop.  `composition` has canaries, too, under the names in `bases`.

    One that was opened stays known when it is closed.
    """

    def __init__(
        self,
        config: Config,
        composition: Composition,
        bases: Mapping[str, str],
        tokenizers: Mapping[str, Tokenizer],
        rows: Rows,
        memory: SharedMemory,
        metrics: Metrics,
        *,
        device: str,
        dtype: str,
        num_threads: int,
        max_model_len: int,
        deliver: Callable[[list[TokenUpdate]], None],
        want: Callable[[Sequence, MediaSpan], None],
        lost: Callable[[Sequence, MmserveError], None],
    ) -> None:
        self._config = config
        self._composition = composition
        self._bases = bases
        self._tokenizers = tokenizers
        self._rows = rows
        self._memory = memory
        self._metrics = metrics
        self._device = device
        self._dtype = dtype
        self._num_threads = num_threads
        self._max_model_len = max_model_len
        self._deliver = deliver
        self._want = want
        self._lost = lost
        self._groups: dict[str, DecoderGroup] = {}

    def __getitem__(self, name: str) -> DecoderGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def open(self, name: str, on_restart: Callable[[str], None]) -> DecoderGroup:
        """Its workers are started.  Raises ConfigError."""
        config, device = self._config, self._device
        self._groups[name] = DecoderGroup(
            replica_specs(
                name,
                config,
                self._composition,
                device=device,
                dtype=self._dtype,
                num_threads=self._num_threads,
                max_model_len=self._max_model_len,
                tokenizer=self._tokenizers[name],
                base=self._bases.get(name),
            ),
            self._memory,
            scheduler_limits(config.scheduler, device, self._max_model_len),
            self._rows,
            self._metrics,
            queue=queue_limits(config.scheduler, device),
            enable_prefix_caching=config.scheduler.enable_prefix_caching,
            deliver=self._deliver,
            want=self._want,
            lost=self._lost,
            on_restart=on_restart,
        )
        return self._groups[name]

    async def close(self) -> None:
        """Those of canaries are closed by whom they were opened."""
        await asyncio.gather(*(group.close() for group in self.stable.values()))

    @property
    def stable(self) -> Mapping[str, DecoderGroup]:
        return {name: group for name, group in self._groups.items() if name not in self._bases}

    @property
    def num_waiting(self) -> Mapping[str, int]:
        """Sequences that wait for a first step, for media or for a worker."""
        return {name: group.num_waiting for name, group in self.stable.items()}

    def capable(self, pools: Collection[MediaKind]) -> Collection[str]:
        """Those that take the media and have workers; or only the former, to say why it can't be had."""
        capable = [name for name in self._composition.decoders_taking(pools) if name not in self._bases]
        return [name for name in capable if not self._groups[name].broken] or capable

    def check_room(self, num_preparing: int) -> None:
        """Raises Overloaded if none takes anything just now, whatever it may be, while `num_preparing` requests are on their way there."""
        groups = self.stable.values()
        if num_preparing >= self._config.scheduler.max_num_queued_reqs:
            raise Overloaded("too many requests are waiting", retry_after_s=max(group.retry_after_s(num_preparing) for group in groups))
        refusal: Overloaded | None = None
        for group in groups:
            try:
                group.check_room()
            except Overloaded as full:
                refusal = full
            else:
                return
        if refusal is not None:
            raise refusal
