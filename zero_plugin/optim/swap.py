"""Optimizer states on NVMe: tiles that are read, updated in a slab, and written back.

A block's elements are cut into tiles; a tile's `[master | state 0 | state 1]` is one contiguous region of the file, so that it
is one read and one write. Where the compute weights hold the master, or its upper half, the region has the rest only
(`zero_plugin.optim.form`). Reads run ahead of the update as far as there are slabs, and a slab is free again when its
write has ended: read(i+k) | update(i) | write(i-1) (ZeRO-Infinity, SC'21, section 5.2.2).

The last tiles of a step may stay in memory (a cache of any size), and the next step of the same optimizer goes through
its tiles in the opposite order: it begins with those that are here. So what is cached is neither read nor written.
"""

from __future__ import annotations

import itertools
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
from zero_plugin.optim.form import StateForm
from zero_plugin.optim.moments import GROUP, STORED, stream_of
from zero_plugin.optim.rule import Rule
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.buffers import Lease, SlabPool
from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.memory import PAGE, round_to_pages
from zero_plugin.runtime.operations import Update
from zero_plugin.sharding.partition import Block
from zero_plugin.store.layout import round_up
from zero_plugin.store.staging import grow_pool
from zero_plugin.store.store import NvmeStore

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.store.layout import Extent

_WORKING = 4
"""Slabs in motion: one is read, one updated, one written, and one more so that none of them waits."""

