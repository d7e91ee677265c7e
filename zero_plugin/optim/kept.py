"""Optimizer states that outlive their engine, for a checkpoint that is saved after training has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_plugin.errors import EngineStateError
from zero_plugin.optim.states import OptimizerStates
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.partition import Block, rebuild
from zero_plugin.trace import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer


class KeptStates:
    """This rank's shards of the states of a closed engine; no thread, hook or process group is kept with them.

    Args:
        states: the states of each optimizer.
        size: ranks that the states are sharded over.
        timeout_seconds: longest wait for another rank.
    """

    def __init__(
        self, states: Sequence[OptimizerStates], *, size: int, timeout_seconds: float
    ) -> None:
        self._states = tuple(states)
        self._size = size
        self._timeout_seconds = timeout_seconds

    def move_to_cpu(self) -> None:
        """Free the device memory that the states take; only once the engine is closed."""
        for item in self._states:
            for states in item.blocks.values():
                states.states = tuple(state.cpu() for state in states.states)
                states.master = None if states.master is None else states.master.cpu()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the states of this optimizer are here."""
        return any(item.optimizer is optimizer for item in self._states)

    def state_dict(self, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """What the engine's `optimizer_state_dict` would return; a collective.

        Args:
            optimizer: one of the closed engine's.
            rank0_only: return `{}` on other ranks.

        Raises:
            EngineStateError: the optimizer is unknown, or the default process group has gone or changed.
        """
        item = next((item for item in self._states if item.optimizer is optimizer), None)
        if item is None:
            raise EngineStateError(
                f"no states of this {type(optimizer).__name__} were kept: save it before the engine closes"
            )
        group = ProcessGroup.create(
            device=torch.device("cpu"), ledger=Ledger(), timeout_seconds=self._timeout_seconds
        )
        try:
            if group.size != self._size:
                raise EngineStateError(
                    f"the states are sharded over {self._size} ranks and the default process group has {group.size}: "
                    "save before it is destroyed"
                )
            with torch.inference_mode(mode=False), torch.no_grad():
                indices = {
                    member.index
                    for states in item.blocks.values()
                    for member in states.block.parameters
                }
                item.import_weights(indices)
                keep = group.rank == 0 or not rank0_only
                return item.state_dict(lambda block, chunk: _gather(group, block, chunk), keep=keep)
        finally:
            group.close()


def _gather(group: ProcessGroup, block: Block, chunk: Tensor) -> list[Tensor]:
    gathered = chunk.view(1, -1)
    if block.layout.shards > 1:
        gathered = torch.empty(block.layout.shards, block.chunk, dtype=chunk.dtype, device="cpu")
        group.all_gather(gathered, chunk.cpu(), tag=block.index, label=f"states of {block.name}")
    return rebuild(block, gathered)
