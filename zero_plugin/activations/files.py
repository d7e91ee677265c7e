"""Space on the `nvme` tier for kept activations: extents of the sizes seen, used again from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero_plugin.budget import Budget
from zero_plugin.runtime.backend import Ticket
from zero_plugin.store.store import NvmeStore


@dataclass(kw_only=True, slots=True, eq=False)
class FileSpace:
    """One piece of the files.

    Attributes:
        extent: where it lies.
        nbytes: how much it holds.
        last: the last operation on it, or None.
    """

    extent: Any
    nbytes: int
    last: Ticket[Any] | None = None


class FileSpaces:
    """Pieces of the store's files, reserved when a size is first needed.

    Files never shrink, so sizes are rounded up to one of four in each doubling: the number of different sizes stays small
    when shapes vary.

    Args:
        store: the files.
        budget: asked first.
    """

    def __init__(self, store: NvmeStore, budget: Budget) -> None:
        self.store = store
        self._budget = budget
        self._free: list[FileSpace] = []
        self.nbytes = 0
        """Bytes of all pieces, used or free."""

    def transfer_bytes(self, nbytes: int) -> int:
        """Bytes to read or write for `nbytes` wanted: whole blocks, which go straight between disk and memory."""
        alignment = self.store.alignment
        return -(-nbytes // alignment) * alignment

    def take(self, nbytes: int, what: str) -> FileSpace:
        """A piece of at least `nbytes` bytes; its `last` operation may still be running.

        Raises:
            BudgetError: `nvme_limit` is exceeded.
            StoreError: a disk does not have the space.
        """
        fitting = [space for space in self._free if space.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda space: space.nbytes)
            self._free.remove(best)
            return best
        size = _round_up(nbytes, self.store.alignment)
        self._budget.take("nvme", size)
        try:
            extent = self.store.reserve(size, what)
        except BaseException:
            self._budget.take("nvme", -size)
            raise
        self.nbytes += size
        return FileSpace(extent=extent, nbytes=size)

    def give(self, space: FileSpace) -> None:
        """Give a piece back; what follows on it comes after its `last` operation."""
        self._free.append(space)


def _round_up(nbytes: int, alignment: int) -> int:
    step = max(alignment, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step
