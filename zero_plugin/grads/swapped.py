"""Reduced gradients on NVMe: every contribution passes through a slab of host memory on its way to the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from zero_plugin.budget import Budget
from zero_plugin.grads.offload import Arrival, GradientShards, Shard, tickets_of
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.buffers import SlabPool
from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.runtime.operations import Accumulate, Copy, NormPartials
from zero_plugin.sharding.partition import Block
from zero_plugin.store.store import NvmeStore

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.store.layout import Extent

_SLABS = 4
"""One is filled while another is written; adding up takes the old sum, its wider copy and the new part."""


@dataclass(kw_only=True, slots=True)
class _Files:
    """One block's file space, and which of it holds the present sum; with a second set, as `Shard` has."""

    low: Extent
    wide: Extent | None = None
    dtype: torch.dtype = torch.float32
    other: _Files | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of file space, both sets."""
        own = self.low.padded + (0 if self.wide is None else self.wide.padded)
        return own + (0 if self.other is None else self.other.nbytes)


class SwappedGradients(GradientShards):
    """Gradient chunks in files.

    Args:
        backend: lanes and memory.
        store: the files.
        gradient_dtype: dtype of a contribution, or None for the parameter's own.
        budget: asked before slabs are made wider, for accumulation.
        doubled: whether a step may read its gradients while the next one's arrive.
    """

    def __init__(
        self,
        backend: Backend,
        store: NvmeStore,
        gradient_dtype: torch.dtype | None,
        budget: Budget,
        *,
        doubled: bool = False,
    ) -> None:
        super().__init__(backend, "nvme", gradient_dtype, budget, doubled=doubled)
        self._store = store
        self._files: dict[int, _Files] = {}
        self._reads = backend.lane("read gradients", "host")
        self._writes = backend.lane("write gradients", "host")
        self._uploads = backend.lane("fetch", "device")

    @override
    def bytes_of(self, block: Block) -> int:
        return self._files[block.index].nbytes

    def planned(self, blocks: Sequence[Block]) -> int:
        """Bytes of host slabs with these blocks."""
        largest = max((b.chunk * self.dtype(b).itemsize for b in blocks), default=0)
        return _SLABS * round_to_pages(largest)

    @override
    def add_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            files = self._files[block.index] = self._make_files(block)
            shard = self._shards[block.index] = self._make_shard(block)
            if self._doubled:
                files.other, shard.other = self._make_files(block), self._make_shard(block)
            self._blocks[block.index] = block
            self._widest = max(self._widest, self.dtype(block).itemsize)

    @override
    def _make_shard(self, block: Block) -> Shard:
        nothing = torch.empty(0, dtype=self.dtype(block), device="cpu")
        return Shard(low=nothing, wide=None, in_wide=False)

    def _make_files(self, block: Block) -> _Files:
        dtype = self.dtype(block)
        nbytes = block.chunk * dtype.itemsize
        return _Files(low=self._store.reserve(nbytes, f"gradients of {block.name}"), dtype=dtype)

    @override
    def _first_or_next(self, block: Block) -> Shard:
        before = self._shards[block.index]
        shard = super()._first_or_next(block)
        files = self._files[block.index]
        if shard is not before and files.other is not None:
            other, files.other = files.other, None
            other.other = files
            self._files[block.index] = other
        return shard

    @override
    def arrive(self, block: Block, *, exact: bool) -> Arrival:
        dtype = torch.float32 if exact else self.dtype(block)
        # Adding up needs fp32 slabs; they are made wider here, where none is held.
        adds = self._first_or_next(block).contributions > 0
        pool = self._slabs(torch.float32 if adds else dtype)
        lease = pool.acquire(f"gradient of {block.name}")
        return Arrival(chunk=lease.tensor(dtype, block.chunk), lease=lease, after=())

    @override
    def commit(self, block: Block, arrival: Arrival, written: Ticket[Any], *, last: bool) -> None:
        shard, files = self._shards[block.index], self._files[block.index]
        source, lease, ready = arrival.chunk, arrival.lease, written
        if shard.contributions:
            pool = self._slabs(torch.float32)
            wide_lease = pool.acquire(f"sum of gradients of {block.name}")
            wide = wide_lease.tensor(torch.float32, block.chunk)
            old = self._read_wide(block, wide)
            ready = self._lane(block).submit(
                Accumulate(destination=wide, source=arrival.chunk), after=(written, *old)
            )
            if lease is not None:
                lease.release(after=ready)
            source, lease = wide, wide_lease
        shard.contributions += 1
        files.dtype = source.dtype
        shard.norm = None
        held: list[Ticket[Any]] = []
        if self._norm_is_due(block, last=last):
            shard.norm = self._lane(block).submit(NormPartials(sources=(source,)), after=(ready,))
            held.append(shard.norm)
        shard.ready = self._write(block, source, (ready, *tickets_of(shard.ready)))
        held.append(shard.ready)
        if lease is not None:
            lease.release(after=held)

    @override
    def chunk(self, block: Block) -> tuple[Tensor, tuple[Ticket[Any], ...]]:
        """A copy of a block's summed gradient in host memory, to look at."""
        files = self._files[block.index]
        lease = self._slabs(files.dtype).acquire(f"gradient of {block.name}")
        here = lease.tensor(files.dtype, block.chunk)
        self._read(block, here).wait()
        copy = here.clone()
        lease.release()
        return copy, ()

    @override
    def current_dtype(self, block: Block) -> torch.dtype:
        return self._files[block.index].dtype

    @override
    def read_into(
        self,
        block: Block,
        destination: Tensor,
        free: Sequence[Ticket[Any]],
        *,
        on_device: bool,
    ) -> tuple[Ticket[Any], ...]:
        if not on_device:
            return (self._read(block, destination, free),)
        lease = self._slabs(destination.dtype).acquire(f"gradient of {block.name}")
        here = lease.tensor(destination.dtype, block.chunk)
        uploaded = self._uploads.submit(
            Copy(
                destinations=(destination,),
                sources=(here,),
                direction="host_to_device",
                label=f"fetch gradient of {block.name}",
            ),
            after=(self._read(block, here), *free),
        )
        lease.release(after=uploaded)
        return (uploaded,)

    @override
    def zero_member(self, block: Block, position: int) -> None:
        shard, files = self._shards[block.index], self._files[block.index]
        lease = self._slabs(files.dtype).acquire(f"gradient of {block.name}")
        here = lease.tensor(files.dtype, block.chunk)
        self._read(block, here).wait()
        block.own_view(here, position).zero_()
        shard.norm = None
        shard.ready = self._write(block, here, tickets_of(shard.ready))
        lease.release(after=shard.ready)

    # Inside ------------------------------------------------------------------------------------------------------

    @override
    def _start_norm(self, block: Block, shard: Shard) -> None:
        files = self._files[block.index]
        lease = self._slabs(files.dtype).acquire(f"gradient of {block.name}")
        here = lease.tensor(files.dtype, block.chunk)
        shard.norm = self._lane(block).submit(
            NormPartials(sources=(here,)), after=(self._read(block, here),)
        )
        lease.release(after=shard.norm)

    def _read_wide(self, block: Block, wide: Tensor) -> tuple[Ticket[Any], ...]:
        """The present sum in fp32."""
        files = self._files[block.index]
        if files.dtype == torch.float32:
            return (self._read(block, wide),)
        lease = self._slabs(torch.float32).acquire(f"gradient of {block.name}")
        low = lease.tensor(files.dtype, block.chunk)
        widened = self._lane(block).submit(
            Copy(destinations=(wide,), sources=(low,)), after=(self._read(block, low),)
        )
        lease.release(after=widened)
        return (widened,)

    def _extent(self, block: Block, dtype: torch.dtype) -> Extent:
        files = self._files[block.index]
        if dtype == self.dtype(block):
            return files.low
        if files.wide is None:
            files.wide = self._store.reserve(
                block.chunk * dtype.itemsize, f"summed gradients of {block.name}"
            )
        return files.wide

    def _read(
        self, block: Block, destination: Tensor, after: Sequence[Ticket[Any]] = ()
    ) -> Ticket[Any]:
        return self._reads.submit(
            Read(
                store=self._store,
                extent=self._extent(block, destination.dtype),
                offset=0,
                destination=destination,
                label=f"read gradient of {block.name}",
            ),
            after=(*after, *tickets_of(self._shards[block.index].ready)),
        )

    def _write(self, block: Block, source: Tensor, after: Sequence[Ticket[Any]]) -> Ticket[Any]:
        return self._writes.submit(
            Write(
                store=self._store,
                extent=self._extent(block, source.dtype),
                offset=0,
                source=source,
                label=f"write gradient of {block.name}",
            ),
            after=after,
        )

    def _slabs(self, dtype: torch.dtype) -> SlabPool:
        widest = max(self._widest, dtype.itemsize)
        pool = self._staging.get("host")
        if pool is None or widest > self._widest:
            self._widest = widest
            largest = max(block.chunk for block in self._blocks.values()) * widest
            if pool is not None:
                self._staging.pop("host").close()
            self._budget.take("host", _SLABS * round_to_pages(largest))
            pool = self._staging["host"] = SlabPool(
                name="gradients on their way",
                backend=self._backend,
                slab_bytes=largest,
                slabs=_SLABS,
                memory="host",
                setting="bucket_bytes",
            )
        return pool
