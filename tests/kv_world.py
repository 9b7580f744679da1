"""A worker made of arithmetic: every KV slot holds a name for all content up to its position, so that wrong sharing shows.

It knows nothing but plans and keeps no requests.  What a row reads is compared, slot by slot, with what a slow oracle says must be there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection
from collections.abc import Sequence as Rows

from mmserve.media import MediaKind, MediaSpan
from mmserve.plan import SampledToken, StepFailed, StepPlan, StepResult
from mmserve.request import SamplingParams
from mmserve.scheduler.sequence import Sequence
from mmserve.shared_buffer import BufferSlice

NUM_TOKEN_IDS = 90
EOS = 89
PLACEHOLDER = 1_000_000  # outside the vocabulary: must never reach a worker

Part = int | tuple[bytes, int]
"""What a token is: a text id, or a row of a window."""


def media_key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def content(before: bytes, part: Part) -> bytes:
    return hashlib.sha256(before + repr(part).encode()).digest()


def next_token(at_last: bytes, seed: int, position: int, banned: Collection[int] = ()) -> int:
    digest = hashlib.sha256(at_last + f"{seed} {position}".encode()).digest()
    allowed = [token_id for token_id in range(NUM_TOKEN_IDS) if token_id not in banned]
    return allowed[int.from_bytes(digest[:4], "little") % len(allowed)]


def parts_of(sequence: Sequence) -> list[Part]:
    parts: list[Part] = list(sequence.token_ids)
    for span in sequence.spans:
        parts[span.start : span.stop] = [(span.key, row) for row in range(span.stop - span.start)]
    return parts


def contents_of(parts: Rows[Part]) -> list[bytes]:
    """The slow, obvious oracle: what the slot of every position must hold."""
    names, name = [], b""
    for part in parts:
        name = content(name, part)
        names.append(name)
    return names


def answer_alone(sequence: Sequence) -> list[int]:
    """What a sequence must say, computed without cache, blocks or neighbours.  Call it before the sequence is scheduled."""
    name = contents_of(parts_of(sequence)[: sequence.num_prompt])[-1]
    position = sequence.num_prompt
    answer: list[int] = []
    while True:
        banned = sequence.end_token_ids if len(answer) < sequence.sampling.min_tokens else ()
        token = next_token(name, sequence.seed, position, banned)
        answer.append(token)
        position += 1
        if token in sequence.end_token_ids or len(answer) == sequence.sampling.max_tokens or position == sequence.max_total_tokens:
            return answer
        name = content(name, token)


class FakeMedia:
    """Windows and where their rows are: `rows_of` is what a scheduler is given."""

    def __init__(self) -> None:
        self._rows: dict[bytes, BufferSlice] = {}
        self._key_at: dict[int, bytes] = {}

    def encode(self, key: bytes, num_rows: int = 64) -> None:
        if key not in self._rows:
            where = BufferSlice(len(self._key_at), (num_rows, 1), "float32")
            self._key_at[where.offset] = key
            self._rows[key] = where

    def drop(self, key: bytes) -> None:
        self._rows.pop(key, None)

    def rows_of(self, key: bytes) -> BufferSlice | None:
        return self._rows.get(key)

    def key_at(self, where: BufferSlice) -> bytes:
        return self._key_at[where.offset]

    @property
    def keys(self) -> list[bytes]:
        return list(self._rows)


class FakeWorker:
    """Executes plans against one KV array.  `truth` finds the sequence behind a row, for the oracle only."""

    def __init__(self, num_blocks: int, block_size: int, media: FakeMedia) -> None:
        self.kv: list[bytes] = [b"?"] * (num_blocks * block_size)
        self.block_size = block_size
        self.media = media
        self.num_computed = 0  # tokens, in all
        self.largest_copy = 0  # tokens
        self.sampled: tuple[SampledToken | None, ...] | None = None  # by the last step
        self._expected: dict[int, list[bytes]] = {}  # seq_id -> what its positions must hold

    def run(self, plan: StepPlan, truth: dict[int, Sequence], stale: Collection[int] = ()) -> StepResult | StepFailed:
        """One step, after all that were sent before.  What becomes of `stale` rows (seq_ids) nobody cares about, but for where it goes."""
        if self.sampled is None and plan.sampled_by.max() >= 0:
            return StepFailed(plan.step_id, "follows_failed_step")
        plan = plan.completed(self.sampled or ())
        self._copy(plan)
        parts = self._parts(plan)
        tokens: list[SampledToken | None] = []
        written: set[int] = set()
        contexts = [self._slots(plan, row) for row in range(len(plan.seq_ids))]
        oracles = [self._oracle(truth[seq_id]) for seq_id in plan.seq_ids]
        for row, (context, expected) in enumerate(zip(contexts, oracles, strict=True)):
            first, last = int(plan.query_starts[row]), int(plan.query_starts[row + 1])
            stop = len(context)
            start = stop - (last - first)
            assert 0 <= start < stop
            assert plan.positions[0, first:last].tolist() == list(range(start, stop))
            assert plan.slot_mapping[first:last].tolist() == context[start:]
            is_stale = plan.seq_ids[row] in stale
            assert is_stale or [self.kv[slot] for slot in context[:start]] == expected[:start], f"row {row} reads another's KV"
            for i, position in enumerate(range(start, stop)):
                before = self.kv[context[position - 1]] if position else b""
                self.kv[context[position]] = content(before, parts[first + i])
                is_right = is_stale or self.kv[context[position]] == expected[position]
                assert is_right, f"row {row} computes the wrong thing at {position}"
            assert written.isdisjoint(context[start:]), "two rows write one slot"
            written.update(context[start:])
            tokens.append(self._sample(plan, row, self.kv[context[-1]]))
        for seq_id, context, expected in zip(plan.seq_ids, contexts, oracles, strict=True):
            is_right = seq_id in stale or [self.kv[slot] for slot in context] == expected[: len(context)]
            assert is_right, "a row wrote over what another was reading"
        self.num_computed += len(plan.token_ids)
        self.sampled = tuple(tokens)
        return StepResult(plan.step_id, self.sampled)

    def fail(self, plan: StepPlan) -> None:
        """The step ran out of memory half way: whatever it was to write is spoilt."""
        self.sampled = None
        for slot in plan.slot_mapping.tolist():
            self.kv[slot] = b"spoilt"
        for copy in plan.copies:
            for offset in range(copy.num_tokens):
                self.kv[copy.target * self.block_size + offset] = b"spoilt"

    def _copy(self, plan: StepPlan) -> None:
        size = self.block_size
        read = {copy.source: self.kv[copy.source * size : (copy.source + 1) * size] for copy in plan.copies}
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets)
        assert read.keys().isdisjoint(targets), "the order of copies would matter"
        for copy in plan.copies:
            assert 0 < copy.num_tokens < size
            start = copy.target * size
            self.kv[start : start + size] = [*read[copy.source][: copy.num_tokens], *([b"?"] * (size - copy.num_tokens))]
            self.largest_copy = max(self.largest_copy, copy.num_tokens)

    def _oracle(self, sequence: Sequence) -> list[bytes]:
        """`contents_of` the whole sequence, kept from step to step because tokens are only ever added."""
        known = self._expected.get(sequence.seq_id)
        if known is None:
            known = self._expected[sequence.seq_id] = contents_of(parts_of(sequence)[: sequence.num_prompt])
        for token_id in sequence.token_ids[len(known) :]:
            known.append(content(known[-1], token_id))
        return known

    def _parts(self, plan: StepPlan) -> list[Part]:
        ids = plan.token_ids.tolist()
        assert all(0 <= token_id < NUM_TOKEN_IDS for token_id in ids), "a placeholder reached the worker"
        parts: list[Part] = ids
        for piece in plan.media:
            key = self.media.key_at(piece.rows)
            assert key == piece.key
            rows = range(piece.row_start, piece.row_start + piece.num_rows)
            assert rows
            parts[piece.token_start : piece.token_start + piece.num_rows] = [(key, row) for row in rows]
        return parts

    def _slots(self, plan: StepPlan, row: int) -> list[int]:
        """Where a row's whole context is, position by position."""
        block_ids = plan.block_tables[row].tolist()
        stop = int(plan.context_lens[row])
        return [block_ids[position // self.block_size] * self.block_size + position % self.block_size for position in range(stop)]

    def _sample(self, plan: StepPlan, row: int, at_last: bytes) -> SampledToken | None:
        how = plan.sampling[row]
        assert (how is not None) == bool(plan.wants_token[row])
        if how is None:
            return None
        assert how.temperature == 0 or how.position == plan.context_lens[row]
        return SampledToken(next_token(at_last, how.seed, int(plan.context_lens[row]), how.banned_ids))


def prompt(*parts: int | str | tuple[str, int]) -> tuple[array[int], tuple[MediaSpan, ...]]:
    """`prompt(5, ("cat", 20), 3)`: five text tokens, twenty rows of the window `cat`, three text tokens.  A string is text of its own."""
    token_ids, spans = array("i"), []
    for part in parts:
        if isinstance(part, tuple):
            name, num_rows = part
            spans.append(MediaSpan(media_key(name), MediaKind.IMAGE, len(token_ids), len(token_ids) + num_rows))
            token_ids.extend([PLACEHOLDER] * num_rows)
        elif isinstance(part, str):
            token_ids.extend(ord(character) % NUM_TOKEN_IDS for character in part)
        else:
            first = len(token_ids)
            token_ids.extend(1 + (first + i) % 80 for i in range(part))
    return token_ids, tuple(spans)


def sequence(seq_id: int, *parts: int | str | tuple[str, int], **fields: object) -> Sequence:
    """A greedy sequence of that prompt which stops after four tokens, unless `fields` say otherwise."""
    token_ids, spans = prompt(*parts)
    defaults: dict[str, object] = {"sampling": SamplingParams(max_tokens=4, temperature=0.0), "arrival_s": float(seq_id)}
    return Sequence(seq_id, token_ids, spans=spans, **{**defaults, **fields})  # type: ignore[arg-type]
