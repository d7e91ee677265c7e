"""The backend for debuggers: every operation runs inside `submit`, on the caller's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from zero_plugin.runtime.backend import Backend, HostCompute, Lane, LaneKind, Memory
from zero_plugin.runtime.execution import (
    GradientFree,
    Job,
    Services,
    first_failure,
    run_operation,
)
from zero_plugin.runtime.memory import allocate_host
from zero_plugin.runtime.ticket import ProgramOrder, Ticket

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.runtime.operations import Operation

T = TypeVar("T")


class InlineLane(Lane):
    """Runs what is submitted before `submit` returns."""

    def __init__(
        self, *, name: str, kind: LaneKind, order: ProgramOrder, services: Services
    ) -> None:
        super().__init__(name=name, kind=kind, order=order, services=services)
        self._queue: deque[Job] = deque()
        self._running = threading.Lock()

    def _enqueue(
        self, ticket: Ticket[T], operation: Operation[T], dependencies: tuple[Ticket[Any], ...]
    ) -> None:
        self._queue.append(Job(ticket=ticket, operation=operation, dependencies=dependencies))

    def _advance(self) -> None:
        # A job leaves the queue only when its ticket has ended, so an interrupt between any two
        # instructions leaves nobody waiting for ever.
        with self._running:
            while self._queue:
                job = self._queue[0]
                try:
                    self._run(job)
                except BaseException as error:
                    job.operation = None
                    job.ticket.abandon(error)
                    raise
                self._queue.popleft()

    def _run(self, job: Job) -> None:
        ticket, operation = job.ticket, job.operation
        failure = first_failure(job.dependencies)
        if failure is not None:
            ticket.poison(failure)
            return
        if operation is None or not ticket.start():
            return
        with GradientFree():
            value, error = run_operation(ticket, operation, self._services)
        job.operation = operation = None
        if error is None:
            ticket.finish(value)
            return
        self._unseen.put(ticket.fail(error))
        if not isinstance(error, Exception):
            raise error


class InlineBackend(Backend):
    """Every lane runs its operations at submission; there are no threads."""

    def __init__(self, *, services: Services) -> None:
        order = ProgramOrder("inline")
        super().__init__(order=order, services=services, compute=HostCompute(order))

    def allocate(self, nbytes: int, memory: Memory) -> Tensor:
        """Pageable host memory for either kind."""
        del memory
        return allocate_host(nbytes, self._services.node)

    def at_rest(self, elsewhere: Collection[int]) -> tuple[int, ...] | None:
        """Lanes run on the threads that submit."""
        return self._order.hosts_at_rest(elsewhere)

    def _shut(self) -> None:
        """There is nothing to end."""

    def _new_lane(self, name: str, kind: LaneKind) -> Lane:
        return InlineLane(name=name, kind=kind, order=self._order, services=self._services)
