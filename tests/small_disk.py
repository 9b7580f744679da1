"""Fixtures: a disk that can be filled to the last byte.  Where mounting is not allowed, a limit on files does the same to a writer."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class SmallDisk:
    """A directory whose disk can be filled to the last byte, and freed."""

    directory: Path
    fill: Callable[[], None]
    free: Callable[[], None]
    freeze: Callable[[], object] = lambda: None  # nothing can be written from here on


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[SmallDisk]:
    """3 MB of tmpfs.  Only where this process may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    filler = mount / "filler"

    def fill() -> None:
        with filler.open("ab", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                try:
                    while file.write(b"x" * size):
                        pass
                except OSError:
                    continue

    def freeze() -> object:
        return subprocess.run(["mount", "-o", "remount,ro", mount], check=True)

    yield SmallDisk(mount, fill, filler.unlink, freeze)
    subprocess.run(["umount", "-l", mount], check=True)


@pytest.fixture
def small_files(tmp_path: Path) -> Iterator[SmallDisk]:
    """No file of this process may grow beyond 64 KiB while it is full: the same for a writer, and allowed everywhere."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    directory = tmp_path / "limited"
    directory.mkdir()
    yield SmallDisk(
        directory,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, old[1])),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture(params=["small_filesystem", "small_files"])
def small_disk(request: pytest.FixtureRequest) -> SmallDisk:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]
