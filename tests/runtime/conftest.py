"""Backends under test, and the check that none leaves a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from runtime.fake_cuda import FakeDriver, Machine
from runtime.probes import TorchKernels

from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.chaos import ChaosBackend
from zero_plugin.runtime.cuda import CudaBackend
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.inline import InlineBackend
from zero_plugin.runtime.threads import ThreadsBackend
from zero_plugin.trace import Ledger, Trace

BACKENDS = ("inline", "threads", "chaos", "cuda")
DEFERRED = ("threads", "chaos", "cuda")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Every thread a test starts ends with it."""
    before = set(threading.enumerate())
    yield
    leaked = [thread.name for thread in threading.enumerate() if thread not in before]
    assert leaked == []


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def make_backend(ledger: Ledger) -> Iterator[Callable[..., Backend]]:
    """Makes backends by name and closes them after the test."""
    made: list[Backend] = []

    def make(name: str, *, seed: int = 0, trace: Trace | None = None, **options: Any) -> Backend:
        services = Services(kernels=TorchKernels(), ledger=ledger, trace=trace)
        if name == "inline":
            backend: Backend = InlineBackend(services=services)
        elif name == "threads":
            backend = ThreadsBackend(services=services, **options)
        elif name == "chaos":
            backend = ChaosBackend(services=services, seed=seed, **options)
        else:
            backend = CudaBackend(services=services, device=CPU, driver=FakeDriver(Machine()))
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, make_backend: Callable[..., Backend]) -> Backend:
    return make_backend(request.param)


@pytest.fixture(params=DEFERRED)
def deferred(request: pytest.FixtureRequest, make_backend: Callable[..., Backend]) -> Backend:
    """A backend whose host lanes run operations after `submit` has returned."""
    return make_backend(request.param)
