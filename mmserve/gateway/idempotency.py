"""`Idempotency-Key`: a request that is sent again, because its answer never came, joins the answer it began or gets it once more.

One generation, any number of readers: each is told from the beginning, and at its own pace.  It goes on as long as anybody reads;
when the last one leaves it is cancelled and forgotten, as without a key.  Answers are kept for ten minutes, errors not at all.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial

from mmserve.errors import BadRequest, KeyReused, MmserveError
from mmserve.gateway.call import Call
from mmserve.gateway.refusals import unexpected
from mmserve.media import MediaItem
from mmserve.request import ChatRequest
from mmserve.token_stream import Delta, Generation

HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 255
KEEP_S = 600.0
MAX_ANSWERS = 4096
MAX_BYTES = 32 * 2**20  # of answers kept
_ANSWER_BYTES, _DELTA_BYTES, _ID_BYTES = 2048, 256, 64  # what Python needs for one, near enough

_log = logging.getLogger(__name__)

Submit = Callable[[ChatRequest], Awaitable[Generation]]


def parse_key(header: str | None) -> str | None:
    """Raises BadRequest."""
    if header is None:
        return None
    if not (0 < len(header) <= MAX_KEY_LENGTH and header.isascii() and header.isprintable()):
        raise BadRequest(f"{HEADER} must be 1 to {MAX_KEY_LENGTH} printable characters", param=HEADER)
    return header


def fingerprint(route: str, call: Call) -> bytes:
    """Of what was asked for, whatever its JSON or its form looked like.  Megabytes of media belong off the event loop."""
    request = call.request
    digest = hashlib.sha256(repr((route, replace(call, request=replace(request, messages=(), request_id="")))).encode())
    for message in request.messages:
        digest.update(repr((message.role, len(message.parts))).encode())
        for part in message.parts:
            kind, data = ((part.kind, part.detail), part.data) if isinstance(part, MediaItem) else ("text", part.encode())
            digest.update(repr((kind, len(data))).encode())
            digest.update(data)
    return digest.digest()


class Replay(Generation):
    """What one reader of a shared answer is told.  `is_repeat` unless it was the first to ask."""

    is_repeat = False


class _Answer:
    """One generation and its readers.  `forget` is called when nobody wants it any more, and when it failed."""

    def __init__(self, submit: Callable[[], Awaitable[Generation]], mark: bytes, born_s: float, forget: Callable[[_Answer], None]) -> None:
        self.mark = mark
        self.born_s = born_s
        self.num_bytes = _ANSWER_BYTES
        self._forget = forget
        self._said: list[Delta] = []
        self._source: Generation | None = None
        self._error: MmserveError | None = None
        self._num_readers = 0
        self._readers: set[Replay] = set()
        self._known = asyncio.Event()  # whether there is a generation or an error
        self._task = asyncio.create_task(self._run(submit), name="shared-answer")

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def join(self) -> Replay:
        """Raises the error with which the request was refused."""
        is_repeat = self._num_readers > 0 or self._known.is_set()
        self._num_readers += 1
        try:
            await self._known.wait()
        except asyncio.CancelledError:
            self._leave()
            raise
        if self._source is None:
            assert self._error is not None
            raise self._error
        reader = self._reader_of(self._source)
        reader.is_repeat = is_repeat
        for delta in self._said:
            reader.push(copy.copy(delta))
        if self._error is not None:
            reader.fail(self._error)
        if self.is_running:
            self._readers.add(reader)
        return reader

    def _reader_of(self, source: Generation) -> Replay:
        reader = Replay(
            request_id=source.request_id,
            model=source.model,
            route_reason=source.route_reason,
            usage=source.usage,
            num_choices=source.num_choices,
        )
        reader.follow(source)
        reader.on_cancel = partial(self._leave, reader)
        return reader

    def _leave(self, reader: Replay | None = None) -> None:
        """Of one that is still being told, or waits to be.  Idempotent for a reader."""
        if reader is not None:
            if reader not in self._readers:
                return
            self._readers.discard(reader)
        self._num_readers -= 1
        if self._num_readers == 0 and self.is_running:
            self._task.cancel()
            self._forget(self)

    async def _run(self, submit: Callable[[], Awaitable[Generation]]) -> None:
        try:
            source = self._source = await submit()
            self._known.set()
            try:
                while batch := await source.next_batch():
                    self._tell(batch, source)
            finally:
                source.cancel()
                source.on_cancel = None  # it knows the request, and that its media
        except MmserveError as error:
            self._fail(error)
        except Exception as error:
            self._fail(unexpected(error, _log, "-"))
        finally:
            self._readers.clear()

    def _tell(self, batch: Iterable[Delta], source: Generation) -> None:
        for reader in self._readers:
            reader.follow(source)
        for delta in batch:
            num_ids = len(delta.token_ids) + sum(1 + len(token.top) for token in delta.logprobs)
            self.num_bytes += _DELTA_BYTES + len(delta.text) + _ID_BYTES * num_ids
            self._said.append(delta)
            for reader in self._readers:
                reader.push(copy.copy(delta))

    def _fail(self, error: MmserveError) -> None:
        self._error = error
        self._known.set()
        for reader in self._readers:
            reader.fail(error)
        self._forget(self)


class Answers:
    """By tenant and key.  Running ones are as many as the engine takes; of the others the oldest go first."""

    def __init__(self, submit: Submit, now_s: Callable[[], float] = time.monotonic) -> None:
        self._submit = submit
        self._now_s = now_s
        self._answers: dict[tuple[str, str], _Answer] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._answers)

    def knows(self, tenant: str, key: str | None) -> bool:
        return key is not None and (tenant, key) in self._answers

    async def submit(self, key: str, mark: bytes, request: ChatRequest) -> Replay:
        """Begin an answer, or join the one that this tenant asked for under this key.  Raises KeyReused if that was another request."""
        self._drop_old()
        place = (request.tenant, key)
        answer = self._answers.get(place)
        if answer is None:
            answer = self._answers[place] = _Answer(partial(self._submit, request), mark, self._now_s(), partial(self._forget, place))
        elif answer.mark != mark:
            raise KeyReused("this Idempotency-Key came with another request before", param=HEADER)
        return await answer.join()

    def _forget(self, place: tuple[str, str], answer: _Answer) -> None:
        if self._answers.get(place) is answer:
            del self._answers[place]

    def _drop_old(self) -> None:
        """Those that have ended: by age, and the oldest of too many or too large ones."""
        num_bytes = sum(answer.num_bytes for answer in self._answers.values())
        oldest_s = self._now_s() - KEEP_S
        for place, answer in list(self._answers.items()):
            if answer.born_s > oldest_s and len(self._answers) < MAX_ANSWERS and num_bytes <= MAX_BYTES:
                break
            if not answer.is_running:
                del self._answers[place]
                num_bytes -= answer.num_bytes
