"""What moved, and when: the always-on byte ledger and the optional event log.

Both are leaves: they import nothing of the package and no torch, and may be written to from any thread.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

Phase = Literal["issued", "begin", "end"]

LEDGER_KEYS = (
    "device_to_host",
    "host_to_device",
    "nvme_read",
    "nvme_write",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
)


_CAUSES = {
    "gather": ("fetch weights", "gather weights", "unpack weights"),
    "gradients": ("offload", "fetch", "collectives", "gradients"),
    "update": ("update", "upload", "publish", "fetch weights for the update"),
    "files": (
        "checkpoint",
        "read states",
        "write states",
        "read weights",
        "write weights",
        "read gradients",
        "write gradients",
    ),
    "activations": ("activations nvme", "activations out", "activations in"),
    "ranks": ("control",),
}
"""What a program waits for, and the lanes that bring it."""

STALL_CAUSES = (*_CAUSES, "other")
_CAUSE_OF = {lane: cause for cause, lanes in _CAUSES.items() for lane in lanes}


class Ledger:
    """Counters of the bytes this rank moved since the start, one for each direction or collective.

    Args:
        extras: Names of further counters, beside `LEDGER_KEYS`. Unknown names are refused by
            `add`, so that a misspelt counter cannot hide bytes.
    """

    __slots__ = ("_counts", "_lock")

    def __init__(self, extras: Sequence[str] = ()) -> None:
        self._counts: dict[str, int] = dict.fromkeys((*LEDGER_KEYS, *extras), 0)
        self._lock = threading.Lock()

    def declare(self, key: str) -> None:
        """Adds a counter named `key`, starting at zero; one that exists keeps its value."""
        with self._lock:
            self._counts.setdefault(key, 0)

    def add(self, key: str, nbytes: int) -> None:
        """Counts `nbytes` bytes under `key`.

        Raises:
            KeyError: `key` is neither in `LEDGER_KEYS` nor declared.
        """
        with self._lock:
            if key not in self._counts:
                known = ", ".join(self._counts)
                raise KeyError(f"unknown ledger key {key!r}; known are {known}; declare it first")
            self._counts[key] += nbytes

    def snapshot(self) -> dict[str, int]:
        """The counters as they are now, as a new dictionary."""
        with self._lock:
            return dict(self._counts)


class Meter:
    """Seconds that the program waited for lanes, and what updates on the host took; from any thread, always on.

    A clock is read only where a wait really blocks, and once for each updated block or tile.
    """

    __slots__ = ("_elements", "_lock", "_moved", "_seconds", "_waited", "tokens", "watcher")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited: dict[str, float] = {}
        self._elements = 0
        self._seconds = 0.0
        self._moved = (0, 0.0)
        self.tokens = 0
        """Of a step of this rank, where somebody has said so."""
        self.watcher: Callable[[Meter], None] | None = None
        """Called when a step begins."""

    def step(self) -> None:
        """A step begins."""
        if self.watcher is not None:
            self.watcher(self)

    def transferred(self, nbytes: int, seconds: float) -> None:
        """A lane read from files or wrote to them for `seconds`."""
        with self._lock:
            self._moved = (self._moved[0] + nbytes, self._moved[1] + seconds)

    def transfers(self) -> tuple[int, float]:
        """Bytes read from files and written to them, and the seconds lanes took."""
        with self._lock:
            return self._moved

    def waited(self, lane: str, seconds: float) -> None:
        """The program was blocked by an operation of `lane`."""
        with self._lock:
            self._waited[lane] = self._waited.get(lane, 0.0) + seconds

    def updated(self, elements: int, seconds: float) -> None:
        """An update on the host of so many parameters ran for `seconds`."""
        with self._lock:
            self._elements += elements
            self._seconds += seconds

    def stalls(self) -> dict[str, float]:
        """Seconds by cause (`STALL_CAUSES`), causes that never were left out, as a new dictionary."""
        found: dict[str, float] = {}
        with self._lock:
            for lane, seconds in self._waited.items():
                cause = _CAUSE_OF.get(lane, "other")
                found[cause] = found.get(cause, 0.0) + seconds
        return found

    def updates(self) -> tuple[int, float]:
        """Parameters updated on the host, and the seconds it took."""
        with self._lock:
            return self._elements, self._seconds


class Event(NamedTuple):
    """One line of the trace.

    Attributes:
        time: Seconds on the monotonic clock of `time.perf_counter`.
        lane: The lane, or the name of a span's row.
        label: What the operation is.
        phase: "issued" (by the program), "begin" and "end" (on the lane).
        nbytes: Bytes the operation writes; 0 where not known.
        sequence: The operation's place in program order; -1 for spans.
    """

    time: float
    lane: str
    label: str
    phase: Phase
    nbytes: int
    sequence: int


class Trace:
    """An append-only log of events; a backend without one records nothing.

    Appending to a list is atomic under CPython, so recording takes no lock.
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[Event] = []

    def record(
        self,
        lane: str,
        label: str,
        phase: Phase,
        *,
        nbytes: int = 0,
        sequence: int = -1,
        at: float | None = None,
    ) -> None:
        """Appends one event, stamped now or with `at` (seconds of `time.perf_counter`)."""
        when = time.perf_counter() if at is None else at
        self._events.append(Event(when, lane, label, phase, nbytes, sequence))

    @contextmanager
    def span(self, label: str, *, lane: str = "program") -> Generator[None]:
        """Records the begin and the end of the enclosed block on the row named `lane`."""
        self.record(lane, label, "begin")
        try:
            yield
        finally:
            self.record(lane, label, "end")

    def events(self) -> list[Event]:
        """The events so far, in the order they were recorded, as a new list."""
        return list(self._events)

    def clear(self) -> None:
        """Forgets every event."""
        self._events.clear()

    def write_chrome(self, path: str | Path) -> None:
        """Writes the log as Chrome trace JSON, which Perfetto and chrome://tracing open.

        Every lane is a row. An arrow leads from the place on the row "program" where an
        operation was issued to where it began.
        """
        text = json.dumps({"traceEvents": _chrome_events(self.events()), "displayTimeUnit": "ms"})
        Path(path).write_text(text, encoding="utf-8")


def _chrome_events(events: list[Event]) -> list[dict[str, Any]]:
    """The log in the Trace Event Format (its JSON object form), times in microseconds."""
    if not events:
        return []
    start = min(event.time for event in events)
    rows = {"program": 0}
    for event in events:
        rows.setdefault(event.lane, len(rows))
    rendered: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        for name, row in rows.items()
    ]
    # A stable sort by time keeps begin before end where both have the same stamp.
    for event in sorted(events, key=lambda event: event.time):
        common = {"pid": 0, "ts": (event.time - start) * 1e6, "name": event.label, "cat": "lane"}
        flow = {"cat": "issue", "name": "issue", "id": event.sequence}
        if event.phase == "issued":
            row = rows["program"]
            rendered.append(
                {**common, "ph": "X", "dur": 1, "tid": row, "args": {"lane": event.lane}}
            )
            rendered.append({**common, **flow, "ph": "s", "tid": row})
        elif event.phase == "begin":
            row = rows[event.lane]
            arguments = {"bytes": event.nbytes, "sequence": event.sequence}
            rendered.append({**common, "ph": "B", "tid": row, "args": arguments})
            if event.sequence >= 0:
                rendered.append({**common, **flow, "ph": "f", "bp": "e", "tid": row})
        else:
            rendered.append({**common, "ph": "E", "tid": rows[event.lane]})
    return rendered
