"""What is kept of a block's states, and where its fp32 master is: on its own, split, or in the compute weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from zero_plugin.config import Tier
from zero_plugin.sharding.parameters import RESIDENT

if TYPE_CHECKING:
    from zero_plugin.sharding.partition import Block

MasterForm = Literal["whole", "split", "weights"]
"""`whole`: kept in full. `split`: as a remainder beside bf16 compute weights (`zero_plugin.optim.split`). `weights`: the
fp32 compute weights are the master."""

_MASTER_WIDTHS: dict[MasterForm, tuple[int, ...]] = {"whole": (4,), "split": (2,), "weights": ()}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateForm:
    """What is kept of a block's states beside its compute weights.

    Attributes:
        master: how the master is kept.
        states: number of fp32 states beside it.
    """

    master: MasterForm
    states: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of an element of each part that is kept, in order."""
        return (*_MASTER_WIDTHS[self.master], *(4 for _ in range(self.states)))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtype of each part that is kept, in order."""
        return tuple(torch.int16 if width == 2 else torch.float32 for width in self.widths)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateForms:
    """Chooses the form of each block.

    Attributes:
        optimizer: tier of the states.
        params: tier of sharded compute weights.
        splits: whether masters of sharded bf16 weights are split.
        holds: whether updated weights wait for their publication: the compute weights are then no master.
    """

    optimizer: Tier
    params: Tier
    splits: bool
    holds: bool = False

    def tier_of(self, block: Block) -> Tier:
        """Where a block's states lie."""
        return "device" if block.on_device else self.optimizer

    def of(self, block: Block, states: int) -> StateForm:
        """The form of a block with so many states beside the master."""
        tier = "device" if block.unit == RESIDENT else self.params
        home = self.tier_of(block)
        if block.dtype == torch.bfloat16 and self.splits and block.unit != RESIDENT:
            return StateForm(master="split", states=states)
        # A block in files without any state would have nothing there that the update goes through.
        serves = not self.holds and (tier != "nvme" or states > 0)
        if block.dtype == torch.float32 and tier == home and serves:
            return StateForm(master="weights", states=states)
        return StateForm(master="whole", states=states)
