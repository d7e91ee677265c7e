"""Optimizer states on NVMe: tiles that are read, updated in a slab, and written back.

A block's elements are cut into tiles; a tile's `[master | state 0 | state 1]` is one contiguous region of the file, so that it
is one read and one write. Reads run ahead of the update as far as there are slabs, and a slab is free again when its
write has ended: read(i+k) | update(i) | write(i-1) (ZeRO-Infinity, SC'21, section 5.2.2).

The last tiles of a step may stay in memory (a cache of any size), and the next step goes through the tiles in the
opposite order: it begins with those that are here. So what is cached is neither read nor written.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from zero_plugin.errors import BudgetError
from zero_plugin.grads.norm import Clip
from zero_plugin.kernels import Kernels
from zero_plugin.optim.rule import Rule
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.buffers import Lease, SlabPool
from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.runtime.operations import Update
from zero_plugin.sharding.layout import round_up
from zero_plugin.sharding.partition import Block
from zero_plugin.store.store import NvmeStore

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.store.layout import Extent

_WORKING = 4
"""Slabs in motion: one is read, one updated, one written, and one more so that none of them waits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tile:
    """A range of one block's chunk, and where its states lie.

    Attributes:
        block: the block.
        start: first element of the chunk.
        stop: one past the last.
        extent: the file space of the block's states.
        offset: bytes before this tile's region in it.
        stride: bytes from one state to the next in the region.
        count: states in the region, the master included.
    """

    block: Block
    start: int
    stop: int
    extent: Extent
    offset: int
    stride: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.stride * self.count

    def parts(self, region: Tensor) -> list[Tensor]:
        """Master and states in a region, fp32 [stop - start] each."""
        numel = self.stop - self.start
        return [
            region[i * self.stride : i * self.stride + numel * 4].view(torch.float32)
            for i in range(self.count)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileUpdate:
    """The update of one tile as data, run on a lane.

    Attributes:
        tile: which.
        region: its states, here.
        positions: members of the block that have a gradient.
        rows: hyper row of each.
        gradient: the block's summed gradient [chunk].
        output: the block's new compute weights [chunk], its dtype.
        rule: the compiled rule.
        hyper: [rows, 16] hyper-parameters, float64.
        clip: factor and value bound.
    """

    tile: Tile
    region: Tensor
    positions: tuple[int, ...]
    rows: npt.NDArray[np.int64]
    gradient: Tensor
    output: Tensor
    rule: Rule
    hyper: Tensor
    clip: Clip

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """What the update reads only."""
        return (self.gradient[self.tile.start : self.tile.stop],)

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """What the update changes."""
        return (self.region, self.output[self.tile.start : self.tile.stop])

    def apply(self, kernels: Kernels) -> None:
        """Update the tile."""
        kernels.update(
            self.rule.native_id,
            torch.from_numpy(self._segments()),
            self.hyper,
            gradient_dtype=self.gradient.dtype,
            output_dtype=self.output.dtype,
            scale=self.clip.factor,
            clip_value=self.clip.value,
        )

    def _segments(self) -> npt.NDArray[np.int64]:
        tile, block = self.tile, self.tile.block
        parts = [part.data_ptr() for part in tile.parts(self.region)]
        rows: list[list[int]] = []
        for position, row in zip(self.positions, self.rows, strict=True):
            offset = block.layout.offsets[position]
            start = max(offset, tile.start)
            stop = min(offset + block.own_slice(position).numel, tile.stop)
            if start >= stop:
                continue
            inside = 4 * (start - tile.start)
            states = [part + inside for part in parts[1:]]
            rows.append(
                [
                    parts[0] + inside,
                    *states,
                    *(0 for _ in range(2 - len(states))),
                    self.gradient.data_ptr() + self.gradient.element_size() * start,
                    self.output.data_ptr() + self.output.element_size() * start,
                    stop - start,
                    int(row),
                ]
            )
        return np.asarray(rows, dtype=np.int64).reshape(len(rows), 7)


@dataclass(kw_only=True, slots=True, eq=False)
class _Cached:
    """A tile that stayed here, newer than its file."""

    lease: Lease
    region: Tensor
    ready: Ticket[Any] | None


class SwappedStates:
    """The optimizer states of all blocks on NVMe, and the slabs they pass through.

    Args:
        backend: lanes and memory.
        store: the files.
        buffer_bytes: host memory for tiles on their way.
        cache_bytes: host memory for tiles that stay.
    """

    def __init__(
        self, backend: Backend, store: NvmeStore, *, buffer_bytes: int, cache_bytes: int
    ) -> None:
        self._backend = backend
        self._store = store
        self._buffer_bytes = buffer_bytes
        self._cache_bytes = cache_bytes
        self._reads = backend.lane("read states", "host")
        self._writes = backend.lane("write states", "host")
        self._updates = backend.lane("update", "host")
        self._pool: SlabPool | None = None
        self._tiles: dict[int, list[Tile]] = {}
        self._cached: dict[Tile, _Cached] = {}
        self._written: dict[Tile, Ticket[Any]] = {}
        self._backwards = True
        self._left = 0

    @property
    def nbytes(self) -> int:
        """Bytes of file space."""
        return sum(tile.nbytes for tiles in self._tiles.values() for tile in tiles)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the slabs, cache included."""
        return 0 if self._pool is None else self._pool.nbytes

    def planned(self, blocks: Sequence[Block], count: int) -> int:
        """Bytes of the slabs with these blocks, of `count` states each."""
        slab, slabs = self._slab_size(blocks, count)
        return round_to_pages(slab) * slabs if slab else 0

    def tiles(self, block: Block) -> Sequence[Tile]:
        """A block's tiles, in order."""
        return self._tiles[block.index]

    def add_block(self, block: Block, count: int) -> None:
        """Reserve file space for a block's states.

        Args:
            block: the block.
            count: states of an element, the master included.

        Raises:
            BudgetError: `nvme_limit` would be passed.
            StoreError: the disk has no room.
        """
        numel = self._tile_numel(count)
        ranges = [
            (start, min(start + numel, block.chunk)) for start in range(0, block.chunk, numel)
        ]
        strides = [round_up((stop - start) * 4, self._store.alignment) for start, stop in ranges]
        extent = self._store.reserve(sum(strides) * count, f"states of {block.name}")
        offset = 0
        tiles: list[Tile] = []
        for (start, stop), stride in zip(ranges, strides, strict=True):
            tiles.append(
                Tile(
                    block=block,
                    start=start,
                    stop=stop,
                    extent=extent,
                    offset=offset,
                    stride=stride,
                    count=count,
                )
            )
            offset += stride * count
        self._tiles[block.index] = tiles
        self._reserve([block], count)

    @contextmanager
    def opened(self, tile: Tile, *, write: bool, fresh: bool = False) -> Generator[list[Tensor]]:
        """A tile's master and states here, to look at or to change outside a step.

        Args:
            tile: which.
            write: whether they are changed.
            fresh: nothing is there yet: zeros.
        """
        cached = self._cached.get(tile)
        if cached is not None:
            if cached.ready is not None:
                cached.ready.wait()
            yield tile.parts(cached.region)
            return
        lease = self._slabs().acquire(f"states of {tile.block.name}")
        try:
            region = lease.tensor(torch.uint8, tile.nbytes)
            if fresh:
                region.zero_()
            else:
                self._read(tile, region).wait()
            yield tile.parts(region)
            if write:
                self._write(tile, region).wait()
        finally:
            lease.release()

    def begin_step(self, tiles: Sequence[Tile]) -> None:
        """Turn the order round.

        Args:
            tiles: of this step. Cached ones that it leaves out make room.
        """
        self._backwards = not self._backwards
        self._left = len(tiles)
        for tile in [tile for tile in self._cached if tile not in tiles]:
            self._evict(tile)

    @property
    def backwards(self) -> bool:
        """Whether this step goes through blocks and tiles from the last to the first."""
        return self._backwards

    def update(
        self, update: Mapping[str, Any], tile: Tile, after: Sequence[Ticket[Any]]
    ) -> Ticket[Any]:
        """Issue one tile's read, update and write.

        Args:
            update: fields of `TileUpdate` but for the tile and its region.
            tile: which.
            after: what must have ended before the update.

        Returns:
            Ends when the tile is updated; its write may still run.
        """
        self._left -= 1
        cached = self._cached.pop(tile, None)
        if cached is None:
            lease, region, arrived = self._fetch(tile)
        else:
            lease, region, arrived = cached.lease, cached.region, cached.ready
        updated = self._updates.submit(
            Update(
                updater=TileUpdate(tile=tile, region=region, **update),
                label=f"update {tile.block.name} from {tile.start}",
            ),
            after=(*after, *(() if arrived is None else (arrived,))),
        )
        if self._left < self._cache_slabs:
            self._cached[tile] = _Cached(lease=lease, region=region, ready=updated)
            return updated
        lease.release(after=self._write(tile, region, updated))
        return updated

    def forget_cache(self) -> None:
        """Write what stayed here to its file, and let go of it."""
        for tile in list(self._cached):
            self._evict(tile)

    def close(self) -> None:
        """Give the slabs back."""
        for cached in self._cached.values():
            cached.lease.release()
        self._cached.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # Inside ------------------------------------------------------------------------------------------------------

    def _fetch(self, tile: Tile) -> tuple[Lease, Tensor, Ticket[Any]]:
        lease = self._slabs().acquire(f"states of {tile.block.name}")
        region = lease.tensor(torch.uint8, tile.nbytes)
        return lease, region, self._read(tile, region)

    def _evict(self, tile: Tile) -> None:
        """Write a cached tile to its file, and let go of it."""
        cached = self._cached.pop(tile)
        cached.lease.release(after=self._write(tile, cached.region, cached.ready))

    def _read(self, tile: Tile, region: Tensor) -> Ticket[Any]:
        written = self._written.get(tile)
        # The next step begins with the tiles that the last one wrote last: on another lane, perhaps still on their way.
        return self._reads.submit(
            Read(
                store=self._store,
                extent=tile.extent,
                offset=tile.offset,
                destination=region,
                label=f"read states of {tile.block.name} from {tile.start}",
            ),
            after=() if written is None else (written,),
        )

    def _write(self, tile: Tile, region: Tensor, after: Ticket[Any] | None = None) -> Ticket[Any]:
        written = self._writes.submit(
            Write(
                store=self._store,
                extent=tile.extent,
                offset=tile.offset,
                source=region,
                label=f"write states of {tile.block.name} from {tile.start}",
            ),
            after=() if after is None else (after,),
        )
        self._written[tile] = written
        return written

    @property
    def _cache_slabs(self) -> int:
        return 0 if self._pool is None else self._pool.slabs - _WORKING

    def _tile_numel(self, count: int) -> int:
        unit = self._store.alignment // 4
        numel = self._buffer_bytes // (_WORKING * 4 * count) // unit * unit
        if numel < unit:
            raise BudgetError(
                f"nvme_buffer_bytes={self._buffer_bytes:,} cannot hold {_WORKING} tiles of {count} states of {unit} elements: "
                f"give at least {_WORKING * 4 * count * unit:,} bytes"
            )
        return numel

    def _slab_size(self, blocks: Sequence[Block], count: int) -> tuple[int, int]:
        """Bytes and number of slabs."""
        if not blocks:
            return 0, 0
        largest = min(self._tile_numel(count), max(block.chunk for block in blocks))
        slab = round_up(largest * 4, self._store.alignment) * count
        return slab, _WORKING + self._cache_bytes // round_to_pages(slab)

    def _reserve(self, blocks: Sequence[Block], count: int) -> None:
        slab, slabs = self._slab_size(blocks, count)
        if self._pool is not None:
            if self._pool.slab_bytes >= slab:
                return
            self.forget_cache()
            self._pool.close()
        self._pool = SlabPool(
            name="states on their way",
            backend=self._backend,
            slab_bytes=slab,
            slabs=slabs,
            memory="host",
            setting="nvme_buffer_bytes",
        )

    def _slabs(self) -> SlabPool:
        if self._pool is None:
            raise BudgetError("states were asked of a closed engine: build a new one")
        return self._pool
