"""One worker thread for each lane, with an optional model of how long operations take."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from zero_plugin.runtime.backend import (
    Backend,
    HostCompute,
    Lane,
    LaneKind,
    Memory,
    UnseenFailure,
)
from zero_plugin.runtime.execution import (
    GradientFree,
    Job,
    Services,
    first_failure,
    run_operation,
)
from zero_plugin.runtime.memory import allocate_host
from zero_plugin.runtime.ticket import ProgramOrder, Ticket
from zero_plugin.runtime.topology import bound

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.runtime.operations import Operation

T = TypeVar("T")
Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """How long an operation takes at least, in place of hardware that is not there.

    Attributes:
        seconds: Fixed part, in seconds.
        bytes_per_second: Rate at which the operation's bytes move; None for no such part.
    """

    seconds: float = 0.0
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.seconds < 0 or (self.bytes_per_second is not None and self.bytes_per_second <= 0):
            raise ValueError(
                f"{self} is no latency; give seconds >= 0 and bytes_per_second > 0 (or None)"
            )

    def of(self, nbytes: int) -> float:
        """Seconds an operation on `nbytes` bytes takes."""
        if self.bytes_per_second is None:
            return self.seconds
        return self.seconds + nbytes / self.bytes_per_second


_START_SECONDS = 1.0
"""Time in which a thread that was started runs."""
_EXIT_SECONDS = 5.0
"""Longest that the end of a process waits for operations."""

LatencyModel = Mapping[str, Latency] | Latency | None


def latency_for(model: LatencyModel, lane: str) -> Latency | None:
    """The latency of `lane`: the model itself, or its entry of that name."""
    if model is None or isinstance(model, Latency):
        return model
    return model.get(lane)


class StoppedLater(Protocol):
    """What has a thread."""

    def stop(self) -> None:
        """Lets the thread end once it has run what is queued."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end, at most `timeout` seconds."""
        ...


