"""Holds answers against what the vision side saw of their pictures: before they end where that is asked for, afterwards for a few others.

`flag` lets an answer through and tells at its end what of it the pictures don't support.  `regenerate` holds it back, and draws once more
when there is something.  Neither ever fails a request that would have been answered without it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmserve.active_request import ActiveRequest
from mmserve.answer_quality import AnswerQuality
from mmserve.background import BackgroundTasks
from mmserve.composition import BadModel, Composition, GuardrailSpec, read_guardrail
from mmserve.config import Config, ConfigError, GuardrailConfig, is_simulated
from mmserve.encoders.to_the_end import to_the_end
from mmserve.errors import BadRequest, EncoderUnavailable, MmserveError, Overloaded
from mmserve.grounding.probe import DETECTORS, Detector, float_rows
from mmserve.grounding.verdict import Grounder, Report, Verdict
from mmserve.grounding.vocabulary import Vocabulary
from mmserve.media import MediaKind, PreparedMedia
from mmserve.media_service import MediaService
from mmserve.metrics import Metrics
from mmserve.request import ChatRequest, FinishReason, SamplingParams
from mmserve.token_stream import Delta, Generation
from mmserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

REDRAW_TEMPERATURE = 0.7  # of a second draw after a greedy one, which would say the same again
MAX_SEEN = 2**14  # pictures whose scores are remembered
MAX_SAMPLES = 32  # looked at at once; beyond that a sampled answer is left out
CLOSE_S = 2.0
_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)

Admit = Callable[[ChatRequest], Awaitable[ActiveRequest]]


@dataclass(frozen=True)
class Judge:
    """For one decoder's answers and rows."""

    grounder: Grounder
    detector: Detector


def load_judges(spec: GuardrailSpec, composition: Composition) -> dict[str, Judge]:
    """By decoder.  Reads files, the encoder's weights among them.  Raises ConfigError."""
    if spec.detector not in DETECTORS:
        raise BadModel(f"there is no detector {spec.detector!r}; there are {', '.join(DETECTORS)}")
    if missing := composition.vision.keys() - spec.probes.keys():
        raise BadModel(f"the guardrail's probes lack {', '.join(sorted(missing))}")
    vocabulary = Vocabulary.read(spec.vocabulary)
    if unknown := spec.thresholds.keys() - set(vocabulary.objects):
        raise BadModel(f"the guardrail has thresholds for {', '.join(sorted(unknown))}, which the vocabulary lacks")
    judges = {}
    for name, encoder in composition.vision.items():
        detector = DETECTORS[spec.detector](spec.probes[name], encoder, name)
        judges[name] = Judge(Grounder(vocabulary, detector.labels(), spec.threshold, spec.thresholds), detector)
    return judges


def own_judges(config: Config, composition: Composition, device: str) -> dict[str, Judge]:
    """For a server as it is configured: none where no table says what its pictures' rows mean, or where others make them."""
    table = config.guardrail.guardrail_table
    spec = composition.guardrail if table is None else read_guardrail(table)
    if spec is None or is_simulated(device) or config.encoder.vision_url is not None:
        return {}
    return load_judges(spec, composition)


