"""Start a process of ours: spawned, bound to its parent's life, talking over a socket pair.

The child runs `module:function(end, *args)`.  It never re-imports the parent's `__main__`, so a script that embeds the engine needs no
`if __name__ == "__main__"` guard, and it dies with its parent whatever kills that.  `ps` and `top` show what it is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_MAX_NAME = 15  # bytes that the kernel keeps (prctl(2))
_MALLOC = "glibc.malloc.hugetlb=1"  # ask for huge pages for whatever is large: fewer page faults, fewer misses of the TLB


def start_child(target: str, args: tuple[object, ...], name: str, *, is_large: bool = False) -> tuple[BaseProcess, socket.socket]:
    """Spawn `module:function` and return the process and our end of its channel.  One that `is_large` computes in gigabytes.

    Call it from a thread that outlives the child: the kernel ties the parent-death signal to the thread that forked.
    """
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_enter, args=(os.getpid(), target, theirs, args), name=name, daemon=True)
    try:
        with _hidden_main(), _malloc_tuned(is_large), _sigterm_blocked():
            process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def shown_name(name: str) -> str:
    """What the kernel calls a child of that name: `mmserve-decode`, and where that would not fit, `small-decoder-0`."""
    return (name if len(name) <= _MAX_NAME else name.removeprefix("mmserve-"))[:_MAX_NAME]


def _enter(parent_pid: int, target: str, end: socket.socket, args: tuple[object, ...]) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, shown_name(multiprocessing.current_process().name).encode())
    if os.getppid() != parent_pid:  # the parent died before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is main's to handle
    threading.Thread(target=_wait_for_sigterm_of, args=(parent_pid,), name="sigterm", daemon=True).start()
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(end, *args)


def _wait_for_sigterm_of(parent_pid: int) -> None:
    """A SIGTERM to the whole group (systemd sends it so) is main's to handle: it lets requests finish, then says Shutdown.

    One from main itself is multiprocessing's, at the exit of an interpreter that closed nothing: it would wait for us for ever.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent_pid:
        pass
    os._exit(0)


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """For children that are started inside: a program inherits what its parent's thread blocks.

    When the child runs its first line of ours it is too late: numpy, which its arguments need, may have started threads.
    """
    resource_tracker.ensure_running()  # it unblocks the signal, if it has to be started first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _malloc_tuned(is_large: bool) -> Iterator[None]:
    """For children that are started inside: glibc reads its tunables once, when a program begins.  What the user has set stays."""
    if not is_large or "GLIBC_TUNABLES" in os.environ:
        yield
        return
    os.environ["GLIBC_TUNABLES"] = _MALLOC
    try:
        yield
    finally:
        del os.environ["GLIBC_TUNABLES"]


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """multiprocessing looks at `__main__` to import it again in the child: show it one without a file."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = type(sys)("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
