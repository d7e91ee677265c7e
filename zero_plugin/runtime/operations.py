"""The closed set of operations a lane can run.

An operation is a value: the tensors it reads and writes and how to run it. On CUDA it is enqueued
when submitted, on a worker thread it runs later; a closed set is right under both, where a closure
over mutable state would not be.

Host work goes through the compiled kernels or libc, never through torch's intra-op pool: each worker
thread that enters the pool gets a team of OpenMP threads of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor

T_co = TypeVar("T_co", covariant=True)
Direction = Literal["device_to_host", "host_to_device"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]

_KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class KernelSet(Protocol):
    """What operations ask of the compiled kernels (`zero_plugin.kernels.Kernels`)."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Casting copy between contiguous CPU tensors of fp32, bf16 or fp16."""
        ...

    def accumulate(self, destination: Tensor, source: Tensor) -> None:
        """Adds: destination (fp32) += source (fp32, bf16 or fp16)."""
        ...

    def sum_ranks(self, destination: Tensor, parts: Sequence[Tensor], divisor: int) -> None:
        """Sums: destination = sum of parts in order, in fp32, divided and rounded once."""
        ...

    def norm_partial(self, source: Tensor) -> Any:
        """Partial of the squared norm, with largest magnitude and count of non-finite values."""
        ...


