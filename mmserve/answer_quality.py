"""Whether people and pictures agree with the answers: thumbs, regenerations and groundedness, by mix of media, in metrics and alarms.

Never a gate: nothing here changes an answer or refuses a request.
"""

from __future__ import annotations

import logging
from collections import defaultdict

from mmserve.grounding.verdict import Report
from mmserve.ledger import Feedback, GroundingRow, Ledger
from mmserve.metrics import Metrics
from mmserve.rate_watch import RateWatch
from mmserve.recent_answers import UNKNOWN, Answered, RecentAnswers

log = logging.getLogger(__name__)

THUMBS_DOWN, REGENERATED, UNSUPPORTED = "thumbs_down", "regenerated", "unsupported"  # what is watched


class AnswerQuality:
    """Owned by the event loop."""

    def __init__(self, ledger: Ledger, metrics: Metrics) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._recent = RecentAnswers()
        self._watches: defaultdict[tuple[str, str], RateWatch] = defaultdict(RateWatch)  # by what, and mix of media

    def note_question(self, question: bytes, modality_mix: str, now_s: float) -> None:
        """An accepted request.  The same question, just answered, is asked again by who didn't like the answer."""
        is_repeat = self._recent.is_repeat(question, now_s)
        if is_repeat:
            self._metrics.regenerations.labels(modality_mix, "question").inc()
        self._watch(REGENERATED, modality_mix, is_repeat, now_s)

    def note_answer(self, request_id: str, question: bytes, tenant: str, modality_mix: str, now_s: float) -> None:
        """It has ended well."""
        self._recent.note(request_id, question, Answered(tenant, modality_mix), now_s)

    def note_feedback(self, feedback: Feedback, now_s: float) -> None:
        """For the ledger, always; in metrics each answer counts once."""
        self._ledger.record_feedback(feedback)
        modality_mix = self._recent.rate(feedback.request_id, feedback.tenant_id)
        if modality_mix is None:
            return
        self._metrics.feedback_ratings.labels(feedback.rating, modality_mix).inc()
        if feedback.regenerated:
            self._metrics.regenerations.labels(modality_mix, "client").inc()
        if modality_mix != UNKNOWN:  # anybody can send those
            self._watch(THUMBS_DOWN, modality_mix, feedback.rating == "down", now_s)

    def note_grounding(self, request_id: str, model: str, modality_mix: str, report: Report, now_s: float) -> None:
        """What was found of an answer, its choices taken together."""
        if report.score is not None:
            self._metrics.grounding_score.labels(model, modality_mix, report.mode).observe(report.score)
            if report.mode == "sample":  # who asks for the guardrail may not be like the others
                self._watch(UNSUPPORTED, modality_mix, report.score < 1, now_s)
        if report.mode != "sample":
            self._metrics.guardrail_flags.labels(model, report.mode, report.outcome).inc()
        self._ledger.record_grounding(
            GroundingRow(
                request_id=request_id,
                mode=report.mode,
                outcome=report.outcome,
                grounding_score=report.score,
                num_mentions=report.num_checked,
                num_unsupported=report.num_unsupported,
                num_draws=report.num_draws,
                created_at=self._ledger.now_s(),
            )
        )

    def _watch(self, what: str, modality_mix: str, is_hit: bool, now_s: float) -> None:
        if alarm := self._watches[what, modality_mix].note(is_hit, now_s):
            self._metrics.quality_alarms.labels(what, modality_mix).inc()
            log.warning(
                "answer quality: %s=%d of=%d last_s=%g before=%.4f mix=%s; more than chance makes it",
                what, alarm.num_hits, alarm.num_trials, alarm.span_s, alarm.past_share, modality_mix,
            )  # fmt: skip
