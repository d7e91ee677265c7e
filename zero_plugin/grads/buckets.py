"""Device buffers that the gradient reduction and the all-gather of updated weights take turns in.

Their size is that of the largest block, so it does not grow with the model (ZeRO, SC'20, section 6.2: constant-size
buffers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zero_plugin.errors import EngineStateError
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.buffers import Lease, SlabPool
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.sharding.partition import Block

if TYPE_CHECKING:
    import torch

_SLABS = 2


class Buckets:
    """Two slabs of [shards, chunk] and two of [chunk]; none at one rank, where nothing is exchanged.

    Args:
        backend: allocates the slabs.
        wire: dtype of gradients on the wire.
        world_size: number of ranks.
    """

    def __init__(self, backend: Backend, wire: torch.dtype, world_size: int) -> None:
        self._backend = backend
        self.wire = wire
        """Dtype of gradients on the wire."""
        self._world_size = world_size
        self._gathered: SlabPool | None = None
        self._chunk: SlabPool | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(pool.nbytes for pool in (self._gathered, self._chunk) if pool is not None)

    def planned(self, blocks: Sequence[Block]) -> int:
        """Bytes that the slabs, and the transport's own copy of the largest bucket, take with these blocks."""
        if self._world_size == 1 or not blocks:
            return 0
        gathered, chunk = self._sizes(blocks)
        return _SLABS * (round_to_pages(gathered) + round_to_pages(chunk)) + gathered + chunk

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Make the slabs large enough for more blocks; between rounds only."""
        if self._world_size == 1 or not blocks:
            return
        gathered, chunk = self._sizes(blocks)
        self._gathered = self._resize(self._gathered, "gradient buckets", gathered)
        self._chunk = self._resize(self._chunk, "reduced chunks", chunk)

    def acquire_gathered(self, holder: str) -> Lease:
        """A slab of [shards, chunk]."""
        return self._open(self._gathered, holder).acquire(holder)

    def acquire_chunk(self, holder: str) -> Lease:
        """A slab of [chunk], 4 bytes an element."""
        return self._open(self._chunk, holder).acquire(holder)

    def next_gathered(self, holder: str) -> tuple[Lease, tuple[Ticket[Any], ...]]:
        """A slab of [shards, chunk] for lanes only, without waiting; with it, what must end before it is written."""
        return self._open(self._gathered, holder).acquire_after(holder)

    def next_chunk(self, holder: str) -> tuple[Lease, tuple[Ticket[Any], ...]]:
        """As `next_gathered`, a slab of [chunk]."""
        return self._open(self._chunk, holder).acquire_after(holder)

    def close(self) -> None:
        """Free the slabs."""
        for pool in (self._gathered, self._chunk):
            if pool is not None:
                pool.close()
        self._gathered = self._chunk = None

    def _sizes(self, blocks: Sequence[Block]) -> tuple[int, int]:
        gathered = max(
            block.layout.shards * block.chunk * max(self.wire.itemsize, block.dtype.itemsize)
            for block in blocks
        )
        # Gradients summed over micro-batches travel in fp32.
        return gathered, max(block.chunk for block in blocks) * 4

    @staticmethod
    def _open(pool: SlabPool | None, holder: str) -> SlabPool:
        if pool is None:
            raise EngineStateError(
                f"{holder} asked for a bucket of a closed engine: build a new engine"
            )
        return pool

    def _resize(self, pool: SlabPool | None, name: str, nbytes: int) -> SlabPool:
        if pool is not None:
            if pool.slab_bytes >= nbytes:
                return pool
            pool.close()
        return SlabPool(
            name=name,
            backend=self._backend,
            slab_bytes=nbytes,
            slabs=_SLABS,
            memory="device",
            setting="bucket_bytes",
        )
