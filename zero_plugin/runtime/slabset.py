"""Slabs of several sizes: as large as what passes through them, not each as large as the largest of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from zero_plugin.errors import BudgetError
from zero_plugin.runtime.buffers import SlabPool
from zero_plugin.runtime.memory import round_to_pages

if TYPE_CHECKING:
    from zero_plugin.runtime.backend import Backend, Memory
    from zero_plugin.runtime.buffers import Lease


def slab_sizes(groups: Iterable[Sequence[int]], *, fewest: int = 2) -> tuple[int, ...]:
    """Bytes of the fewest and smallest slabs that hold any one group at once, largest first.

    The i-th is as large as the i-th largest piece of any group. Pieces of a group that come in any order, each into the smallest
    free slab that it fits, all find one: where one did not, there would be more pieces of its size than there are slabs.

    Args:
        groups: bytes of the pieces that are there together.
        fewest: slabs where groups have fewer pieces, so that one group's last piece and the next one's first do not wait for each
            other. What is added holds the third largest piece: two larger ones (an embedding, an output) wait.
    """
    sizes: list[int] = []
    pieces: list[int] = []
    for group in groups:
        pieces += group
        for place, nbytes in enumerate(sorted(group, reverse=True)):
            if place == len(sizes):
                sizes.append(nbytes)
            sizes[place] = max(sizes[place], nbytes)
    usual = sorted(pieces, reverse=True)[:3]
    while sizes and len(sizes) < fewest:
        sizes.append(min(sizes[-1], usual[-1]))
    return tuple(sizes)


class SlabSet:
    """A fixed number of slabs of given sizes; a pool for each size.

    Args:
        name: names the pools in errors.
        backend: allocates the memory.
        sizes: bytes of each slab, none of them 0.
        memory: "host" or "device".
        setting: the setting that bounds them, named in `BudgetError`.
    """

    def __init__(
        self, *, name: str, backend: Backend, sizes: Sequence[int], memory: Memory, setting: str
    ) -> None:
        self._name = name
        self._setting = setting
        self.sizes = tuple(sorted(sizes, reverse=True))
        """Bytes of each slab, largest first."""
        self._pools = [
            SlabPool(
                name=name,
                backend=backend,
                slab_bytes=nbytes,
                slabs=count,
                memory=memory,
                setting=setting,
            )
            for nbytes, count in sorted(Counter(sizes).items())
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, page rounding included."""
        return sum(pool.nbytes for pool in self._pools)

    def suffices(self, sizes: Sequence[int]) -> bool:
        """Whether the slabs here can take the place of others.

        Args:
            sizes: bytes of each of those, largest first.
        """
        return len(sizes) <= len(self.sizes) and all(
            wanted <= have for wanted, have in zip(sizes, self.sizes, strict=False)
        )

    def acquire(self, holder: str, nbytes: int) -> Lease:
        """The smallest free slab of at least `nbytes`; waits for the first one to come free where there is none.

        Raises:
            BudgetError: no slab is as large, or all that are are held and none of them has been released.
            LeaseError: the set is closed.
        """
        fitting = [pool for pool in self._pools if pool.slab_bytes >= nbytes]
        if not fitting:
            raise BudgetError(
                f"{holder!r} asked {nbytes} bytes of pool {self._name!r}, whose largest slab has {self.sizes[0]}; raise "
                f"{self._setting!r}"
            )
        for pool in fitting:
            if pool.free:
                return pool.acquire(holder)
        return min(fitting, key=lambda pool: pool.next_free).acquire(holder)

    def close(self) -> None:
        """Wait for operations on the slabs, and free the memory; may be called again."""
        with ExitStack() as closing:
            for pool in self._pools:
                closing.callback(pool.close)


def planned_bytes(sizes: Sequence[int]) -> int:
    """Bytes of memory that slabs of these sizes take."""
    return sum(map(round_to_pages, sizes))
