"""The contract of the lane backends: tickets, lanes and program order.

A *lane* is a first-in-first-out queue of operations from the closed set in `operations`. Submitting
returns a *ticket*, and what the operation produces is reachable only through it: `wait()` blocks the
host, `on(lane)` makes a lane wait and leaves the host free. Every ticket has a place in one global
program order and a lane waits only on tickets issued earlier, so waits cannot form a cycle.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

from torch.profiler import record_function

from zero_plugin.errors import LaneError

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.runtime.buffers import Lease
    from zero_plugin.runtime.operations import KernelSet, Operation
    from zero_plugin.trace import Ledger, Trace

T = TypeVar("T")
LaneKind = Literal["device", "host"]
Memory = Literal["device", "host"]


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
        # The frames of the traceback would keep the operation's buffers alive.
        clear_frames(cause.__traceback__)

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


class ProgramOrder:
    """The one order in which a backend's operations were issued, shared by its lanes.

    Holds the lock under which a sequence number is taken and the operation queued, so that the two
    orders agree whatever thread submits.
    """

    __slots__ = ("_next", "backend", "closed", "lock", "process")

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.lock = threading.Lock()
        self.closed = False
        self.process = os.getpid()
        self._next = 0

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
        return self._state in _ENDED

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
        if self._state in _ENDED:
            return
        self.order.demand(self.sequence)
        self.block()

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
        return self._state in _ENDED

    # What follows is for the backends.

    def start(self) -> bool:
        """The operation starts; False, and nothing is to be run, when it was withdrawn."""
        return self.move(TicketState.RUNNING, unless=_WITHDRAWN)

    def finish(self, value: T) -> None:
        """The operation ended with `value`."""
        self._value = value
        self.move(TicketState.DONE)

    def fail(self, cause: BaseException) -> Failure:
        """The operation ended with the exception `cause`."""
        self._failure = Failure(label=self.label, lane=self.lane, cause=cause)
        self.move(TicketState.FAILED)
        return self._failure

    def poison(self, failure: Failure) -> None:
        """The operation will not run, because of `failure`."""
        self._failure = failure
        self.move(TicketState.POISONED, unless=_WITHDRAWN)

    def withdraw(self, cause: BaseException) -> None:
        """Submitting was interrupted by `cause`: unless it already runs, the operation never will."""
        if self._state is TicketState.ISSUED:
            self.poison(Failure(label=self.label, lane=self.lane, cause=cause))

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
        if self._passable():
            self.open_gates()
        return True

    def open_gates(self) -> None:
        """Lets every waiter of `pass_gate` go."""
        with self._lock:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()


_WITHDRAWN = frozenset({TicketState.POISONED})
_ENDED = frozenset({TicketState.DONE, TicketState.FAILED, TicketState.POISONED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What operations need to run and where they report; one for each backend.

    Attributes:
        kernels: The compiled kernels.
        ledger: Counters of moved bytes, always on.
        trace: The event log, or None for none.
    """

    kernels: KernelSet
    ledger: Ledger
    trace: Trace | None


