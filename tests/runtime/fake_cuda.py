"""A recording fake of CUDA's streams, events and caching allocator, with a race detector.

Work "on a stream" is done at once, on CPU memory. What the fake keeps is *happens-before*: every
stream and the host (all its threads together, in the order they really ran) carry a vector clock;
launching, recording, waiting and synchronising join clocks as CUDA does; every access to a byte range
is compared with the earlier ones. Two accesses of which one writes and neither happens before the
other are a race, however the run came out.

As in CUDA, an event that was never recorded has "passed" and nobody waits for it, a stream's work is
not known to have ended before the host synchronised with it (or `finish_everything` was called), and
freed memory goes to the next allocation of its stream at once, except that work of streams that were
recorded on it ends first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

HOST = "host"
Clock = dict[str, int]


@dataclass
class Access:
    start: int
    end: int
    writes: bool
    actor: str
    time: int
    what: str


@dataclass
class Machine:
    """Clocks, memory and the races found."""

    clocks: dict[str, Clock] = field(default_factory=lambda: {HOST: {HOST: 0}})
    history: list[Access] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    finished: Clock = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    streams_of: dict[int, set[str]] = field(default_factory=dict)
    free_blocks: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def tick(self, actor: str) -> int:
        clock = self.clocks.setdefault(actor, {})
        clock[actor] = clock.get(actor, 0) + 1
        return clock[actor]

    def join(self, actor: str, other: Clock) -> None:
        clock = self.clocks.setdefault(actor, {})
        for name, time in other.items():
            clock[name] = max(clock.get(name, 0), time)

    def launch(self, stream: str) -> None:
        """The host enqueues on `stream`: the work comes after what the host did before."""
        self.tick(HOST)
        self.join(stream, self.clocks[HOST])

    def access(self, actor: str, tensor: Tensor, *, writes: bool, what: str) -> None:
        with self.lock:
            start = tensor.data_ptr()
            end = start + tensor.numel() * tensor.element_size()
            time = self.tick(actor)
            clock = self.clocks[actor]
            for earlier in self.history:
                if earlier.end <= start or end <= earlier.start:
                    continue
                if not (writes or earlier.writes):
                    continue
                if clock.get(earlier.actor, 0) < earlier.time:
                    self.races.append(
                        f"{what} by {actor} races with {earlier.what} by {earlier.actor}"
                    )
            self.history.append(Access(start, end, writes, actor, time, what))

    def host_reads(self, tensor: Tensor, what: str = "host read") -> Tensor:
        self.access(HOST, tensor, writes=False, what=what)
        return tensor

    def host_writes(self, tensor: Tensor, value: float, what: str = "host write") -> None:
        self.access(HOST, tensor, writes=True, what=what)
        tensor.fill_(value)

    def finish_everything(self) -> None:
        """All work enqueued so far ends; the host learns of it only by asking."""
        with self.lock:
            for clock in self.clocks.values():
                for name, time in clock.items():
                    self.finished[name] = max(self.finished.get(name, 0), time)

    def allocate(self, nbytes: int, stream: str) -> FakeCudaTensor:
        with self.lock:
            blocks = self.free_blocks.get((stream, nbytes), [])
            memory = blocks.pop() if blocks else torch.zeros(nbytes, dtype=torch.uint8)
            return fake_tensor(memory, self)

    def free(self, tensor: Tensor, stream: str) -> None:
        """The storage of `tensor`, allocated on `stream`, goes back to the allocator."""
        with self.lock:
            block = plain(tensor).view(torch.uint8)
            start, end = block.data_ptr(), block.data_ptr() + block.numel()
            recorded = self.streams_of.pop(start, set())
            # The allocator does not hand the block out before these streams' work has ended.
            self.history = [
                access
                for access in self.history
                if not (access.actor in recorded and start <= access.start < end)
            ]
            self.free_blocks.setdefault((stream, block.numel()), []).append(block)


class FakeCudaTensor(Tensor):
    """CPU memory that says it is on CUDA and reports who touches it."""

    machine: Machine

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def record_stream(self, stream: FakeStream) -> None:  # type: ignore[override]
        with self.machine.lock:
            start = plain(self).untyped_storage().data_ptr()
            self.machine.streams_of.setdefault(start, set()).add(stream.name)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        machine = next(leaf.machine for leaf in tree_leaves(args) if isinstance(leaf, cls))
        if name.endswith("_") and not name.endswith("__"):
            stream = current_name(machine)
            with machine.lock:
                machine.launch(stream)
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
                for source in tensors[1:]:
                    machine.access(stream, source, writes=False, what=f"{name} source")
                machine.access(stream, tensors[0], writes=True, what=name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is Tensor:
            result = fake_tensor(result, machine)
        elif isinstance(result, cls):
            result.machine = machine
        return result


def plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def fake_tensor(memory: Tensor, machine: Machine) -> FakeCudaTensor:
    tensor = memory.as_subclass(FakeCudaTensor)
    tensor.machine = machine
    return tensor


class FakeStream:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        with machine.lock:
            machine.clocks.setdefault(name, {})

    def wait_event(self, event: FakeEvent) -> None:
        with self.machine.lock:
            self.machine.launch(self.name)
            if event.clock is not None:
                self.machine.join(self.name, event.clock)

    def synchronize(self) -> None:
        with self.machine.lock:
            self.machine.join(HOST, self.machine.clocks[self.name])


class FakeEvent:
    def __init__(self, machine: Machine, *, timing: bool) -> None:
        self.machine = machine
        self.timing = timing
        self.clock: Clock | None = None

    def record(self, stream: FakeStream) -> None:
        with self.machine.lock:
            self.machine.launch(stream.name)
            self.machine.tick(stream.name)
            self.clock = dict(self.machine.clocks[stream.name])

    def query(self) -> bool:
        with self.machine.lock:
            if self.clock is None:
                return True
            known = self.machine.clocks[HOST]
            for name, time in self.clock.items():
                if max(known.get(name, 0), self.machine.finished.get(name, 0)) < time:
                    return False
            self.machine.join(HOST, self.clock)
            return True

    def synchronize(self) -> None:
        with self.machine.lock:
            if self.clock is not None:
                self.machine.join(HOST, self.clock)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        for event in (self, end_event):
            if not event.timing or event.clock is None or not event.query():
                raise RuntimeError("elapsed_time needs two timing events that have passed")
        return 1.0


_current = threading.local()


def current_name(machine: Machine) -> str:
    stream = getattr(_current, "stream", None)
    return stream.name if stream is not None and stream.machine is machine else "compute"


class FakeDriver:
    """What `zero_plugin.runtime.cuda` needs of CUDA, on a `Machine`.

    Args:
        machine: Records.
        refuse_pinning: The reason for which no host memory can be pinned, or None.
    """

    def __init__(self, machine: Machine, *, refuse_pinning: str | None = None) -> None:
        self.machine = machine
        self.refuse_pinning = refuse_pinning
        self.pinned: dict[int, int] = {}
        self._compute = FakeStream(machine, "compute")
        self._num_streams = 0

    def new_stream(self, device: torch.device) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self.machine, f"stream{self._num_streams}")

    def new_event(self, *, timing: bool) -> FakeEvent:
        return FakeEvent(self.machine, timing=timing)

    def current_stream(self, device: torch.device) -> FakeStream:
        stream = getattr(_current, "stream", None)
        return stream if stream is not None and stream.machine is self.machine else self._compute

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        previous = getattr(_current, "stream", None)
        _current.stream = stream
        try:
            yield
        finally:
            _current.stream = previous

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        yield

    def is_device_tensor(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        return self.machine.allocate(nbytes, current_name(self.machine))

    def pin(self, address: int, nbytes: int) -> str | None:
        if self.refuse_pinning is None:
            self.pinned[address] = nbytes
        return self.refuse_pinning

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class RecordingKernels:
    """Host kernels that report what they touch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.machine.access(HOST, source, writes=False, what="kernel copy source")
        self.machine.access(HOST, destination, writes=True, what="kernel copy")
        destination.copy_(source.view_as(destination))

    def accumulate(self, destination: Tensor, source: Tensor) -> None:
        self.machine.access(HOST, source, writes=False, what="kernel accumulate source")
        self.machine.access(HOST, destination, writes=True, what="kernel accumulate")
        destination.add_(source.to(destination.dtype))

    def sum_ranks(self, destination: Tensor, parts: Sequence[Tensor], divisor: int) -> None:
        raise NotImplementedError

    def norm_partial(self, source: Tensor) -> float:
        self.machine.access(HOST, source, writes=False, what="kernel norm")
        return float(source.double().square().sum())
