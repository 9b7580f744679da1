"""Await something that must not be left halfway: another process or thread is writing into memory that we would give away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of `work`.  A cancellation takes effect only when `work` has ended."""
    future = asyncio.ensure_future(work)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        with suppress(BaseException):
            future.exception()  # looked at, so that nobody logs it
        raise asyncio.CancelledError
    return future.result()
