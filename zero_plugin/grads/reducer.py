"""Turns gradients as autograd makes them into reduced chunks, during backward.

One *round* is one backward: every block is reduced once, in one fixed order that is the same on all ranks, whatever
order the gradients come in. A block is launched when all its gradients are there and all earlier blocks were launched;
what is missing at the end of the outermost backward goes out with zeros. Gradients that come after their block was
launched (a weight used again under a reentrant checkpoint) are kept and go out in one more round before the step.

Ranks that ran fewer backwards than others join the rounds they missed, with zeros, before a step: every rank counts
the collectives it issued, and the counts are exchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import EngineStateError
from zero_plugin.grads.offload import GradientShards
from zero_plugin.grads.sentinel import GradientSentinel
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.buffers import Lease, SlabPool
from zero_plugin.runtime.operations import Collective, Copy, Zero
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.partition import Block, ManagedParameter, add_into, pack

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True, slots=True)
class _Fill:
    """A block on its way out of one round."""

    arrived: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)
    lease: Lease | None = None
    expected: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a parameter is laid out."""

    block: Block
    position: int


class GradientReducer:
    """Receives local gradients, reduces them by block, and hands the chunks to `GradientShards`.

    Args:
        backend: lanes and memory.
        group: the ranks.
        shards: where the reduced chunks go.
        config: bucket size, wire dtype, and whether gradients are sharded.
    """

    def __init__(
        self, backend: Backend, group: ProcessGroup, shards: GradientShards, config: ZeroConfig
    ) -> None:
        self._backend = backend
        self._group = group
        self._shards = shards
        self._wire = DTYPES[config.reduce_dtype]
        self._sharded = config.shards_gradients
        self._sharded_states = config.shards_optimizer
        self._parameters: list[ManagedParameter] = []
        self._places: list[_Place] = []
        self._order: list[Block] = []
        self._rank_in_order: dict[int, int] = {}
        self._local: list[Tensor | None] = []
        self._present: list[bool] = []
        self._cleared: set[int] = set()
        self._fills: dict[int, _Fill] = {}
        self._next = 0
        self._issued = 0
        self._forget_before = 0
        self._completed: list[int] = []
        self._open = False
        self._in_flight: deque[Ticket[Any]] = deque()
        self._collectives = backend.lane("collectives", "device")
        self._offload = backend.lane("offload", "device")
        self._fill_pool: SlabPool | None = None
        self._output_pool: SlabPool | None = None
        self._exact = False
        self._live = 0
        self.peak_live_bytes = 0
        """Most device bytes of unreduced gradients (held or packed) seen so far."""
        self.deferred = False
        """True inside `no_sync`: another backward follows before the step."""
        self.generation = 0
        """Changes whenever a gradient arrives or is cleared."""
        self.spent: set[int] = set()
        """Optimizers that stepped on the present gradients."""

    # Blocks ----------------------------------------------------------------------------------------------------

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Take on new blocks; they are launched after the earlier ones, last block first."""
        for block in blocks:
            for position, member in enumerate(block.parameters):
                if member.index != len(self._parameters):
                    self._grow(member.index)
                self._grow(member.index + 1)
                self._parameters[member.index] = member
                self._places[member.index] = _Place(block=block, position=position)
        self._set_order([*self._order, *reversed(blocks)])
        self._make_pools()

    @property
    def order(self) -> tuple[Block, ...]:
        """Blocks in launch order."""
        return tuple(self._order)

    def reorder(self, indices: Sequence[int]) -> None:
        """Launch blocks in the order of these block indices from now on; between rounds only."""
        by_index = {block.index: block for block in self._order}
        self._set_order([by_index[index] for index in indices])

    @property
    def completion_order(self) -> list[int]:
        """Block indices in the order in which the last round's gradients completed them."""
        seen = [index for index in self._completed if index >= 0]
        return seen + [block.index for block in self._order if block.index not in seen]

    def is_present(self, index: int) -> bool:
        """Whether this rank has a gradient of the parameter."""
        return self._present[index]

    @property
    def staging_bytes(self) -> int:
        """Device bytes of the bucket buffers."""
        return sum(pool.nbytes for pool in (self._fill_pool, self._output_pool) if pool is not None)

    @property
    def fill_pool(self) -> SlabPool | None:
        """Bucket buffers of [shards, chunk], shared with the all-gather of updated weights."""
        return self._fill_pool

    @property
    def output_pool(self) -> SlabPool | None:
        """Chunk buffers on the device, shared with the all-gather of updated weights."""
        return self._output_pool

    # Gradients as autograd makes them ----------------------------------------------------------------------------

    def expect(self, index: int) -> None:
        """Make room for the gradient: autograd must not add to a stand-in."""
        parameter = self._parameters[index].parameter
        grad = parameter.grad
        if grad is None:
            if self._present[index]:
                self._cleared.add(index)
        elif isinstance(grad, GradientSentinel):
            parameter.grad = None

    def receive(self, index: int) -> None:
        """Take the gradient out of `Parameter.grad`."""
        member = self._parameters[index]
        grad = member.parameter.grad
        if grad is None or isinstance(grad, GradientSentinel):
            return
        grad = grad.detach()
        if not self._open:
            self._sync_clears(arriving=index)
        if self._places[index].block.optimizer in self.spent:
            member.parameter.grad = self._stand_in(index)
            raise EngineStateError(
                f"parameter {member.name!r} received a gradient, but those of the last step were not cleared: call "
                "zero_grad() after each step (plain torch would add the new gradient to the old one)"
            )
        member.parameter.grad = self._stand_in(index)
        self._present[index] = True
        self.generation += 1
        if grad.layout != torch.strided:
            raise EngineStateError(
                f"parameter {member.name!r} received a {grad.layout} gradient: sharded reduction needs dense ones; "
                "use sparse=False in its embedding"
            )
        self._track(grad.numel() * grad.element_size())
        if self.deferred and not self._sharded:
            self._exact = True
            self._add_local(index, grad)
            return
        self._open_round()
        self._place(index, grad)
        self._launch_ready()

    def end_backward(self) -> None:
        """Launch what is left of the round, with zeros for what has no gradient."""
        if not self._open:
            return
        while self._next < len(self._order):
            self._launch(self._order[self._next])
        self._open = False
        self._fills.clear()
        self._next = 0

    # Between backward and step -----------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Bring every rank to the same set of reduced gradients; all ranks call it."""
        self.end_backward()
        self._sync_clears()
        self._adopt_foreign()
        if any(item is not None for item in self._local):
            self._open_round()
            self.end_backward()
        if self._group.size == 1:
            return
        rows = self._group.exchange(
            torch.tensor([self._issued, self._forget_before], dtype=torch.int64)
        )
        target = max(int(row[0]) for row in rows)
        forget = max(int(row[1]) for row in rows)
        while self._issued < target:
            forgotten = self._issued < forget
            self._open_round()
            self.end_backward()
            if forgotten:
                self._shards.clear(self._order)

    def clear(self, optimizers: Sequence[int]) -> None:
        """Drop the gradients of some optimizers (zero_grad)."""
        self.end_backward()
        self.generation += 1
        blocks = [block for block in self._order if block.optimizer in optimizers]
        for block in blocks:
            for member in block.parameters:
                self._present[member.index] = False
                self._drop_local(member.index)
                member.parameter.grad = None
        self._shards.clear(blocks)
        self._exact = self._exact and any(self._present)
        self.spent.difference_update(optimizers)
        self._forget_before = self._issued

    def zero(self, index: int) -> None:
        """Make a present gradient zero (zero_grad(set_to_none=False))."""
        place = self._places[index]
        self.end_backward()
        self.generation += 1
        self._drop_local(index)
        if not self._shards.is_empty(place.block):
            self._shards.zero_member(place.block, place.position)
        self.spent.discard(place.block.optimizer)

    def abort(self) -> None:
        """Drop every gradient after an exception; the round in progress is completed so that ranks stay in step."""
        try:
            self.end_backward()
        except Exception:  # noqa: BLE001 - the exception that broke the step is the one to report
            self.release()
            self._open = False
            self._fills.clear()
            self._next = 0
        self.clear(sorted({block.optimizer for block in self._order}))

    def release(self) -> None:
        """Give back the buffers of a round in progress."""
        for fill in self._fills.values():
            if fill.lease is not None:
                fill.lease.release()
                fill.lease = None

    def close(self) -> None:
        """Give the buffers back; the lanes belong to the backend."""
        for pool in (self._fill_pool, self._output_pool):
            if pool is not None:
                pool.close()
        self._fill_pool = self._output_pool = None

    # Inside a round ----------------------------------------------------------------------------------------------

    def _open_round(self) -> None:
        if self._open:
            return
        self._open = True
        self._next = 0
        self._completed = []
        self._fills = {
            block.index: _Fill(
                expected=sum(member.parameter.requires_grad for member in block.parameters)
            )
            for block in self._order
        }

    def _place(self, index: int, grad: Tensor) -> None:
        place = self._places[index]
        fill = self._fills.get(place.block.index)
        if fill is None or self._is_launched(place.block) or index in fill.arrived:
            if fill is not None and index in fill.packed and fill.lease is not None:
                add_into(place.block, place.position, grad, self._buffer(place.block, fill.lease))
                self._track(-grad.numel() * grad.element_size())
                return
            self._add_local(index, grad)
            return
        fill.arrived.add(index)
        if len(fill.arrived) == fill.expected:
            self._completed.append(place.block.index)
        if self._local[index] is not None:
            self._add_local(index, grad)
        else:
            self._local[index] = grad
        if self._group.size > 1 and self._rank_in_order[place.block.index] <= self._next + 1:
            self._pack(place, fill)

    def _is_launched(self, block: Block) -> bool:
        return self._rank_in_order[block.index] < self._next

    def _pack(self, place: _Place, fill: _Fill) -> None:
        """Move a held gradient into the block's bucket buffer and let go of it."""
        index = place.block.parameters[place.position].index
        grad = self._local[index]
        if fill.lease is None and self._fill_pool is not None:
            fill.lease = self._fill_pool.acquire(f"gradients of {place.block.name}")
        if fill.lease is None:
            return
        pack(place.block, place.position, grad, self._buffer(place.block, fill.lease))
        fill.packed.add(index)
        self._drop_local(index)

    def _launch_ready(self) -> None:
        while self._next < len(self._order):
            block = self._order[self._next]
            fill = self._fills[block.index]
            if not fill.arrived or len(fill.arrived) < fill.expected:
                return
            self._launch(block)

    def _launch(self, block: Block) -> None:
        fill = self._fills[block.index]
        if self._group.size > 1:
            self._launch_collective(block, fill)
        else:
            self._launch_copy(block)
        self._next += 1
        self._issued += 1

    def _launch_copy(self, block: Block) -> None:
        """One rank: nothing to reduce, the gradients go straight to their tier."""
        if self._in_flight:
            self._in_flight.popleft().wait()
        arrival = self._shards.arrive(block, exact=self._exact)
        sources: list[Tensor] = []
        destinations: list[Tensor] = []
        # A chunk of its own has zero padding from the start; a staging slab holds what it held before.
        absent = [] if arrival.lease is None else block.padding_views(arrival.chunk)
        for position, member in enumerate(block.parameters):
            view = block.own_view(arrival.chunk, position)
            grad = self._local[member.index]
            if grad is None:
                absent.append(view)
            elif grad.numel():
                sources.append(grad.reshape(-1))
                destinations.append(view)
            self._drop_local(member.index)
        after = (*arrival.after, self._backend.mark(f"gradients of {block.name}"))
        if absent:
            after = (*after, self._offload.submit(Zero(destinations=tuple(absent)), after=after))
        written = self._offload.submit(
            Copy(
                destinations=tuple(destinations),
                sources=tuple(sources),
                direction="device_to_host" if self._shards.tier == "host" else None,
            ),
            after=after,
        )
        self._in_flight.append(written)
        self._shards.commit(block, arrival, written, last=not self.deferred)

    def _launch_collective(self, block: Block, fill: _Fill) -> None:
        for position, member in enumerate(block.parameters):
            if member.index not in fill.packed:
                self._pack(_Place(block=block, position=position), fill)
        if fill.lease is None:
            return
        buffer = self._buffer(block, fill.lease)
        buffer[:, block.layout.end :].zero_()
        arrival = self._shards.arrive(block, exact=self._exact)
        ready = self._backend.mark(f"gradients of {block.name}")
        kind = "reduce_scatter" if self._sharded_states else "all_reduce"
        stays = self._shards.tier == "device"
        staging = (
            None
            if stays or self._output_pool is None
            else self._output_pool.acquire(f"reduced {block.name}")
        )
        output = (
            arrival.chunk if staging is None else staging.tensor(arrival.chunk.dtype, block.chunk)
        )
        reduced = self._collectives.submit(
            Collective(
                kind=kind,
                group=self._group,
                output=output,
                input=buffer,
                tag=block.index,
                label=block.name,
            ),
            after=(ready, *(arrival.after if stays else ())),
        )
        fill.lease.release(after=reduced)
        fill.lease = None
        written = reduced
        if staging is not None:
            written = self._offload.submit(
                Copy(destinations=(arrival.chunk,), sources=(output,), direction="device_to_host"),
                after=(reduced, *arrival.after),
            )
            staging.release(after=written)
        self._shards.commit(block, arrival, written, last=not self.deferred)

    def _buffer(self, block: Block, lease: Lease) -> Tensor:
        shards = block.layout.shards
        return lease.tensor(self._wire, shards * block.chunk).view(shards, block.chunk)

    # Local gradients ---------------------------------------------------------------------------------------------

    def _add_local(self, index: int, grad: Tensor) -> None:
        """Add to a held gradient, in fp32."""
        held = self._local[index]
        self._local[index] = grad if held is None else held.float().add_(grad)
        if held is not None:
            merged = self._local[index]
            after = 0 if merged is None else merged.numel() * merged.element_size()
            self._track(
                after - held.numel() * held.element_size() - grad.numel() * grad.element_size()
            )

    def _drop_local(self, index: int) -> None:
        held = self._local[index]
        if held is not None:
            self._track(-held.numel() * held.element_size())
        self._local[index] = None

    def _track(self, nbytes: int) -> None:
        self._live += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self._live)

    def _adopt_foreign(self) -> None:
        """Take gradients that user code put into `Parameter.grad` itself."""
        for member in self._parameters:
            grad = member.parameter.grad
            if grad is not None and not isinstance(grad, GradientSentinel):
                self._present[member.index] = True
                self.generation += 1
                self._track(grad.numel() * grad.element_size())
                self._add_local(member.index, grad.detach())
                member.parameter.grad = self._stand_in(member.index)

    def _sync_clears(self, arriving: int = -1) -> None:
        """Forget gradients whose `Parameter.grad` user code set to None (`model.zero_grad()`)."""
        cleared = {
            member.index
            for member in self._parameters
            if self._present[member.index]
            and member.parameter.grad is None
            and member.index != arriving
        } | self._cleared
        self._cleared = set()
        if not cleared:
            return
        self.generation += 1
        for block in self._order:
            gone = [i for i, member in enumerate(block.parameters) if member.index in cleared]
            if not gone:
                continue
            for position in gone:
                index = block.parameters[position].index
                self._present[index] = False
                self._drop_local(index)
            if any(self._present[member.index] for member in block.parameters):
                if not self._shards.is_empty(block):
                    for position in gone:
                        self._shards.zero_member(block, position)
            else:
                self._shards.clear([block])
        self._exact = self._exact and any(self._present)
        for optimizer in {block.optimizer for block in self._order}:
            members = [
                m.index
                for block in self._order
                if block.optimizer == optimizer
                for m in block.parameters
            ]
            if not any(self._present[index] for index in members):
                self.spent.discard(optimizer)
        self._forget_before = self._issued

    def _stand_in(self, index: int) -> GradientSentinel:
        member = self._parameters[index]
        return GradientSentinel.stand_in(member.parameter, member.name, lambda: self.zero(index))

    def _set_order(self, order: list[Block]) -> None:
        self._order = order
        self._rank_in_order = {block.index: position for position, block in enumerate(order)}

    def _grow(self, count: int) -> None:
        while len(self._local) < count:
            self._local.append(None)
            self._present.append(False)
            self._parameters.append(None)  # type: ignore[arg-type]
            self._places.append(None)  # type: ignore[arg-type]

    def _make_pools(self) -> None:
        if self._group.size == 1 or not self._order:
            return
        fill = max(
            block.layout.shards * block.chunk * max(self._wire.itemsize, block.dtype.itemsize)
            for block in self._order
        )
        chunk = max(block.chunk for block in self._order) * torch.float32.itemsize
        if self._fill_pool is None or self._fill_pool.slab_bytes < fill:
            if self._fill_pool is not None:
                self._fill_pool.close()
            self._fill_pool = SlabPool(
                name="gradient buckets",
                backend=self._backend,
                slab_bytes=fill,
                slabs=2,
                memory="device",
                setting="bucket_bytes",
            )
        if self._output_pool is None or self._output_pool.slab_bytes < chunk:
            if self._output_pool is not None:
                self._output_pool.close()
            self._output_pool = SlabPool(
                name="reduced chunks",
                backend=self._backend,
                slab_bytes=chunk,
                slabs=2,
                memory="device",
                setting="bucket_bytes",
            )
