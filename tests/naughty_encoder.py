"""An encoder worker that misbehaves on demand: what a bug or a broken card would do, in the real process over the real tower.

Files in the directory `NAUGHTY_ENCODER` say what it does, by the name of the tower's folder: `vision.crash` ends each life before it is
ready, `vision.die` at work, `vision.hang` never answers, `vision.nan` spoils all rows.  A picture of one colour does that to itself: see
the constants.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mmserve.models.tower import Tower, TowerItem
from mmserve.plan import EncoderWorkerSpec
from mmserve.shared_buffer import SharedMemory
from mmserve.worker.main import live, prepare_process

DIRECTORY = "NAUGHTY_ENCODER"
POISON, NOT_FINITE, NEVER_FITS = 66, 77, 88  # grey pictures: kill the worker, give rows that aren't finite, need too much memory
MOST_THAT_FIT = 24  # pictures in a batch, where NEVER_FITS is among them or `vision.small` is set


class NaughtyTower:
    def __init__(self, tower: Tower, name: str) -> None:
        self.blank = tower.blank
        self._tower = tower
        self._name = name

    def encode(self, items: Sequence[TowerItem], decoder: str) -> list[torch.Tensor]:
        colours = [_colour(item) for item in items]
        if POISON in colours or self._is("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is("hang"):
            time.sleep(3600)
        if (self._is("small") and len(items) > MOST_THAT_FIT) or NEVER_FITS in colours:
            raise torch.OutOfMemoryError("CUDA out of memory")
        rows = self._tower.encode(items, decoder)
        spoilt = [torch.full_like(each, torch.nan) if colour == NOT_FINITE else each for each, colour in zip(rows, colours, strict=True)]
        return [torch.full_like(each, torch.nan) for each in rows] if self._is("nan") else spoilt

    def _is(self, verb: str) -> bool:
        return is_told(self._name, verb)


def run_encoder(end: socket.socket, spec: EncoderWorkerSpec, memory: SharedMemory) -> None:
    prepare_process("naughty-encoder", spec.num_threads)
    from mmserve.worker import encoder_worker

    load_tower = encoder_worker._load_tower
    name = next(iter(spec.specs.values())).weights.path.name
    encoder_worker._load_tower = lambda spec, device, dtype: NaughtyTower(load_tower(spec, device, dtype), name)  # type: ignore[assignment]
    if is_told(name, "crash"):
        os._exit(1)
    live(end, lambda: encoder_worker.start_encoder(spec, memory))


def is_told(name: str, verb: str) -> bool:
    return Path(os.environ[DIRECTORY], f"{name}.{verb}").exists()


def _colour(item: TowerItem) -> int | None:
    """Of a picture that has only one."""
    pixels = item.features
    if pixels.dtype != torch.uint8 or bool((pixels != pixels.flatten()[0]).any()):
        return None
    return int(pixels.flatten()[0])
