"""Operations between host memory and the NVMe tier. For host lanes: they block the lane until the bytes are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from zero_plugin.runtime.operations import KernelSet, _Base

if TYPE_CHECKING:
    from torch import Tensor


class ByteStore(Protocol):
    """What the operations ask of a store (`zero_plugin.store.store.NvmeStore`); it counts its own bytes in the ledger."""

    def read(self, extent: Any, offset: int, destination: Tensor) -> None:
        """Fills `destination` from `offset` of `extent`."""
        ...

    def write(self, extent: Any, offset: int, source: Tensor) -> None:
        """Writes `source` at `offset` of `extent`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Read(_Base):
    """Fills `destination`, a contiguous CPU tensor, from a store.

    Args:
        store: Where the bytes lie.
        extent: What the store's `reserve` gave.
        offset: Of the first byte within the extent, a multiple of the store's alignment.
        destination: Tensor to overwrite.
        label: Names the operation in errors and traces.
    """

    store: ByteStore
    extent: Any
    offset: int
    destination: Tensor
    label: str = "read"

    @property
    @override
    def writes(self) -> tuple[Tensor, ...]:
        return (self.destination,)

    def run(self, kernels: KernelSet) -> None:
        """Reads."""
        del kernels
        self.store.read(self.extent, self.offset, self.destination)


@dataclass(frozen=True, kw_only=True, slots=True)
class Write(_Base):
    """Writes `source`, a contiguous CPU tensor, to a store; fields as for `Read`."""

    store: ByteStore
    extent: Any
    offset: int
    source: Tensor
    label: str = "write"

    @property
    @override
    def reads(self) -> tuple[Tensor, ...]:
        return (self.source,)

    @property
    @override
    def nbytes(self) -> int:
        """Bytes the operation writes, to the store."""
        return self.source.numel() * self.source.element_size()

    def run(self, kernels: KernelSet) -> None:
        """Writes."""
        del kernels
        self.store.write(self.extent, self.offset, self.source)
