"""Reduced gradients in their tier: one chunk a block, added up over micro-batches in fp32.

The first contribution of a step is written straight into the block's chunk in the gradient dtype (2 bytes an element
for bf16). A second one promotes the chunk to fp32 and adds, so low-precision gradients are never summed in low
precision, and a run without accumulation never pays for the wider buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_plugin.budget import Budget
from zero_plugin.config import Tier
from zero_plugin.grads.norm import NormSummary, merge_partials, read_partial
from zero_plugin.runtime.backend import Backend, Lane, Ticket
from zero_plugin.runtime.buffers import Lease, SlabPool
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.runtime.operations import Accumulate, Copy, NormPartials, Zero
from zero_plugin.sharding.partition import Block

_SMALLEST = 64
"""Bytes of the smallest allocation."""


@dataclass(kw_only=True, slots=True)
class Shard:
    """What one block holds.

    Attributes:
        low: chunk in the gradient dtype.
        wide: chunk in fp32, or None while nothing is added up.
        in_wide: which of the two holds the sum.
        contributions: micro-batches in it.
        ready: ends when the chunk may be read or written.
        norm: of the chunk, or None.
        other: the second set of buffers, where a step may still read the first while the next one's gradients arrive.
    """

    low: Tensor
    wide: Tensor | None
    in_wide: bool
    contributions: int = 0
    ready: Ticket[Any] | None = None
    norm: Ticket[Any] | None = None
    other: Shard | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers, both sets."""
        total = self.low.numel() * self.low.element_size()
        if self.wide is not None and self.wide is not self.low:
            total += self.wide.numel() * self.wide.element_size()
        return total + (0 if self.other is None else self.other.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Where one contribution goes.

    Attributes:
        chunk: the destination in the gradient tier, gradient dtype.
        lease: the staging slab it lies in when it must still be added, else None.
        after: what must have ended before `chunk` is written.
    """

    chunk: Tensor
    lease: Lease | None
    after: tuple[Ticket[Any], ...]


class GradientShards:
    """The gradient chunks of all blocks.

    Args:
        backend: lanes and memory.
        tier: where the chunks lie, `device` or `host`.
        gradient_dtype: dtype of a contribution, or None for the parameter's own.
        budget: asked before a buffer is made that only accumulation needs.
        doubled: whether a step may read its gradients while the next one's arrive (a delayed update): two sets of buffers.
    """

    def __init__(
        self,
        backend: Backend,
        tier: Tier,
        gradient_dtype: torch.dtype | None,
        budget: Budget,
        *,
        doubled: bool = False,
    ) -> None:
        self._doubled = doubled
        self._budget = budget
        self._backend = backend
        self._tier: Tier = tier
        self._gradient_dtype = gradient_dtype
        self._shards: dict[int, Shard] = {}
        self._blocks: dict[int, Block] = {}
        self._widest = 2
        self._staging: dict[Tier, SlabPool] = {}
        self._fetches = backend.lane("fetch", "device")
        self._unasked: set[int] = set()

    def tier_of(self, block: Block) -> Tier:
        """Where a block's chunk lies."""
        return "device" if block.on_device else self._tier

    def bytes_of(self, block: Block) -> int:
        """Bytes of a block's chunks, fp32 accumulators included."""
        return self._shards[block.index].nbytes

    def staging_bytes(self, tier: Tier) -> int:
        """Bytes of the staging slabs in a tier."""
        pool = self._staging.get(tier)
        return 0 if pool is None else pool.nbytes

    def dtype(self, block: Block) -> torch.dtype:
        """Dtype of one contribution of a block."""
        return self._gradient_dtype or block.dtype

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Reserve a zeroed chunk for each block."""
        for block in blocks:
            shard = self._shards[block.index] = self._make_shard(block)
            if self._doubled:
                shard.other = self._make_shard(block)
            self._blocks[block.index] = block

    def set_bytes(self, block: Block) -> int:
        """Bytes that a block's buffers take before anything is added up."""
        nbytes = max(block.chunk * self.dtype(block).itemsize, _SMALLEST)
        return 2 * nbytes if self._doubled else nbytes

    def arrive(self, block: Block, *, exact: bool) -> Arrival:
        """Say where the next contribution of a block must be written.

        Args:
            block: the block.
            exact: the contribution is itself a sum over micro-batches, so it is kept in fp32.
        """
        shard = self._first_or_next(block)
        dtype = torch.float32 if exact else self.dtype(block)
        if shard.contributions:
            pool = self._staging_pool(dtype, self.tier_of(block))
            lease = pool.acquire(f"gradient of {block.name}")
            return Arrival(chunk=lease.tensor(dtype, block.chunk), lease=lease, after=())
        shard.in_wide = dtype == torch.float32
        chunk = self._wide(block, shard) if shard.in_wide else shard.low
        return Arrival(chunk=chunk, lease=None, after=tickets_of(shard.ready))

    def _first_or_next(self, block: Block) -> Shard:
        """Where the next contribution goes: at a step's first, the set that the last step does not read."""
        shard = self._shards[block.index]
        other = shard.other
        if other is None or shard.contributions:
            return shard
        shard.other, other.other = None, shard
        self._shards[block.index] = other
        return other

    def commit(self, block: Block, arrival: Arrival, written: Ticket[Any], *, last: bool) -> None:
        """Count a contribution whose bytes are on their way.

        Args:
            block: the block.
            arrival: what `arrive` said.
            written: ticket of the operation that fills `arrival.chunk`.
            last: whether a step may follow, so that the norm is worth computing now.
        """
        shard = self._shards[block.index]
        shard.norm = None
        shard.contributions += 1
        if arrival.lease is None:
            shard.ready = written
        else:
            wide = self._promote(block, shard)
            shard.ready = self._lane(block).submit(
                Accumulate(destination=wide, source=arrival.chunk),
                after=(written, *tickets_of(shard.ready)),
            )
            arrival.lease.release(after=shard.ready)
        if self._norm_is_due(block, last=last):
            self._start_norm(block, shard)

    def expect_norm(self, optimizer: int, *, wanted: bool) -> None:
        """Whether norms of an optimizer's gradients are computed as they arrive, or when somebody asks.

        With updates in backward, or a processor that has other work there, a pass over gradients is not free.
        """
        (self._unasked.discard if wanted else self._unasked.add)(optimizer)

    def _norm_is_due(self, block: Block, *, last: bool) -> bool:
        return last and block.optimizer not in self._unasked

    def chunk(self, block: Block) -> tuple[Tensor, tuple[Ticket[Any], ...]]:
        """A block's summed gradient and what to wait for before it is read."""
        shard = self._shards[block.index]
        return self._current(shard), tickets_of(shard.ready)

    def current_dtype(self, block: Block) -> torch.dtype:
        """Dtype of a block's summed gradient."""
        return self._current(self._shards[block.index]).dtype

    def read_into(
        self,
        block: Block,
        destination: Tensor,
        free: Sequence[Ticket[Any]],
        *,
        on_device: bool,
    ) -> tuple[Ticket[Any], ...]:
        """Bring a block's summed gradient into `destination` [chunk], of `current_dtype`.

        Args:
            block: the block.
            destination: in the memory that the update runs on.
            free: what must end before it is written.
            on_device: whether that is the device's.
        """
        chunk, after = self.chunk(block)
        return (
            self._fetches.submit(
                Copy(
                    destinations=(destination,),
                    sources=(chunk,),
                    direction="host_to_device" if on_device else "device_to_host",
                    label=f"fetch gradient of {block.name}",
                ),
                after=(*after, *free),
            ),
        )

    def read_by(self, block: Block, ticket: Ticket[Any]) -> None:
        """Keep the chunk from being overwritten before `ticket` (a reader of it) has ended."""
        self._shards[block.index].ready = ticket

    def contributions(self, block: Block) -> int:
        """Micro-batches in a block's gradient."""
        return self._shards[block.index].contributions

    def is_empty(self, block: Block) -> bool:
        """Whether no contribution arrived since the last clear."""
        return self._shards[block.index].contributions == 0

    def summarise(self, blocks: Sequence[Block]) -> NormSummary:
        """Norm partials of this rank's chunks, block by block in order; waits for the gradients.

        Blocks without a contribution count as absent.
        """
        tickets: list[Ticket[Any]] = []
        for block in blocks:
            shard = self._shards[block.index]
            if shard.contributions == 0:
                continue
            if shard.norm is None:
                self._start_norm(block, shard)
            if shard.norm is not None:
                tickets.append(shard.norm)
        return merge_partials(
            read_partial(partial) for ticket in tickets for partial in ticket.wait()
        )

    def wait(self) -> None:
        """Wait for every gradient on its way."""
        for shard in self._every():
            if shard.ready is not None:
                shard.ready.wait()

    def clear(self, blocks: Sequence[Block]) -> None:
        """Forget the contributions of whole blocks; bytes in flight land and are then overwritten."""
        for block in blocks:
            shard = self._shards[block.index]
            shard.contributions = 0
            shard.norm = None

    def take_back(self) -> None:
        """Take back the slabs of a step that is given up, once nothing runs."""
        for pool in self._staging.values():
            pool.take_back()

    def forget_ended(self) -> None:
        """Let go of tickets that ended, failed ones included, so that a broken step does not poison the next."""
        for shard in self._every():
            if shard.ready is not None and shard.ready.done:
                shard.ready = None
            if shard.norm is not None and shard.norm.done:
                shard.norm = None

    def zero_member(self, block: Block, position: int) -> None:
        """Set one member's gradient to zero, in order with what is in flight."""
        shard = self._shards[block.index]
        chunk, after = self.chunk(block)
        shard.norm = None
        shard.ready = self._lane(block).submit(
            Zero(destinations=(block.own_view(chunk, position),)), after=after
        )

    def find_nonfinite(self, blocks: Sequence[Block]) -> list[str]:
        """Names of the members with a NaN or infinite element in this rank's chunks."""
        names: list[str] = []
        for block in blocks:
            if self.is_empty(block):
                continue
            chunk, after = self.chunk(block)
            for ticket in after:
                ticket.wait()
            names += [
                member.name
                for position, member in enumerate(block.parameters)
                if not torch.isfinite(block.own_view(chunk, position)).all()
            ]
        return names

    def close(self) -> None:
        """Give the staging slabs back."""
        for pool in self._staging.values():
            pool.close()
        self._staging.clear()

    def _lane(self, block: Block) -> Lane:
        tier = self.tier_of(block)
        name = "gradients" if tier == self._tier else "gradients on device"
        return self._backend.lane(name, "device" if tier == "device" else "host")

    def _start_norm(self, block: Block, shard: Shard) -> None:
        shard.norm = self._lane(block).submit(
            NormPartials(sources=(self._current(shard),)), after=tickets_of(shard.ready)
        )
        shard.ready = shard.norm

    @staticmethod
    def _current(shard: Shard) -> Tensor:
        return shard.wide if shard.in_wide and shard.wide is not None else shard.low

    def _wide(self, block: Block, shard: Shard) -> Tensor:
        if shard.wide is None:
            self._budget.take(self.tier_of(block), block.chunk * 4)
            shard.wide = self._allocate(block, torch.float32)
        return shard.wide

    def _promote(self, block: Block, shard: Shard) -> Tensor:
        wide = self._wide(block, shard)
        if not shard.in_wide:
            shard.ready = self._lane(block).submit(
                Copy(destinations=(wide,), sources=(shard.low,)), after=tickets_of(shard.ready)
            )
            shard.in_wide = True
        return wide

    def _every(self) -> list[Shard]:
        others = [shard.other for shard in self._shards.values() if shard.other is not None]
        return [*self._shards.values(), *others]

    def _make_shard(self, block: Block) -> Shard:
        dtype = self.dtype(block)
        low = self._allocate(block, dtype)
        wide = low if dtype == torch.float32 else None
        return Shard(low=low, wide=wide, in_wide=wide is not None)

    def _allocate(self, block: Block, dtype: torch.dtype) -> Tensor:
        nbytes = block.chunk * dtype.itemsize
        memory = "device" if self.tier_of(block) == "device" else "host"
        raw = self._backend.allocate(max(nbytes, _SMALLEST), memory)
        raw.zero_()
        return raw[:nbytes].view(dtype)

    def _staging_pool(self, dtype: torch.dtype, tier: Tier) -> SlabPool:
        self._widest = max(self._widest, dtype.itemsize)
        chunks = [block.chunk for block in self._blocks.values() if self.tier_of(block) == tier]
        largest = max(chunks) * self._widest
        pool = self._staging.get(tier)
        if pool is not None and pool.slab_bytes < largest:
            self._staging.pop(tier).close()
            pool = None
        if pool is None:
            self._budget.take(tier, 2 * round_to_pages(largest))
            pool = self._staging[tier] = SlabPool(
                name="gradient staging",
                backend=self._backend,
                slab_bytes=largest,
                slabs=2,
                memory="device" if tier == "device" else "host",
                setting="bucket_bytes",
            )
        return pool


def tickets_of(ticket: Ticket[Any] | None) -> tuple[Ticket[Any], ...]:
    """The ticket, or nothing, as what to wait for."""
    return () if ticket is None else (ticket,)