class Operation(Protocol[T_co]):
    """One member of the closed set."""

    @property
    def label(self) -> str:
        """Names the operation in errors and traces."""
        ...

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Tensors it reads."""
        ...

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """Tensors it writes."""
        ...

    @property
    def overwrites(self) -> tuple[Tensor, ...]:
        """Those of `writes` whose every element it replaces without reading it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes it writes."""
        ...

    @property
    def traffic(self) -> tuple[str, int] | None:
        """Ledger key and bytes that it adds, or None."""
        ...

    def run(self, kernels: KernelSet) -> T_co:
        """Does the work on the calling thread, or enqueues it on the current stream."""
        ...


class _Base:
    """What most operations share: they replace all they write, and count no bytes."""

    __slots__ = ()

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Tensors the operation reads."""
        return ()

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """Tensors the operation writes."""
        return ()

    @property
    def overwrites(self) -> tuple[Tensor, ...]:
        """Those of `writes` whose every element it replaces without reading it."""
        return self.writes

    @property
    def nbytes(self) -> int:
        """Bytes the operation writes."""
        return _total_bytes(self.writes)

    @property
    def traffic(self) -> tuple[str, int] | None:
        """Ledger key and bytes that the operation adds, or None."""
        return None


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy(_Base):
    """Copies every source into the destination at the same place, casting where dtypes differ.

    Args:
        destinations: Tensors to overwrite.
        sources: As many tensors of the same numbers of elements.
        direction: The ledger key that counts the bytes written, or None when no tier is crossed.
        label: Names the copy in errors and traces.
    """

    destinations: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]
    direction: Direction | None = None
    label: str = "copy"

    def __post_init__(self) -> None:
        if len(self.destinations) != len(self.sources):
            raise ValueError(
                f"copy {self.label!r} has {len(self.destinations)} destinations and "
                f"{len(self.sources)} sources; give one source for each destination"
            )
        for place, (destination, source) in enumerate(
            zip(self.destinations, self.sources, strict=True)
        ):
            if destination.numel() != source.numel():
                raise ValueError(
                    f"copy {self.label!r} number {place} goes from {source.numel()} elements to "
                    f"{destination.numel()}; slice one of them"
                )

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return self.sources

    @property
    @override
    def writes(self) -> tuple[Tensor, ...]:
        return self.destinations

    @property
    @override
    def traffic(self) -> tuple[str, int] | None:
        # A cast across devices happens on the source's side, so what crosses is the destination's
        # dtype.
        return None if self.direction is None else (self.direction, self.nbytes)

    def run(self, kernels: KernelSet) -> None:
        """Copies; pairs in host memory through the kernels or libc."""
        for destination, source in zip(self.destinations, self.sources, strict=True):
            copy_tensor(kernels, destination, source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero(_Base):
    """Fills every destination with zeros."""

    destinations: tuple[Tensor, ...]
    label: str = "zero"

    @property
    @override
    def writes(self) -> tuple[Tensor, ...]:
        return self.destinations

    def run(self, kernels: KernelSet) -> None:
        """Fills with zeros."""
        del kernels
        for destination in self.destinations:
            if not fill_bytes(destination, 0):
                destination.zero_()


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulate(_Base):
    """Adds `source` (fp32, bf16 or fp16) to `destination` (fp32), element by element."""

    destination: Tensor
    source: Tensor
    label: str = "accumulate"

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return (self.destination, self.source)

    @property
    @override
    def writes(self) -> tuple[Tensor, ...]:
        return (self.destination,)

    @property
    @override
    def overwrites(self) -> tuple[Tensor, ...]:
        return ()

    def run(self, kernels: KernelSet) -> None:
        """Adds."""
        if _plain_host(self.destination) and _plain_host(self.source):
            kernels.accumulate(self.destination, self.source)
        else:
            self.destination.add_(self.source.to(self.destination.dtype).view_as(self.destination))


@dataclass(frozen=True, kw_only=True, slots=True)
class SumRanks(_Base):
    """destination = (parts[0] + parts[1] + ...) / divisor, in fp32 in this order, rounded once."""

    destination: Tensor
    parts: tuple[Tensor, ...]
    divisor: int
    label: str = "sum_ranks"

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return self.parts

    @property
    @override
    def writes(self) -> tuple[Tensor, ...]:
        return (self.destination,)

    def run(self, kernels: KernelSet) -> None:
        """Sums."""
        if _plain_host(self.destination) and all(_plain_host(part) for part in self.parts):
            kernels.sum_ranks(self.destination, self.parts, self.divisor)
            return
        total = self.parts[0].to(torch.float32, copy=True)
        for part in self.parts[1:]:
            total.add_(part.to(torch.float32))
        self.destination.copy_(total.div_(self.divisor).view_as(self.destination))


@dataclass(frozen=True, kw_only=True, slots=True)
class NormPartials(_Base):
    """The norm partial of every source, in order (see `zero_plugin.kernels.NormPartial`)."""

    sources: tuple[Tensor, ...]
    label: str = "norm_partials"

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return self.sources

    def run(self, kernels: KernelSet) -> list[Any]:
        """Reads every source once.

        Returns:
            The kernels' exact partials in host memory. For a device tensor, a float64 tensor there of sum of squares,
            largest magnitude and count of non-finite elements, to be read once the ticket has ended.
        """
        return [
            kernels.norm_partial(source) if source.is_cpu else _device_partial(source)
            for source in self.sources
        ]


class CollectiveGroup(Protocol):
    """What collectives ask of a process group; it counts its own bytes in the ledger."""

    def reduce_scatter(self, output: Tensor, input: Tensor, *, tag: int, label: str = "") -> None:  # noqa: A002
        """Into output [n] goes the average over ranks of input [size, n], this rank's row."""
        ...

    def all_gather(self, output: Tensor, input: Tensor, *, tag: int, label: str = "") -> None:  # noqa: A002
        """Into output [size, n] goes input [n] of every rank."""
        ...

    def all_reduce(self, output: Tensor, input: Tensor, *, tag: int, label: str = "") -> None:  # noqa: A002
        """Into output [n] goes the average over ranks of input [n]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective(_Base):
    """One collective of `group`; the lane it runs on must carry no other group's.

    Args:
        kind: Which method of the group to call.
        group: The process group.
        output: Tensor to overwrite.
        input: Tensor to read.
        tag: Checked by the group to be the same on every rank.
        label: Names the collective in errors and traces.
    """

    kind: CollectiveKind
    group: CollectiveGroup
    output: Tensor
    input: Tensor
    tag: int
    label: str = "collective"

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return (self.input,)

    @property
    @override
    def writes(self) -> tuple[Tensor, ...]:
        return (self.output,)

    def run(self, kernels: KernelSet) -> None:
        """Calls the group and returns when this rank's part has ended or is enqueued."""
        del kernels
        if self.kind == "all_gather":
            self.group.all_gather(self.output, self.input, tag=self.tag, label=self.label)
        elif self.kind == "reduce_scatter":
            self.group.reduce_scatter(self.output, self.input, tag=self.tag, label=self.label)
        else:
            self.group.all_reduce(self.output, self.input, tag=self.tag, label=self.label)


class ExchangeGroup(Protocol):
    """What an exchange asks of a process group."""

    def exchange(self, payload: Tensor, *, label: str) -> list[Tensor]:
        """Every rank's payload, in rank order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(_Base):
    """Sends a small CPU tensor to every rank and gives all ranks' in rank order."""

    group: ExchangeGroup
    payload: Tensor
    label: str = "exchange"

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The payload."""
        return (self.payload,)

    def run(self, kernels: KernelSet) -> list[Tensor]:
        """Returns when every rank's payload is here."""
        del kernels
        return self.group.exchange(self.payload, label=self.label)


class Updater(Protocol):
    """An optimizer's work on one block of states."""

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Tensors read."""
        ...

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """Tensors written, wholly or in part."""
        ...

    def apply(self, kernels: Any) -> None:
        """Updates the block."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(_Base):
    """Runs `updater` on its block of states."""

    updater: Updater
    label: str = "update"

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return self.updater.reads

    @property
    @override
    def writes(self) -> tuple[Tensor, ...]:
        return self.updater.writes

    @property
    @override
    def overwrites(self) -> tuple[Tensor, ...]:
        return ()

    def run(self, kernels: KernelSet) -> None:
        """Updates."""
        self.updater.apply(kernels)


class Taker(Protocol):
    """Who copies tensors that change afterwards."""

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Tensors read."""
        ...

    def take(self) -> None:
        """Reads them, and hands them on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot(_Base):
    """Has `taker` copy what is to be kept as it is now; for host lanes, which it blocks until everything is copied."""

    taker: Taker
    label: str = "snapshot"

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return self.taker.reads

    def run(self, kernels: KernelSet) -> None:
        """Copies."""
        del kernels
        self.taker.take()


def _device_partial(source: Tensor) -> Tensor:
    values = source.to(torch.float64)
    finite = torch.isfinite(values)
    squares = torch.where(finite, values, 0.0).square().sum()
    largest = values.abs().amax() if values.numel() else squares
    return torch.stack([squares, largest, (~finite).sum().to(torch.float64)])


def copy_tensor(kernels: KernelSet, destination: Tensor, source: Tensor) -> None:
    """Copies `source` into `destination`, which has as many elements; any devices, any dtypes."""
    if _contiguous_host(destination) and _contiguous_host(source):
        if destination.dtype in _KERNEL_DTYPES and source.dtype in _KERNEL_DTYPES:
            kernels.copy(destination, source)
            return
        if destination.dtype == source.dtype:
            ctypes.memmove(
                destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
            )
            return
    destination.copy_(source.view_as(destination), non_blocking=True)


def fill_bytes(tensor: Tensor, value: int) -> bool:
    """Sets every byte of a contiguous host tensor to `value`; False when it is not one."""
    if not _contiguous_host(tensor):
        return False
    # libc, and not fill_: it gives up the GIL and stays on this thread.
    ctypes.memset(tensor.data_ptr(), value, tensor.numel() * tensor.element_size())
    return True


def _contiguous_host(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _plain_host(tensor: Tensor) -> bool:
    return _contiguous_host(tensor) and tensor.dtype in _KERNEL_DTYPES
