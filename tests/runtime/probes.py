"""Operations and kernels for the runtime's tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_plugin.runtime.operations import KernelSet

DEADLINE = 20.0


class TorchKernels:
    """The kernels' contract in plain torch."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source.view_as(destination))

    def accumulate(self, destination: Tensor, source: Tensor) -> None:
        destination.add_(source.to(destination.dtype).view_as(destination))

    def sum_ranks(self, destination: Tensor, parts: Sequence[Tensor], divisor: int) -> None:
        total = torch.zeros_like(parts[0], dtype=torch.float32)
        for part in parts:
            total += part.float()
        destination.copy_(total / divisor)

    def norm_partial(self, source: Tensor) -> float:
        return float(source.double().square().sum())


class Probe:
    """An operation without tensors, whose doings a test decides."""

    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()
    overwrites: tuple[Tensor, ...] = ()
    nbytes = 0
    traffic: tuple[str, int] | None = None
    label = "probe"

    def run(self, kernels: KernelSet) -> Any:
        raise NotImplementedError


@dataclass
class Note(Probe):
    """Appends its label to a list, after a pause."""

    log: list[str]
    label: str
    pause: float = 0.0

    def run(self, kernels: KernelSet) -> str:
        time.sleep(self.pause)
        self.log.append(self.label)
        return self.label


@dataclass
class Fail(Probe):
    """Raises."""

    error: BaseException = field(default_factory=lambda: ValueError("broken on purpose"))
    label: str = "fail"

    def run(self, kernels: KernelSet) -> None:
        raise self.error


@dataclass
class Gate(Probe):
    """Ends when it is opened."""

    label: str = "gate"
    started: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def run(self, kernels: KernelSet) -> None:
        self.started.set()
        if not self.opened.wait(DEADLINE):
            raise TimeoutError("never opened")

    def open_soon(self, seconds: float = 0.02) -> None:
        """Opens it from another thread."""
        threading.Timer(seconds, self.opened.set).start()


@dataclass
class Modes(Probe):
    """Reports the modes operations run under."""

    label: str = "modes"

    def run(self, kernels: KernelSet) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@dataclass
class Holder(Probe):
    """Holds a tensor, and fails if told so."""

    tensor: Tensor
    fails: bool = False
    label: str = "holder"

    @property
    def reads(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.tensor,)

    def run(self, kernels: KernelSet) -> None:
        local = self.tensor
        if self.fails:
            raise ValueError(f"broken with {local.numel()} elements in hand")
