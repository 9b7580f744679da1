"""What happened in a soak, a JSON line each, in a directory that can be looked at while it runs and gone on with after an interruption."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self


class Journal:
    """Time in it is that of the soak: it stands still while nothing runs."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "journal.jsonl"
        self.entries: list[dict[str, Any]] = _read(path)
        self._start_s = time.monotonic() - (self.entries[-1]["at_s"] if self.entries else 0.0)
        self._file = path.open("a")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    def note(self, what: str, **details: Any) -> None:
        entry = {"at_s": round(self.now_s, 3), "what": what, **details}
        self.entries.append(entry)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def all(self, what: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["what"] == what]


def _read(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: an interruption may have cut the last, which is taken out of the file."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    path.write_text(whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]
