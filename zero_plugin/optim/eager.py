"""Updates that begin inside backward and stay: for steps that nothing between backward and `step()` can change.

As `zero_plugin.optim.speculation`, a block's update begins when its gradient is complete, and its weights are shown by the step.
Nothing is kept to undo it with, so that whatever asks for another step afterwards is an error: it is the bargain of every
optimizer that is fused into backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_plugin.errors import EngineStateError
from zero_plugin.grads.norm import Clip
from zero_plugin.optim.plan import is_same_update

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.optim.pipeline import StepPipeline, Updated
    from zero_plugin.optim.plan import BlockPlan, StepPlan
    from zero_plugin.optim.states import OptimizerStates
    from zero_plugin.sharding.partition import Block


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """One block's update, and what it was begun with."""

    updated: Updated
    hyper: Tensor
    clip: Clip


class EagerUpdater:
    """Begins updates in backward for good.

    Args:
        pipeline: runs the updates.
        states: of each optimizer.
        loss_scale: the present factor on the loss.
    """

    def __init__(
        self,
        pipeline: StepPipeline,
        states: Sequence[OptimizerStates],
        loss_scale: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._states = states
        self._loss_scale = loss_scale
        self._begun: dict[int, _Begun] = {}
        self.taken = 0
        """Updates that a step took."""
        self.undone = 0
        """None ever is."""

    @property
    def begun(self) -> Container[int]:
        """Blocks whose update has begun before its step."""
        return self._begun.keys()

    def begin(self, block: Block, present: Container[int]) -> None:
        """A block's gradient is complete here: begin its update.

        Args:
            block: the block; its gradient was handed to the gradient shards.
            present: managed indices of the members that have a gradient.

        Raises:
            EngineStateError: its update has begun already, from an earlier gradient.
        """
        if block.index in self._begun:
            raise EngineStateError(
                f"another gradient reached {block.name}, which had its step inside an earlier backward (update_in_backward=True): "
                "call step() after each backward, put all but the last micro-batch into engine.no_sync(), or leave "
                "update_in_backward out"
            )
        states = self._states[block.optimizer]
        if states.rule is None:
            return
        plan = states.peek(block, present.__contains__)
        if plan is None:
            return
        clip = Clip(factor=1.0 / self._loss_scale(), value=None)
        (updated,) = self._pipeline.hold(plan, states.blocks, states.rule, clip)
        self._begun[block.index] = _Begun(updated=updated, hyper=plan.hyper, clip=clip)

    def check(self, plan: StepPlan, clip: Clip) -> None:
        """Before a step is counted: it asks for the updates that have been made.

        Raises:
            EngineStateError: it asks for another one; nothing is changed.
        """
        for item in plan.blocks:
            begun = self._begun.get(item.block.index)
            if begun is None:
                continue
            same = is_same_update(item, plan.hyper, begun.updated.plan, begun.hyper)
            if not same or clip != begun.clip:
                raise EngineStateError(
                    f"{item.block.name} had its step inside backward (update_in_backward=True), and something that step depends on "
                    "has changed since: change learning rates and other options before backward, not between backward and step()"
                )

    @staticmethod
    def is_wanted(plan: StepPlan, clip: Clip) -> bool:
        """Whether the step is one whose updates begin in backward; the same on all ranks."""
        del plan, clip
        return True

    def take(self, plan: BlockPlan, hyper: Tensor, clip: Clip) -> Updated | None:
        """The update of a block that has begun and was checked, or None."""
        del hyper, clip
        begun = self._begun.pop(plan.block.index, None)
        if begun is None:
            return None
        self.taken += 1
        return begun.updated

    def undo(self, blocks: Sequence[Block] | None = None) -> None:
        """Refuse what would need an update undone.

        Raises:
            EngineStateError: one of these blocks, or any, has been updated before its step.
        """
        found = self._begun if blocks is None else {block.index for block in blocks}
        first = next((index for index in found if index in self._begun), None)
        if first is None:
            return
        raise EngineStateError(
            f"{self._begun[first].updated.plan.block.name} was updated inside backward (update_in_backward=True) and its step was "
            "not taken yet: call step() before gradients are cleared and before weights or optimizer states are read, written, "
            "saved or loaded"
        )

    def abandon(self) -> list[Updated]:
        """No step will come: hand over what has begun, to be shown as if it had."""
        found = [begun.updated for begun in self._begun.values()]
        self._begun.clear()
        return found
