"""Modelled latency and the choice of a backend."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime.probes import Note, TorchKernels

from zero_plugin.errors import ConfigError
from zero_plugin.runtime import BackendName, Copy, Latency, create_backend
from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.ticket import ProgramOrder, Ticket
from zero_plugin.trace import Ledger, Trace

CPU = torch.device("cpu")
Make = Callable[..., Backend]


def test_latency_of_bytes_and_fixed_part(make_backend: Make) -> None:
    trace = Trace()
    latency = {"down": Latency(seconds=0.02, bytes_per_second=4e5)}
    backend = make_backend("threads", latency=latency, trace=trace)
    x, y = torch.zeros(5000), torch.empty(5000)
    down, free = backend.lane("down", "device"), backend.lane("free", "device")
    down.submit(Copy(destinations=(y,), sources=(x,))).wait()
    free.submit(Copy(destinations=(y,), sources=(x,))).wait()
    down_begin, down_end, free_begin, free_end = (
        event.time for event in trace.events() if event.phase != "issued"
    )
    # 20000 bytes at 4e5 bytes/s and 20 ms: 70 ms at least. Only the lower bound holds on any machine.
    assert down_end - down_begin >= 0.07
    assert free_end - free_begin < down_end - down_begin


@pytest.mark.parametrize("name", ["threads", "chaos"])
@pytest.mark.parametrize("started", [True, False], ids=["after it runs", "before"])
def test_an_interrupt_while_a_lanes_thread_starts(
    make_backend: Make, name: BackendName, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(name)
    plain = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            plain(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.lane("broken off", "host")
    monkeypatch.undo()
    # The next one of that name works, and none is left in the end.
    backend.lane("broken off", "host").submit(Note([], "x")).wait()
    backend.close()
    assert [t for t in threading.enumerate() if t.name == "zero-lane-broken off"] == []


class LockLetGo:
    """A lock that has something done as soon as it is free again, once."""

    def __init__(self, lock: Any, then: Callable[[], None]) -> None:
        self.lock = lock
        self.then: Callable[[], None] | None = then

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self.lock.release()
        then, self.then = self.then, None
        if then is not None:
            then()


def test_who_comes_while_an_operation_starts_waits_for_its_end() -> None:
    ticket: Ticket[int] = Ticket(label="x", lane="y", sequence=0, order=ProgramOrder("test"))
    passed = threading.Event()

    def wait() -> None:
        ticket.block()
        passed.set()

    waiter = threading.Thread(target=wait, daemon=True)

    def comes() -> None:
        waiter.start()
        deadline = time.monotonic() + 20.0
        while not ticket._gates and time.monotonic() < deadline:
            time.sleep(0.001)

    ticket._lock = LockLetGo(ticket._lock, comes)  # pyright: ignore[reportAttributeAccessIssue]
    assert ticket.start()
    assert ticket._gates
    assert not passed.wait(0.1)
    ticket.finish(1)
    assert passed.wait(20.0)
    waiter.join(20.0)


def test_modelled_time_takes_no_processor(make_backend: Make) -> None:
    backend = make_backend("threads", latency=Latency(seconds=0.3))
    before = time.process_time()
    backend.lane("down", "device").submit(Note([], "x")).wait()
    assert time.process_time() - before < 0.2


def test_lanes_with_latency_overlap(make_backend: Make) -> None:
    """Two lanes of modelled time run side by side: the second begins before the first ends."""
    trace = Trace()
    backend = make_backend("threads", latency=Latency(seconds=0.2), trace=trace)
    backend.lane("one", "device").submit(Note([], "a"))
    backend.lane("two", "device").submit(Note([], "b"))
    backend.drain()
    at = {(event.label, event.phase): event.time for event in trace.events()}
    assert at["b", "begin"] < at["a", "end"]


def test_impossible_latency_is_refused() -> None:
    with pytest.raises(ValueError, match="is no latency"):
        Latency(seconds=-1.0)
    with pytest.raises(ValueError, match="is no latency"):
        Latency(bytes_per_second=0.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("auto", "threads"), ("inline", "inline"), ("threads", "threads"), ("chaos", "chaos")],
)
def test_create_backend(name: BackendName, expected: str) -> None:
    backend = create_backend(name, device=CPU, kernels=TorchKernels(), trace=None, ledger=Ledger())
    assert backend.name == expected
    backend.close()
    assert backend.closed


@pytest.mark.parametrize(
    ("name", "device", "options", "message"),
    [
        ("cuda", CPU, {}, "'cuda' needs a CUDA device and was given cpu"),
        ("threads", torch.device("cuda"), {}, "'threads' cannot serve cuda"),
        ("inline", CPU, {"latency": Latency()}, "'inline' cannot model a latency"),
        ("fast", CPU, {}, "unknown backend 'fast'; choose"),
    ],
)
def test_create_backend_refuses(
    name: Any, device: torch.device, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create_backend(
            name, device=device, kernels=TorchKernels(), trace=None, ledger=Ledger(), **options
        )


NO_POOL = """
import os, sys, torch
from zero_plugin.kernels import Kernels
from zero_plugin.runtime import Accumulate, Copy, NormPartials, SumRanks, Zero, create_backend
from zero_plugin.trace import Ledger

def tasks():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(4)
size = 1 << 20
a, b, half = torch.empty(size), torch.empty(size), torch.empty(size, dtype=torch.bfloat16)
number, other = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int64)
kernels = Kernels(threads=1)
backend = create_backend(
    "chaos", device=torch.device("cpu"), kernels=kernels, trace=None, ledger=Ledger()
)
lane = backend.lane("lane", "host")
before = tasks()
lane.submit(Zero(destinations=(a, number)))
lane.submit(Copy(destinations=(b, half, other), sources=(a, a, number)))
lane.submit(Accumulate(destination=a, source=half))
lane.submit(SumRanks(destination=half, parts=(a, b), divisor=2))
lane.submit(NormPartials(sources=(half,)))
lane.drain()
print("lanes", tasks() - before)
a.add_(b)
print("torch", tasks() - before)
backend.close()
kernels.close()
"""


def test_operations_start_no_torch_threads() -> None:
    """A lane's thread that entered torch's intra-op pool would get a team of OpenMP threads."""
    answer = subprocess.run(
        [sys.executable, "-c", NO_POOL], capture_output=True, text=True, timeout=100, check=True
    )
    counts = dict(line.split() for line in answer.stdout.splitlines())
    # The second number shows that the first one could have been another.
    assert counts["lanes"] == "0"
    assert int(counts["torch"]) > 0