class Worker:
    """A thread that runs jobs in the order they were put.

    Args:
        name: The lane's name, for the thread's.
        services: Kernels, ledger and trace.
        latency: Modelled time of its operations.
        scope: Entered by the thread for as long as it lives.
        before: Called with a job's sequence number when it is about to run.
        ended: Called with it when it has run or never will, before its ticket ends.

    It refers neither to its lane nor to its backend, so that a backend that is dropped without
    `close` can be collected and its threads told to stop.
    """

    def __init__(
        self,
        *,
        name: str,
        services: Services,
        latency: Latency | None = None,
        scope: Scope = GradientFree,
        before: Callable[[int], None] | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        self.unseen = UnseenFailure()
        self._services = services
        self._latency = latency
        self._scope = scope
        self._before = before
        self._ended = ended
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._stopping = False
        self._put = 0
        self._ended_jobs = 0
        self._awaited: Ticket[Any] | None = None
        # Daemon, because the interpreter joins other threads before it runs any exit handler.
        self._thread = threading.Thread(target=self._serve, name=f"zero-lane-{name}", daemon=True)
        self._serves = threading.Event()

    def start(self) -> None:
        """Starts the thread; by then somebody knows the worker who will stop it, since an interrupt may end this call."""
        with bound(self._services.cpus):
            self._thread.start()

    def put(self, job: Job) -> None:
        """Queues `job`."""
        self._put += 1
        self._queue.put(job)

    def at_rest(self, elsewhere: Collection[int]) -> int | None:
        """How many jobs have ended, if nothing can run here before another thread did something; else None."""
        ended = self._ended_jobs
        awaited = self._awaited
        waits = awaited is not None and not awaited.done
        return ended if waits or self._put == ended or self._thread.ident in elsewhere else None

    def stop(self) -> None:
        """Lets the thread end once it has run what is queued. May be called again."""
        if not self._stopping:
            self._stopping = True
            self._queue.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end, at most `timeout` seconds."""
        # An interrupted start may have started it or not; where it has, the thread says so in no time.
        if self._serves.wait(_START_SECONDS):
            self._thread.join(timeout)

    def _serve(self) -> None:
        self._serves.set()
        with self._scope():
            while True:
                job = self._queue.get()
                if job is None:
                    return
                self._run(job)
                self._ended_jobs += 1
                # Hold nothing while the queue is empty.
                del job

    def _run(self, job: Job) -> None:
        for ticket in job.dependencies:
            self._awaited = ticket
            ticket.block()
        self._awaited = None
        failure = first_failure(job.dependencies)
        ticket = job.ticket
        if failure is not None:
            self._let_go(job)
            ticket.poison(failure)
            return
        if not ticket.start():
            self._let_go(job)
            return
        try:
            value, error = self._execute(job)
        except BaseException as cause:  # noqa: BLE001 - a worker that died would hang every waiter
            value, error = None, cause
        self._let_go(job)
        if error is None:
            ticket.finish(value)
        else:
            self.unseen.put(ticket.fail(error))

    def _let_go(self, job: Job) -> None:
        job.operation = None
        if self._ended is not None:
            self._ended(job.ticket.sequence)

    def _execute(self, job: Job) -> tuple[Any, BaseException | None]:
        operation = job.operation
        if operation is None:
            raise RuntimeError(f"{job.ticket} was run twice")
        if self._before is not None:
            self._before(job.ticket.sequence)
        begun = time.perf_counter()
        pace = None
        if self._latency is not None:
            until = begun + self._latency.of(operation.nbytes)
            pace = _SleepUntil(until)
        return run_operation(job.ticket, operation, self._services, pace=pace)


class _SleepUntil:
    """Sleeps out what is left of a modelled time; takes no processor."""

    __slots__ = ("_until",)

    def __init__(self, until: float) -> None:
        self._until = until

    def __call__(self, operation: Operation[Any]) -> None:
        del operation
        left = self._until - time.perf_counter()
        if left > 0:
            time.sleep(left)


class WorkerLane(Lane):
    """A lane whose operations run on a thread of its own."""

    def __init__(
        self,
        *,
        name: str,
        kind: LaneKind,
        order: ProgramOrder,
        services: Services,
        worker: Worker,
    ) -> None:
        super().__init__(name=name, kind=kind, order=order, services=services)
        self._worker = worker
        self._unseen = worker.unseen

    def _enqueue(
        self, ticket: Ticket[T], operation: Operation[T], dependencies: tuple[Ticket[Any], ...]
    ) -> None:
        self._worker.put(Job(ticket=ticket, operation=operation, dependencies=dependencies))


class ThreadsBackend(Backend):
    """Lanes on worker threads; the framework computes on the caller's thread."""

    def __init__(
        self,
        *,
        services: Services,
        latency: LatencyModel = None,
        order: ProgramOrder | None = None,
    ) -> None:
        order = order or ProgramOrder("threads")
        super().__init__(order=order, services=services, compute=HostCompute(order))
        self._latency = latency
        self._workers: list[Worker] = []
        weakref.finalize(self, stop_workers, self._workers)

    def allocate(self, nbytes: int, memory: Memory) -> Tensor:
        """Pageable host memory for either kind."""
        del memory
        return allocate_host(nbytes, self._services.node)

    def at_rest(self, elsewhere: Collection[int]) -> tuple[int, ...] | None:
        """Whether the host and every worker wait; see `Backend.at_rest`."""
        found = self._order.hosts_at_rest(elsewhere)
        for worker in self._workers:
            ended = worker.at_rest(elsewhere)
            if found is None or ended is None:
                return None
            found = (*found, ended)
        return found

    def _shut(self) -> None:
        """Runs what is queued, then ends the threads."""
        for worker in self._workers:
            worker.stop()
        for lane in self._lanes.values():
            lane.settle()
        for worker in self._workers:
            worker.join()

    def _new_lane(self, name: str, kind: LaneKind) -> Lane:
        worker = self._new_worker(name)
        self._workers.append(worker)
        worker.start()
        return WorkerLane(
            name=name, kind=kind, order=self._order, services=self._services, worker=worker
        )

    def _new_worker(self, name: str) -> Worker:
        return Worker(name=name, services=self._services, latency=latency_for(self._latency, name))


def stop_workers(workers: Sequence[StoppedLater]) -> None:
    """Tells every worker to end; for a backend that was dropped without `close`, or whose process exits.

    At exit it also waits for them, as long as `_EXIT_SECONDS` allow: a thread that the interpreter ends inside native code takes
    the process with it, and one that waits for a dead rank never ends.
    """
    for worker in workers:
        worker.stop()
    if threading.main_thread().is_alive():
        return
    until = time.monotonic() + _EXIT_SECONDS
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
