"""`/v1/feedback`: what a user thought of an answer, for the ledger."""

from __future__ import annotations

from mmserve.gateway.fields import Fields
from mmserve.gateway.json_body import parse_object
from mmserve.ledger import Feedback

MAX_ID_LENGTH = 200
RATINGS = ("up", "down")
_PREFIXES = ("chatcmpl-", "cmpl-")


def parse_feedback(data: bytes, *, tenant: str, now_s: float) -> Feedback:
    """`request_id` may be an answer's `id` as well.  Raises BadRequest naming the field."""
    fields = Fields(parse_object(data))
    request_id = fields.required("request_id", fields.text("request_id", max_length=MAX_ID_LENGTH) or None)
    rating = fields.required("rating", fields.choice("rating", RATINGS))
    regenerated = fields.flag("regenerated") or False
    fields.done()
    for prefix in _PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return Feedback(request_id, tenant, rating, regenerated, now_s)
