"""How many bytes an engine holds in each tier, and how many more blocks would need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zero_plugin.activations.offload import ActivationOffload
from zero_plugin.config import Tier, ZeroConfig
from zero_plugin.grads.buckets import Buckets
from zero_plugin.grads.offload import GradientShards
from zero_plugin.grads.swapped import SwappedGradients
from zero_plugin.optim.form import StateForm
from zero_plugin.optim.pipeline import StepPipeline
from zero_plugin.optim.speculation import UndoMemory
from zero_plugin.optim.states import OptimizerStates
from zero_plugin.optim.swap import SwappedStates
from zero_plugin.sharding.partition import Block
from zero_plugin.sharding.sharded import ShardedModel

if TYPE_CHECKING:
    from torch import nn

KINDS: tuple[str, ...] = ("params", "master", "moments", "gradients", "activations", "staging")
"""Keys of each tier, the same in all."""

_SMALLEST = 64
"""Bytes of the smallest allocation."""


class Accounts:
    """Adds up what the parts of an engine hold.

    Args:
        config: the tiers.
        states: of each optimizer.
        gradients: the reduced chunks.
        buckets: device buffers.
        pipeline: the step's staging.
        workspace: bytes that the transport keeps.
        sharded: the sharded weights, or None.
        swap: the states on NVMe, or None.
        activations: the inputs of checkpoints on the host, or None.
        undo: memory for updates that may have to be undone, or None.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts it adds up
        self,
        config: ZeroConfig,
        states: Sequence[OptimizerStates],
        gradients: GradientShards,
        buckets: Buckets,
        pipeline: StepPipeline,
        workspace: Callable[[], int],
        sharded: ShardedModel | None,
        swap: SwappedStates | None,
        activations: ActivationOffload | None,
        undo: UndoMemory | None = None,
    ) -> None:
        self._undo = undo
        self._activations = activations
        self._swap = swap
        self._sharded = sharded
        self._config = config
        self._states = states
        self._gradients = gradients
        self._buckets = buckets
        self._pipeline = pipeline
        self._workspace = workspace

    def held(self, model: nn.Module) -> dict[str, dict[str, int]]:
        """Bytes of each kind in each tier now, staging and padding included."""
        config = self._config
        table: dict[str, dict[str, int]] = {
            tier: dict.fromkeys(KINDS, 0) for tier in ("device", "host", "nvme")
        }
        sharded = self._sharded
        table["device"]["params"] = sum(
            p.numel() * p.element_size()
            for p in model.parameters()
            if sharded is None or not sharded.is_released(p)
        )
        if sharded is not None:
            table[config.params]["params"] += sharded.shards.nbytes
            table["device"]["staging"] += sharded.gatherer.staging_bytes
            table["host"]["staging"] += sharded.shards.staging_bytes
        states = [block for item in self._states for block in item.blocks.values()]
        for item in states:
            table[item.tier]["master"] += item.master_bytes
            table[item.tier]["moments"] += item.moment_bytes
            tier = self._gradients.tier_of(item.block)
            table[tier]["gradients"] += self._gradients.bytes_of(item.block)
        table["device"]["staging"] += self._buckets.nbytes + self._workspace()
        for memory in ("device", "host"):
            table[memory]["staging"] += self._gradients.staging_bytes(memory)
            table[memory]["staging"] += self._pipeline.staging_bytes(memory)
        if self._swap is not None:
            table["host"]["staging"] += self._swap.staging_bytes
        if self._undo is not None:
            table["host"]["staging"] += self._undo.nbytes
        if self._activations is not None:
            table["host"]["activations"] = self._activations.host_bytes
            table["nvme"]["activations"] = self._activations.nvme_bytes
            table["device"]["activations"] = self._activations.device_bytes
        return table

    def needed(
        self, model: nn.Module, present: Sequence[Block], more: Sequence[Block]
    ) -> dict[Tier, int]:
        """Bytes of each tier once `more` blocks are added to the present ones."""
        config, every = self._config, [*present, *more]
        held = self.held(model)
        need: dict[Tier, int] = {
            "device": sum(held["device"].values()) - held["device"]["staging"],
            "host": sum(held["host"].values()) - held["host"]["staging"],
            "nvme": sum(held["nvme"].values()),
        }
        for block in more:
            form = self._states[block.optimizer].form_of(block)
            nbytes = sum(form.sizes(block.chunk))
            if self._swap is not None:
                nbytes = self._swap.file_bytes(block, form)
            home = "device" if block.on_device else config.optimizer
            need[home] += max(nbytes, _SMALLEST)
            need[self._gradients.tier_of(block)] += self._gradients.set_bytes(block)
        if self._sharded is not None:
            needs = self._sharded.needs(more)
            need[config.params] += needs.shards
            need["device"] += needs.staging + needs.gathered
            need["host"] += needs.host_staging
        for memory, nbytes in self._pipeline.planned(every).items():
            need[memory] += nbytes
        if isinstance(self._gradients, SwappedGradients):
            need["host"] += self._gradients.planned(every)
        if self._swap is not None:
            need["host"] += self._swap.planned(self.formed(every))
        if self._undo is not None:
            need["host"] += self._undo.planned(self.with_states(more))
        need["device"] += self._buckets.planned(every)
        return need

    def with_states(self, blocks: Sequence[Block]) -> list[tuple[Block, StateForm]]:
        """Blocks whose updates may begin inside backward: in host memory, by a compiled rule; with what is kept of their states."""
        return self.formed(
            [
                block
                for block in blocks
                if not block.on_device and self._states[block.optimizer].rule is not None
            ]
        )

    def formed(self, blocks: Sequence[Block]) -> list[tuple[Block, StateForm]]:
        """Blocks with what is kept of their states."""
        return [(block, self._states[block.optimizer].form_of(block)) for block in blocks]