class Lane(ABC):
    """A first-in-first-out queue of operations.

    Attributes:
        name: Unique in its backend.
        kind: "device" when it moves bytes to, from or on the device, "host" when it works in host
            memory.
    """

    def __init__(
        self, *, name: str, kind: LaneKind, order: ProgramOrder, services: Services
    ) -> None:
        self.name = name
        self.kind: LaneKind = kind
        self._order = order
        self._services = services
        self._followed: list[Ticket[Any]] = []
        self._last: Ticket[Any] | None = None
        self._unseen = UnseenFailure()

    def __repr__(self) -> str:
        return f"<{self.kind} lane {self.name!r} of backend {self._order.backend!r}>"

    def submit(
        self,
        operation: Operation[T],
        *,
        after: Sequence[Ticket[Any]] = (),
        leases: Sequence[Lease] = (),
    ) -> Ticket[T]:
        """Queues `operation` and returns at once.

        Args:
            operation: One of the closed set.
            after: Tickets that must end first. One that failed poisons this operation.
            leases: Leases whose memory the operation touches; they are in flight until it ends.

        Raises:
            LaneError: The backend is closed or belongs to another process, or a ticket in `after`
                is of another backend or was issued later.
            LeaseError: A lease was already given back.
        """
        order = self._order
        with order.lock:
            sequence = order.take(self.name, operation.label, after)
            for lease in leases:
                lease.check_open()
            dependencies = (*after, *self._pending_followed()) if self._followed else tuple(after)
            ticket: Ticket[T] = self._new_ticket(operation.label, sequence)
            try:
                for lease in leases:
                    lease.lend(ticket)
                self._trace_issue(ticket, operation)
                self._enqueue(ticket, operation, dependencies)
                self._last = ticket
            except BaseException as error:
                # An interrupt here must not leave a ticket that nobody will end.
                ticket.withdraw(error)
                raise
        self._advance()
        return ticket

    def follow(self, ticket: Ticket[Any]) -> None:
        """Makes every operation submitted from now on come after `ticket`.

        A ticket that fails poisons them until the lane is settled or drained.
        """
        with self._order.lock:
            self._order.check(ticket, f"lane {self.name!r}")
            self._followed.append(ticket)

    def settle(self) -> None:
        """Blocks until every operation submitted so far has ended; raises nothing if some failed.

        Failures nobody awaited are forgotten, and so are failed tickets the lane followed: the lane
        is as good as new.
        """
        self.finish()

    def drain(self) -> None:
        """Blocks until every operation submitted so far has ended.

        Raises:
            LaneError: One failed and nobody has awaited it; the cause is chained.
        """
        failure = self.finish()
        if failure is not None:
            raise failure.error() from failure.cause

    def finish(self) -> Failure | None:
        """As `settle`, and returns the first failure nobody has awaited."""
        self._settle_last()
        with self._order.lock:
            self._followed = [ticket for ticket in self._followed if not ticket.done]
        return self._unseen.take()

    def _trace_issue(self, ticket: Ticket[Any], operation: Operation[Any]) -> None:
        trace = self._services.trace
        if trace is not None:
            trace.record(
                self.name,
                ticket.label,
                "issued",
                nbytes=operation.nbytes,
                sequence=ticket.sequence,
            )

    def _settle_last(self) -> None:
        # The queue is first in, first out, so the end of the last is the end of all.
        last = self._last
        if last is not None:
            last.settle()

    def _pending_followed(self) -> list[Ticket[Any]]:
        self._followed = [
            ticket for ticket in self._followed if not ticket.done or ticket.failure is not None
        ]
        return self._followed

    def _new_ticket(self, label: str, sequence: int) -> Ticket[Any]:
        return Ticket(label=label, lane=self.name, sequence=sequence, order=self._order)

    @abstractmethod
    def _enqueue(
        self, ticket: Ticket[T], operation: Operation[T], dependencies: tuple[Ticket[Any], ...]
    ) -> None:
        """Queues the operation; called with the program order's lock held."""

    def _advance(self) -> None:  # noqa: B027 - most lanes have nothing to do here
        """Starts what was queued, where that is the submitting thread's work."""


class UnseenFailure:
    """The first failure of a lane that nobody has awaited; later ones are dropped."""

    __slots__ = ("_failure", "_lock")

    def __init__(self) -> None:
        self._failure: Failure | None = None
        self._lock = threading.Lock()

    def put(self, failure: Failure) -> None:
        """Keeps `failure` unless an earlier one is still unseen."""
        with self._lock:
            if self._failure is None or self._failure.observed:
                self._failure = failure

    def take(self) -> Failure | None:
        """The failure, once; None when there is none or somebody has awaited it."""
        with self._lock:
            failure, self._failure = self._failure, None
        return None if failure is None or failure.observed else failure


