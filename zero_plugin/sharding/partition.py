"""Blocks of parameters, and the moves between full parameters and a block's chunks.

A *block* is the set of parameters that is reduced, updated and gathered together. Its gradient bucket, its optimizer
states and its all-gather share one `ChunkLayout`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_plugin.sharding.layout import ChunkLayout, Slice, group_by_bytes, lay_out
from zero_plugin.sharding.parameters import RESIDENT, ManagedParameter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Parameters of one optimizer and one dtype that move together.

    Attributes:
        index: position among the blocks, the same on every rank; forward order.
        parameters: members in layout order.
        layout: where each member lies in a chunk.
        dtype: dtype of the compute weights.
        device: device of the compute weights.
        optimizer: index of the optimizer.
        rank: which chunk of the layout this rank holds.
        unit: the unit whose weights it is part of, or `RESIDENT`.
        on_device: whether its gradient and states stay on the device, where they are updated, whatever the others' tier.
    """

    index: int
    parameters: tuple[ManagedParameter, ...]
    layout: ChunkLayout
    dtype: torch.dtype
    device: torch.device
    optimizer: int
    rank: int
    unit: int = RESIDENT
    on_device: bool = False

    @property
    def chunk(self) -> int:
        """Elements of this rank's chunk."""
        return self.layout.chunk

    @property
    def name(self) -> str:
        """For traces and errors: the first and last member."""
        first, last = self.parameters[0].name, self.parameters[-1].name
        return (
            f"block {self.index} ({first})"
            if first == last
            else f"block {self.index} ({first} .. {last})"
        )

    def own_slice(self, position: int) -> Slice:
        """This rank's part of member `position`."""
        return self.layout.slices[position][self.rank]

    def own_view(self, chunk: Tensor, position: int) -> Tensor:
        """The part of a chunk that holds this rank's slice of member `position`."""
        offset = self.layout.offsets[position]
        return chunk.narrow(0, offset, self.own_slice(position).numel)

    def padding_views(self, chunk: Tensor) -> list[Tensor]:
        """The parts of a chunk that belong to no member; they must be zero for norms to be taken of whole chunks."""
        views: list[Tensor] = []
        for position, (offset, slot) in enumerate(
            zip(self.layout.offsets, self.layout.slots, strict=True)
        ):
            used = self.own_slice(position).numel
            if used < slot:
                views.append(chunk.narrow(0, offset + used, slot - used))
        end = self.layout.end
        if end < self.chunk:
            views.append(chunk.narrow(0, end, self.chunk - end))
        return views


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """This rank's place among the shards.

    Attributes:
        shards: ranks each parameter is cut over; 1 when optimizer states are not sharded.
        rank: which shard this rank holds.
        world_size: number of ranks; an unsharded chunk is padded so that each can reduce a part.
    """

    shards: int
    rank: int
    world_size: int


def form_blocks(
    parameters: Sequence[ManagedParameter],
    place: ShardPlace,
    *,
    wire_bytes: int,
    limit: int,
    first_index: int = 0,
    device_fraction: float = 0.0,
) -> list[Block]:
    """Group parameters into blocks of at most `limit` bytes of reduced gradient.

    Args:
        parameters: in forward (registration) order.
        place: over how many ranks, and which part is ours.
        wire_bytes: bytes of an element on the wire.
        limit: bytes of a block; a larger parameter is a block of its own.
        first_index: index of the first new block.
        device_fraction: most of the elements whose states stay on the device: those of the first blocks, whose gradients
            come last in backward, so that nothing is left of the step to hide a move of theirs behind.
    """
    keys = [
        (item.unit, item.optimizer, item.parameter.dtype, item.parameter.device)
        for item in parameters
    ]
    groups = group_by_bytes([item.numel * wire_bytes for item in parameters], keys, limit)
    counts = [sum(parameters[i].numel for i in members) for members in groups]
    left = device_fraction * sum(counts)
    stays = [running <= left for running in itertools.accumulate(counts)]
    return [
        Block(
            index=first_index + number,
            parameters=tuple(parameters[i] for i in members),
            layout=lay_out(
                [parameters[i].numel for i in members],
                place.shards,
                multiple=place.world_size // place.shards,
            ),
            dtype=parameters[members[0]].parameter.dtype,
            device=parameters[members[0]].parameter.device,
            optimizer=parameters[members[0]].optimizer,
            rank=place.rank,
            unit=parameters[members[0]].unit,
            on_device=device_fraction > 0 and stays[number],
        )
        for number, members in enumerate(groups)
    ]


def pack(block: Block, position: int, source: Tensor | None, buffer: Tensor) -> None:
    """Write member `position` into every rank's chunk of `buffer`; padding and an absent member become zero.

    Args:
        block: the block being packed.
        position: which member.
        source: the full tensor, any shape and floating dtype, or None for zeros.
        buffer: [shards, chunk], the wire dtype.
    """
    layout = block.layout
    slot = buffer.narrow(1, layout.offsets[position], layout.slots[position])
    if source is None:
        slot.zero_()
        return
    flat = source.reshape(-1)
    if layout.is_even(position):
        slot.copy_(flat.view(layout.shards, -1))
        return
    for rank, part in enumerate(layout.slices[position]):
        slot[rank, : part.numel].copy_(flat[part.start : part.stop])
        slot[rank, part.numel :].zero_()


def unpack_pairs(
    block: Block, gathered: Tensor, position: int, full: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Copies (destination, source) that rebuild member `position` from every rank's chunk.

    Args:
        block: the block that was gathered.
        gathered: [shards, chunk].
        position: which member.
        full: [numel], flat.
    """
    layout = block.layout
    offset = layout.offsets[position]
    return [
        (full.narrow(0, part.start, part.numel), gathered[rank].narrow(0, offset, part.numel))
        for rank, part in enumerate(layout.slices[position])
        if part.numel
    ]


def rebuild(block: Block, gathered: Tensor) -> list[Tensor]:
    """Full CPU tensors of every member, in their own shapes.

    Args:
        block: the block.
        gathered: [shards, chunk], every rank's chunk.
    """
    fulls: list[Tensor] = []
    for position, member in enumerate(block.parameters):
        full = torch.empty(member.numel, dtype=gathered.dtype, device="cpu")
        for target, part in unpack_pairs(block, gathered, position, full):
            target.copy_(part)
        fulls.append(full.view(member.parameter.shape))
    return fulls
