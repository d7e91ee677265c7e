"""Programs for the CUDA backend on the fake machine; correct ones, so any race is the backend's.

Each takes a freshly loaded `zero_plugin.runtime.cuda` module, so that a mutated one can be tried. A
scenario returns the machine; it raises when the backend itself gives a wrong answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from runtime.fake_cuda import FakeDriver, Machine, RecordingKernels
from torch import Tensor

from zero_plugin.errors import LaneError
from zero_plugin.runtime.buffers import SlabPool
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.operations import Accumulate, Copy, NormPartials
from zero_plugin.trace import Ledger, Trace

CPU = torch.device("cpu")
NUM = 64


class Rig:
    """A backend on a machine."""

    def __init__(self, module: ModuleType, *, trace: Trace | None = None) -> None:
        self.machine = Machine()
        self.driver = FakeDriver(self.machine)
        services = Services(kernels=RecordingKernels(self.machine), ledger=Ledger(), trace=trace)
        self.backend = module.CudaBackend(services=services, device=CPU, driver=self.driver)

    def device(self) -> Tensor:
        return self.machine.allocate(4 * NUM, "compute").view(torch.float32)

    def host(self) -> Tensor:
        return self.backend.allocate(4 * NUM, "host").view(torch.float32)

    def release(self, tensor: Tensor) -> None:
        self.machine.free(tensor, "compute")


@contextmanager
def rig(module: ModuleType, *, trace: Trace | None = None) -> Iterator[Rig]:
    made = Rig(module, trace=trace)
    try:
        yield made
    finally:
        made.backend.close()


class Held:
    """A host operation that ends when it is let go."""

    label = "held"
    reads = ()
    writes = ()
    overwrites = ()
    nbytes = 0
    traffic = None

    def __init__(self) -> None:
        self.gate = threading.Event()

    def run(self, kernels: Any) -> None:
        if not self.gate.wait(20):
            raise TimeoutError("never let go")


class HalfThenFail(Held):
    """Enqueues a copy and then fails."""

    label = "half then fail"

    def __init__(self, destination: Tensor, source: Tensor) -> None:
        self.destination, self.source = destination, source

    def run(self, kernels: Any) -> None:
        self.destination.copy_(self.source)
        raise ValueError("half way")


def gradient_to_host(module: ModuleType) -> Machine:
    """mark -> copy down -> wait -> the host reads."""
    with rig(module) as r:
        gradient, shard = r.device(), r.host()
        gradient.fill_(3.0)
        down = r.backend.lane("down", "device")
        ticket = down.submit(
            Copy(destinations=(shard,), sources=(gradient,)), after=[r.backend.mark("backward")]
        )
        ticket.wait()
        assert r.machine.host_reads(shard).eq(3.0).all()
    return r.machine


def weights_to_device(module: ModuleType) -> Machine:
    """The host writes -> copy up after the last use -> compute waits and uses."""
    with rig(module) as r:
        weight, shard = r.device(), r.host()
        weight.mul_(2.0)
        r.machine.host_writes(shard, 5.0)
        up = r.backend.lane("up", "device")
        ticket = up.submit(
            Copy(destinations=(weight,), sources=(shard,)), after=[r.backend.mark("forward")]
        )
        ticket.on(r.backend.compute)
        weight.mul_(2.0)
    return r.machine


def lane_after_lane(module: ModuleType) -> Machine:
    """Two device lanes, ordered by `on` and by `after`."""
    with rig(module) as r:
        first, second, shard = r.device(), r.device(), r.host()
        up, peer = r.backend.lane("up", "device"), r.backend.lane("peer", "device")
        start = r.backend.mark("start")
        ticket = up.submit(Copy(destinations=(first,), sources=(shard,)), after=[start])
        ticket.on(peer)
        moved = peer.submit(Copy(destinations=(second,), sources=(first,)), after=[start])
        up.submit(Copy(destinations=(first,), sources=(shard,)), after=[moved])
        moved.on(r.backend.compute)
        second.mul_(2.0)
    return r.machine


def host_lane_after_device_lane(module: ModuleType) -> Machine:
    """Copy down -> a host lane accumulates and takes the norm."""
    with rig(module) as r:
        gradient, shard, total = r.device(), r.host(), torch.zeros(NUM)
        gradient.fill_(3.0)
        down, host = r.backend.lane("down", "device"), r.backend.lane("host", "host")
        copied = down.submit(
            Copy(destinations=(shard,), sources=(gradient,)), after=[r.backend.mark("backward")]
        )
        added = host.submit(Accumulate(destination=total, source=shard), after=[copied])
        assert host.submit(NormPartials(sources=(total,)), after=[added]).wait() == [9.0 * NUM]
    return r.machine


def device_lane_after_host_lane(module: ModuleType) -> Machine:
    """A host operation that has not ended -> copies up in order -> compute."""
    with rig(module) as r:
        weight, other, shard, master = r.device(), r.device(), r.host(), torch.full((NUM,), 7.0)
        host, up = r.backend.lane("host", "host"), r.backend.lane("up", "device")
        held = Held()
        start = r.backend.mark("forward")
        host.submit(held)
        update = host.submit(Copy(destinations=(shard,), sources=(master,)))
        first = up.submit(Copy(destinations=(weight,), sources=(shard,)), after=[update, start])
        second = up.submit(Copy(destinations=(other,), sources=(weight,)))
        assert not first.done
        assert not second.done
        threading.Timer(0.02, held.gate.set).start()
        second.on(r.backend.compute)
        other.mul_(2.0)
        assert other.eq(14.0).all()
    return r.machine


def waited_for_before_it_was_enqueued(module: ModuleType) -> Machine:
    """The host waits for a copy that the dispatcher has not enqueued yet."""
    with rig(module) as r:
        gradient, shard = r.device(), r.host()
        host, down = r.backend.lane("host", "host"), r.backend.lane("down", "device")
        gradient.fill_(3.0)
        held = Held()
        gate = host.submit(held)
        copied = down.submit(
            Copy(destinations=(shard,), sources=(gradient,)),
            after=[gate, r.backend.mark("backward")],
        )
        threading.Timer(0.02, held.gate.set).start()
        copied.wait()
        assert r.machine.host_reads(shard).eq(3.0).all()
    return r.machine


def compute_after_host_lane(module: ModuleType) -> Machine:
    """Compute reads what a host lane writes."""
    with rig(module) as r:
        weight, shard, master = r.device(), r.host(), torch.full((NUM,), 7.0)
        host = r.backend.lane("host", "host")
        held = Held()
        host.submit(held)
        updated = host.submit(Copy(destinations=(shard,), sources=(master,)))
        threading.Timer(0.02, held.gate.set).start()
        updated.on(r.backend.compute)
        weight.copy_(shard)
    return r.machine


def compute_after_a_failure(module: ModuleType) -> Machine:
    """Compute does not go on with what a failed operation should have written."""
    with rig(module) as r:
        gradient, shard = r.device(), r.host()
        down = r.backend.lane("down", "device")
        ticket = down.submit(HalfThenFail(shard, gradient), after=[r.backend.mark("backward")])
        with pytest.raises(LaneError, match="half way"):
            ticket.on(r.backend.compute)
    return r.machine


def freed_while_in_flight(module: ModuleType) -> Machine:
    """A gathered weight is read by a lane, freed, and its memory reused by compute."""
    with rig(module) as r:
        weight, shard = r.device(), r.host()
        weight.fill_(3.0)
        down = r.backend.lane("down", "device")
        down.submit(
            Copy(destinations=(shard,), sources=(weight,)), after=[r.backend.mark("forward")]
        )
        address = weight.data_ptr()
        r.release(weight)
        again = r.device()
        assert again.data_ptr() == address
        again.fill_(0.0)
    return r.machine


def failed_half_way(module: ModuleType) -> Machine:
    """Part of a failed operation is still enqueued when the error is raised."""
    with rig(module) as r:
        gradient, shard = r.device(), r.host()
        down = r.backend.lane("down", "device")
        ticket = down.submit(HalfThenFail(shard, gradient), after=[r.backend.mark("backward")])
        with pytest.raises(LaneError, match="half way"):
            ticket.wait()
        r.machine.host_writes(shard, 0.0)
    return r.machine


def slab_comes_back(module: ModuleType) -> Machine:
    """A released slab is handed out again only when its copy has ended."""
    with rig(module) as r:
        pool = SlabPool(
            name="staging",
            backend=r.backend,
            slab_bytes=4 * NUM,
            slabs=1,
            memory="host",
            setting="pinned_limit",
        )
        weight = r.device()
        up = r.backend.lane("up", "device")
        for value in (1.0, 2.0):
            lease = pool.acquire("weight")
            staging = lease.tensor(torch.float32)
            r.machine.host_writes(staging, value)
            ticket = up.submit(
                Copy(destinations=(weight,), sources=(staging,)),
                after=[r.backend.mark("forward")],
                leases=[lease],
            )
            lease.release()
            ticket.on(r.backend.compute)
        pool.close()
    return r.machine


def polled(module: ModuleType) -> Machine:
    """`done` is false until the device is, and means what it says."""
    with rig(module) as r:
        gradient, shard = r.device(), r.host()
        gradient.fill_(3.0)
        down = r.backend.lane("down", "device")
        ticket = down.submit(
            Copy(destinations=(shard,), sources=(gradient,)), after=[r.backend.mark("backward")]
        )
        assert not ticket.done, "the ticket ended before the device did"
        r.machine.finish_everything()
        assert ticket.done
        r.machine.host_reads(shard)
    return r.machine


def drained(module: ModuleType) -> Machine:
    """After `drain` everything has ended."""
    with rig(module) as r:
        gradient, shard = r.device(), r.host()
        gradient.fill_(3.0)
        down = r.backend.lane("down", "device")
        down.submit(
            Copy(destinations=(shard,), sources=(gradient,)), after=[r.backend.mark("backward")]
        )
        r.backend.drain()
        r.machine.host_reads(shard)
    return r.machine


def closed(module: ModuleType) -> Machine:
    """After `close` everything has ended."""
    with rig(module) as r:
        gradient, shard = r.device(), r.host()
        gradient.fill_(3.0)
        down = r.backend.lane("down", "device")
        down.submit(
            Copy(destinations=(shard,), sources=(gradient,)), after=[r.backend.mark("backward")]
        )
    r.machine.host_reads(shard)
    return r.machine


def marked(module: ModuleType) -> Machine:
    """Waiting for a mark means that compute has come so far."""
    with rig(module) as r:
        shard, gradient = r.host(), r.device()
        # Compute itself reads pinned memory here.
        gradient.copy_(shard)
        r.backend.mark("forward").wait()
        r.machine.host_writes(shard, 1.0)
    return r.machine


def traced(module: ModuleType) -> Machine:
    """Device times reach the trace."""
    trace = Trace()
    with rig(module, trace=trace) as r:
        gradient, shard = r.device(), r.host()
        down = r.backend.lane("down", "device")
        stream = "stream1"
        assert r.machine.clocks["host"].get(stream) == r.machine.clocks[stream].get(stream), (
            "the host's clock was read before the stream's clock had started"
        )
        down.submit(
            Copy(destinations=(shard,), sources=(gradient,)), after=[r.backend.mark("backward")]
        ).wait()
        r.backend.drain()
    phases = [event.phase for event in trace.events() if event.lane == "down"]
    assert phases == ["issued", "begin", "end"], phases
    return r.machine


SCENARIOS: dict[str, Callable[[ModuleType], Machine]] = {
    scenario.__name__: scenario
    for scenario in (
        gradient_to_host,
        weights_to_device,
        lane_after_lane,
        host_lane_after_device_lane,
        device_lane_after_host_lane,
        waited_for_before_it_was_enqueued,
        compute_after_host_lane,
        compute_after_a_failure,
        freed_while_in_flight,
        failed_half_way,
        slab_comes_back,
        polled,
        drained,
        closed,
        marked,
        traced,
    )
}
