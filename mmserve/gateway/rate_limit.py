"""How a tenant stands, in headers named and written like OpenAI's.  Pure."""

from __future__ import annotations

import math

from mmserve.quota import Standing


def rate_limit_headers(standing: Standing) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`.  Of requests: at a time.  What has no limit has no header."""
    quota, headers = standing.quota, {}
    for noun, limit, remaining, reset_s in (
        ("requests", quota.concurrent_requests, standing.remaining_requests, standing.requests_reset_s),
        ("tokens", quota.tokens_per_minute, standing.remaining_tokens, standing.tokens_reset_s),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{noun}"] = str(limit)
            headers[f"x-ratelimit-remaining-{noun}"] = str(remaining)
            headers[f"x-ratelimit-reset-{noun}"] = f"{math.ceil(reset_s)}s"
    return headers
