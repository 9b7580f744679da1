"""Whether an answer declines to be one.  Pure, linear in the text."""

from __future__ import annotations

import re

_REFUSALS = re.compile(
    r"\b(?:i(?:'m| am) (?:sorry|unable|not able)|i (?:can't|cannot|can not|could not|couldn't)|as an ai|i only see one picture"
    r"|i (?:don't|do not) (?:see a|see any|hear a|know)|(?:unable|impossible) to (?:tell|say|determine|answer|see|hear))\b"
)


def declines(text: str) -> bool:
    """Whether it says that it can't answer, by the usual phrases."""
    return _REFUSALS.search(text.casefold().replace("\u2019", "'")) is not None
