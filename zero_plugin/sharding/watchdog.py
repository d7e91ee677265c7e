"""A thread that tells the other ranks where this one waits, and wakes it when another has failed.

Nothing is posted while collectives flow: only a wait longer than a second reaches the store. The thread is the
only user of the store, so that a store that hangs (its host died) delays a message, never an error.

One watchdog serves all sequences of collectives of a rank, whatever group they are of, so that ranks that wait for one
another in different ones are found too (see `standstill`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from zero_plugin.sharding.standstill import Standing, standing_still, standstill_text

FailureKind = Literal["mismatch", "timeout", "error"]

PATIENCE_SECONDS = 1.0
_PERIOD_SECONDS = 0.25
_STORE_SECONDS = 3.0
_RECORD_SECONDS = 1.0
_LONGEST_PERIOD = 2.0

AtRest = Callable[[Collection[int]], "tuple[int, ...] | None"]
"""`Backend.at_rest`."""


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


class Place(NamedTuple):
    """A collective that is waited in.

    Attributes:
        text: which.
        since: when, by `time.monotonic`.
        thread: which thread waits.
    """

    text: str
    since: float
    thread: int


class Watched(Protocol):
    """A sequence of collectives that may be waiting."""

    name: str

    @property
    def come(self) -> int:
        """How many collectives this rank has come to."""
        ...

    def waiting(self) -> Place | None:
        """What is waited in, or None."""
        ...

    def absent(self) -> tuple[int, ...]:
        """Peers that have not come to the collective that is waited in."""
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
        self._watched: tuple[Watched, ...] = ()
        self._at_rest: AtRest | None = None
        self._requests: list[_Request] = []
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._posted = ""
        self._beat = 0
        self._next_beat = 0.0
        self._suspicion: dict[int, Standing] = {}
        self._standstill = ""
        self._suspected: dict[str, tuple[int, ...]] = {}
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="zero-watchdog", daemon=True)

    def watch(self, watched: Sequence[Watched]) -> None:
        """Begins to watch these too."""
        self._watched = (*self._watched, *watched)
        if not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()

    def look_at(self, at_rest: AtRest) -> None:
        """Asks `at_rest` from now on whether anything runs on this rank."""
        self._at_rest = at_rest

    def unwatch(self, watched: Sequence[Watched]) -> None:
        """Leaves these; the thread ends when nothing is left to watch. Idempotent."""
        self._watched = tuple(item for item in self._watched if item not in watched)
        if self._watched:
            return
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _STORE_SECONDS)

    @property
    def failure(self) -> Failure | None:
        """Another rank's failure, when one was seen while waiting."""
        return self._failure

    @property
    def standstill(self) -> str:
        """Where the ranks are, once they were found waiting for one another; else empty."""
        return self._standstill

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
        if self._closed.is_set():
            return request.answer
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
        places = {
            watched: place for watched in self._watched if (place := watched.waiting()) is not None
        }
        long = [
            watched for watched, place in places.items() if now - place.since > PATIENCE_SECONDS
        ]
        for watched in long:
            ranks = watched.disagreeing()
            if ranks and ranks == self._suspected.get(watched.name):
                watched.interrupt()
            self._suspected[watched.name] = ranks
        text = "; ".join(f"waiting in {watched.name} {places[watched].text}" for watched in long)
        if not long:
            self._next_beat, self._suspicion = 0.0, {}
            self._post_place("")
        elif text != self._posted or now > self._next_beat:
            waited = max(now - places[watched].since for watched in long)
            self._next_beat = now + min(_LONGEST_PERIOD, waited / 8)
            self._look_for_standstill(self._say(text, places))
        if long and self._failure is None and self._store.check(["failed"]):
            failures = self._read().failures
            self._failure = failures[min(failures)] if failures else None
        if self._failure is not None or self._standstill:
            for watched in long:
                watched.interrupt()

    def _post_place(self, text: str) -> None:
        if text != self._posted:
            self._posted = text
            self._store.set(f"place/{self._rank}", text)

    def _say(self, text: str, places: dict[Watched, Place]) -> Standing | None:
        """Tells the others where this rank waits, and that nothing can run here if that is so."""
        come = {watched.name: watched.come for watched in self._watched}
        rest = self._at_rest and self._at_rest([place.thread for place in places.values()])
        # Looked at again last: what went on meanwhile is seen here, or in the next beat.
        if rest is None or any(item.waiting() != places.get(item) for item in self._watched):
            self._post_place(text)
            return None
        self._beat += 1
        names = tuple(watched.name for watched in places)
        standing = Standing(text=text, come=come, waits=names, rest=rest, beat=self._beat)
        self._posted = text
        self._store.set(f"place/{self._rank}", standing.dump())
        return standing

    def _look_for_standstill(self, mine: Standing | None) -> None:
        """See whether this rank is one of several that wait for one another."""
        if mine is None or self._standstill:
            return
        # Where one rank is slow the others need read only what that one says.
        late = {rank for watched in self._watched for rank in watched.absent()}
        said = {rank: standing for rank in late if (standing := self._standing(rank))}
        if said:
            said.update({r: s for r in self._others if r not in said and (s := self._standing(r))})
        said[self._rank] = mine
        still = standing_still(said)
        if self._rank not in still:
            self._suspicion = {}
            return
        circle = {rank: said[rank] for rank in still}
        before = self._suspicion
        if before.keys() == circle.keys():
            if all(circle[rank].confirms(before[rank]) for rank in still):
                self._standstill = standstill_text(circle)
                return
            if all(circle[rank].is_as(before[rank]) for rank in still):
                return
        self._suspicion = circle

    def _standing(self, rank: int) -> Standing | None:
        """What a rank says of itself while nothing can run there."""
        value = self._place(rank)
        return Standing.load(value) if value.startswith("[") else None

    def _place(self, rank: int) -> str:
        key = f"place/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read(self) -> Report:
        places: dict[int, str] = {}
        failures: dict[int, Failure] = {}
        failed = self._store.check(["failed"])
        for rank in self._others:
            text = self._place(rank)
            if text:
                places[rank] = Standing.load(text).text if text.startswith("[") else text
            if failed and self._store.check([f"failure/{rank}"]):
                record = json.loads(self._store.get(f"failure/{rank}"))
                failures[rank] = Failure(rank=rank, kind=record["kind"], text=record["text"])
        return Report(places=places, failures=failures)
