"""A process that fills a disk cache for as long as it is left alive, and what its entries must look like to whoever comes after it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mmserve.encoders.disk_tier import DiskTier

SHAPE = (16, 512)
MAX_BYTES = 2**20  # some thirty entries
NUM_KEYS = 60  # more than fit, so that old ones are replaced and others make room
TTL_S = 86_400.0


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"window %d" % number).digest()


def rows_of(number: int) -> np.ndarray:
    """What is stored under `key_of(number)`, by whichever process."""
    return np.random.default_rng(number).standard_normal(SHAPE, np.float32)


def fill(directory: Path, first: int, progress: Connection) -> None:
    """Write entries from `first` on, in circles, and say so after each."""
    asyncio.run(_fill(directory, first, progress))


async def _fill(directory: Path, first: int, progress: Connection) -> None:
    tier = DiskTier(directory, MAX_BYTES)
    await tier.open()
    for number in itertools.count(first):
        await tier.write(key_of(number % NUM_KEYS), rows_of(number % NUM_KEYS), "float32", TTL_S)
        progress.send(number)
