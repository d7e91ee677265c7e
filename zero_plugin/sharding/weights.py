"""This rank's shards of the compute weights, in their tier (stage 3).

A block's shard is one chunk in the block's own layout: each parameter is sliced over all ranks, so that a gather reads
from every rank's tier at once (bandwidth-centric partitioning, ZeRO-Infinity, SC'21, section 5.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zero_plugin.config import Tier
from zero_plugin.errors import EngineStateError
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.buffers import Lease
from zero_plugin.runtime.memory import trim_heap
from zero_plugin.runtime.operations import Copy
from zero_plugin.sharding.partition import Block
from zero_plugin.sharding.precut import take_part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One block's chunk, to be read.

    Attributes:
        chunk: the block's dtype, on the device or in host memory.
        after: what must have ended before it is read.
        lease: of the slab it passes through, or None.
    """

    chunk: Tensor
    after: tuple[Ticket[Any], ...]
    lease: Lease | None = None

    def release(self, after: Ticket[Any] | None = None) -> None:
        """It is not needed any more once `after` has ended."""
        if self.lease is not None:
            self.lease.release(after=after)


_TRIM_FROM = 1 << 20
"""Freed bytes of early slices from which memory is given back."""


class WeightShards:
    """The chunks of compute weights of all sharded blocks on this rank.

    Args:
        backend: allocates the memory.
        tier: where the chunks lie.
    """

    def __init__(self, backend: Backend, tier: Tier) -> None:
        self._backend = backend
        self._chunks: dict[int, Tensor] = {}
        self._written: dict[int, Ticket[Any]] = {}
        self._kept: dict[int, Tensor] = {}
        self.tier: Tier = tier
        """Where the chunks lie."""
        self.closed = False
        """Whether `close` was called."""
        self.followers: dict[int, Callable[[Tensor, Tensor], None]] = {}
        """By a block's index, what must follow a write of user code to its weights: told of the chunk before and after, and
        allowed to change the latter."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.numel() * chunk.element_size() for chunk in self._chunks.values())

    def cut(self, block: Block) -> None:
        """Take this rank's slices of a block: those cut early, else from its full weights, which must be here."""
        chunk = self._chunks.get(block.index)
        if chunk is None:
            nbytes = block.chunk * block.dtype.itemsize
            raw = self._backend.allocate(
                max(nbytes, 64), "device" if self.tier == "device" else "host"
            )
            raw.zero_()
            chunk = self._chunks[block.index] = raw[:nbytes].view(block.dtype)
        self._fill(block, chunk)

    @staticmethod
    def _fill(block: Block, chunk: Tensor) -> None:
        freed = 0
        for position, member in enumerate(block.parameters):
            part = block.own_slice(position)
            early = take_part(member.parameter)
            freed += 0 if early is None else early.numel() * early.element_size()
            if early is None:
                early = member.alias.narrow(0, part.start, part.numel)
            block.own_view(chunk, position).copy_(early)
        if freed >= _TRIM_FROM:
            trim_heap()

    def drop(self, blocks: Sequence[Block]) -> None:
        """Free the chunks of some blocks."""
        for block in blocks:
            self._chunks.pop(block.index, None)
            self._written.pop(block.index, None)
            self.followers.pop(block.index, None)

    def chunk(self, block: Block) -> Tensor:
        """A block's chunk, the block's dtype; wait for `ready` before it is read.

        Raises:
            EngineStateError: the engine was closed.
        """
        found = self._chunks.get(block.index)
        if found is None:
            raise EngineStateError(
                f"the weights of {block.name} were asked of a closed engine: take engine.full_state_dict() before close()"
            )
        return found

    def ready(self, block: Block) -> tuple[Ticket[Any], ...]:
        """What must have ended before a chunk is read."""
        ticket = self._written.get(block.index)
        return () if ticket is None else (ticket,)

    @property
    def staging_bytes(self) -> int:
        """Bytes of host slabs that chunks pass through."""
        return 0

    def planned(self, blocks: Sequence[Block]) -> int:
        """Bytes of host slabs with these blocks."""
        del blocks
        return 0

    def fetch(self, block: Block) -> Shard:
        """A block's chunk for a gather."""
        return Shard(chunk=self.chunk(block), after=self.ready(block))

    def read_ahead(self, blocks: Sequence[Block]) -> None:
        """Blocks that will be fetched soon."""

    def forget_ahead(self) -> None:
        """The weights change: what was read ahead is stale."""

    def snapshot(self, block: Block) -> Tensor:
        """A block's chunk to look at on the host's thread, finished; here the chunk itself.

        After `close` only where `keep` was called before.
        """
        for ticket in self.ready(block):
            ticket.wait()
        return self.chunk(block)

    def fill(
        self,
        block: Block,
        chunk: Tensor,
        free: Sequence[Ticket[Any]] = (),
        *,
        on_device: bool = False,
    ) -> tuple[Ticket[Any], ...]:
        """Bring a block's present weights into `chunk`, on the device or in host memory, once `free` has ended.

        Nothing is done where they lie in the memory that `chunk` is of.
        """
        if self.tier == "host" or on_device:
            return ()
        copy = Copy(
            destinations=(chunk,),
            sources=(self.chunk(block),),
            direction="device_to_host",
            label=f"fetch weights of {block.name}",
        )
        lane = self._backend.lane("fetch weights for the update", "device")
        return (lane.submit(copy, after=(*free, *self.ready(block))),)

    def replace(self, block: Block, chunk: Tensor) -> None:
        """Replace a block's weights on the host's thread; no full weights of it may be here.

        Args:
            block: the block.
            chunk: the new ones, its dtype, in any memory.
        """
        for ticket in self.ready(block):
            ticket.wait()
        self.chunk(block).copy_(chunk)

    def take_write(self, block: Block) -> None:
        """Cut this rank's slices of a block again after user code wrote to its full weights, which are here."""
        follower = self.followers.get(block.index)
        if follower is None:
            self.cut(block)
            return
        before = self.snapshot(block)
        after = torch.zeros_like(before)
        self._fill(block, after)
        follower(before, after)
        self.replace(block, after)

    def keep(self) -> None:
        """Have the weights be readable by `snapshot` after `close`."""
        self._kept = self._chunks

    def write(
        self,
        block: Block,
        chunk: Tensor,
        after: Sequence[Ticket[Any]],
        *,
        on_device: bool = False,
    ) -> Ticket[Any]:
        """Replace a block's weights by `chunk`, on the device or in host memory, where they lie in a file."""
        del chunk, after, on_device
        raise EngineStateError(f"the weights of {block.name} lie in memory: write there")

    def written_by(self, block: Block, ticket: Ticket[Any]) -> None:
        """The chunk is complete when `ticket` has ended."""
        self._written[block.index] = ticket

    def close(self) -> None:
        """Free everything."""
        self.closed = True
        self._chunks = self._kept
        self._written.clear()
        self.followers.clear()
