"""Lines that could not go where they belong, kept in files until they can: each file whole or not there, oldest first by name."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path


class Spool:
    """A directory of finished files.  Raises OSError when the disk does; knows nothing of what the lines say."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last_ns = 0

    def files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.directory.glob("*.jsonl"))

    def write(self, lines: Iterable[str]) -> None:
        """One new file, on disk when this returns."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)  # a clock set back must not change the order
        target = self.directory / f"{self._last_ns:020d}-{uuid.uuid4().hex}.jsonl"
        unfinished = target.with_suffix(".tmp")
        if not self.directory.exists():
            self.directory.mkdir(exist_ok=True)
            _fsync_directory(self.directory.parent)  # else a power cut takes the directory, with all that is synced in it
        try:
            with unfinished.open("w") as file:
                file.writelines(line + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(target)
            _fsync_directory(self.directory)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def set_aside(self, file: Path) -> None:
        """Keep a file that makes no sense for somebody to look at."""
        file.rename(file.with_suffix(".damaged"))


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
