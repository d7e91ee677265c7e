"""What every benchmark shares: interleaved timing, a table on the terminal and a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SETTLE_SECONDS = 0.03


def interleaved(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    prepare: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every run: A B C A B C ..., so that a drift of the machine meets all sides alike.

    Threads of OpenMP spin for some milliseconds after their work; a pause lets them come to rest, so that
    no side runs beside those of the one before it. What a side needs before each run, and what does not count, is in `prepare`.
    """
    before = prepare or {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + rounds):
        for name, run in sides.items():
            if name in before:
                before[name]()
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if turn >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over the rounds of the ratio of two sides."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


@dataclass(frozen=True, kw_only=True)
class Report:
    """One benchmark's outcome."""

    benchmark: str
    settings: dict[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    notes: Sequence[str] = ()

    def show(self) -> None:
        """Prints the table, the settings above it and the notes below."""
        print(f"{self.benchmark}: {', '.join(f'{k}={v}' for k, v in self.settings.items())}")
        cells = [list(self.columns)]
        cells += [
            [value if isinstance(value, str) else f"{value:.3f}" for value in row]
            for row in self.rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        for row in cells:
            first, *others = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join([first, *others]))
        for note in self.notes:
            print(note)


def machine() -> dict[str, Any]:
    """What the figures depend on, without names of hosts or users."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "processor": model,
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "system": platform.system(),
        "python": platform.python_version(),
    }


def write_json(path: Path | None, reports: Sequence[Report]) -> None:
    """Writes the reports and the machine they ran on, when a path was given."""
    if path is None:
        return
    content = {"machine": machine(), "reports": [asdict(report) for report in reports]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
