"""Turns gradients as autograd makes them into reduced chunks, during backward.

One *round* is one backward: every block is reduced once, in one fixed order that is the same on all ranks, whatever
order the gradients come in. A block is launched when all its gradients are there and all earlier blocks were launched;
what is missing at the end of the outermost backward goes out with zeros. Gradients that come after their block was
launched (a weight used again under a reentrant checkpoint) are kept and go out in one more round before the step.

Ranks need not run the same number of backwards. Every round is announced to the others, and so is the step that follows
the last one; a rank that is about to step while another announces a round joins it with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import EngineStateError
from zero_plugin.grads.buckets import Buckets
from zero_plugin.grads.local import LocalGradients
from zero_plugin.grads.offload import GradientShards
from zero_plugin.grads.parts import Parts
from zero_plugin.grads.scaler import LossScaler
from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.buffers import Lease
from zero_plugin.runtime.operations import Collective, Copy, Zero
from zero_plugin.runtime.ticket import Ticket
from zero_plugin.sharding.control import Control
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.partition import Block, pack

_ROUND, _STEP = 1, 2
"""What a rank announces: one more round, or the step."""


@dataclass(kw_only=True, slots=True)
class _Fill:
    """A block on its way out of one round."""

    expected: int
    arrived: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)
    lease: Lease | None = None


class GradientReducer:
    """Receives local gradients, reduces them by block, and hands the chunks to `GradientShards`.

    Args:
        backend: lanes and memory.
        group: the ranks.
        control: announces rounds to them.
        shards: where the reduced chunks go.
        buckets: device buffers.
        config: what is sharded.
        scaler: knows whether the loss was scaled.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts it connects
        self,
        backend: Backend,
        group: ProcessGroup,
        control: Control,
        shards: GradientShards,
        buckets: Buckets,
        config: ZeroConfig,
        scaler: LossScaler,
    ) -> None:
        self._backend = backend
        self._group = group
        self._control = control
        self._shards = shards
        self._buckets = buckets
        self._scaler = scaler
        self._sharded = config.shards_gradients
        self._sharded_states = config.shards_optimizer
        self.local = LocalGradients(self.zero)
        """Gradients not reduced yet."""
        self.parts = Parts(self.local)
        """Of a backward that several micro-batches run together."""
        self._places: dict[int, tuple[Block, int]] = {}
        self._order: list[Block] = []
        self._rank_in_order: dict[int, int] = {}
        self._fills: dict[int, _Fill] = {}
        self._next = 0
        self._open = False
        self._synced = False
        self._announced: Ticket[list[Tensor]] | None = None
        self._unsaid_clears: set[int] = set()
        self._own_rounds = 0
        self._completed: list[int] = []
        self._exact = False
        self._last_copy: Ticket[Any] | None = None
        self._collectives = backend.lane("collectives", "device")
        self._offload = backend.lane("offload", "device")
        self.reduced: Callable[[Block, Container[int]], None] | None = None
        """Told of a block whose gradient is complete, and of the members that have one, before the step."""
        self.showing = False
        """True while `Parameter.grad` holds full gradients to read: no backward may add to them."""
        self.deferred = False
        """True inside `no_sync`: another backward follows before the step."""
        self.spent: set[int] = set()
        """Optimizers that stepped on the present gradients."""
        self._stale: dict[int, str] = {}

    # Blocks ----------------------------------------------------------------------------------------------------

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Take on new blocks; they are launched after the earlier ones, last block first."""
        for block in blocks:
            self.local.add_members(block.parameters)
            self._places.update(
                (member.index, (block, position))
                for position, member in enumerate(block.parameters)
            )
        self._set_order([*self._order, *reversed(blocks)])

    def reorder(self, indices: Sequence[int]) -> None:
        """Launch blocks in the order of these block indices from now on; between rounds only."""
        by_index = {block.index: block for block in self._order}
        self._set_order([by_index[index] for index in indices])

    @property
    def completion_order(self) -> list[int]:
        """Block indices in the order in which the last round's gradients completed them; the others follow."""
        return self._completed + [
            block.index for block in self._order if block.index not in self._completed
        ]

    # Gradients as autograd makes them ----------------------------------------------------------------------------

    def expect(self, index: int) -> None:
        """A gradient of the parameter is about to be accumulated."""
        if self.showing:
            block, position = self._places[index]
            raise EngineStateError(
                f"a backward reached parameter {block.parameters[position].name!r} inside engine.full_grads(): read the "
                "gradients there, and run backward outside"
            )
        self.local.make_room(index)

    def receive(self, index: int) -> None:
        """Take the gradient out of `Parameter.grad`.

        Raises:
            EngineStateError: the gradient is sparse.
        """
        if not self._synced:
            self._sync_clears(arriving=index)
            self._synced = True
        self._scaler.check_applied()
        grad = self.local.take(index)
        if grad is None:
            return
        block, position = self._places[index]
        if block.optimizer in self.spent:
            self._stale[block.optimizer] = block.parameters[position].name
        if self.parts.count:
            self._place_part(block, index, self.parts.current(), grad)
            return
        if self.deferred and not self._sharded:
            self._exact = True
            self.local.hold(index, grad)
            return
        self._open_round()
        self._place(block, position, grad)
        self._launch_ready()

    def begin_parts(self, count: int) -> None:
        """The backward that begins is that of several micro-batches; all ranks call it."""
        self.end_backward()
        # On top of earlier gradients the order of the sum would show.
        adds = self._group.size == 1 and count > 1 and not self.local.any_present()
        self.parts.start(count, adds=adds)
        self._exact = self._exact or adds
        self._open_round()

    def receive_part(self, index: int, part: int, grad: Tensor) -> None:
        """Take a gradient that is one micro-batch's alone."""
        if not self._synced:
            self._sync_clears()
            self._synced = True
        self._scaler.check_applied()
        block, position = self._places[index]
        if block.optimizer in self.spent:
            self._stale[block.optimizer] = block.parameters[position].name
        self._place_part(block, index, part, self.local.adopt(index, grad))

    def _place_part(self, block: Block, index: int, part: int, grad: Tensor) -> None:
        if self.parts.put(block, index, part, grad, self._shards.dtype(block)):
            self._launch_ready()
        else:
            self.local.hold_late(index, grad)

    def end_backward(self) -> None:
        """Launch what is left of the round, with zeros for what has no gradient; then the late gradients."""
        self._synced = False
        if not self._open:
            return
        self._close_round()
        while late := self.local.next_late():
            completed = self._completed
            self._open_round()
            self._completed = completed
            for index in late:
                self._fills[self._places[index][0].index].arrived.add(index)
            self._close_round()

    # Between backward and step -----------------------------------------------------------------------------------

    def notice_user_writes(self) -> None:
        """See what user code did to `Parameter.grad`: set to None (`model.zero_grad()`), or to a gradient of its own."""
        if self.showing:
            return
        self._sync_clears()
        if self.local.foreign():
            self.local.touch()

    def has_unspent(self) -> bool:
        """Whether a gradient waits for its optimizer's step."""
        return any(
            block.optimizer not in self.spent
            and self.local.any_present(member.index for member in block.parameters)
            for block in self._order
        )

    def check_cleared(self, optimizer: int) -> None:
        """Before a step on gradients that came in part before, in part after the last one.

        Raises:
            EngineStateError: plain torch would have added them up.
        """
        if optimizer in self._stale:
            raise EngineStateError(
                f"parameter {self._stale[optimizer]!r} received a gradient, but those of the last step were not "
                "cleared: call zero_grad() after each step (plain torch would add the new gradient to the old one)"
            )

    def finalize(self) -> None:
        """Bring every rank to the same set of reduced gradients; all ranks call it."""
        self.end_backward()
        self.notice_user_writes()
        if not self.showing:
            for index in self.local.foreign():
                grad = self.local.take(index)
                if grad is not None:
                    self.local.hold(index, grad)
        if self.local:
            self._open_round()
            self.end_backward()
        while self._group.size > 1:
            rows = self._control.exchange(self._news(_STEP), label="before the step")
            self._hear(rows)
            if not any(int(row[0]) == _ROUND for row in rows):
                break
            self._join_round(max(int(row[3]) for row in rows))

    def clear(self, optimizers: Sequence[int]) -> None:
        """Drop the gradients of some optimizers (zero_grad)."""
        self.end_backward()
        blocks = [block for block in self._order if block.optimizer in optimizers]
        for block in blocks:
            for member in block.parameters:
                self.local.forget(member.index, clear=True)
        self._shards.clear(blocks)
        for optimizer in optimizers:
            self._forget_step(optimizer)
        self._note_clear(optimizers)

    def zero(self, index: int) -> None:
        """Make a present gradient zero (zero_grad(set_to_none=False))."""
        self.end_backward()
        block, position = self._places[index]
        self.local.drop(index)
        if not self._shards.is_empty(block):
            self._shards.zero_member(block, position)
        self.local.touch()
        self._forget_step(block.optimizer)

    def abort(self) -> None:
        """Drop every gradient after an exception; the round in progress is completed so that ranks stay in step."""
        try:
            self.end_backward()
        except Exception:  # noqa: BLE001 - the exception that broke the step is the one to report
            self.release()
            self._open = False
            self.parts.end()
            self._fills.clear()
            self._next = 0
        self.clear(sorted({block.optimizer for block in self._order}))
        self._last_copy = None

    def release(self) -> None:
        """Give back the buffers of a round in progress."""
        for fill in self._fills.values():
            if fill.lease is not None:
                fill.lease.release()
                fill.lease = None

    # Inside a round ----------------------------------------------------------------------------------------------

    def _open_round(self) -> None:
        if self._open:
            return
        self._open = True
        self._completed = []
        if self._group.size > 1:
            self._announced = self._control.announce(self._news(_ROUND), label="gradients")
            self._own_rounds += 1
        self._make_fills()

    def _join_round(self, parts: int) -> None:
        """Take part, with zeros, in a round that another rank announced."""
        self._open = True
        self._announced = None
        self.parts.start(parts, adds=False)
        self._make_fills()
        self._close_round()

    def _make_fills(self) -> None:
        self._next = 0
        self._fills = {
            block.index: _Fill(
                expected=sum(member.parameter.requires_grad for member in block.parameters)
            )
            for block in self._order
        }

    def _close_round(self) -> None:
        while self._next < len(self._order):
            self._launch(self._order[self._next])
        self._open = False
        self.parts.end()
        self._fills.clear()
        self._next = 0

    def _place(self, block: Block, position: int, grad: Tensor) -> None:
        index = block.parameters[position].index
        fill = self._fills[block.index]
        if index in fill.arrived:
            # Used again under a reentrant checkpoint: kept apart whether or not its block is gone already, so that the
            # order of the sum does not depend on the size of blocks.
            self.local.hold_late(index, grad)
            return
        self.local.hold(index, grad)
        if self._rank_in_order[block.index] < self._next:
            return
        fill.arrived.add(index)
        if len(fill.arrived) == fill.expected:
            self._completed.append(block.index)
        # Two buckets: the next to go and the one after it. A later block must wait outside, or the next could starve.
        if self._group.size > 1 and self._rank_in_order[block.index] <= self._next + 1:
            self._pack(block, position, fill)

    def _pack(self, block: Block, position: int, fill: _Fill) -> None:
        """Move a held gradient (zeros, if there is none) into the block's bucket and let go of it."""
        index = block.parameters[position].index
        if fill.lease is None:
            fill.lease = self._buckets.acquire_gathered(f"gradients of {block.name}")
        pack(block, position, self.local.held(index), self._bucket(block, fill.lease))
        fill.packed.add(index)
        self.local.drop(index)

    def _launch_ready(self) -> None:
        while self._next < len(self._order):
            block = self._order[self._next]
            fill = self._fills[block.index]
            if self.parts.count:
                if not self.parts.is_complete(block, fill.expected):
                    return
            elif len(fill.arrived) < fill.expected:
                return
            self._launch(block)

    def _launch(self, block: Block) -> None:
        fill = self._fills[block.index]
        if self.parts.count:
            self._agree_on_parts()
            fill.arrived |= self.parts.load(block, self._shards.dtype(block))
        if self._group.size > 1:
            self._launch_collective(block, fill)
        elif any(self.local.held(member.index) is not None for member in block.parameters):
            self._launch_copy(block)
        if self.parts.count:
            fill.packed.clear()
            if self.parts.advance(block):
                self._launch(block)
                return
            if fill.expected and len(fill.arrived) == fill.expected:
                self._completed.append(block.index)
        self._next += 1
        is_whole = fill.expected > 0 and len(fill.arrived) == fill.expected
        if self.reduced is not None and is_whole and not self.deferred:
            self.reduced(block, frozenset(fill.arrived))

    def _is_last(self, block: Block) -> bool:
        """Whether a step may follow a block's contribution."""
        return not self.deferred and (not self.parts.count or self.parts.is_last(block))

    def _agree_on_parts(self) -> None:
        """Ranks may have different numbers of micro-batches: those with fewer add zeros.

        Raises:
            EngineStateError: a rank runs an ordinary backward meanwhile.
        """
        if self._announced is None:
            return
        rows = self._announced.wait()
        self._announced = None
        self._hear(rows)
        for rank, row in enumerate(rows):
            if int(row[0]) == _ROUND and not int(row[3]):
                raise EngineStateError(
                    f"rank {rank} runs a backward of one micro-batch while rank {self._control.rank} runs layer_first with "
                    f"{self.parts.count}: call layer_first on every rank"
                )
        self.parts.count = max(int(row[3]) for row in rows)

    def _launch_copy(self, block: Block) -> None:
        """One rank: nothing to reduce, the gradients go straight to their tier."""
        if self._last_copy is not None:
            # Gradients of two blocks are alive at once: the one that is copied and the one that is filled.
            self._last_copy.wait()
        arrival = self._shards.arrive(block, exact=self._exact)
        pairs: list[tuple[Tensor, Tensor]] = []
        # A chunk of its own has zero padding from the start; a staging slab holds what it held before.
        absent = [] if arrival.lease is None else block.padding_views(arrival.chunk)
        for position, member in enumerate(block.parameters):
            view = block.own_view(arrival.chunk, position)
            grad = self.local.held(member.index)
            if grad is None:
                absent.append(view)
            elif grad.numel():
                pairs.append((view, grad.reshape(-1)))
            self.local.drop(member.index)
        after = (*arrival.after, self._backend.mark(f"gradients of {block.name}"))
        if absent:
            label = f"no gradients of {block.name}"
            zeroed = self._offload.submit(
                Zero(destinations=tuple(absent), label=label), after=after
            )
            after = (*after, zeroed)
        written = self._offload.submit(
            Copy(
                destinations=tuple(pair[0] for pair in pairs),
                sources=tuple(pair[1] for pair in pairs),
                direction=None if self._shards.tier_of(block) == "device" else "device_to_host",
                label=f"offload {block.name}",
            ),
            after=after,
        )
        self._last_copy = written
        self._shards.commit(block, arrival, written, last=self._is_last(block))

    def _news(self, kind: int) -> Tensor:
        """What the other ranks must know: what comes next, whether sums are exact, and what was cleared."""
        cleared = sum(1 << optimizer for optimizer in self._unsaid_clears)
        self._unsaid_clears.clear()
        news = [kind, int(self._exact), cleared, self.parts.count]
        return torch.tensor(news, dtype=torch.int64, device="cpu")

    def _hear(self, rows: Sequence[Tensor]) -> None:
        """Take the others' news in."""
        self._exact = any(int(row[1]) for row in rows)
        if self._own_rounds:
            return
        # What this rank holds came from rounds it only joined: it goes when its makers clear it.
        cleared = [
            number
            for number in {block.optimizer for block in self._order}
            if any(int(row[2]) >> number & 1 for row in rows)
        ]
        if cleared:
            self._shards.clear([block for block in self._order if block.optimizer in cleared])
            self.local.touch()

    def _launch_collective(self, block: Block, fill: _Fill) -> None:
        for position, member in enumerate(block.parameters):
            if member.index not in fill.packed:
                self._pack(block, position, fill)
        lease = fill.lease or self._buckets.acquire_gathered(f"gradients of {block.name}")
        bucket = self._bucket(block, lease)
        bucket[:, block.layout.end :].zero_()
        if not self._sharded and self._announced is not None:
            # Ranks that summed micro-batches here and ranks that did not must keep the result in one dtype.
            self._hear(self._announced.wait())
            self._announced = None
        ready = self._backend.mark(f"gradients of {block.name}")
        arrival = self._shards.arrive(block, exact=self._exact)
        stays = self._shards.tier_of(block) == "device"
        staging = None if stays else self._buckets.acquire_chunk(f"reduced {block.name}")
        output = (
            arrival.chunk if staging is None else staging.tensor(arrival.chunk.dtype, block.chunk)
        )
        written = self._collectives.submit(
            Collective(
                kind="reduce_scatter" if self._sharded_states else "all_reduce",
                group=self._group,
                output=output,
                input=bucket,
                tag=block.index,
                label=f"reduce {block.name}",
            ),
            after=(ready, *(arrival.after if stays else ())),
        )
        lease.release(after=written)
        fill.lease = None
        if staging is not None:
            written = self._offload.submit(
                Copy(
                    destinations=(arrival.chunk,),
                    sources=(output,),
                    direction="device_to_host",
                    label=f"offload {block.name}",
                ),
                after=(written, *arrival.after),
            )
            staging.release(after=written)
        self._shards.commit(block, arrival, written, last=self._is_last(block))

    def _bucket(self, block: Block, lease: Lease) -> Tensor:
        shards = block.layout.shards
        flat = lease.tensor(self._buckets.wire, shards * block.chunk)
        return flat.view(shards, block.chunk)

    # Clearing ----------------------------------------------------------------------------------------------------

    def _sync_clears(self, arriving: int = -1) -> None:
        """Forget gradients whose `Parameter.grad` user code set to None (`model.zero_grad()`)."""
        cleared = self.local.take_cleared(arriving)
        if not cleared:
            return
        for index in cleared:
            self.local.forget(index, clear=False)
        for block in self._order:
            gone = [i for i, member in enumerate(block.parameters) if member.index in cleared]
            if not gone:
                continue
            if not self.local.any_present(member.index for member in block.parameters):
                self._shards.clear([block])
            elif not self._shards.is_empty(block):
                for position in gone:
                    self._shards.zero_member(block, position)
        whole = {
            number
            for number in {block.optimizer for block in self._order}
            if not self.local.any_present(
                member.index
                for block in self._order
                if block.optimizer == number
                for member in block.parameters
            )
        }
        for optimizer in whole:
            self._forget_step(optimizer)
        self._note_clear(whole)

    def _forget_step(self, optimizer: int) -> None:
        self.spent.discard(optimizer)
        self._stale.pop(optimizer, None)

    def _note_clear(self, optimizers: Iterable[int]) -> None:
        self.local.touch()
        self._unsaid_clears.update(optimizers)
        if not self.local.any_present():
            self._exact = False
            self._own_rounds = 0

    def _set_order(self, order: list[Block]) -> None:
        self._order = order
        self._rank_in_order = {block.index: position for position, block in enumerate(order)}
