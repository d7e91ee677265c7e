"""What is kept of a block's states: its fp32 master on its own, split, or in the compute weights; its moments in what dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from zero_plugin.config import MomentDType, Tier
from zero_plugin.optim.moments import STORED, kept_bytes
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
        states: number of states beside it, the moments.
        moments: how those are kept.
    """

    master: MasterForm
    states: int
    moments: MomentDType = "fp32"

    @property
    def masters(self) -> int:
        """Number of parts before the moments: 1, or 0 where the compute weights are the master."""
        return len(_MASTER_WIDTHS[self.master])

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtype of each part that is kept, in order."""
        first = (
            torch.int16 if width == 2 else torch.float32 for width in _MASTER_WIDTHS[self.master]
        )
        return (*first, *(STORED[self.moments] for _ in range(self.states)))

    def sizes(self, numel: int) -> tuple[int, ...]:
        """Bytes of each part that is kept of so many elements, in order."""
        moments = kept_bytes(self.moments, numel)
        first = (numel * width for width in _MASTER_WIDTHS[self.master])
        return (*first, *(moments for _ in range(self.states)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateForms:
    """Chooses the form of each block.

    Attributes:
        optimizer: tier of the states.
        params: tier of sharded compute weights.
        splits: whether masters of sharded bf16 weights are split.
        holds: whether updated weights wait for their publication: the compute weights are then no master.
        moments: how moments are kept.
    """

    optimizer: Tier
    params: Tier
    splits: bool
    holds: bool = False
    moments: MomentDType = "fp32"

    def tier_of(self, block: Block) -> Tier:
        """Where a block's states lie."""
        return "device" if block.on_device else self.optimizer

    def of(self, block: Block, states: int) -> StateForm:
        """The form of a block with so many states beside the master."""
        tier = "device" if block.unit == RESIDENT else self.params
        home = self.tier_of(block)
        if block.dtype == torch.bfloat16 and self.splits and block.unit != RESIDENT:
            return StateForm(master="split", states=states, moments=self.moments)
        # A block in files without any state would have nothing there that the update goes through.
        serves = not self.holds and (tier != "nvme" or states > 0)
        if block.dtype == torch.float32 and tier == home and serves:
            return StateForm(master="weights", states=states, moments=self.moments)
        return StateForm(master="whole", states=states, moments=self.moments)
