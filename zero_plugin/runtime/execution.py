"""How an operation is run, whichever backend runs it, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.profiler import record_function

from zero_plugin.runtime.ticket import Failure, Ticket

if TYPE_CHECKING:
    from zero_plugin.runtime.operations import KernelSet, Operation
    from zero_plugin.trace import Ledger, Trace

T = TypeVar("T")


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


@dataclass(kw_only=True, slots=True)
class Job:
    """One queued operation. `operation` is let go of before the ticket ends."""

    ticket: Ticket[Any]
    operation: Operation[Any] | None
    dependencies: tuple[Ticket[Any], ...]


def gradient_free() -> AbstractContextManager[Any]:
    """Turns grad mode and inference mode off on this thread, whatever the caller set."""
    if torch.is_inference_mode_enabled():
        # Leaving inference mode turns grad mode on, so the order matters.
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        return stack
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


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
