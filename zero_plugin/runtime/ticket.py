"""Tickets: the promise of an operation's end, and the program order in which they are issued."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from time import perf_counter
from traceback import clear_frames
from typing import Any, Generic, Protocol, TypeVar, cast

from zero_plugin.errors import LaneError
from zero_plugin.trace import Meter

T = TypeVar("T")


class TicketState(Enum):
    """Where an operation is; `TICKET_MOVES` lists which state may follow which."""

    ISSUED = "issued"
    """Queued, or waiting for tickets it comes after. The operation's buffers are not to be touched."""
    RUNNING = "running"
    """Started on its lane; on CUDA, enqueued on the lane's stream."""
    DONE = "done"
    """Ended; the value may be read."""
    FAILED = "failed"
    """Ended with an exception, which is kept."""
    POISONED = "poisoned"
    """Never run, because something it comes after failed."""

    # Members are singletons, and Enum's own hash is a Python function called at every transition.
    __hash__ = object.__hash__


TICKET_MOVES: Mapping[TicketState, frozenset[TicketState]] = {
    TicketState.ISSUED: frozenset({TicketState.RUNNING, TicketState.POISONED}),
    TicketState.RUNNING: frozenset({TicketState.DONE, TicketState.FAILED}),
    TicketState.DONE: frozenset(),
    TicketState.FAILED: frozenset(),
    TicketState.POISONED: frozenset(),
}


class Failure:
    """The first cause of one or more failed tickets, kept until somebody awaits it."""

    __slots__ = ("cause", "label", "lane", "observed")

    def __init__(self, *, label: str, lane: str, cause: BaseException) -> None:
        self.label = label
        self.lane = lane
        self.cause = cause
        self.observed = False
        _drop_locals(cause)

    def error_for(self, ticket: Ticket[Any]) -> LaneError:
        """A new error for whoever awaits `ticket`; raise it `from self.cause`."""
        self.observed = True
        return self._error(ticket.label, ticket.lane)

    def error(self) -> LaneError:
        """A new error naming the operation that failed first; raise it `from self.cause`."""
        self.observed = True
        return self._error(self.label, self.lane)

    def _error(self, label: str, lane: str) -> LaneError:
        what = f"{type(self.cause).__name__}: {self.cause}"
        if (label, lane) == (self.label, self.lane):
            return LaneError(f"operation {label!r} on lane {lane!r} failed: {what}")
        return LaneError(
            f"operation {label!r} on lane {lane!r} did not run, because {self.label!r} on lane "
            f"{self.lane!r} failed: {what}"
        )


def _drop_locals(cause: BaseException) -> None:
    """Lets go of what the frames of the traceback hold, such as an operation's buffers.

    A traceback also keeps the frames that called its outermost one; of these the ended ones are
    cleared too, and those still running drop the operation themselves.
    """
    clear_frames(cause.__traceback__)
    frame = None if cause.__traceback__ is None else cause.__traceback__.tb_frame.f_back
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:
            return
        frame = frame.f_back