_REGISTERED_FROM = 8 * PAGE
"""Bytes from which a pool is a mapping of its own, that a forked child can lack."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tile:
    """A range of one block's chunk, and where its states lie.

    Attributes:
        block: the block.
        start: first element of the chunk.
        stop: one past the last.
        extent: the file space of the block's states.
        offset: bytes before this tile's region in it.
        form: which parts the region has.
        strides: bytes of each part in the region.
    """

    block: Block
    start: int
    stop: int
    extent: Extent
    offset: int
    form: StateForm
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return sum(self.strides)

    def parts(self, region: Tensor) -> list[Tensor]:
        """What the region holds: fp32 master or int16 remainder, if any, and the states as they are kept."""
        return [
            region[place : place + size].view(dtype)
            for place, size, dtype in zip(
                itertools.accumulate(self.strides, initial=0),
                self.form.sizes(self.stop - self.start),
                self.form.dtypes,
                strict=False,
            )
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
        output: the block's compute weights [chunk], its dtype; also read where they are part of the master.
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
        segments, places = self._segments()
        kernels.update(
            self.rule.native_id,
            torch.from_numpy(segments),
            self.hyper,
            gradient_dtype=self.gradient.dtype,
            output_dtype=None if self.tile.form.master == "weights" else self.output.dtype,
            scale=self.clip.factor,
            clip_value=self.clip.value,
            split=self.tile.form.master == "split",
            moment_dtype=STORED[self.tile.form.moments],
            places=torch.from_numpy(places),
        )

    def _segments(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The table of segments, and the one of places."""
        tile, block = self.tile, self.tile.block
        parts = [(part.data_ptr(), part.element_size()) for part in tile.parts(self.region)]
        # Of each moment, where its exponents begin; only those of int8 are looked at.
        exponents = [address + tile.stop - tile.start for address, _ in parts[tile.form.masters :]]
        rows: list[list[int]] = []
        places: list[list[int]] = []
        for position, row in zip(self.positions, self.rows, strict=True):
            offset = block.layout.offsets[position]
            start = max(offset, tile.start)
            stop = min(offset + block.own_slice(position).numel, tile.stop)
            if start >= stop:
                continue
            output = self.output.data_ptr() + self.output.element_size() * start
            columns = [part + width * (start - tile.start) for part, width in parts]
            if tile.form.master == "weights":
                columns, output = [output, *columns], 0
            rows.append(
                [
                    *columns,
                    *(0 for _ in range(3 - len(columns))),
                    self.gradient.data_ptr() + self.gradient.element_size() * start,
                    output,
                    stop - start,
                    int(row),
                ]
            )
            places.append(
                [
                    stream_of(block.parameters[position].name),
                    block.own_slice(position).start + start - offset,
                    *(place + (start - tile.start) // GROUP for place in exponents),
                    *(0 for _ in range(2 - len(exponents))),
                ]
            )
        return (
            np.asarray(rows, dtype=np.int64).reshape(len(rows), 7),
            np.asarray(places, dtype=np.int64).reshape(len(rows), 4),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class _Here:
    """A tile whose states are in a slab, newer than its file once they are ready."""

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
        self._cached: dict[Tile, _Here] = {}
        self._written: dict[Tile, Ticket[Any]] = {}
        # Of each optimizer: whether its last step went backwards.
        self._turned: dict[int, bool] = {}
        self._backwards = True
        self._left = 0
        self._keeps = 0

    @property
    def nbytes(self) -> int:
        """Bytes of file space."""
        return sum(tile.nbytes for tiles in self._tiles.values() for tile in tiles)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the slabs, cache included."""
        return 0 if self._pool is None else self._pool.nbytes

    def planned(self, blocks: Sequence[tuple[Block, StateForm]]) -> int:
        """Bytes of the slabs with these blocks.

        Args:
            blocks: each with its form.

        Raises:
            BudgetError: `nvme_buffer_bytes` is too small for one.
        """
        slab, slabs = self._slab_size(blocks)
        if self._pool is not None and self._pool.slab_bytes >= slab:
            return self._pool.nbytes
        return round_to_pages(slab) * slabs

    def file_bytes(self, block: Block, form: StateForm) -> int:
        """Bytes of file space that a block of this form takes."""
        return sum(sum(strides) for _, _, strides in self._ranges(block, form))

    def prepare(self, blocks: Sequence[tuple[Block, StateForm]]) -> None:
        """Reserve the slabs for these blocks, given as to `planned`; the pool there is stays if it suffices."""
        # Each optimizer's share of the cache changes with the blocks.
        self.forget_cache()
        slab, slabs = self._slab_size(blocks)
        if slab == 0:
            return
        before = self._pool
        self._pool = grow_pool(before, self._backend, "states on their way", slab, slabs)
        if self._pool is not before and self._pool.nbytes >= _REGISTERED_FROM:
            self._store.register(self._pool.whole)

    def tiles(self, block: Block) -> Sequence[Tile]:
        """A block's tiles, in order."""
        return self._tiles[block.index]

    def add_block(self, block: Block, form: StateForm) -> None:
        """Reserve file space for a block's states.

        Args:
            block: the block.
            form: what is kept there.

        Raises:
            BudgetError: `nvme_limit` would be passed.
            StoreError: the disk has no room.
        """
        ranges = self._ranges(block, form)
        extent = self._store.reserve(self.file_bytes(block, form), f"states of {block.name}")
        offset = 0
        tiles: list[Tile] = []
        for start, stop, strides in ranges:
            tiles.append(
                Tile(
                    block=block,
                    start=start,
                    stop=stop,
                    extent=extent,
                    offset=offset,
                    form=form,
                    strides=strides,
                )
            )
            offset += sum(strides)
        self._tiles[block.index] = tiles

    @contextmanager
    def opened(self, tile: Tile, *, write: bool, fresh: bool = False) -> Generator[list[Tensor]]:
        """A tile's parts here, to look at or to change outside a step.

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
        if self._pool is None:
            yield from self._opened_alone(tile, write=write)
            return
        lease = self._pool.acquire(f"states of {tile.block.name}")
        moving: list[Ticket[Any]] = []
        try:
            region = lease.tensor(torch.uint8, tile.nbytes)
            if fresh:
                region.zero_()
            else:
                moving.append(self._read(tile, region))
                moving[-1].wait()
            yield tile.parts(region)
            if write:
                moving.append(self._write(tile, region))
                moving[-1].wait()
        finally:
            # An interrupted wait leaves the disk at work on the slab.
            lease.release(after=moving)

    def _opened_alone(self, tile: Tile, *, write: bool) -> Generator[list[Tensor]]:
        """The same once the engine is closed: no lanes, no slabs; only where the files were kept."""
        region = torch.empty(tile.nbytes, dtype=torch.uint8, device="cpu")
        self._store.read(tile.extent, tile.offset, region)
        yield tile.parts(region)
        if write:
            self._store.write(tile.extent, tile.offset, region)

    def keep_files(self) -> None:
        """Have the files outlive the engine, for states that are saved later; they go with the last reference."""
        self.forget_cache()
        self._backend.drain()
        self._store.is_kept = True

    def begin_step(self, tiles: Sequence[Tile]) -> None:
        """Turn the order of an optimizer's tiles round.

        Args:
            tiles: of this step, all of one optimizer. Cached ones of its that the step leaves out stay as far as there
                is room.
        """
        if not tiles:
            return
        owner = tiles[0].block.optimizer
        # Without a cache the blocks go in the order in which the next forward waits for them.
        self._backwards = self._cache_bytes > 0 and not self._turned.get(owner, True)
        self._turned[owner] = self._backwards
        self._left = len(tiles)
        share = self._share_of(owner)
        wanted = set(tiles)
        others = [
            tile for tile in self._cached if tile.block.optimizer == owner and tile not in wanted
        ]
        room = max(0, share - len(tiles))
        for tile in others[room:]:
            self._evict(tile)
        self._keeps = share - min(room, len(others))

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
            after: what must have ended before the update; the update of the block's tile before this one is part of it,
                so that a tile that could not be read stops the block.

        Returns:
            Ends when the tile is updated; its write may still run.
        """
        self._left -= 1
        here = self._cached.get(tile) or self._fetch(tile)
        try:
            here.ready = self._updates.submit(
                Update(
                    updater=TileUpdate(tile=tile, region=here.region, **update),
                    label=f"update {tile.block.name} from {tile.start}",
                ),
                after=(*after, *(() if here.ready is None else (here.ready,))),
            )
        finally:
            # Also when interrupted: what is here is newer than the file.
            self._cached[tile] = here
        if self._left >= self._keeps:
            self._evict(tile)
        return here.ready

    def forget_cache(self) -> None:
        """Write what stayed here to its file, and let go of it."""
        for tile in list(self._cached):
            self._evict(tile)

    def written(self, block: Block) -> tuple[Ticket[Any], ...]:
        """What must have ended before a block's states are read from its files, with nothing of it cached."""
        tickets = (self._written.get(tile) for tile in self._tiles[block.index])
        return tuple(t for t in tickets if t is not None and (not t.done or t.failure is not None))

    def close(self) -> None:
        """Give the slabs back."""
        for cached in self._cached.values():
            cached.lease.release()
        self._cached.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # Inside ------------------------------------------------------------------------------------------------------

    def _fetch(self, tile: Tile) -> _Here:
        lease, after = self._slabs().acquire_after(f"states of {tile.block.name}")
        try:
            region = lease.tensor(torch.uint8, tile.nbytes)
            return _Here(lease=lease, region=region, ready=self._read(tile, region, after))
        except BaseException:
            lease.release()
            raise

    def _evict(self, tile: Tile) -> None:
        """Write a tile that is here to its file, and let go of it."""
        here = self._cached[tile]
        written = self._write(tile, here.region, here.ready)
        del self._cached[tile]
        here.lease.release(after=written)

    def _read(self, tile: Tile, region: Tensor, after: tuple[Ticket[Any], ...] = ()) -> Ticket[Any]:
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
            after=after if written is None else (*after, written),
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

    def _share_of(self, owner: int) -> int:
        """Slabs of the cache that one optimizer's tiles may keep: its part of all tiles."""
        slabs = 0 if self._pool is None else self._pool.slabs - _WORKING
        counts: dict[int, int] = {}
        for tiles in self._tiles.values():
            for tile in tiles:
                counts[tile.block.optimizer] = counts.get(tile.block.optimizer, 0) + 1
        every = sum(counts.values())
        before = sum(count for number, count in counts.items() if number < owner)
        return slabs * (before + counts[owner]) // every - slabs * before // every

    def _ranges(self, block: Block, form: StateForm) -> list[tuple[int, int, tuple[int, ...]]]:
        """Start, stop and bytes of each part of each tile: as few tiles as fit a slab, of even size."""
        unit, most = self._tile_numels(form)
        if block.chunk == 0:
            return []
        number = -(-block.chunk // most)
        size = round_up(-(-block.chunk // number), unit)
        return [
            (start, stop, tuple(round_up(size, alignment) for size in form.sizes(stop - start)))
            for alignment in (self._store.alignment,)
            for start in range(0, block.chunk, size)
            for stop in (min(start + size, block.chunk),)
        ]

    def _tile_numels(self, form: StateForm) -> tuple[int, int]:
        """What the elements of a tile are a multiple of, and the most there are."""
        alignment = self._store.alignment
        unit = alignment // min(dtype.itemsize for dtype in form.dtypes)
        # Bytes of a unit, and what a tile takes beyond its units where exponents end within a page.
        nbytes, padded = (
            sum(form.sizes(unit)),
            sum(round_up(s, alignment) for s in form.sizes(unit)),
        )
        slack = 0 if padded == nbytes else alignment * form.states
        units = max(0, self._buffer_bytes // _WORKING - slack) // nbytes
        if units < 1:
            raise BudgetError(
                f"nvme_buffer_bytes={self._buffer_bytes:,} cannot hold {_WORKING} tiles of {len(form.dtypes)} states of "
                f"{unit} elements: give at least {_WORKING * (nbytes + slack):,} bytes"
            )
        return unit, units * unit

    def _slab_size(self, blocks: Sequence[tuple[Block, StateForm]]) -> tuple[int, int]:
        """Bytes and number of slabs."""
        slab = max(
            (sum(strides) for block, form in blocks for _, _, strides in self._ranges(block, form)),
            default=0,
        )
        if slab == 0:
            return 0, 0
        return slab, _WORKING + self._cache_bytes // round_to_pages(slab)

    def _slabs(self) -> SlabPool:
        if self._pool is None:
            raise BudgetError("states were asked of a closed engine: build a new one")
        return self._pool
