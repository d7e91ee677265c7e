"""Runs a planned step: gradient in | update | weights out, block after block on lanes.

The low-precision weights of a block are on their way to the device while the next block is updated (ZeRO-Offload,
ATC'21, Algorithm 2, line 15), through two staging slabs of one block each. The whole step is issued at once and the host
goes on: a slab that is still in use is handed on with the operations that must end first.

A delayed update (`hold`, then `publish` one step later) leaves the new weights beside the states until they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from zero_plugin.config import Tier
from zero_plugin.grads.buckets import Buckets
from zero_plugin.grads.norm import Clip
from zero_plugin.grads.offload import GradientShards
from zero_plugin.optim.blocks import BlockStates, BlockUpdate
from zero_plugin.optim.plan import BlockPlan, StepPlan
from zero_plugin.optim.rule import Rule
from zero_plugin.optim.swap import SwappedStates, Tile
from zero_plugin.runtime.backend import Backend, Lane
from zero_plugin.runtime.buffers import Lease, LeaseState, SlabPool
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.runtime.operations import Collective, Copy, Update
from zero_plugin.runtime.ticket import Ticket
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.parameters import RESIDENT
from zero_plugin.sharding.partition import Block, rebuild, unpack_pairs
from zero_plugin.sharding.weights import WeightShards

_T = TypeVar("_T")
_Memory = Literal["device", "host"]
"""Where an update runs; states on NVMe come to host memory for it."""
_SLABS = 2
_SMALLEST = 64
"""Bytes of a slab for a block without elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """One block's update under way.

    Attributes:
        plan: the block and its members that are updated.
        states: its states.
        output: its new low-precision weights, or None where the master is what is published.
        lease: of the slab they lie in, or None.
        ticket: of the update.
    """

    plan: BlockPlan
    states: BlockStates
    output: Tensor | None
    lease: Lease | None
    ticket: Ticket[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One block's weights on their way.

    Attributes:
        plan: the block and its members that are written.
        ticket: when it ends, the members' compute weights are the updated ones.
    """

    plan: BlockPlan
    ticket: Ticket[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What the blocks of one step share."""

    hyper: Tensor
    states: Mapping[int, BlockStates]
    rule: Rule | None
    clip: Clip
    hold: bool
    source: tuple[Tensor, ...] | None = None


class StepPipeline:
    """Executes step plans.

    Args:
        backend: lanes and memory.
        group: the ranks.
        gradients: where the reduced gradients lie.
        tier: where states lie and the update runs.
        buckets: device buffers.
        sharded: whether optimizer states are sharded.
        holds: whether updated weights wait for their publication (a delayed update).
        weights: shards of the compute weights, where they are sharded.
        swap: the states, where they lie on NVMe.
    """

    def __init__(  # noqa: PLR0913 - the parts it connects
        self,
        backend: Backend,
        group: ProcessGroup,
        gradients: GradientShards,
        tier: Tier,
        buckets: Buckets,
        *,
        sharded: bool,
        holds: bool = False,
        weights: WeightShards | None = None,
        swap: SwappedStates | None = None,
    ) -> None:
        self._swap = swap
        self._weights = weights
        self._weights_tier: Tier = "device" if weights is None else weights.tier
        self._backend = backend
        self._group = group
        self._gradients = gradients
        # Of blocks that do not stay on the device.
        self._tier: _Memory = "device" if tier == "device" else "host"
        self._buckets = buckets
        self._gathers = sharded and group.size > 1
        self._upload = backend.lane("upload", "device")
        self._collectives = backend.lane("collectives", "device")
        self._publish = backend.lane("publish", "device")
        self._outputs: dict[_Memory, SlabPool] = {}
        self._inputs: dict[_Memory, SlabPool] = {}
        self._holds = holds
        self._held: dict[int, tuple[_Memory, Tensor]] = {}
        self._running: dict[int, Ticket[Any]] = {}

    def planned(self, blocks: Sequence[Block]) -> dict[_Memory, int]:
        """Bytes of staging in each memory with these blocks."""
        planned: dict[_Memory, int] = {"device": 0, "host": 0}
        for block in blocks:
            if self._keeps(block):
                planned[self._memory(block)] += block.chunk * block.dtype.itemsize
        for memory in planned:
            sizes = self._sizes(blocks, memory)
            planned[memory] += sum(_SLABS * round_to_pages(size) for size in sizes if size)
        return planned

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Reserve staging for the largest block, and what holds the updated weights of each."""
        for block in blocks:
            if self._keeps(block) and block.index not in self._held:
                nbytes = block.chunk * block.dtype.itemsize
                raw = self._backend.allocate(max(nbytes, _SMALLEST), self._memory(block))
                chunk = raw[:nbytes].view(block.dtype)
                self._held[block.index] = (self._memory(block), chunk)
        for memory in ("device", "host"):
            outputs, inputs = self._sizes(blocks, memory)
            self._reserve(self._outputs, memory, "updated weights", outputs)
            self._reserve(self._inputs, memory, "gradients for the update", inputs)

    def _memory(self, block: Block) -> _Memory:
        """Where a block is updated."""
        return "device" if block.on_device else self._tier

    def _lane(self, block: Block) -> Lane:
        memory = self._memory(block)
        return self._backend.lane("update" if memory == self._tier else "update on device", memory)

    def _sizes(self, blocks: Sequence[Block], memory: _Memory) -> tuple[int, int]:
        """Bytes of the largest low-precision chunk to write, and of the largest gradient to fetch, to update in a memory."""
        here = [block for block in blocks if self._memory(block) == memory]
        outputs = [
            max(block.chunk * block.dtype.itemsize, _SMALLEST)
            for block in here
            if self._stages_output(block)
        ]
        inputs = [
            max(block.chunk * 4, _SMALLEST)
            for block in here
            if self._gradients.tier_of(block) != memory
        ]
        return max(outputs, default=0), max(inputs, default=0)

    def _keeps(self, block: Block) -> bool:
        """Whether a block's updated weights are held in memory of their own."""
        return self._holds and (self._swap is not None or block.dtype != torch.float32)

    def _stages_output(self, block: Block) -> bool:
        """Whether updated weights pass through a slab beside the optimizer's states."""
        if self._swap is None and block.dtype == torch.float32:
            return False  # The master is published.
        if block.unit == RESIDENT:
            return self._memory(block) == "host"
        return self._memory(block) != self._weights_tier

    def staging_bytes(self, memory: _Memory) -> int:
        """Bytes of staging in a memory, held weights included."""
        held = sum(
            chunk.numel() * chunk.element_size()
            for at, chunk in self._held.values()
            if at == memory
        )
        pools = (pools.get(memory) for pools in (self._outputs, self._inputs))
        return held + sum(pool.nbytes for pool in pools if pool is not None)

    def run(
        self,
        plan: StepPlan,
        states: Mapping[int, BlockStates],
        rule: Rule | None,
        clip: Clip,
        begun: Callable[[BlockPlan], Updated | None] | None = None,
        *,
        backwards: bool = False,
    ) -> list[Published]:
        """Issue every block's work; the host waits for none of it.

        Args:
            plan: the step.
            states: of each block.
            rule: the compiled rule, or None.
            clip: factor and bound.
            begun: gives the update of a block that has begun before, or None.
            backwards: whether updates have begun in the order of backward: weights are then written in that order too, since
                copies and collectives keep theirs. The same on all ranks.
        """
        step = _Step(hyper=plan.hyper, states=states, rule=rule, clip=clip, hold=False)
        published: list[Published] = []
        ordered = self._ordered(plan)
        for item in reversed(ordered) if backwards else ordered:
            done = begun(item) if begun is not None else None
            if done is not None:
                published.append(self._publish_block(done))
            else:
                published.append(self._guarded(item, step, self._run_and_publish))
        return published

    def hold(
        self,
        plan: StepPlan,
        states: Mapping[int, BlockStates],
        rule: Rule | None,
        clip: Clip,
        source: tuple[Tensor, ...] | None = None,
    ) -> list[Updated]:
        """Issue every block's update, and leave the compute weights as they are until `publish`.

        Args:
            plan: the step.
            states: of each block.
            rule: the compiled rule, or None.
            clip: factor and bound.
            source: what the update of a single block reads in place of its master and states.
        """
        step = _Step(
            hyper=plan.hyper, states=states, rule=rule, clip=clip, hold=True, source=source
        )
        return [self._guarded(item, step, self._issue_block) for item in self._ordered(plan)]

    def publish(self, held: Sequence[Updated]) -> list[Published]:
        """Issue the publication of held weights; the next update of a block comes after it."""
        return [self._publish_block(item) for item in held]

    def held_output(self, block: Block) -> Tensor | None:
        """Where a block's updated weights are held; None where the master itself is published."""
        held = self._held.get(block.index)
        return None if held is None else held[1]

    def running(self, block: Block) -> tuple[Ticket[Any], ...]:
        """What last used a block's states, if that may still run."""
        ticket = self._running.get(block.index)
        return () if ticket is None else (ticket,)

    def follow(self, block: Block, ticket: Ticket[Any]) -> None:
        """Have a block's next update come after `ticket`."""
        self._running[block.index] = ticket

    def wait(self, *, again: bool = True, but: Container[int] = ()) -> None:
        """Wait until states and weights are those of the last step.

        Args:
            again: raise an error also if somebody has been told of it.
            but: blocks that are left out.

        Raises:
            LaneError: an operation failed; the others are waited for all the same.
        """
        failed: Ticket[Any] | None = None
        waited = [index for index in self._running if index not in but]
        for ticket in [self._running.pop(index) for index in waited]:
            ticket.settle()
            failure = ticket.failure
            if failed is None and failure is not None and (again or not failure.observed):
                failed = ticket
        if failed is not None:
            failed.wait()

    def forget(self) -> None:
        """Let go of what ended, well or not; for a step that is given up, once nothing runs."""
        self._running.clear()
        for pools in (self._outputs, self._inputs):
            for pool in pools.values():
                pool.take_back()

    def _ordered(self, plan: StepPlan) -> tuple[BlockPlan, ...]:
        if self._swap is None:
            return plan.blocks
        self._swap.begin_step([tile for item in plan.blocks for tile in self._tiles(item)])
        return tuple(reversed(plan.blocks)) if self._swap.backwards else plan.blocks

    def gather_chunk(self, block: Block, chunk: Tensor) -> list[Tensor]:
        """Full CPU tensors of every member from all ranks' chunks; a collective where states are sharded.

        Args:
            block: the block.
            chunk: this rank's chunk, fp32 or lower, on any device.
        """
        shards = block.layout.shards
        if not self._gathers:
            return rebuild(block, chunk.view(1, -1))
        gathered = torch.empty(shards, block.chunk, dtype=chunk.dtype, device=block.device)
        self._collectives.submit(
            self._all_gather(block, chunk.to(block.device), gathered, "states")
        ).wait()
        return rebuild(block, gathered)

    def close(self) -> None:
        """Give the staging back."""
        for pools in (self._outputs, self._inputs):
            for pool in pools.values():
                pool.close()
            pools.clear()
        self._held.clear()
        self._running.clear()

    # One block ---------------------------------------------------------------------------------------------------

    def _run_and_publish(self, plan: BlockPlan, step: _Step, leases: list[Lease]) -> Published:
        return self._publish_block(self._issue_block(plan, step, leases))

    @staticmethod
    def _guarded(
        plan: BlockPlan, step: _Step, issue: Callable[[BlockPlan, _Step, list[Lease]], _T]
    ) -> _T:
        leases: list[Lease] = []
        try:
            return issue(plan, step, leases)
        except BaseException:
            # What was not issued will not give its slabs back.
            for lease in leases:
                if lease.state in (LeaseState.HELD, LeaseState.IN_FLIGHT):
                    lease.release()
            raise

    def _issue_block(self, plan: BlockPlan, step: _Step, leases: list[Lease]) -> Updated:
        states, rule = step.states[plan.block.index], step.rule
        block = plan.block
        gradient, after, input_lease = self._gradient(block)
        if input_lease is not None:
            leases.append(input_lease)
        output, output_lease, free = (
            (self.held_output(block), None, ()) if step.hold else self._output(states)
        )
        if output_lease is not None:
            leases.append(output_lease)
        after = (*after, *free)
        if output is not None and self._is_filled(plan, states, output):
            after = (*after, *self._fill_output(block, output, free))
        # What still reads the block's states, its last publication included.
        running = self._running.get(block.index)
        if running is not None:
            after = (*after, running)
        updated = self._backend.mark(f"step of {block.name}")
        if self._swap is not None and rule is not None and output is not None:
            fields = {
                "positions": plan.positions,
                "rows": plan.rows,
                "gradient": gradient,
                "output": output,
                "rule": rule,
                "hyper": step.hyper,
                "clip": step.clip,
            }
            for tile in self._tiles(plan):
                updated = self._swap.update(fields, tile, (*after, updated))
        else:
            updater = BlockUpdate(
                states=states,
                positions=plan.positions,
                gradient=gradient,
                output=output,
                direct=self._writes_weights(states) and not step.hold,
                rule=rule,
                hyper=step.hyper,
                rows=plan.rows,
                clip=step.clip,
                groups=plan.groups,
                source=step.source,
            )
            updated = self._lane(block).submit(
                Update(updater=updater, label=f"update {block.name}"), after=(*after, updated)
            )
        self._gradients.read_by(block, updated)
        if input_lease is not None:
            input_lease.release(after=updated)
        self._running[block.index] = updated
        return Updated(plan=plan, states=states, output=output, lease=output_lease, ticket=updated)

    def _is_filled(self, plan: BlockPlan, states: BlockStates, output: Tensor) -> bool:
        """Whether the present weights come first: the update reads them, or writes a whole of which only some change."""
        if states.reads_weights:
            return output is not states.weights
        absent = len(plan.positions) < len(plan.block.parameters)
        return absent and plan.block.unit != RESIDENT and self._weights_tier == "nvme"

    def _fill_output(
        self, block: Block, output: Tensor, after: Sequence[Ticket[Any]]
    ) -> tuple[Ticket[Any], ...]:
        return (
            ()
            if self._weights is None
            else self._weights.fill(block, output, after, on_device=self._memory(block) == "device")
        )

    def _tiles(self, plan: BlockPlan) -> Sequence[Tile]:
        """The tiles of a block that hold a present member, in this step's order."""
        if self._swap is None:
            return ()
        found = [
            tile
            for tile in self._swap.tiles(plan.block)
            if any(
                tile.start < offset + plan.block.own_slice(position).numel and offset < tile.stop
                for position in plan.positions
                for offset in (plan.block.layout.offsets[position],)
            )
        ]
        return found[::-1] if self._swap.backwards else found

    def _publish_block(self, done: Updated) -> Published:
        block = done.plan.block
        if block.unit != RESIDENT:
            ticket = self._publish_shard(done)
        elif self._gathers:
            ticket = self._publish_gathered(done)
        else:
            ticket = self._publish_own(done)
        self._running[block.index] = ticket
        return Published(plan=done.plan, ticket=ticket)

    def _writes_weights(self, states: BlockStates) -> bool:
        """Whether the update writes the low-precision compute weights itself: same tier, one shard."""
        low = states.block.dtype != torch.float32
        resident = states.block.unit == RESIDENT
        return states.tier == "device" and not self._gathers and low and resident

    def _gradient(self, block: Block) -> tuple[Tensor, tuple[Ticket[Any], ...], Lease | None]:
        memory = self._memory(block)
        if self._gradients.tier_of(block) == memory or memory not in self._inputs:
            chunk, after = self._gradients.chunk(block)
            return chunk, after, None
        lease, free = self._inputs[memory].acquire_after(f"gradient of {block.name}")
        here = lease.tensor(self._gradients.current_dtype(block), block.chunk)
        try:
            fetched = self._gradients.read_into(block, here, free, on_device=memory == "device")
        except BaseException:
            lease.release()
            raise
        return here, fetched, lease

    def _output(
        self, states: BlockStates
    ) -> tuple[Tensor | None, Lease | None, tuple[Ticket[Any], ...]]:
        """A low-precision chunk to write, where the master itself is not what is published; and what must end first."""
        block = states.block
        if self._swap is None and block.dtype == torch.float32:
            return None, None, ()
        if self._writes_weights(states):
            return None, None, ()
        memory = self._memory(block)
        if states.weights is not None and memory == self._weights_tier:
            return states.weights, None, ()
        holder = f"weights of {block.name}"
        if self._stages_output(block):
            lease, free = self._outputs[memory].acquire_after(holder)
        else:
            lease, free = self._buckets.next_chunk(holder)
        return lease.tensor(block.dtype, block.chunk), lease, free

    def _publish_own(self, done: Updated) -> Ticket[Any]:
        """One shard: the updated chunk holds whole parameters."""
        block, states, updated = done.plan.block, done.states, done.ticket
        source = done.output if done.output is not None else states.master
        if source is None or (done.output is None and self._writes_weights(states)):
            return updated
        pairs = [
            (block.parameters[position].alias, block.own_view(source, position))
            for position in done.plan.positions
            if block.parameters[position].numel
        ]
        uploaded = self._upload.submit(
            Copy(
                destinations=tuple(pair[0] for pair in pairs),
                sources=tuple(pair[1] for pair in pairs),
                direction="host_to_device" if self._memory(block) == "host" else None,
                label=f"upload {block.name}",
            ),
            after=(updated,),
        )
        if done.lease is not None:
            done.lease.release(after=uploaded)
        return uploaded

    def _publish_shard(self, done: Updated) -> Ticket[Any]:
        """Sharded weights: only the own shard is written; the next gather reads it."""
        block, updated, weights = done.plan.block, done.ticket, done.states.weights
        source = done.output if done.output is not None else done.states.master
        if self._weights is not None and self._weights.tier == "nvme" and source is not None:
            written = self._weights.write(
                block, source, (updated,), on_device=self._memory(block) == "device"
            )
        elif self._weights is None or weights is None or source is None or source is weights:
            written = updated
        else:
            written = self._upload_shard(done.plan, weights, source, updated)
        if self._weights is not None:
            self._weights.written_by(block, written)
        if done.lease is not None:
            done.lease.release(after=written)
        return written

    def _upload_shard(
        self, plan: BlockPlan, weights: Tensor, source: Tensor, updated: Ticket[Any]
    ) -> Ticket[Any]:
        block = plan.block
        return self._upload.submit(
            Copy(
                destinations=tuple(block.own_view(weights, p) for p in plan.positions),
                sources=tuple(block.own_view(source, p) for p in plan.positions),
                direction="host_to_device" if self._memory(block) == "host" else "device_to_host",
                label=f"upload shard of {block.name}",
            ),
            after=(updated,),
        )

    def _publish_gathered(self, done: Updated) -> Ticket[Any]:
        """Several shards: upload the own chunk, gather all, and rebuild the parameters."""
        block, states = done.plan.block, done.states
        if states.tier == "device" and done.output is not None and done.lease is not None:
            shard, shard_lease, ready = done.output, done.lease, done.ticket
        else:
            shard_lease, free = self._buckets.next_chunk(f"weights of {block.name}")
            shard = shard_lease.tensor(block.dtype, block.chunk)
            ready = self._upload.submit(
                self._upload_copy(states, done.output, shard), after=(done.ticket, *free)
            )
            if done.lease is not None:
                done.lease.release(after=ready)
        gathered_lease, free = self._buckets.next_gathered(f"weights of {block.name}")
        shards = block.layout.shards
        gathered = gathered_lease.tensor(block.dtype, shards * block.chunk).view(shards, -1)
        arrived = self._collectives.submit(
            self._all_gather(block, shard, gathered, "weights"), after=(ready, *free)
        )
        shard_lease.release(after=arrived)
        pairs = [
            pair
            for position in done.plan.positions
            for pair in unpack_pairs(block, gathered, position, block.parameters[position].alias)
        ]
        published = self._publish.submit(
            Copy(
                destinations=tuple(pair[0] for pair in pairs),
                sources=tuple(pair[1] for pair in pairs),
                label=f"publish {block.name}",
            ),
            after=(arrived,),
        )
        gathered_lease.release(after=published)
        return published

    def _upload_copy(self, states: BlockStates, output: Tensor | None, target: Tensor) -> Copy:
        block = states.block
        direction = "host_to_device" if self._memory(block) == "host" else None
        label = f"upload {block.name}"
        source = output if output is not None else states.master
        if source is not None:
            return Copy(destinations=(target,), sources=(source,), direction=direction, label=label)
        positions = range(len(block.parameters))
        return Copy(
            destinations=tuple(block.own_view(target, position) for position in positions),
            sources=tuple(states.master_view(position) for position in positions),
            direction=direction,
            label=label,
        )

    def _all_gather(self, block: Block, shard: Tensor, gathered: Tensor, what: str) -> Collective:
        return Collective(
            kind="all_gather",
            group=self._group,
            output=gathered,
            input=shard,
            tag=block.index,
            label=f"gather {what} of {block.name}",
        )

    def _reserve(
        self, pools: dict[_Memory, SlabPool], memory: _Memory, name: str, nbytes: int
    ) -> None:
        pool = pools.get(memory)
        if not nbytes or (pool is not None and pool.slab_bytes >= nbytes):
            return
        if pool is not None:
            pool.close()
        pools[memory] = SlabPool(
            name=name,
            backend=self._backend,
            slab_bytes=nbytes,
            slabs=_SLABS,
            memory=memory,
            setting="bucket_bytes",
        )
