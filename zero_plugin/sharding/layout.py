"""Where every element of every parameter lies, on every rank. Pure arithmetic.

Bandwidth-centric partitioning (ZeRO-Infinity, SC'21, section 6.1): each *parameter* is sliced over all ranks, so
that every rank's links and tiers carry an equal part of every gather, however few parameters a block has.
A block of parameters is laid out as one *chunk* a rank; the same offsets hold for the reduced gradient, the fp32
master, the moments and the low-precision copy of the block, so a block is one contiguous range in each of them.

Nothing here knows tensors, processes or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_plugin.errors import ConfigError
from zero_plugin.store.layout import round_up

UNIT = 16
"""Elements a slice is rounded up to: 64 bytes of fp32, so that no two slices share a cache line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A contiguous range of a flattened parameter.

    Attributes:
        start: first element.
        numel: number of elements; 0 where a rank holds nothing of a small parameter.
    """

    start: int
    numel: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


def cut(numel: int, shards: int, unit: int = UNIT) -> tuple[Slice, ...]:
    """Cut a flattened parameter into one slice a rank.

    Slices are in rank order, cover every element once, start at multiples of `unit` and differ by at most one unit.

    Args:
        numel: elements of the parameter, 0 allowed.
        shards: number of ranks it is cut over.
        unit: elements that are never parted.

    Raises:
        ConfigError: a count is negative, or `shards` or `unit` is not positive.
    """
    if numel < 0 or shards < 1 or unit < 1:
        raise ConfigError(
            f"cannot cut {numel} elements into {shards} shards of units of {unit}: "
            "counts must be positive (numel may be 0)"
        )
    whole, extra = divmod(-(-numel // unit), shards)
    slices: list[Slice] = []
    start = 0
    for rank in range(shards):
        stop = min(start + (whole + (rank < extra)) * unit, numel)
        slices.append(Slice(start=start, numel=stop - start))
        start = stop
    return tuple(slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLayout:
    """The layout of one block of parameters over `shards` ranks.

    Attributes:
        numels: elements of each parameter.
        shards: number of ranks.
        slices: for each parameter, its slice on each rank.
        slots: elements reserved for each parameter in each rank's chunk.
        offsets: where each parameter's slot starts in a chunk.
        chunk: elements of one rank's chunk, the same on every rank.
    """

    numels: tuple[int, ...]
    shards: int
    slices: tuple[tuple[Slice, ...], ...]
    slots: tuple[int, ...]
    offsets: tuple[int, ...]
    chunk: int

    @property
    def padding(self) -> int:
        """Elements, over all ranks, that belong to no parameter."""
        return self.chunk * self.shards - sum(self.numels)

    @property
    def end(self) -> int:
        """Where the last slot ends in a chunk; what follows is padding."""
        return self.offsets[-1] + self.slots[-1] if self.slots else 0

    def is_even(self, index: int) -> bool:
        """Whether parameter `index` fills its slot on every rank, so that one strided copy moves it."""
        return self.numels[index] == self.slots[index] * self.shards


def lay_out(
    numels: Sequence[int], shards: int, *, unit: int = UNIT, multiple: int = 1
) -> ChunkLayout:
    """Lay out the parameters of one block.

    Args:
        numels: elements of each parameter, in block order.
        shards: number of ranks.
        unit: elements a slice is rounded up to.
        multiple: the chunk is padded to a multiple of this many units (an all-reduce needs the world size).
    """
    slices = tuple(cut(numel, shards, unit) for numel in numels)
    slots = tuple(round_up(parts[0].numel, unit) for parts in slices)
    offsets: list[int] = []
    position = 0
    for slot in slots:
        offsets.append(position)
        position += slot
    return ChunkLayout(
        numels=tuple(numels),
        shards=shards,
        slices=slices,
        slots=slots,
        offsets=tuple(offsets),
        chunk=round_up(position, unit * multiple),
    )


def group_by_bytes(sizes: Sequence[int], keys: Sequence[object], limit: int) -> list[list[int]]:
    """Group consecutive items into blocks of at most `limit` bytes.

    An item larger than the limit is a block of its own. A change of key (dtype, optimizer) ends a block.

    Args:
        sizes: bytes of each item.
        keys: items of different keys never share a block.
        limit: bytes of a block.

    Returns:
        Indices of each block's items; every item is in exactly one block, in order within its key.
    """
    blocks: list[list[int]] = []
    open_blocks: dict[object, tuple[list[int], int]] = {}
    for index, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        members, filled = open_blocks.get(key, ([], 0))
        if members and filled + size > limit:
            members, filled = [], 0
        if not members:
            blocks.append(members)
        members.append(index)
        open_blocks[key] = (members, filled + size)
    return blocks
