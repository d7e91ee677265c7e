"""The CUDA backend, and the only file of the package that uses `torch.cuda`.

A device lane is a stream. An operation is enqueued on it while it is submitted, unless it comes after
a host operation that has not ended: then the lane's own dispatcher thread enqueues it, and everything
behind it, as soon as that is possible, and the submitting thread goes on. A host lane is a worker
thread that waits on events.

[Note: memory of tensors in flight] Torch's caching allocator hands a freed block to the next
allocation on the stream it came from, at once. So every device tensor of an operation is marked with
`record_stream`, which covers storages that are freed explicitly while the lane still uses them, and
the ticket holds the operation until its event has passed, which covers pinned memory and everything
else.

Everything goes through an injected `Driver`, so that the tests can put a recording fake in place of
the hardware.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from zero_plugin.errors import LaneError
from zero_plugin.runtime.backend import Backend, Lane, LaneKind, Memory
from zero_plugin.runtime.execution import (
    GradientFree,
    Job,
    Services,
    first_failure,
    profiler_range,
)
from zero_plugin.runtime.memory import map_pages
from zero_plugin.runtime.threads import Worker, WorkerLane, stop_workers
from zero_plugin.runtime.ticket import ENDED, Follower, ProgramOrder, Ticket, TicketState

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.runtime.operations import Operation

T = TypeVar("T")


class Stream(Protocol):
    """What is used of `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> None:
        """Everything enqueued from now on comes after `event`."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until everything enqueued has ended."""
        ...


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Stands for everything enqueued on `stream` so far."""
        ...

    def query(self) -> bool:
        """Whether it has passed."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until it has passed."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`, both passed."""
        ...


class Driver(Protocol):
    """What the backend needs of the hardware; nothing here orders anything."""

    def new_stream(self, device: torch.device) -> Stream:
        """A new stream."""
        ...

    def new_event(self, *, timing: bool) -> Event:
        """A new event, which takes the time when `timing`."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """The stream the calling thread computes on."""
        ...

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream` the calling thread's current one."""
        ...

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes `device` the calling thread's current one."""
        ...

    def is_device_tensor(self, tensor: Tensor) -> bool:
        """Whether the caching allocator owns the tensor's memory."""
        ...

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Device memory as a uint8 tensor."""
        ...

    def pin(self, address: int, nbytes: int) -> str | None:
        """Page-locks host memory; says why when the system refuses."""
        ...

    def unpin(self, address: int) -> None:
        """Undoes `pin`."""
        ...


class TorchDriver:
    """The hardware, through `torch.cuda`."""

    def new_stream(self, device: torch.device) -> Stream:
        """A new stream of the default priority."""
        return torch.cuda.Stream(device=device)

    def new_event(self, *, timing: bool) -> Event:
        """A new event; a host that waits for it sleeps, since its cores have an optimizer to run."""
        return torch.cuda.Event(enable_timing=timing, blocking=True)

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's current stream."""
        return torch.cuda.current_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream` current."""
        return torch.cuda.stream(stream)

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes `device` current."""
        return torch.cuda.device(device)

    def is_device_tensor(self, tensor: Tensor) -> bool:
        """Whether it is a CUDA tensor."""
        return tensor.is_cuda

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """From the caching allocator, which aligns to 512 bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pin(self, address: int, nbytes: int) -> str | None:
        """Registers the memory, which does not round it up as torch's pinned allocator does."""
        code = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            return None
        self._clear_error()
        return f"cudaHostRegister returned error {code}"

    def unpin(self, address: int) -> None:
        """Unregisters the memory."""
        _cudart().cudaHostUnregister(address)

    @staticmethod
    def _clear_error() -> None:
        # CUDA reports a refused registration once more at the next launch that torch checks; let
        # that be this one.
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            return


class DeviceTicket(Ticket[T]):
    """A ticket whose end is an event on a stream.

    Waiting passes two gates: until the work was enqueued (`pass_gate`), and until its event passed.
    """

    __slots__ = ("_event", "_operation", "begun", "nbytes")

    def __init__(self, *, label: str, lane: str, sequence: int, order: ProgramOrder) -> None:
        super().__init__(label=label, lane=lane, sequence=sequence, order=order)
        self._event: Event | None = None
        self._operation: Operation[T] | None = None
        self.begun: Event | None = None
        self.nbytes = 0

    @property
    def event(self) -> Event | None:
        """The event, once recorded."""
        return self._event

    @property
    def done(self) -> bool:
        """Whether the event has passed or the operation failed. Never blocks."""
        event = self._event
        if super().done:
            return True
        if event is None:
            return False
        try:
            passed = event.query()
        except RuntimeError as error:
            self._end(error)
            return True
        if passed:
            self._end(None)
        return passed

    def block(self) -> None:
        """Blocks the calling thread until the event has passed."""
        self.pass_gate()
        event = self._event
        if super().done or event is None:
            return
        try:
            event.synchronize()
        except RuntimeError as error:
            self._end(error)
        else:
            self._end(None)

    def issue(self, *, event: Event, value: T, operation: Operation[T] | None) -> None:
        """The work was enqueued and `event` recorded behind it; `operation` is held until then."""
        self._value = value
        self._operation = operation
        self._event = event
        self.open_gates()

    def _passable(self) -> bool:
        return self._event is not None or super()._passable()

    def _end(self, cause: Exception | None) -> None:
        # Several threads may see the event pass, or fail; the first ends the ticket.
        if cause is None:
            self.move(TicketState.DONE, unless=ENDED)
        elif not super().done:
            self.fail(cause, unless=ENDED)
        self._operation = None


_WAKE, _STOP = object(), object()


class DeviceLane(Lane):
    """A stream, and a thread for what cannot be enqueued yet."""

    def __init__(
        self,
        *,
        name: str,
        order: ProgramOrder,
        services: Services,
        driver: Driver,
        device: torch.device,
    ) -> None:
        super().__init__(name=name, kind="device", order=order, services=services)
        self._driver = driver
        self._device = device
        self._stream = driver.new_stream(device)
        self._issuing = threading.Lock()
        self._backlog: deque[Job] = deque()
        self._flying: deque[DeviceTicket[Any]] = deque()
        self._dispatcher: threading.Thread | None = None
        self._wakeups: SimpleQueue[object] = SimpleQueue()
        self._handed_over = False
        self._clock = _DeviceClock(driver, self._stream) if services.trace is not None else None

    def stop(self) -> None:
        """Ends the dispatcher once the backlog is empty. May be called again."""
        self._wakeups.put(_STOP)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the dispatcher to end, at most `timeout` seconds."""
        if self._dispatcher is not None:
            self._dispatcher.join(timeout)

    def _settle_last(self) -> None:
        last = self._last
        if last is None:
            return
        last.settle()
        if last.failure is not None:
            self._unseen.put(last.failure)
        with self._issuing:
            self._reap()

    def _new_ticket(self, label: str, sequence: int) -> DeviceTicket[Any]:
        return DeviceTicket(label=label, lane=self.name, sequence=sequence, order=self._order)

    def _enqueue(
        self, ticket: Ticket[T], operation: Operation[T], dependencies: tuple[Ticket[Any], ...]
    ) -> None:
        self._backlog.append(Job(ticket=ticket, operation=operation, dependencies=dependencies))

    def _advance(self) -> None:
        """Enqueues what can be; leaves the rest, in order, to the dispatcher."""
        with self._issuing:
            self._reap()
            while self._backlog and not self._handed_over:
                # A job leaves the backlog only when it is enqueued or its ticket has ended.
                if all(_enqueued(ticket) for ticket in self._backlog[0].dependencies):
                    self._issue(self._backlog[0])
                    self._backlog.popleft()
                else:
                    self._hand_over()

    def _hand_over(self) -> None:
        self._handed_over = True
        if self._dispatcher is None:
            self._dispatcher = threading.Thread(
                target=self._dispatch, name=f"zero-lane-{self.name}", daemon=True
            )
            self._dispatcher.start()
        self._wakeups.put(_WAKE)

    def _dispatch(self) -> None:
        with GradientFree(), self._driver.on_device(self._device):
            while self._wakeups.get() is not _STOP:
                while self._handed_over:
                    self._dispatch_one()

    def _dispatch_one(self) -> None:
        with self._issuing:
            if not self._backlog:
                self._handed_over = False
                return
            job = self._backlog[0]
        for ticket in job.dependencies:
            ticket.pass_gate()
        with self._issuing:
            self._issue(self._backlog[0])
            self._backlog.popleft()
            self._reap()

    def _issue(self, job: Job) -> None:
        ticket = job.ticket
        failure = first_failure(job.dependencies)
        if failure is not None:
            ticket.poison(failure)
            return
        try:
            if ticket.state is TicketState.ISSUED and ticket.start():
                with GradientFree():
                    self._launch(job)
        except BaseException as error:
            # Part of the operation may be enqueued; nobody may touch its memory before that ended.
            self._stream.synchronize()
            ticket.abandon(error)
            if ticket.failure is not None:
                self._unseen.put(ticket.failure)
            if not isinstance(error, Exception):
                raise
        finally:
            job.operation = None

    def _launch(self, job: Job) -> None:
        ticket, operation = job.ticket, job.operation
        if operation is None or not isinstance(ticket, DeviceTicket):
            raise LaneError(f"{ticket} is no work of device lane {self.name!r}")
        stream = self._stream
        for dependency in job.dependencies:
            event = dependency.event if isinstance(dependency, DeviceTicket) else None
            if event is not None:
                stream.wait_event(event)
        for tensor in (*operation.reads, *operation.writes):
            if self._driver.is_device_tensor(tensor):
                tensor.record_stream(stream)  # pyright: ignore[reportArgumentType]
        if self._clock is not None:
            ticket.begun = self._driver.new_event(timing=True)
            ticket.begun.record(stream)
            ticket.nbytes = operation.nbytes
        with self._driver.on_stream(stream), profiler_range(self._services, ticket):
            value = operation.run(self._services.kernels)
        event = self._driver.new_event(timing=self._clock is not None)
        event.record(stream)
        traffic = operation.traffic
        if traffic is not None:
            self._services.ledger.add(*traffic)
        ticket.issue(event=event, value=value, operation=operation)
        self._flying.append(ticket)

    def _reap(self) -> None:
        """Lets go of what operations held that have ended; called with `_issuing` held."""
        while self._flying and self._flying[0].done:
            ticket = self._flying.popleft()
            if self._clock is not None and self._services.trace is not None:
                self._trace_times(ticket, self._clock)

    def _trace_times(self, ticket: DeviceTicket[Any], clock: _DeviceClock) -> None:
        trace = self._services.trace
        if trace is None or ticket.begun is None or ticket.event is None or ticket.failure:
            return
        for phase, event in (("begin", ticket.begun), ("end", ticket.event)):
            trace.record(
                self.name,
                ticket.label,
                phase,  # pyright: ignore[reportArgumentType]
                nbytes=ticket.nbytes,
                sequence=ticket.sequence,
                at=clock.host_time(event),
            )


class _DeviceClock:
    """Translates events into seconds of `time.perf_counter`."""

    __slots__ = ("_base", "_host")

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._base = driver.new_event(timing=True)
        self._base.record(stream)
        self._base.synchronize()
        self._host = time.perf_counter()

    def host_time(self, event: Event) -> float:
        """When `event`, which has passed, did."""
        return self._host + self._base.elapsed_time(event) / 1e3


class CudaCompute:
    """Compute on the calling thread's current stream: to follow is to make that stream wait."""

    __slots__ = ("_device", "_driver", "_order")

    def __init__(self, order: ProgramOrder, driver: Driver, device: torch.device) -> None:
        self._order = order
        self._driver = driver
        self._device = device

    def follow(self, ticket: Ticket[Any]) -> None:
        """Makes the current stream wait; the host only until the work was enqueued.

        Work of a host lane cannot be enqueued, so for that the host waits.

        Raises:
            LaneError: The operation failed, or comes after one that did.
        """
        self._order.check(ticket, "compute")
        event: Event | None = None
        if isinstance(ticket, DeviceTicket):
            ticket.pass_gate()
            event = ticket.event
        else:
            ticket.settle()
        if ticket.failure is not None:
            ticket.wait()
        if event is not None:
            self._driver.current_stream(self._device).wait_event(event)


class CudaBackend(Backend):
    """Streams for device lanes, threads for host lanes.

    Args:
        services: Kernels, ledger and trace.
        device: The CUDA device the framework computes on.
        driver: The hardware, or what stands for it in tests.
    """

    def __init__(
        self, *, services: Services, device: torch.device, driver: Driver | None = None
    ) -> None:
        order = ProgramOrder("cuda")
        self._driver: Driver = driver or TorchDriver()
        compute: Follower = CudaCompute(order, self._driver, device)
        super().__init__(order=order, services=services, compute=compute)
        self._device = device
        self._threads: list[Worker | DeviceLane] = []
        self._warned = False
        weakref.finalize(self, stop_workers, self._threads)

    def mark(self, label: str) -> Ticket[None]:
        """A ticket for what the calling thread has enqueued on its current stream so far."""
        with self._order.lock:
            sequence = self._order.take("compute", label, ())
        ticket: DeviceTicket[None] = DeviceTicket(
            label=label, lane="compute", sequence=sequence, order=self._order
        )
        ticket.start()
        event = self._driver.new_event(timing=False)
        event.record(self._driver.current_stream(self._device))
        ticket.issue(event=event, value=None, operation=None)
        return ticket

    def allocate(self, nbytes: int, memory: Memory) -> Tensor:
        """Device memory from the caching allocator, host memory pinned at its exact size.

        Where the system refuses to pin, host memory is pageable and a warning, once a backend, says
        so.
        """
        if memory == "device":
            return self._driver.allocate(nbytes, self._device)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        pages = map_pages(nbytes, self._services.node)
        address = ctypes.addressof(pages)
        refusal = self._driver.pin(address, nbytes)
        if refusal is None:
            # Runs when the last tensor on the memory goes, and before the memory does.
            weakref.finalize(pages, self._driver.unpin, address)
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"{nbytes} bytes of host memory could not be pinned ({refusal}); copies will be "
                f"slower. The limit on locked memory, RLIMIT_MEMLOCK, is {_locked_memory_limit()}: "
                "raise it (ulimit -l) or ask for less",
                RuntimeWarning,
                stacklevel=2,
            )
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _shut(self) -> None:
        """Waits for lanes and streams, then ends the threads."""
        for lane in self._lanes.values():
            lane.settle()
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join()

    def _new_lane(self, name: str, kind: LaneKind) -> Lane:
        if kind == "device":
            lane = DeviceLane(
                name=name,
                order=self._order,
                services=self._services,
                driver=self._driver,
                device=self._device,
            )
            self._threads.append(lane)
            return lane
        worker = Worker(name=name, services=self._services, scope=self._worker_scope())
        self._threads.append(worker)
        worker.start()
        return WorkerLane(
            name=name, kind=kind, order=self._order, services=self._services, worker=worker
        )

    def _worker_scope(self) -> Any:
        driver, device = self._driver, self._device

        @contextmanager
        def scope() -> Generator[None]:
            with GradientFree(), driver.on_device(device):
                yield

        return scope


def _cudart() -> Any:
    return torch.cuda.cudart()


def _enqueued(ticket: Ticket[Any]) -> bool:
    """Whether a stream can be made to wait for `ticket`, or need not wait."""
    return (isinstance(ticket, DeviceTicket) and ticket.event is not None) or ticket.done


def memory_node(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """Memory node of the host that a device is attached to; -1 where the system does not say."""
    found = torch.cuda.get_device_properties(device)
    parts = (getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    try:
        domain, bus, slot = (int(part) for part in parts if part is not None)
        name = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        return int((devices / name / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def _locked_memory_limit() -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
