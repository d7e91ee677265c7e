"""Worker threads that finish late and memory that shows who looked too early.

What an operation will overwrite is filled with NaN from the moment it is submitted until it has run,
and operations run as late as they may: not before somebody waits for them or `hold_seconds` have
passed, and then after a random delay. A program that reads a destination without waiting sees NaN; a
correct one sees what it sees under every other backend. The delays depend on the seed and on program
order, not on how threads happen to be scheduled.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zero_plugin.runtime.backend import LaneKind
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.operations import fill_bytes
from zero_plugin.runtime.threads import (
    LatencyModel,
    ThreadsBackend,
    Worker,
    WorkerLane,
    latency_for,
)
from zero_plugin.runtime.ticket import ProgramOrder, Ticket

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.runtime.operations import Operation

T = TypeVar("T")

# All bits set is a NaN in fp64, fp32, bf16 and fp16, and -1 in a signed integer.
_POISON_BYTE = 0xFF


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosOptions:
    """How late operations are.

    Attributes:
        max_delay: Upper end, in seconds, of the random delay before an operation runs.
        hold_seconds: How long an operation nobody waits for is held back.
    """

    max_delay: float = 0.002
    hold_seconds: float = 0.05


class ChaosOrder(ProgramOrder):
    """Program order that knows how far the host has come to wait."""

    __slots__ = ("_awaited", "_changed")

    def __init__(self) -> None:
        super().__init__("chaos")
        self._changed = threading.Condition()
        self._awaited = -1

    def demand(self, sequence: int) -> None:
        """The host waits for ticket `sequence`: nothing up to it is held back any longer."""
        with self._changed:
            if sequence > self._awaited:
                self._awaited = sequence
                self._changed.notify_all()

    def hold(self, sequence: int, until: float) -> None:
        """Blocks until the host waits for `sequence` or the clock (`time.monotonic`) shows `until`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._awaited >= sequence, timeout=max(0.0, until - time.monotonic())
            )


@dataclass(kw_only=True, slots=True)
class _Pending:
    """What is known of an operation that has not ended."""

    spans: list[tuple[int, int]]
    submitted: float
    unpoisoned: list[Tensor]


class Chaos:
    """Holds operations back and poisons what they will overwrite; shared by a backend's lanes."""

    def __init__(self, *, order: ChaosOrder, seed: int, options: ChaosOptions) -> None:
        self._order = order
        self._seed = seed
        self._options = options
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}

    def submitted(self, sequence: int, operation: Operation[Any]) -> None:
        """Poisons the operation's destinations, those in use by pending operations later."""
        reads = [_span(tensor) for tensor in operation.reads]
        writes = [_span(tensor) for tensor in operation.writes]
        with self._lock:
            busy = [span for pending in self._pending.values() for span in pending.spans]
            postponed: list[Tensor] = []
            for tensor in operation.overwrites:
                if _overlaps(_span(tensor), reads):
                    continue
                if _overlaps(_span(tensor), busy):
                    postponed.append(tensor)
                else:
                    poison(tensor)
            self._pending[sequence] = _Pending(
                spans=reads + writes, submitted=time.monotonic(), unpoisoned=postponed
            )

    def before(self, sequence: int) -> None:
        """The operation's turn has come: poison what is left, then be late."""
        with self._lock:
            pending = self._pending[sequence]
            postponed, pending.unpoisoned = pending.unpoisoned, []
        for tensor in postponed:
            poison(tensor)
        del postponed
        self._order.hold(sequence, pending.submitted + self._options.hold_seconds)
        time.sleep(self._delay(sequence))

    def ended(self, sequence: int) -> None:
        """The operation's memory is no longer in use."""
        with self._lock:
            self._pending.pop(sequence, None)

    def _delay(self, sequence: int) -> float:
        # Half of the operations are not delayed, so that order among lanes varies most.
        draw = random.Random(f"{self._seed}:{sequence}").uniform(-1.0, 1.0)
        return max(0.0, draw) * self._options.max_delay


class ChaosLane(WorkerLane):
    """A worker lane that poisons on submission."""

    def __init__(
        self,
        *,
        name: str,
        kind: LaneKind,
        order: ProgramOrder,
        services: Services,
        worker: Worker,
        chaos: Chaos,
    ) -> None:
        super().__init__(name=name, kind=kind, order=order, services=services, worker=worker)
        self._chaos = chaos

    def _enqueue(
        self, ticket: Ticket[T], operation: Operation[T], dependencies: tuple[Ticket[Any], ...]
    ) -> None:
        self._chaos.submitted(ticket.sequence, operation)
        super()._enqueue(ticket, operation, dependencies)


class ChaosBackend(ThreadsBackend):
    """Threads, seeded delays and poison.

    Args:
        services: Kernels, ledger and trace.
        seed: Of the delays.
        latency: Modelled time of operations, on top of the delays.
        options: How late operations are.
    """

    def __init__(
        self,
        *,
        services: Services,
        seed: int,
        latency: LatencyModel = None,
        options: ChaosOptions | None = None,
    ) -> None:
        order = ChaosOrder()
        super().__init__(services=services, latency=latency, order=order)
        self._chaos = Chaos(order=order, seed=seed, options=options or ChaosOptions())

    def retire(self, buffer: Tensor) -> None:
        """Poisons the slab, so that a use after release shows."""
        poison(buffer)

    def _new_lane(self, name: str, kind: LaneKind) -> ChaosLane:
        worker = Worker(
            name=name,
            services=self._services,
            latency=latency_for(self._latency, name),
            before=self._chaos.before,
            ended=self._chaos.ended,
        )
        self._workers.append(worker)
        worker.start()
        return ChaosLane(
            name=name,
            kind=kind,
            order=self._order,
            services=self._services,
            worker=worker,
            chaos=self._chaos,
        )


def poison(tensor: Tensor) -> None:
    """Fills `tensor` with NaN, or with -1 where its dtype has no NaN."""
    if tensor.dtype is not torch.bool and fill_bytes(tensor, _POISON_BYTE):
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address of the tensor's elements and the one past the last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (reach + 1) * tensor.element_size()


def _overlaps(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    start, end = span
    return any(start < other_end and other_start < end for other_start, other_end in others)