class Backend(ABC):
    """Lanes, their memory and their program order.

    Attributes:
        name: "inline", "threads", "chaos" or "cuda".
        kernels: The compiled kernels, for callers that run one on their own thread.
        compute: What the framework computes on; `ticket.on(backend.compute)` makes it wait.
    """

    def __init__(self, *, order: ProgramOrder, services: Services, compute: Follower) -> None:
        self.compute = compute
        self._order = order
        self._services = services
        self._lanes: dict[str, Lane] = {}

    @property
    def name(self) -> str:
        """Which backend this is."""
        return self._order.backend

    @property
    def kernels(self) -> KernelSet:
        """The compiled kernels."""
        return self._services.kernels

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._order.closed

    def lane(self, name: str, kind: LaneKind) -> Lane:
        """The lane called `name`, made at the first call.

        Raises:
            LaneError: The backend is closed, or the lane exists with another kind.
        """
        with self._order.lock:
            lane = self._lanes.get(name)
            if lane is None:
                if self._order.closed:
                    raise LaneError(
                        f"lane {name!r} was asked of a closed {self.name!r} backend; create a new one"
                    )
                lane = self._lanes[name] = self._new_lane(name, kind)
        if lane.kind != kind:
            raise LaneError(
                f"lane {name!r} is a {lane.kind} lane and was asked for as a {kind} lane; use "
                "another name"
            )
        return lane

    def mark(self, label: str) -> Ticket[None]:
        """A ticket for all compute the calling thread has enqueued so far."""
        order = self._order
        with order.lock:
            sequence = order.take("compute", label, ())
        ticket: Ticket[None] = Ticket(label=label, lane="compute", sequence=sequence, order=order)
        ticket.start()
        ticket.finish(None)
        return ticket

    def drain(self) -> None:
        """Blocks until every operation of every lane has ended.

        Raises:
            LaneError: One failed and nobody has awaited it; the cause is chained.
        """
        failures = [lane.finish() for lane in list(self._lanes.values())]
        for failure in failures:
            if failure is not None and not failure.observed:
                raise failure.error() from failure.cause

    def settle(self) -> None:
        """As `drain`, but raises nothing and forgets failures: the way out of a broken step."""
        for lane in list(self._lanes.values()):
            lane.settle()

    def retire(self, buffer: Tensor) -> None:
        """A pool owns `buffer` now and nobody may read it; `chaos` poisons it."""
        del buffer

    @abstractmethod
    def allocate(self, nbytes: int, memory: Memory) -> Tensor:
        """New memory, exactly `nbytes` bytes and 64-byte aligned.

        Args:
            nbytes: Size in bytes, 0 allowed.
            memory: "device" or "host"; on CUDA host memory is pinned where the system allows it.

        Returns:
            A one-dimensional uint8 tensor. Host memory is zeroed and its pages are present.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for every operation to end, stops the threads and refuses what comes later.

        May be called again, and after an interrupted call. Raises nothing for failed operations.
        """

    @abstractmethod
    def _new_lane(self, name: str, kind: LaneKind) -> Lane:
        """Makes a lane; called with the program order's lock held."""


class HostCompute:
    """Compute that runs on the calling thread, as on a CPU: to follow is to wait."""

    __slots__ = ("_order",)

    def __init__(self, order: ProgramOrder) -> None:
        self._order = order

    def follow(self, ticket: Ticket[Any]) -> None:
        """Blocks until `ticket` has ended; raises its error."""
        self._order.check(ticket, "compute")
        ticket.wait()


def first_failure(tickets: Iterable[Ticket[Any]]) -> Failure | None:
    """The failure of the first ticket that has one; all of them have ended."""
    for ticket in tickets:
        if ticket.failure is not None:
            return ticket.failure
    return None


def run_operation(
    ticket: Ticket[T],
    operation: Operation[T],
    services: Services,
    *,
    pace: Callable[[Operation[Any]], None] | None = None,
) -> tuple[T | None, BaseException | None]:
    """Runs a started operation on the calling thread and feeds ledger and trace.

    Args:
        ticket: The operation's ticket, already started; left for the caller to end, once the caller
            has let go of the operation.
        operation: What to run.
        services: Kernels, ledger and trace.
        pace: Called with the operation after it ran; may sleep to model a slower one.

    Returns:
        The value, and the exception when there was one.
    """
    trace = services.trace
    if trace is None:
        return _run_untraced(operation, services, pace)
    nbytes, sequence = operation.nbytes, ticket.sequence
    trace.record(ticket.lane, ticket.label, "begin", nbytes=nbytes, sequence=sequence)
    try:
        with profiler_range(services, ticket):
            return _run_untraced(operation, services, pace)
    finally:
        trace.record(ticket.lane, ticket.label, "end", nbytes=nbytes, sequence=sequence)


def _run_untraced(
    operation: Operation[T], services: Services, pace: Callable[[Operation[Any]], None] | None
) -> tuple[T | None, BaseException | None]:
    try:
        value = operation.run(services.kernels)
        traffic = operation.traffic
        if traffic is not None:
            services.ledger.add(*traffic)
        if pace is not None:
            pace(operation)
    except BaseException as error:  # noqa: BLE001 - kept in the ticket, raised where it is awaited
        return None, error
    return value, None


def profiler_range(services: Services, ticket: Ticket[Any]) -> AbstractContextManager[Any]:
    """Names the operation for torch's profiler while there is a trace; else does nothing."""
    if services.trace is None:
        return nullcontext()
    return record_function(f"{ticket.lane}: {ticket.label}")
