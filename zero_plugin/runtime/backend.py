"""The contract of the lane backends.

A *lane* is a first-in-first-out queue of operations from the closed set in `operations`. Submitting
returns a *ticket*, and what the operation produces is reachable only through it: `wait()` blocks the
host, `on(lane)` makes a lane wait and leaves the host free. Every ticket has a place in one global
program order and a lane waits only on tickets issued earlier, so waits cannot form a cycle.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from zero_plugin.errors import LaneError
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.ticket import Failure, Follower, ProgramOrder, Ticket, TicketState

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.runtime.buffers import Lease
    from zero_plugin.runtime.operations import KernelSet, Operation
    from zero_plugin.trace import Meter

__all__ = [
    "Backend",
    "HostCompute",
    "Lane",
    "LaneKind",
    "Memory",
    "Services",
    "Ticket",
    "TicketState",
    "UnseenFailure",
]

T = TypeVar("T")
LaneKind = Literal["device", "host"]
Memory = Literal["device", "host"]


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
        # An error raised below keeps this frame, and through it must not keep the buffers.
        del operation
        self._advance()
        return ticket

    def follow(self, ticket: Ticket[Any]) -> None:
        """Makes every operation submitted from now on come after `ticket`.

        A ticket that fails poisons them until the lane is settled or drained.
        """
        with self._order.lock:
            self._order.check(ticket, f"lane {self.name!r}")
            self._followed = [*self._pending_followed(), ticket]

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
        self._advance()
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
        order.meter = services.meter
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
    def meter(self) -> Meter:
        """What the program waited for, and what updates took."""
        return self._services.meter

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

    def at_rest(self, elsewhere: Collection[int]) -> tuple[int, ...] | None:
        """None while anything runs here; else numbers that differ once anything has run.

        At rest, every thread that submits is blocked on a ticket, and every lane has nothing to do, waits for another
        one, or is blocked elsewhere.

        Args:
            elsewhere: threads, of lanes or not, that are known to be blocked in a collective.

        Returns:
            None too where the backend cannot tell.
        """
        del elsewhere
        return None

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

    def close(self) -> None:
        """Waits for every operation to end, stops the threads and refuses what comes later.

        May be called again, and after an interrupted call. Raises nothing for failed operations. In
        a forked child, which has none of the threads, it only refuses what comes later.
        """
        self._order.closed = True
        if self._order.process == os.getpid():
            # Whoever holds the lock submits at this moment; the lanes see all of that.
            with self._order.lock:
                pass
            self._shut()

    @abstractmethod
    def _shut(self) -> None:
        """Waits for every operation to end and stops the threads; may be called again."""

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
