"""A decode process whose decoder does what it is told by the data: what a bug in a real one would do, on demand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np

from mmserve.composition.picture_fit import PictureFit
from mmserve.encoders import decode_child, image
from mmserve.media import MediaLimits
from mmserve.shared_buffer import SharedMemory


def run(end: socket.socket, memory: SharedMemory, limits: MediaLimits) -> None:
    image.decode = _decode  # type: ignore[assignment]
    decode_child.run(end, memory, limits)


def _decode(data: bytes, fit: PictureFit, limits: MediaLimits | None = None) -> np.ndarray:
    shape = fit.feature_shape(1, 1)
    verb, _, argument = data.decode().partition(":")
    if verb == "hang":
        time.sleep(3600)
    elif verb == "spin":
        while True:
            pass
    elif verb == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif verb == "eat":
        np.ones(2 * 2**30, np.uint8)
    elif verb == "bug":
        raise ZeroDivisionError("at 0x7f00dead in /secret/path")
    elif verb == "shout":
        for fd in (1, 2):
            os.write(fd, b"at 0x7f00dead in /secret/path")
    elif verb == "open":
        return np.full(shape, _num_opened(argument), np.uint8)
    elif verb == "die once":
        flag = Path(argument)  # made by the test; taken by the first attempt
        if flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "wait for":
        deadline = time.monotonic() + 20
        while not Path(argument).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    return np.full(shape, 7, np.uint8)


def _num_opened(directory: str) -> int:
    """How many of these come off: read a file, write a file, open a socket."""
    opened = 0
    for attempt in (
        lambda: open("/etc/passwd", "rb").close(),
        lambda: Path(directory, "file").write_bytes(b"x"),
        lambda: socket.socket().close(),
    ):
        with contextlib.suppress(OSError):
            attempt()
            opened += 1
    return opened
