"""Loading shows a bar to whoever watches, and leaves a line to whoever reads the log."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from mmserve.worker.load_progress import load_progress


def load(console: Console, **options: bool) -> str:
    """What a load of 3 of 4 and then 4 of 4 MB leaves on the console."""
    with load_progress("small", console, **options) as on_progress:
        on_progress(3_000_000, 4_000_000)
        on_progress(4_000_000, 4_000_000)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_a_terminal_sees_bytes_and_keeps_no_bar(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        written = load(terminal())
    assert "loading small" in written
    assert "4.0/4.0 MB" in written
    assert written.endswith("\x1b[2K")  # the line is wiped
    assert not caplog.records


def test_a_log_gets_one_line_with_all_bytes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load(Console(file=io.StringIO(), force_terminal=False)) == ""
    assert re.fullmatch(r"pid=\d+ model=small loaded bytes=4000000 load_s=0\.\d", caplog.messages[0])
    assert len(caplog.messages) == 1


def test_only_one_rank_of_a_group_draws() -> None:
    assert load(terminal(), has_bar=False) == ""


def test_a_load_that_fails_logs_no_success(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="torn"), load_progress("small", Console(file=io.StringIO())):
        raise ValueError("torn")
    assert not caplog.records
