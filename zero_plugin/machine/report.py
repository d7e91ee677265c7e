"""`zero-plugin report DIR`: draws what a run left there: memory of each tier over time, and the timeline of its lanes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero_plugin.errors import ConfigError
from zero_plugin.machine.figures import FILE_PATTERN, TIERS, read_steps

_MOST_SPANS = 20_000


class Span(NamedTuple):
    """An operation on a lane; seconds since the first event.

    Attributes:
        lane: its row.
        label: what it is.
        start: when it began.
        seconds: how long it took.
    """

    lane: str
    label: str
    start: float
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", help="where a run's traces (trace=) and step figures lie")
    parser.add_argument("--text", action="store_true", help="print only, draw nothing")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Print a summary of each file and draw a PNG beside it."""
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder: name the one with a run's trace and step figures"
        )
    steps = {file: read_steps(file) for file in sorted(folder.glob(FILE_PATTERN))}
    traces = {file: found for file in sorted(folder.glob("*.json")) if (found := _spans(file))}
    if not any(steps.values()) and not traces:
        raise ConfigError(
            f"{folder} holds neither a trace (ZeroConfig(trace='{folder}/trace.json')) nor step figures ({FILE_PATTERN})"
        )
    for file, lines in steps.items():
        if lines:
            say(f"{file.name}: {len(lines)} steps")
            for line in _of_steps(lines):
                say(f"  {line}")
            if not arguments.text:
                say(f"  drawn: {_draw_memory(file, lines)}")
    for file, spans in traces.items():
        say(f"{file.name}: {max(span.start + span.seconds for span in spans):.3g} s")
        for line in _of_spans(spans):
            say(f"  {line}")
        if not arguments.text:
            say(f"  drawn: {_draw_timeline(file, spans)}")
    return 0


def _of_steps(lines: Sequence[Mapping[str, float]]) -> Iterator[str]:
    for tier in TIERS:
        most = max(line.get(f"zero/{tier}_bytes", 0) for line in lines)
        if most:
            yield f"{tier}: at most {most / 2**20:,.1f} MiB"
    seconds = sorted(line["zero/step_seconds"] for line in lines)
    yield f"step: {seconds[len(seconds) // 2]:.3g} s in the median, {seconds[-1]:.3g} s the longest"


def _of_spans(spans: Sequence[Span]) -> Iterator[str]:
    every = max(span.start + span.seconds for span in spans)
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.lane] = busy.get(span.lane, 0.0) + span.seconds
    for lane, seconds in sorted(busy.items(), key=lambda pair: -pair[1]):
        yield f"{lane:24} busy {seconds:.3g} s, {seconds / every:.0%}" if every else lane


def _spans(file: Path) -> list[Span]:
    """The operations of a Chrome trace of ours; empty for any other JSON file."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        return []
    names: dict[int, str] = {}
    begun: dict[int, list[tuple[str, float]]] = {}
    spans: list[Span] = []
    for event in events:
        row = event.get("tid", 0)
        if event.get("ph") == "M":
            names[row] = event.get("args", {}).get("name", str(row))
        elif event.get("ph") == "B":
            begun.setdefault(row, []).append((event.get("name", ""), event["ts"]))
        elif event.get("ph") == "E" and begun.get(row):
            label, start = begun[row].pop()
            spans.append(
                Span(names.get(row, str(row)), label, start / 1e6, (event["ts"] - start) / 1e6)
            )
    return spans


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib, or --text") from error
    return Figure(figsize=(width, height), layout="constrained")


def _draw_memory(file: Path, lines: Sequence[Mapping[str, float]]) -> Path:
    figure = _figure(8, 3)
    axes = figure.add_subplot()
    times = [line["seconds"] for line in lines]
    for tier in TIERS:
        values = [line.get(f"zero/{tier}_bytes", 0) / 2**20 for line in lines]
        if any(values):
            axes.step(times, values, where="post", label=tier)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    target = file.with_suffix(".png")
    figure.savefig(target, dpi=120)
    return target


def _draw_timeline(file: Path, spans: Sequence[Span]) -> Path:
    lanes = sorted({span.lane for span in spans})
    figure = _figure(12, 1 + 0.35 * len(lanes))
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        drawn = [(s.start, max(s.seconds, 1e-6)) for s in spans[:_MOST_SPANS] if s.lane == lane]
        axes.broken_barh(drawn, (row - 0.4, 0.8))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    target = file.with_suffix(".png")
    figure.savefig(target, dpi=120)
    return target