class Guardrail:
    """Owned by the event loop; pictures and texts are looked at in threads.  Without `judges` it refuses what asks for it.

    `bases` gives the decoder beside which a canary stands.  A canary's answers are held against what that one's encoder sees: through an
    adapter of its own it would see what it says.  `on_report` hears of everything that was looked at.
    """

    def __init__(
        self,
        config: GuardrailConfig,
        judges: Mapping[str, Judge],
        media: MediaService,
        tokenizers: Mapping[str, Tokenizer],
        quality: AnswerQuality,
        metrics: Metrics,
        *,
        bases: Mapping[str, str],
        on_report: Callable[[ActiveRequest, Report], None],
    ) -> None:
        if config.guardrail != "off" and not judges:
            raise ConfigError("this model has nothing to tell what is in a picture; --guardrail-table names it", param="guardrail")
        if config.grounding_sample > 1:
            raise ConfigError(f"grounding-sample is a share, at most 1, got {config.grounding_sample}", param="grounding-sample")
        self._config = config
        self._judges = judges
        self._media = media
        self._tokenizers = tokenizers
        self._quality = quality
        self._metrics = metrics
        self._bases = bases
        self._on_report = on_report
        self._lot = random.Random(0)
        self._seen: OrderedDict[bytes, np.ndarray] = OrderedDict()  # window key -> scores, least recently used first
        self._tasks = BackgroundTasks()
        self._num_samples = 0

    def resolve(self, request: ChatRequest) -> ChatRequest:
        """The same with the mode that it gets.  Raises BadRequest."""
        mode = request.guardrail or self._config.guardrail
        if mode != "off" and not self._judges:
            raise BadRequest("this model has no guardrail: nothing tells what is in its pictures", param="guardrail")
        return request if request.guardrail == mode else replace(request, guardrail=mode)

    def guard(self, active: ActiveRequest, admit: Admit) -> Generation:
        """What the reader is told of an accepted request.  `admit` accepts another."""
        mode = active.request.guardrail
        if mode is None or mode == "off":
            return active.generation
        if MediaKind.IMAGE not in active.route.pools:
            active.generation.grounding = Report(mode)
            return active.generation
        stream = _GuardedStream(active, mode, self, admit)
        task = self._tasks.start(stream.run(), f"guard-{active.generation.request_id}")

        def leave() -> None:
            task.cancel()
            active.generation.cancel()  # a task that has not begun cleans nothing up

        stream.reader.on_cancel = leave
        return stream.reader

    def sample(self, active: ActiveRequest, reason: FinishReason) -> None:
        """A request has ended, and its rows are still held.  Perhaps look at what it said, when there is time."""
        pictures = _pictures(active)
        is_told = active.request.guardrail in ("flag", "regenerate")
        is_wanted = active.arm is not None and active.arm.is_watched
        if is_told or not (self._judges and pictures and (is_wanted or active.overhead is None) and reason in _ANSWERED):
            return
        if not is_wanted and self._lot.random() >= self._config.grounding_sample:
            return
        if self._num_samples >= MAX_SAMPLES:
            self._metrics.grounding_samples_left_out.labels("busy").inc()
        elif not _are_ours(active):
            self._metrics.grounding_samples_left_out.labels("other_encoder").inc()
        elif (pinned := [] if active.generation.model in self._bases else self._pin(pictures)) is None:
            self._metrics.grounding_samples_left_out.labels("no_rows").inc()
        else:
            self._num_samples += 1
            self._tasks.start(self._look_at_sample(active, pinned), f"sample-{active.generation.request_id}")

    async def close(self) -> None:
        """When all requests have ended.  What is left has nothing to wait for but threads, or an encoder that is down."""
        await self._tasks.close(CLOSE_S)

    async def judge(self, active: ActiveRequest, texts: Sequence[str]) -> tuple[Verdict, ...] | None:
        """On each of the texts; None when the pictures can't be looked at.  `active` may have ended."""
        if not _are_ours(active):
            return None
        model = active.generation.model
        try:
            scores = await self._all_scores(active)
        except MmserveError as error:
            log.info("request=%s can't be held against its pictures code=%s", active.generation.request_id, error.code)
            return None
        return await self._read(texts, scores, model)

    def note(self, active: ActiveRequest, report: Report) -> None:
        generation = active.generation
        if active.overhead is None:
            self._quality.note_grounding(generation.request_id, generation.model, active.route.modality_mix, report, time.monotonic())
        self._on_report(active, report)

    async def _read(self, texts: Sequence[str], scores: Sequence[np.ndarray], model: str) -> tuple[Verdict, ...]:
        judge = self._judges[self._bases.get(model, model)].grounder.judge
        return await asyncio.to_thread(lambda: tuple(judge(text, scores) for text in texts))

    async def _look_at_sample(self, active: ActiveRequest, pinned: list[bytes]) -> None:
        model = active.generation.model
        try:
            scores = await self._all_scores(active)
        except MmserveError as error:
            log.info("request=%s can't be held against its pictures code=%s", active.generation.request_id, error.code)
            self._metrics.grounding_samples_left_out.labels("no_rows").inc()
            return
        finally:
            self._num_samples -= 1
            for key in pinned:
                self._media.cache.unpin(key)
        sequences = [choice.sequence for choice in active.choices]
        decode = self._tokenizers[model].decode
        texts = await asyncio.to_thread(lambda: [decode(each.token_ids[each.num_prompt :]) for each in sequences])
        self.note(active, Report("sample", await self._read(texts, scores, model)))

    def _pin(self, pictures: Sequence[PreparedMedia]) -> list[bytes] | None:
        """Rows that must be looked at, held for the caller; None, and nothing is held, if some are gone."""
        pinned: list[bytes] = []
        for key in (window.key for picture in pictures for window in picture.windows):
            if key in self._seen or key in pinned:
                continue
            if not self._media.cache.acquire(key):
                for held in pinned:
                    self._media.cache.unpin(held)
                return None
            pinned.append(key)
        return pinned

    async def _all_scores(self, active: ActiveRequest) -> list[np.ndarray]:
        """Of each of its pictures.  Raises the MmserveError with which their rows can't be had."""
        model, pictures = active.generation.model, _pictures(active)
        base = self._bases.get(model)
        if base is None:
            return [await self._scores(picture, model) for picture in pictures]
        salt = active.request.cache_salt.encode()
        seen = [await self._media.prepare(picture.item, base, salt) for picture in pictures]
        if any(picture.is_fallback for picture in seen):
            raise EncoderUnavailable("the detector doesn't know the rows of the fallback encoder")
        return [await self._scores(picture, base) for picture in seen]

    async def _scores(self, picture: PreparedMedia, model: str) -> np.ndarray:
        """float32 [L].  Raises the MmserveError with which its rows can't be had."""
        (window,) = picture.windows
        cache = self._media.cache
        if (known := self._seen.get(window.key)) is not None:
            self._seen.move_to_end(window.key)
            return known
        # Not through the pool: what we look at is no traffic, and must not count as hits.  Rows of a prompt that
        # was found in the KV cache may be gone, though.
        if not cache.acquire(window.key):
            await self._media.fetch(picture, window, model)
        try:
            rows = cache.lookup(window.key)
            assert rows is not None, "rows that are held are there"
            detector, stored = self._judges[model].detector, cache.buffer.array(rows)
            scores = await to_the_end(asyncio.to_thread(lambda: detector.scores(float_rows(stored, rows))))
        finally:
            cache.unpin(window.key)
        self._seen[window.key] = scores
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return scores