class ProgramOrder:
    """The one order in which a backend's operations were issued, shared by its lanes.

    Holds the lock under which a sequence number is taken and the operation queued, so that the two
    orders agree whatever thread submits.
    """

    __slots__ = (
        "_blocked",
        "_next",
        "_submitters",
        "backend",
        "closed",
        "lock",
        "meter",
        "process",
    )

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.meter: Meter | None = None
        self.lock = threading.Lock()
        self.closed = False
        self.process = os.getpid()
        self._next = 0
        self._submitters: set[int] = set()
        self._blocked: dict[int, Ticket[Any]] = {}

    def take(self, lane: str, label: str, after: Iterable[Ticket[Any]]) -> int:
        """The next sequence number, to be called with `lock` held.

        Raises:
            LaneError: The backend is closed or was created by another process, or a ticket in
                `after` belongs to another backend or was issued later.
        """
        if self.closed:
            raise LaneError(
                f"operation {label!r} was submitted to lane {lane!r} after its "
                f"{self.backend!r} backend was closed; create a new backend"
            )
        if os.getpid() != self.process:
            raise LaneError(
                f"operation {label!r} was submitted to lane {lane!r} in process {os.getpid()}, but "
                f"its {self.backend!r} backend belongs to process {self.process} and its threads do "
                "not survive a fork; create the backend after forking, or spawn"
            )
        sequence = self._next
        for ticket in after:
            self.check(ticket, f"operation {label!r} on lane {lane!r}", sequence)
        self._next = sequence + 1
        self._submitters.add(threading.get_ident())
        return sequence

    def check(self, ticket: Ticket[Any], who: str, sequence: int | None = None) -> None:
        """Refuses a ticket that `who`, issued as number `sequence`, must not wait for."""
        order = ticket.order
        if order is not self:
            state = "a closed" if order.closed else "another"
            raise LaneError(
                f"{who} cannot come after {ticket.label!r}, a ticket of {state} backend "
                f"({order.backend!r}); wait for it on the host first"
            )
        limit = self._next if sequence is None else sequence
        if ticket.sequence >= limit:
            raise LaneError(
                f"{who} is number {limit} in program order and cannot come after "
                f"{ticket.label!r}, number {ticket.sequence}; submit the earlier one first"
            )

    def demand(self, sequence: int) -> None:
        """Says that the host is about to block on ticket `sequence`; only `chaos` cares."""

    def block_host(self, ticket: Ticket[Any]) -> None:
        """Blocks the calling thread, which is no lane's, until `ticket` has ended.

        Raises:
            LaneError: This is a forked child, in which no thread will end it.
        """
        if os.getpid() != self.process:
            raise LaneError(
                f"operation {ticket.label!r} on lane {ticket.lane!r} was under way in process {self.process} when process "
                f"{os.getpid()} was forked from it, and threads do not survive a fork: wait before forking, "
                "for example with engine.wait_for_update(), or spawn"
            )
        self.demand(ticket.sequence)
        thread = threading.get_ident()
        self._blocked[thread] = ticket
        begun = perf_counter()
        try:
            ticket.block()
        finally:
            del self._blocked[thread]
            if self.meter is not None:
                self.meter.waited(ticket.lane, perf_counter() - begun)

    def hosts_at_rest(self, elsewhere: Collection[int]) -> tuple[int, ...] | None:
        """Numbers of the tickets that the submitting threads are blocked on; None while one of them runs.

        Args:
            elsewhere: threads known to be blocked in something else.
        """
        alive = {thread.ident or 0 for thread in threading.enumerate()}
        found: list[int] = []
        for thread in alive.intersection(self._submitters).difference(elsewhere):
            ticket = self._blocked.get(thread)
            if ticket is None or ticket.done:
                return None
            found.append(ticket.sequence)
        return tuple(sorted(found))


class Follower(Protocol):
    """Something that can be made to wait for a ticket: a lane, or the framework's compute."""

    def follow(self, ticket: Ticket[Any]) -> None:
        """Makes everything issued here from now on come after `ticket`."""
        ...


