"""Fixtures that several test modules share."""

from small_disk import small_disk, small_files, small_filesystem

__all__ = ["small_disk", "small_files", "small_filesystem"]
