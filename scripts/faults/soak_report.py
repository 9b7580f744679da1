"""What a soak's journal comes to: counts, slopes with what they are worth, a table, a picture.  Knows nothing of servers."""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.faults.slopes import Slope, slope

WARM_UP_S = 600.0  # of a server's life: caches fill, pools grow
YOUNG_S = 60.0  # of a worker's life: it touches the pages of its KV cache for the first time
MAX_GROWTH = 1.0  # MB an hour
JUDGED_AFTER_S = 1800.0  # of samples: each peak of the load may leave a step of a MB, and a few of those make a slope
MAX_OFF_LINES = 20
MB = 2**20
Entries = Sequence[Mapping[str, Any]]


def summary(entries: Entries) -> dict[str, Any]:
    """`ok` is the verdict; `off` begins with why not."""
    lives = [entry["at_s"] for entry in entries if entry["what"] == "life"]
    off = [entry["details"] for entry in entries if entry["what"] == "off"]
    slopes = memory_slopes(entries)
    main = slopes.get("main")
    if main is not None and main.span_s >= JUDGED_AFTER_S and main.surely_above > MAX_GROWTH:
        off.append(f"the server grows by {main.per_hour:.1f} +- {main.half_width:.1f} MB an hour")
    return {
        "minutes": round(entries[-1]["at_s"] / 60, 1),
        "lives": len(lives),
        "faults": dict(Counter(entry["name"] for entry in entries if entry["what"] == "fault").most_common()),
        "ends": dict(_totals(entries, "ends")),
        "counters": dict(_totals(entries, "counters")),
        "quiet_moments": sum(entry["what"] == "quiet" for entry in entries),
        "memory_mb_per_hour": {role: {name: round(value, 2) for name, value in asdict(found).items()} for role, found in slopes.items()},
        "num_off": len(off),
        "off": off[:MAX_OFF_LINES],
        "ok": not off,
    }


def memory_slopes(entries: Entries) -> dict[str, Slope]:
    """Of each role's own memory, in MB an hour, once it has warmed up."""
    points: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for life_s, entry in _samples(entries):
        for role, process in entry["processes"].items():
            if entry["at_s"] - life_s >= WARM_UP_S:
                points[role][process["pid"]].append((entry["at_s"], process["anonymous_bytes"] / MB))
    for role, lives in points.items():
        if role != "main":
            points[role] = defaultdict(
                list, {pid: [p for p in life if p[0] - life[0][0] >= YOUNG_S] for pid, life in lives.items() if life}
            )
    found = {role: slope(lives) for role, lives in points.items()}
    return {role: each for role, each in found.items() if each is not None}


def table(report: Mapping[str, Any]) -> Table:
    shown = Table(title=f"{report['minutes']} minutes, {sum(report['faults'].values())} faults", show_header=False)
    for name, count in report["faults"].items():
        shown.add_row("fault", name, str(count))
    for name, count in report["ends"].items():
        shown.add_row("requests", name, str(count))
    for name, count in report["counters"].items():
        shown.add_row("counter", name, f"{count:g}")
    for role, found in report["memory_mb_per_hour"].items():
        shown.add_row("MB an hour", role, f"{found['per_hour']:.2f} +- {found['half_width']:.2f}  ({found['num_points']} samples)")
    for line in report["off"]:
        shown.add_row("[bold red]off", line, "")
    return shown


def plot(entries: Entries, path: Path) -> None:
    """Memory of each process over time, kills as marks.  Nothing where there is no matplotlib."""
    samples = list(_samples(entries))
    if importlib.util.find_spec("matplotlib") is None or not samples:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, latency) = pyplot.subplots(2, 1, sharex=True, figsize=(12, 8))
    lines: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _, entry in samples:
        for role, process in entry["processes"].items():
            lines[role, process["pid"]].append((entry["at_s"] / 60, process["anonymous_bytes"] / MB))
    colours = {role: f"C{i}" for i, role in enumerate(dict.fromkeys(role for role, _ in lines))}
    for (role, _), points in lines.items():
        memory.plot(*zip(*points, strict=True), color=colours[role])
    for role, colour in colours.items():
        memory.plot([], [], color=colour, label=role)
    memory.set_ylabel("memory of its own, MB")
    memory.legend()
    for name in ("p50", "p99"):
        latency.plot([e["at_s"] / 60 for _, e in samples], [e["latency_s"][name] for _, e in samples], label=name)
    for entry in entries:
        if entry["what"] == "fault":
            latency.axvline(entry["began_s"] / 60, color="red" if "worker" in entry["name"] else "grey", alpha=0.2)
    latency.set_ylabel("request to last token, s")
    latency.set_xlabel("minutes")
    latency.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _samples(entries: Entries) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """(when that life of the server began, sample)"""
    life_s = 0.0
    for entry in entries:
        if entry["what"] == "life":
            life_s = entry["at_s"]
        elif entry["what"] == "sample":
            yield life_s, entry


def _totals(entries: Entries, field: str) -> Counter[str]:
    """Counters begin at zero with each life: the sum of what each had reached."""
    total: Counter[str] = Counter()
    last: Mapping[str, float] = {}
    for entry in entries:
        if entry["what"] == "life":
            total.update(last)
            last = {}
        elif entry["what"] == "sample":
            last = entry[field]
    total.update(last)
    return total