class _GuardedStream:
    """One answer on its way through.  `reader` is told what the request's own generation says, and at the end what was found of it."""

    def __init__(self, active: ActiveRequest, mode: str, guardrail: Guardrail, admit: Admit) -> None:
        source = active.generation
        self.reader = Generation(
            request_id=source.request_id,
            model=source.model,
            route_reason=source.route_reason,
            usage=source.usage,
            num_choices=source.num_choices,
        )
        self._active = active
        self._mode = mode
        self._guardrail = guardrail
        self._admit = admit
        self.reader.follow(source)

    async def run(self) -> None:
        first = self._active
        try:
            held, report = await self._first_draw()
            if self._mode == "regenerate" and report.num_unsupported:
                held, report = await self._second_draw(held, report)
            self.reader.grounding = report
            self._guardrail.note(first, report)
            for delta in held:
                self.reader.push(delta)
        except MmserveError as error:
            self.reader.fail(error)
        except asyncio.CancelledError:  # the client has left, or the server ends
            self.reader.fail(Overloaded("the server is shutting down", code="shutdown"))
            raise
        except Exception:
            self.reader.fail(MmserveError("internal error"))
            raise
        finally:
            self._active.generation.cancel()

    async def _first_draw(self) -> tuple[list[Delta], Report]:
        """The answer's deltas that the reader hasn't been told, and what was found.  To flag one, all but the very last can go ahead."""
        source, held = self._active.generation, list[Delta]()
        texts, num_open = [""] * source.num_choices, source.num_choices
        while batch := await source.next_batch():
            self.reader.follow(source)
            for delta in batch:
                texts[delta.index] += delta.text
                num_open -= delta.finish_reason is not None
                if self._mode == "regenerate" or num_open == 0:
                    held.append(delta)
                else:
                    self.reader.push(delta)
        self.reader.follow(source)
        verdicts = await self._guardrail.judge(self._active, texts)
        return held, Report(self._mode, verdicts or (), is_unavailable=verdicts is None)

    async def _second_draw(self, held: list[Delta], report: Report) -> tuple[list[Delta], Report]:
        """Of each choice the draw of which more is supported.  Where there can be no second one, the first is what there is."""
        first = self._active
        request = replace(first.request, model=first.generation.model, sampling=drawn_otherwise(first.request.sampling))
        try:
            self._active = await self._admit(request)
            again, found = await self._first_draw()
        except MmserveError as error:
            log.info("request=%s is not drawn again code=%s", self.reader.request_id, error.code)
            return held, report
        finally:
            self.reader.follow(first.generation)
        if found.is_unavailable:
            return held, report
        pairs = list(zip(report.verdicts, found.verdicts, strict=True))
        is_better = [new.num_unsupported < old.num_unsupported for old, new in pairs]
        self._add_up(first.generation, self._active.generation)
        deltas = [delta for draw, better in ((held, False), (again, True)) for delta in draw if is_better[delta.index] is better]
        return deltas, Report(self._mode, tuple(new if better else old for (old, new), better in zip(pairs, is_better, strict=True)), 2)

    def _add_up(self, first: Generation, second: Generation) -> None:
        """Both draws were computed, whichever is told."""
        num_tokens = first.usage.completion_tokens + second.usage.completion_tokens
        self.reader.usage = replace(first.usage, completion_tokens=num_tokens)
        if first.cost is not None and second.cost is not None:
            self.reader.cost = first.cost + second.cost
        self.reader.timings = {stage: seconds + second.timings.get(stage, 0.0) for stage, seconds in first.timings.items()}


def drawn_otherwise(sampling: SamplingParams) -> SamplingParams:
    """With seeds that the first draw's choices didn't have, and never greedily.  Equal requests still get equal second draws."""
    seed = None if sampling.seed is None else (sampling.seed + sampling.n) % 2**63
    return replace(sampling, seed=seed, temperature=sampling.temperature or REDRAW_TEMPERATURE)


def _pictures(active: ActiveRequest) -> list[PreparedMedia]:
    return [item for item in active.media if item.item.kind is MediaKind.IMAGE]


def _are_ours(active: ActiveRequest) -> bool:
    """Whether all its pictures were shown, as rows of the encoder that the detector knows."""
    kinds = {notice.kind for notice in (*active.generation.degraded, *active.generation.fallback)}
    return MediaKind.IMAGE.value not in kinds
