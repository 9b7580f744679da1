"""How far the weights are: a bar where somebody watches, one line in the log where nobody does."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)


@contextmanager
def load_progress(name: str, console: Console, *, has_bar: bool = True) -> Iterator[Callable[[int, int], None]]:
    """What it yields is told bytes done and bytes in all.  `has_bar` is for one rank of a group: the others load as fast.

    The line, at level INFO, is written when all went well.
    """
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (console.is_terminal and has_bar)) as bar:
        task = bar.add_task(f"loading {name}", total=None)
        num_bytes = 0

        def show(done: int, total: int) -> None:
            nonlocal num_bytes
            num_bytes = done
            bar.update(task, completed=done, total=total)

        yield show
    if not console.is_terminal:
        log.info("pid=%d model=%s loaded bytes=%d load_s=%.1f", os.getpid(), name, num_bytes, time.monotonic() - started)
