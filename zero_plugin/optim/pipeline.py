"""Runs a planned step: gradient in | update | weights out, block after block on lanes.

The low-precision weights of a block are on their way to the device while the next block is updated (ZeRO-Offload,
ATC'21, Algorithm 2, line 15), through two staging slabs of one block each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

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
from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.buffers import Lease, LeaseState, SlabPool
from zero_plugin.runtime.memory import round_to_pages
from zero_plugin.runtime.operations import Collective, Copy, Update
from zero_plugin.runtime.ticket import Ticket
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.parameters import RESIDENT
from zero_plugin.sharding.partition import Block, rebuild, unpack_pairs
from zero_plugin.sharding.weights import WeightShards

_SLABS = 2
_SMALLEST = 64
"""Bytes of a slab for a block without elements."""


class StepPipeline:
    """Executes step plans.

    Args:
        backend: lanes and memory.
        group: the ranks.
        gradients: where the reduced gradients lie.
        tier: where states lie and the update runs.
        buckets: device buffers.
        sharded: whether optimizer states are sharded.
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
        weights: WeightShards | None = None,
        swap: SwappedStates | None = None,
    ) -> None:
        self._swap = swap
        self._weights = weights
        self._weights_tier: Tier = "device" if weights is None else weights.tier
        self._backend = backend
        self._group = group
        self._gradients = gradients
        # Where the update runs: states on NVMe come to host memory for it.
        self._tier: Literal["device", "host"] = "device" if tier == "device" else "host"
        self._buckets = buckets
        self._gathers = sharded and group.size > 1
        self._updates = backend.lane("update", self._tier)
        self._upload = backend.lane("upload", "device")
        self._collectives = backend.lane("collectives", "device")
        self._publish = backend.lane("publish", "device")
        self._outputs: SlabPool | None = None
        self._inputs: SlabPool | None = None

    def planned(self, blocks: Sequence[Block]) -> int:
        """Bytes of staging in the optimizer's tier with these blocks."""
        return sum(_SLABS * round_to_pages(size) for size in self._sizes(blocks) if size)

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Reserve staging for the largest block."""
        outputs, inputs = self._sizes(blocks)
        if outputs:
            self._outputs = self._reserve(self._outputs, "updated weights", outputs)
        if inputs:
            self._inputs = self._reserve(self._inputs, "gradients for the update", inputs)

    def _sizes(self, blocks: Sequence[Block]) -> tuple[int, int]:
        """Bytes of the largest low-precision chunk to write, and of the largest gradient to fetch."""
        outputs = [
            max(block.chunk * block.dtype.itemsize, _SMALLEST)
            for block in blocks
            if self._stages_output(block)
        ]
        inputs = [
            max(block.chunk * 4, _SMALLEST)
            for block in blocks
            if self._gradients.tier != self._tier
        ]
        return max(outputs, default=0), max(inputs, default=0)

    def _stages_output(self, block: Block) -> bool:
        """Whether updated weights pass through a slab beside the optimizer's states."""
        if self._swap is None and block.dtype == torch.float32:
            return False  # The master is published.
        if block.unit == RESIDENT:
            return self._tier == "host"
        return self._tier != self._weights_tier

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging in the optimizer's tier."""
        return sum(pool.nbytes for pool in (self._outputs, self._inputs) if pool is not None)

    def run(
        self, plan: StepPlan, states: Mapping[int, BlockStates], rule: Rule | None, clip: Clip
    ) -> list[Ticket[Any]]:
        """Issue every block's work.

        Returns:
            One ticket a block; when it ends, the block's compute weights are the updated ones.
        """
        blocks = plan.blocks
        if self._swap is not None:
            self._swap.begin_step([tile for item in blocks for tile in self._tiles(item)])
            blocks = tuple(reversed(blocks)) if self._swap.backwards else blocks
        return [
            self._run_block(item, plan.hyper, states[item.block.index], rule, clip)
            for item in blocks
        ]

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
        for pool in (self._outputs, self._inputs):
            if pool is not None:
                pool.close()
        self._outputs = self._inputs = None

    # One block ---------------------------------------------------------------------------------------------------

    def _run_block(
        self, plan: BlockPlan, hyper: Tensor, states: BlockStates, rule: Rule | None, clip: Clip
    ) -> Ticket[Any]:
        leases: list[Lease] = []
        try:
            return self._issue_block(plan, hyper, states, rule, clip, leases)
        except BaseException:
            # What was not issued will not give its slabs back.
            for lease in leases:
                if lease.state in (LeaseState.HELD, LeaseState.IN_FLIGHT):
                    lease.release()
            raise

    def _issue_block(
        self,
        plan: BlockPlan,
        hyper: Tensor,
        states: BlockStates,
        rule: Rule | None,
        clip: Clip,
        leases: list[Lease],
    ) -> Ticket[Any]:
        block = plan.block
        gradient, after, input_lease = self._gradient(block)
        if input_lease is not None:
            leases.append(input_lease)
        output, output_lease = self._output(states)
        if output_lease is not None:
            leases.append(output_lease)
        if output is not None and self._is_filled(plan, states, output):
            after = (*after, *self._fill_output(block, output))
        if self._swap is not None and rule is not None and output is not None:
            fields = {
                "positions": plan.positions,
                "rows": plan.rows,
                "gradient": gradient,
                "output": output,
                "rule": rule,
                "hyper": hyper,
                "clip": clip,
            }
            updated = self._backend.mark(f"step of {block.name}")
            for tile in self._tiles(plan):
                updated = self._swap.update(fields, tile, (*after, updated))
            return self._hand_over(plan, states, output, output_lease, updated, input_lease)
        updated = self._updates.submit(
            Update(
                updater=BlockUpdate(
                    states=states,
                    positions=plan.positions,
                    gradient=gradient,
                    output=output,
                    direct=self._writes_weights(states),
                    rule=rule,
                    hyper=hyper,
                    rows=plan.rows,
                    clip=clip,
                    groups=plan.groups,
                ),
                label=f"update {block.name}",
            ),
            after=(*after, self._backend.mark(f"step of {block.name}")),
        )
        return self._hand_over(plan, states, output, output_lease, updated, input_lease)

    def _is_filled(self, plan: BlockPlan, states: BlockStates, output: Tensor) -> bool:
        """Whether the present weights come first: the update reads them, or writes a whole of which only some change."""
        if states.reads_weights:
            return output is not states.weights
        absent = len(plan.positions) < len(plan.block.parameters)
        return absent and plan.block.unit != RESIDENT and self._weights_tier == "nvme"

    def _fill_output(self, block: Block, output: Tensor) -> tuple[Ticket[Any], ...]:
        return (
            ()
            if self._weights is None
            else self._weights.fill(block, output, on_device=self._tier == "device")
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

    def _hand_over(
        self,
        plan: BlockPlan,
        states: BlockStates,
        output: Tensor | None,
        output_lease: Lease | None,
        updated: Ticket[Any],
        input_lease: Lease | None,
    ) -> Ticket[Any]:
        """After a block's update: free its gradient and publish its weights."""
        block = plan.block
        self._gradients.read_by(block, updated)
        if input_lease is not None:
            input_lease.release(after=updated)
        if block.unit != RESIDENT:
            return self._publish_shard(plan, states, output, output_lease, updated)
        if self._gathers:
            return self._publish_gathered(plan, states, output, output_lease, updated)
        return self._publish_own(plan, states, output, output_lease, updated)

    def _writes_weights(self, states: BlockStates) -> bool:
        """Whether the update writes the low-precision compute weights itself: same tier, one shard."""
        low = states.block.dtype != torch.float32
        resident = states.block.unit == RESIDENT
        return states.tier == "device" and not self._gathers and low and resident

    def _gradient(self, block: Block) -> tuple[Tensor, tuple[Ticket[Any], ...], Lease | None]:
        if self._gradients.tier == self._tier or self._inputs is None:
            chunk, after = self._gradients.chunk(block)
            return chunk, after, None
        lease = self._inputs.acquire(f"gradient of {block.name}")
        here = lease.tensor(self._gradients.current_dtype(block), block.chunk)
        try:
            fetched = self._gradients.read_into(block, here, on_device=self._tier == "device")
        except BaseException:
            lease.release()
            raise
        return here, fetched, lease

    def _output(self, states: BlockStates) -> tuple[Tensor | None, Lease | None]:
        """A low-precision chunk to write, where the master itself is not what is published."""
        block = states.block
        if self._swap is None and block.dtype == torch.float32:
            return None, None
        if self._writes_weights(states):
            return None, None
        if states.weights is not None and self._tier == self._weights_tier:
            return states.weights, None
        holder = f"weights of {block.name}"
        if self._outputs is not None:
            lease = self._outputs.acquire(holder)
        else:
            lease = self._buckets.acquire_chunk(holder)
        return lease.tensor(block.dtype, block.chunk), lease

    def _publish_own(
        self,
        plan: BlockPlan,
        states: BlockStates,
        output: Tensor | None,
        lease: Lease | None,
        updated: Ticket[Any],
    ) -> Ticket[Any]:
        """One shard: the updated chunk holds whole parameters."""
        block = plan.block
        source = output if output is not None else states.master
        if source is None or self._writes_weights(states):
            return updated
        pairs = [
            (block.parameters[position].alias, block.own_view(source, position))
            for position in plan.positions
            if block.parameters[position].numel
        ]
        uploaded = self._upload.submit(
            Copy(
                destinations=tuple(pair[0] for pair in pairs),
                sources=tuple(pair[1] for pair in pairs),
                direction="host_to_device" if self._tier == "host" else None,
                label=f"upload {block.name}",
            ),
            after=(updated,),
        )
        if lease is not None:
            lease.release(after=uploaded)
        return uploaded

    def _publish_shard(
        self,
        plan: BlockPlan,
        states: BlockStates,
        output: Tensor | None,
        lease: Lease | None,
        updated: Ticket[Any],
    ) -> Ticket[Any]:
        """Sharded weights: only the own shard is written; the next gather reads it."""
        block, weights = plan.block, states.weights
        source = output if output is not None else states.master
        if self._weights is not None and self._weights.tier == "nvme" and source is not None:
            written = self._weights.write(
                block, source, (updated,), on_device=self._tier == "device"
            )
        elif self._weights is None or weights is None or source is None or source is weights:
            written = updated
        else:
            written = self._upload_shard(plan, weights, source, updated)
        if self._weights is not None:
            self._weights.written_by(block, written)
        if lease is not None:
            lease.release(after=written)
        return written

    def _upload_shard(
        self, plan: BlockPlan, weights: Tensor, source: Tensor, updated: Ticket[Any]
    ) -> Ticket[Any]:
        block = plan.block
        return self._upload.submit(
            Copy(
                destinations=tuple(block.own_view(weights, p) for p in plan.positions),
                sources=tuple(block.own_view(source, p) for p in plan.positions),
                direction="host_to_device" if self._tier == "host" else "device_to_host",
                label=f"upload shard of {block.name}",
            ),
            after=(updated,),
        )

    def _publish_gathered(
        self,
        plan: BlockPlan,
        states: BlockStates,
        output: Tensor | None,
        lease: Lease | None,
        updated: Ticket[Any],
    ) -> Ticket[Any]:
        """Several shards: upload the own chunk, gather all, and rebuild the parameters."""
        block = plan.block
        if states.tier == "device" and output is not None and lease is not None:
            shard, shard_lease, ready = output, lease, updated
        else:
            shard_lease = self._buckets.acquire_chunk(f"weights of {block.name}")
            shard = shard_lease.tensor(block.dtype, block.chunk)
            ready = self._upload.submit(self._upload_copy(states, output, shard), after=(updated,))
            if lease is not None:
                lease.release(after=ready)
        gathered_lease = self._buckets.acquire_gathered(f"weights of {block.name}")
        shards = block.layout.shards
        gathered = gathered_lease.tensor(block.dtype, shards * block.chunk).view(shards, -1)
        arrived = self._collectives.submit(
            self._all_gather(block, shard, gathered, "weights"), after=(ready,)
        )
        shard_lease.release(after=arrived)
        pairs = [
            pair
            for position in plan.positions
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
        direction = "host_to_device" if self._tier == "host" else None
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

    def _reserve(self, pool: SlabPool | None, name: str, nbytes: int) -> SlabPool:
        if pool is not None and pool.slab_bytes >= nbytes:
            return pool
        if pool is not None:
            pool.close()
        return SlabPool(
            name=name,
            backend=self._backend,
            slab_bytes=nbytes,
            slabs=_SLABS,
            memory=self._tier,
            setting="bucket_bytes",
        )
