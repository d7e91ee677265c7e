"""Host memory for kept activations: slabs of exactly the sizes seen, used again from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero_plugin.budget import Budget
from zero_plugin.errors import BudgetError
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.memory import available_host_bytes, round_to_pages

if TYPE_CHECKING:
    from torch import Tensor

_CURE = "use smaller micro-batches or sequences, or keep the activations on the device (activations='device')"


@dataclass(kw_only=True, slots=True, eq=False)
class HostSlab:
    """One piece of host memory.

    Attributes:
        memory: uint8, one-dimensional.
        last: the last operation on it, or None.
    """

    memory: Tensor
    last: Ticket[Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return round_to_pages(self.memory.numel())


class HostSlabs:
    """Slabs that are made when a size is first needed, and kept.

    The smallest free slab that is large enough is taken. Where none is, a new one is made in the place of the largest
    free one, so that memory follows the largest shapes seen and not all of them.

    Args:
        backend: allocates.
        budget: asked first.
    """

    def __init__(self, backend: Backend, budget: Budget) -> None:
        self._backend = backend
        self._budget = budget
        self._free: list[HostSlab] = []
        self.nbytes = 0
        """Bytes of all slabs, used or free."""
        self.allocations = 0
        """How many slabs were ever made."""

    def take(self, nbytes: int, what: str) -> HostSlab:
        """A slab of at least `nbytes` bytes; its `last` operation may still be running.

        Args:
            nbytes: how many are needed.
            what: names the tensor in the error.

        Raises:
            BudgetError: `host_limit` is exceeded.
        """
        fitting = [slab for slab in self._free if slab.memory.numel() >= nbytes]
        if fitting:
            best = min(fitting, key=lambda slab: slab.memory.numel())
            self._free.remove(best)
            return best
        if self._free:
            self._drop(max(self._free, key=lambda slab: slab.memory.numel()))
        return self._make(nbytes, what)

    def give(self, slab: HostSlab) -> None:
        """Give a slab back; what follows on it comes after its `last` operation."""
        if slab.last is None or slab.last.done:
            slab.last = None
            self._backend.retire(slab.memory)
        self._free.append(slab)

    def close(self) -> None:
        """Free what is not in use; the rest goes with its users."""
        while self._free:
            self._drop(self._free[-1])

    def _make(self, nbytes: int, what: str) -> HostSlab:
        size = round_to_pages(nbytes)
        available = available_host_bytes()
        if available is not None and size > available:
            raise BudgetError(
                f"keeping activations off the device: {what} needs {size:,} bytes of host memory on this rank, and the system has {available:,} "
                f"left: {_CURE}"
            )
        try:
            self._budget.take("host", size)
        except BudgetError as error:
            raise BudgetError(
                f"keeping activations off the device: {what} needs {size:,} bytes beside the {self.nbytes:,} of those already kept, and "
                f"host_limit does not allow it ({error}); raise host_limit, or {_CURE}"
            ) from error
        try:
            memory = self._backend.allocate(size, "host")
        except BaseException:
            self._budget.take("host", -size)
            raise
        self.nbytes += size
        self.allocations += 1
        return HostSlab(memory=memory)

    def _drop(self, slab: HostSlab) -> None:
        self._free.remove(slab)
        self._budget.take("host", -slab.nbytes)
        self.nbytes -= slab.nbytes
