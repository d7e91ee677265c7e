"""The backend for debuggers: every operation runs inside `submit`, on the caller's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zero_plugin.runtime.backend import (
    Backend,
    HostCompute,
    Lane,
    LaneKind,
    Memory,
    ProgramOrder,
    Services,
    Ticket,
    first_failure,
    run_operation,
)
from zero_plugin.runtime.memory import allocate_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from zero_plugin.runtime.buffers import Lease
    from zero_plugin.runtime.operations import Operation

T = TypeVar("T")


class InlineLane(Lane):
    """Runs what is submitted before `submit` returns."""

    def submit(
        self,
        operation: Operation[T],
        *,
        after: Sequence[Ticket[Any]] = (),
        leases: Sequence[Lease] = (),
    ) -> Ticket[T]:
        """Runs `operation` and returns its ticket, which has ended."""
        order = self._order
        with order.lock:
            sequence = order.take(self.name, operation.label, after)
            for lease in leases:
                lease.check_open()
            dependencies = (*after, *self._pending_followed()) if self._followed else after
        ticket: Ticket[T] = self._new_ticket(operation.label, sequence)
        self._trace_issue(ticket, operation)
        failure = first_failure(dependencies)
        if failure is not None:
            ticket.poison(failure)
            return ticket
        self._enqueue(ticket, operation, ())
        return ticket

    def _enqueue(
        self, ticket: Ticket[T], operation: Operation[T], dependencies: tuple[Ticket[Any], ...]
    ) -> None:
        del dependencies
        ticket.start()
        with torch.inference_mode(mode=False), torch.no_grad():
            value, error = run_operation(ticket, operation, self._services)
        if error is None:
            ticket.finish(value)  # pyright: ignore[reportArgumentType]
        else:
            self._unseen.put(ticket.fail(error))


class InlineBackend(Backend):
    """Every lane runs its operations at submission; there are no threads."""

    def __init__(self, *, services: Services) -> None:
        order = ProgramOrder("inline")
        super().__init__(order=order, services=services, compute=HostCompute(order))

    def allocate(self, nbytes: int, memory: Memory) -> Tensor:
        """Pageable host memory for either kind."""
        del memory
        return allocate_host(nbytes)

    def close(self) -> None:
        """Refuses what comes later."""
        self._order.closed = True

    def _new_lane(self, name: str, kind: LaneKind) -> Lane:
        return InlineLane(name=name, kind=kind, order=self._order, services=self._services)
