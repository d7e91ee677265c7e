"""Which parameters the engine manages, the blocks they form, and whether user code has written to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from zero_plugin.sharding.control import Control
from zero_plugin.sharding.hooks import bump_versions
from zero_plugin.sharding.parameters import ManagedParameter, collect_parameters
from zero_plugin.sharding.partition import Block, ShardPlace, form_blocks

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Roster:
    """Managed parameters and blocks; both only ever grow.

    Args:
        model: the module.
        optimizers: its optimizers.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._versions: list[int] = []
        self.members: list[ManagedParameter] = []
        """Managed parameters; a member's index is its place here."""
        self.blocks: list[Block] = []
        """Blocks in forward order."""

    def newcomers(self) -> list[ManagedParameter]:
        """Trainable parameters of the optimizers that are not managed yet.

        Raises:
            ParameterError: a managed parameter was converted, moved or reshaped.
        """
        for member in self.members:
            member.check_unchanged()
        managed = {id(member.parameter) for member in self.members}
        if all(
            id(parameter) in managed or not parameter.requires_grad
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            return []
        return collect_parameters(self._model, self._optimizers, known=self.members)

    def form(
        self,
        members: Sequence[ManagedParameter],
        place: ShardPlace,
        *,
        wire_bytes: int,
        limit: int,
        device_fraction: float = 0.0,
    ) -> list[Block]:
        """The blocks that new members would form."""
        return form_blocks(
            members,
            place,
            wire_bytes=wire_bytes,
            limit=limit,
            first_index=len(self.blocks),
            device_fraction=device_fraction,
        )

    def admit(self, members: Sequence[ManagedParameter], blocks: Sequence[Block]) -> None:
        """Manage new members in new blocks."""
        self.members += members
        self.blocks += blocks
        self._versions += [member.parameter._version for member in members]

    def of(self, optimizer: int) -> list[Block]:
        """One optimizer's blocks."""
        return [block for block in self.blocks if block.optimizer == optimizer]

    def note_published(self, members: Iterable[ManagedParameter]) -> None:
        """The engine wrote new weights: tell autograd, and do not take it for a write of the user's."""
        written = list(members)
        bump_versions([member.parameter for member in written])
        for member in written:
            self._versions[member.index] = member.parameter._version

    def note_written(self, indices: Iterable[int]) -> None:
        """Writes of the user's that were taken in already."""
        for index in indices:
            self._versions[index] = self.members[index].parameter._version

    def take_foreign_writes(self, optimizer: int, control: Control) -> set[int]:
        """Members of an optimizer that user code wrote to, on any rank, since the last call; a collective."""
        members = [member for member in self.members if member.optimizer == optimizer]
        if not members:
            return set()
        for member in members:
            member.check_unchanged()
        changed = [
            member.moved or member.parameter._version != self._versions[member.index]
            for member in members
        ]
        if control.size > 1:
            rows = control.exchange(
                torch.tensor(changed, dtype=torch.int64, device="cpu"), label="written weights"
            )
            changed = torch.stack(rows).sum(dim=0).tolist()
        written = {member.index for member, seen in zip(members, changed, strict=True) if seen}
        for index in written:
            self._versions[index] = self.members[index].parameter._version
        return written
