"""A thread that tells the other ranks where this one waits, and wakes it when another has failed.

Nothing is posted while collectives flow: only a wait longer than a second reaches the store. The thread is the
only user of the store, so that a store that hangs (its host died) delays a message, never an error.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

FailureKind = Literal["mismatch", "timeout", "error"]

PATIENCE_SECONDS = 1.0
_PERIOD_SECONDS = 0.25
_STORE_SECONDS = 3.0
_RECORD_SECONDS = 1.0


class Store(Protocol):
    """What is used of a torch store."""

    def set(self, key: str, value: str, /) -> None:
        """Stores a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Reads a value that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there; does not wait."""
        ...


class Watched(Protocol):
    """A sequence of collectives that may be waiting."""

    name: str

    def waiting(self) -> tuple[str, float] | None:
        """What is waited in and since when (`time.monotonic`), or None."""
        ...

    def disagreeing(self) -> tuple[int, ...]:
        """Ranks known to be in another collective; counts when seen twice."""
        ...

    def interrupt(self) -> None:
        """Makes the wait in progress end with an error."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rank gave up, as it told the others."""

    rank: int
    kind: FailureKind
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the store says of the other ranks.

    Attributes:
        places: for some ranks, what they wait in, per sequence.
        failures: for the ranks that gave up, why.
    """

    places: dict[int, str] = field(default_factory=dict[int, str])
    failures: dict[int, Failure] = field(default_factory=dict[int, Failure])


class _Request:
    """Something the thread is asked to do with the store."""

    def __init__(self, action: Callable[[], Report]) -> None:
        self.action = action
        self.answer = Report()
        self.done = threading.Event()


class Watchdog:
    """See the module's docstring.

    Args:
        store: shared by the ranks, with keys of its own.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, *, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._watched: list[Watched] = []
        self._requests: list[_Request] = []
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._posted = ""
        self._suspected: dict[str, tuple[int, ...]] = {}
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="zero-watchdog", daemon=True)

    def start(self, watched: Sequence[Watched]) -> None:
        """Begins to watch."""
        self._watched.extend(watched)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _STORE_SECONDS)

    @property
    def failure(self) -> Failure | None:
        """Another rank's failure, when one was seen while waiting."""
        return self._failure

    def post_failure(self, kind: FailureKind, text: str) -> None:
        """Tells the others that this rank gives up; returns at the latest after some seconds."""
        value = json.dumps({"kind": kind, "text": text})

        def action() -> Report:
            self._store.set(f"failure/{self._rank}", value)
            self._store.set("failed", "1")
            return Report()

        self._ask(action)

    def report(self, suspects: Sequence[int] = ()) -> Report:
        """Reads what the others posted.

        Args:
            suspects: ranks whose connection closed; their reason is waited for a little, since a rank that gives
                up closes its connections just before it can post why.
        """

        def action() -> Report:
            limit = time.monotonic() + _RECORD_SECONDS
            while True:
                report = self._read()
                if report.failures or not suspects or time.monotonic() > limit:
                    return report
                time.sleep(0.02)

        return self._ask(action)

    def _ask(self, action: Callable[[], Report]) -> Report:
        request = _Request(action)
        self._requests.append(request)
        self._wake.set()
        request.done.wait(_STORE_SECONDS)
        return request.answer

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(_PERIOD_SECONDS)
            self._wake.clear()
            try:
                self._serve()
                self._look()
            except Exception:  # noqa: BLE001, S112 - the store's host is gone; waits have deadlines
                continue

    def _serve(self) -> None:
        while self._requests:
            request = self._requests.pop(0)
            try:
                request.answer = request.action()
            finally:
                request.done.set()

    def _look(self) -> None:
        now = time.monotonic()
        long = {
            watched: place[0]
            for watched in self._watched
            if (place := watched.waiting()) is not None and now - place[1] > PATIENCE_SECONDS
        }
        for watched in long:
            ranks = watched.disagreeing()
            if ranks and ranks == self._suspected.get(watched.name):
                watched.interrupt()
            self._suspected[watched.name] = ranks
        places = [f"waiting in {watched.name} {what}" for watched, what in long.items()]
        self._post_place("; ".join(places))
        if long and self._failure is None and self._store.check(["failed"]):
            failures = self._read().failures
            self._failure = failures[min(failures)] if failures else None
        if self._failure is not None:
            for watched in long:
                watched.interrupt()

    def _post_place(self, text: str) -> None:
        if text != self._posted:
            self._posted = text
            self._store.set(f"place/{self._rank}", text)

    def _read(self) -> Report:
        places: dict[int, str] = {}
        failures: dict[int, Failure] = {}
        failed = self._store.check(["failed"])
        for rank in self._others:
            if self._store.check([f"place/{rank}"]):
                text = self._store.get(f"place/{rank}").decode()
                if text:
                    places[rank] = text
            if failed and self._store.check([f"failure/{rank}"]):
                record = json.loads(self._store.get(f"failure/{rank}"))
                failures[rank] = Failure(rank=rank, kind=record["kind"], text=record["text"])
        return Report(places=places, failures=failures)
