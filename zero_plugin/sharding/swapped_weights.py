"""This rank's shards of the compute weights on NVMe: read into slabs ahead of their use, written when they are updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from zero_plugin.errors import EngineStateError
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.buffers import SlabPool
from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.runtime.operations import Copy
from zero_plugin.sharding.partition import Block
from zero_plugin.sharding.weights import Shard, WeightShards
from zero_plugin.store.layout import round_up
from zero_plugin.store.staging import grow_pool
from zero_plugin.store.store import NvmeStore

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.store.layout import Extent

_FEWEST = 3
"""Slabs: one is read, one is copied to the device, and one waits between."""


class SwappedWeights(WeightShards):
    """Chunks of compute weights in files.

    Args:
        backend: lanes and memory.
        store: the files.
        buffer_bytes: host memory that weights pass through; at least three chunks are taken.
    """

    def __init__(self, backend: Backend, store: NvmeStore, *, buffer_bytes: int) -> None:
        super().__init__(backend, "nvme")
        self._store = store
        self._buffer_bytes = buffer_bytes
        self._extents: dict[int, Extent] = {}
        self._reads = backend.lane("read weights", "host")
        self._writes = backend.lane("write weights", "host")
        self._uploads = backend.lane("upload", "device")
        self._ahead: dict[int, Shard] = {}
        self._pool: SlabPool | None = None

    @property
    @override
    def nbytes(self) -> int:
        return sum(extent.padded for extent in self._extents.values())

    @property
    @override
    def staging_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.nbytes

    @override
    def planned(self, blocks: Sequence[Block]) -> int:
        slab, slabs = self._slab_size(blocks)
        return round_to_pages(slab) * slabs

    @override
    def cut(self, block: Block) -> None:
        if block.index not in self._extents:
            self._extents[block.index] = self._store.reserve(
                block.chunk * block.dtype.itemsize, f"weights of {block.name}"
            )
        self._reserve([block])

        def fill(chunk: Tensor) -> None:
            chunk.zero_()
            self._fill(block, chunk)

        self._write_now(block, fill)

    @override
    def drop(self, blocks: Sequence[Block]) -> None:
        super().drop(blocks)
        for block in blocks:
            self._extents.pop(block.index, None)

    @override
    def fetch(self, block: Block) -> Shard:
        ahead = self._ahead.pop(block.index, None)
        if ahead is not None:
            return ahead
        pool = self._slabs()
        while not pool.free and self._ahead:
            # A wrong guess must not starve what is needed now.
            self._forget(next(iter(self._ahead)))
        return self._read(block)

    @override
    def read_ahead(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.index not in self._ahead and self._slabs().free > _FEWEST - 1:
                self._ahead[block.index] = self._read(block)

    @override
    def forget_ahead(self) -> None:
        for index in list(self._ahead):
            self._forget(index)

    @override
    def snapshot(self, block: Block) -> Tensor:
        if self.closed:
            kept = torch.zeros(block.chunk, dtype=block.dtype, device="cpu")
            self._store.read(self._extents[block.index], 0, kept)
            return kept
        shard = self.fetch(block)
        for ticket in shard.after:
            ticket.wait()
        copy = shard.chunk.clone()
        shard.release()
        return copy

    @override
    def replace(self, block: Block, chunk: Tensor) -> None:
        self._forget(block.index)
        self._write_now(block, lambda here: here.copy_(chunk))

    @override
    def keep(self) -> None:
        for ticket in self._written.values():
            ticket.wait()
        self._store.is_kept = True

    @override
    def fill(
        self,
        block: Block,
        chunk: Tensor,
        free: Sequence[Ticket[Any]] = (),
        *,
        on_device: bool = False,
    ) -> tuple[Ticket[Any], ...]:
        if on_device:
            shard = self.fetch(block)
            uploaded = self._uploads.submit(
                Copy(
                    destinations=(chunk,),
                    sources=(shard.chunk,),
                    direction="host_to_device",
                    label=f"upload weights of {block.name}",
                ),
                after=(*shard.after, *free),
            )
            shard.release(after=uploaded)
            return (uploaded,)
        return (
            self._reads.submit(
                Read(
                    store=self._store,
                    extent=self._extents[block.index],
                    offset=0,
                    destination=chunk,
                    label=f"read weights of {block.name}",
                ),
                after=(*free, *self.ready(block)),
            ),
        )

    @override
    def write(
        self,
        block: Block,
        chunk: Tensor,
        after: Sequence[Ticket[Any]],
        *,
        on_device: bool = False,
    ) -> Ticket[Any]:
        lease = None
        if on_device:
            lease, free = self._slabs().acquire_after(f"updated weights of {block.name}")
            here = lease.tensor(block.dtype, block.chunk)
            copy = Copy(
                destinations=(here,),
                sources=(chunk,),
                direction="device_to_host",
                label=f"save weights of {block.name}",
            )
            chunk, after = here, (self._uploads.submit(copy, after=(*after, *free)),)
        written = self._writes.submit(
            Write(
                store=self._store,
                extent=self._extents[block.index],
                offset=0,
                source=chunk,
                label=f"write weights of {block.name}",
            ),
            after=(*after, *self.ready(block)),
        )
        if lease is not None:
            lease.release(after=written)
        self.written_by(block, written)
        return written

    @override
    def close(self) -> None:
        self.forget_ahead()
        super().close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # Inside ------------------------------------------------------------------------------------------------------

    def _write_now(self, block: Block, fill: Callable[[Tensor], object]) -> None:
        lease = self._slabs().acquire(f"weights of {block.name}")
        written: Ticket[Any] | None = None
        try:
            chunk = lease.tensor(block.dtype, block.chunk)
            fill(chunk)
            written = self.write(block, chunk, ())
            written.wait()
        finally:
            # An interrupted wait leaves the disk at work on the slab.
            lease.release(after=written)

    def _read(self, block: Block) -> Shard:
        lease = self._slabs().acquire(f"weights of {block.name}")
        chunk = lease.tensor(block.dtype, block.chunk)
        return Shard(chunk=chunk, after=self.fill(block, chunk), lease=lease)

    def _forget(self, index: int) -> None:
        shard = self._ahead.pop(index, None)
        if shard is not None and shard.lease is not None:
            shard.lease.release(after=shard.after)

    def _padded(self, block: Block) -> int:
        return round_up(block.chunk * block.dtype.itemsize, self._store.alignment)

    def _slab_size(self, blocks: Sequence[Block]) -> tuple[int, int]:
        slab = max((self._padded(block) for block in blocks), default=0)
        return slab, max(_FEWEST, self._buffer_bytes // slab) if slab else 0

    def _reserve(self, blocks: Sequence[Block]) -> None:
        slab, slabs = self._slab_size(blocks)
        if self._pool is not None:
            if self._pool.slab_bytes >= slab:
                return
            self.forget_ahead()
        self._pool = grow_pool(self._pool, self._backend, "weights on their way", slab, slabs)

    def _slabs(self) -> SlabPool:
        if self._pool is None:
            raise EngineStateError("sharded weights were asked of a closed engine: build a new one")
        return self._pool
