"""How an operation is run, whichever backend runs it, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import profiler

from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.operations import Update
from zero_plugin.runtime.ticket import Failure, Ticket
from zero_plugin.trace import Meter

if TYPE_CHECKING:
    from zero_plugin.runtime.operations import KernelSet, Operation
    from zero_plugin.runtime.topology import HostPlace
    from zero_plugin.trace import Ledger, Trace

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What operations need to run and where they report; one for each backend.

    Attributes:
        kernels: The compiled kernels.
        ledger: Counters of moved bytes, always on.
        trace: The event log, or None for none.
        place: Which processors and memory of the host to use, or None for any.
        meter: Seconds that were waited, and of updates.
    """

    kernels: KernelSet
    ledger: Ledger
    trace: Trace | None
    place: HostPlace | None = None
    meter: Meter = field(default_factory=Meter)

    @property
    def cpus(self) -> tuple[int, ...]:
        """Processors that workers are bound to; empty for any."""
        return () if self.place is None else self.place.cpus

    @property
    def node(self) -> int | None:
        """Memory node of host memory; None for any."""
        return None if self.place is None else self.place.node


@dataclass(kw_only=True, slots=True)
class Job:
    """One queued operation. `operation` is let go of before the ticket ends."""

    ticket: Ticket[Any]
    operation: Operation[Any] | None
    dependencies: tuple[Ticket[Any], ...]


class GradientFree:
    """Grad mode and inference mode off on this thread for a while, whatever the caller set.

    A class of its own because a lane that runs operations inside `submit` pays for it every time.
    """

    __slots__ = ("_grad", "_inference")

    def __enter__(self) -> None:
        self._inference: torch.inference_mode | None = None
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(mode=False)
            self._inference.__enter__()
        # Leaving inference mode turned grad mode on, so this comes second.
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch.set_grad_enabled(mode=False)

    def __exit__(self, *exception: object) -> None:
        if self._grad:
            torch.set_grad_enabled(mode=True)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)


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
        if not _is_profiled():
            return _run_untraced(operation, services, pace)
        with profiler_range(services, ticket):
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
        begun = perf_counter()
        value = operation.run(services.kernels)
        if isinstance(operation, (Update, Read, Write)):
            _measure(operation, services.meter, perf_counter() - begun)
        traffic = operation.traffic
        if traffic is not None:
            services.ledger.add(*traffic)
        if pace is not None:
            pace(operation)
    except BaseException as error:  # noqa: BLE001 - kept in the ticket, raised where it is awaited
        return None, error
    return value, None


def _measure(operation: Update | Read | Write, meter: Meter, seconds: float) -> None:
    if not isinstance(operation, Update):
        meter.transferred(operation.nbytes, seconds)
        return
    gradient = next(iter(operation.reads), None)
    # On a device it was only enqueued.
    if gradient is not None and gradient.is_cpu:
        meter.updated(gradient.numel(), seconds)


def profiler_range(services: Services, ticket: Ticket[Any]) -> AbstractContextManager[Any]:
    """Names the operation for torch's profiler, if that runs."""
    del services
    # Entering a range costs more than a small operation even where nothing records it.
    if not _is_profiled():
        return nullcontext()
    return profiler.record_function(f"{ticket.lane}: {ticket.label}")


def _is_profiled() -> bool:
    return getattr(profiler, "_is_profiler_enabled", True)
