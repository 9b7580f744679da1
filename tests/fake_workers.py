"""Worker processes for tests of supervision: real processes, trivial work."""

from __future__ import annotations

import os
import signal
import socket
import time

from mmserve.plan import Shutdown
from mmserve.transport import WorkerChannel


def echo(end: socket.socket, *_: object) -> None:
    """Ready, then every message back."""
    channel = WorkerChannel(end)
    channel.send("ready")
    while not isinstance(message := channel.receive(), Shutdown):
        channel.send(message)


def echo_rank(end: socket.socket, rank: int) -> None:
    """Ready, then every message back with the rank that got it."""
    channel = WorkerChannel(end)
    channel.send("ready")
    while not isinstance(message := channel.receive(), Shutdown):
        channel.send((rank, message))


def hang(end: socket.socket, *_: object) -> None:
    """Ready, then never an answer."""
    channel = WorkerChannel(end)
    channel.send("ready")
    channel.receive()
    time.sleep(3600)


def die_at_once(end: socket.socket, *_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def report_main_module(end: socket.socket, *_: object) -> None:
    """What `__main__` is in the child, and whether its parent-death signal is set."""
    import ctypes
    import sys

    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(value))
    WorkerChannel(end).send((getattr(sys.modules.get("__mp_main__"), "__file__", None), value.value))
