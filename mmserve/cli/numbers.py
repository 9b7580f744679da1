"""Numbers on the command line, checked where they are read: types for argparse.  All raise ValueError."""

from __future__ import annotations

import math


def count(text: str) -> int:
    """1 or more."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def whole(text: str) -> int:
    """0 or more."""
    if (value := int(text)) < 0:
        raise ValueError(text)
    return value


def positive(text: str) -> float:
    """Above 0; `inf` is."""
    if not (value := float(text)) > 0:
        raise ValueError(text)
    return value


def finite(text: str) -> float:
    """Above 0, and not `inf`."""
    if math.isinf(value := positive(text)):
        raise ValueError(text)
    return value


def share(text: str) -> float:
    """0 to 1."""
    if not 0 <= (value := float(text)) <= 1:
        raise ValueError(text)
    return value