class Ticket(Generic[T]):
    """The promise of an operation's end and of its value.

    Attributes:
        label: The operation's label.
        lane: Name of the lane it runs on.
        sequence: Its place in the backend's program order.
        order: The program order it belongs to.
    """

    __slots__ = (
        "__weakref__",
        "_failure",
        "_gates",
        "_lock",
        "_state",
        "_value",
        "label",
        "lane",
        "order",
        "sequence",
    )

    def __init__(self, *, label: str, lane: str, sequence: int, order: ProgramOrder) -> None:
        self.label = label
        self.lane = lane
        self.sequence = sequence
        self.order = order
        self._lock = threading.Lock()
        self._state = TicketState.ISSUED
        self._value: T | None = None
        self._failure: Failure | None = None
        self._gates: list[threading.Lock] = []

    def __repr__(self) -> str:
        return f"<Ticket {self.sequence} {self.label!r} on {self.lane!r}, {self._state.value}>"

    @property
    def state(self) -> TicketState:
        """The state as last seen; `done` looks again where that needs asking the device."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether the operation has ended, well or not. Never blocks."""
        return self._state in ENDED

    @property
    def failure(self) -> Failure | None:
        """The first cause, when the operation failed or was poisoned."""
        return self._failure

    def wait(self) -> T:
        """Blocks the host until the operation has ended and returns its value.

        Raises:
            LaneError: The operation, or one it comes after, failed; the cause is chained.
        """
        self.settle()
        if self._failure is not None:
            raise self._failure.error_for(self) from self._failure.cause
        return cast("T", self._value)

    def on(self, lane: Follower) -> None:
        """Makes `lane` wait for this ticket; the host does not.

        Everything submitted to `lane` from now on comes after this ticket. When this ticket fails,
        those operations do not run, until `lane` is settled or drained.
        """
        lane.follow(self)

    def settle(self) -> None:
        """Blocks the host until the operation has ended, and raises nothing if it failed."""
        if self._state in ENDED:
            return
        self.order.block_host(self)

    def block(self) -> None:
        """As `settle`, for a lane's own worker, whose waiting is not the host's."""
        self.pass_gate()

    def pass_gate(self) -> None:
        """Blocks until the ticket has ended; on a device lane, until the work was enqueued."""
        # Each waiter brings a lock of its own: an interrupted waiter then leaves nothing held that
        # another one needs.
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if self._passable():
                return
            self._gates.append(gate)
        gate.acquire()

    def _passable(self) -> bool:
        return self._state in ENDED

    # What follows is for the backends.

    def start(self) -> bool:
        """The operation starts; False, and nothing is to be run, when it has ended already."""
        return self.move(TicketState.RUNNING, unless=ENDED)

    def finish(self, value: T) -> None:
        """The operation ended with `value`."""
        self._value = value
        self.move(TicketState.DONE)

    def fail(
        self, cause: BaseException, *, unless: frozenset[TicketState] = frozenset()
    ) -> Failure:
        """The operation ended with the exception `cause`, unless it has ended in one of the states `unless`."""
        failure = self._failure = Failure(label=self.label, lane=self.lane, cause=cause)
        self.move(TicketState.FAILED, unless=unless)
        return failure

    def poison(self, failure: Failure) -> None:
        """The operation will not run, because of `failure`."""
        self._failure = failure
        self.move(TicketState.POISONED, unless=ENDED)

    def withdraw(self, cause: BaseException) -> None:
        """Submitting was interrupted by `cause`: unless it already runs, the operation never will."""
        if self._state is TicketState.ISSUED:
            self.poison(Failure(label=self.label, lane=self.lane, cause=cause))

    def abandon(self, cause: BaseException) -> None:
        """Running was interrupted by `cause`, at whatever point; ends the ticket if nothing has."""
        self.withdraw(cause)
        if self._state is TicketState.RUNNING:
            self.fail(cause)

    def move(self, state: TicketState, *, unless: frozenset[TicketState] = frozenset()) -> bool:
        """Goes to `state` and wakes the waiters that this lets through.

        Returns:
            Whether it did; False only when the ticket was in one of the states `unless`.
        """
        with self._lock:
            if self._state in unless:
                return False
            if state not in TICKET_MOVES[self._state]:
                raise RuntimeError(
                    f"ticket {self.label!r} cannot go from {self._state.value} to {state.value}"
                )
            self._state = state
            # A truth value, not the list: a waiter that comes once the lock is free would be in that.
            opens = bool(self._gates) and self._passable()
        if opens:
            self.open_gates()
        return True

    def open_gates(self) -> None:
        """Lets every waiter of `pass_gate` go."""
        with self._lock:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()


ENDED = frozenset({TicketState.DONE, TicketState.FAILED, TicketState.POISONED})
