"""Updates that begin inside backward, before it is known whether they hold, and are undone exactly where they do not.

With clipping on, or steps that a non-finite gradient skips, no weight may change before the gradients of all ranks are known.
A speculative update changes masters and moments only, never a weight; what they were is kept beside them until the step says
what it wants. It is taken when the step asks for the very same update: the same gradients and members, a clip that does not
bind, the same hyper-parameters. Otherwise the old values come back, bit for bit, and the step's own update runs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_plugin.grads.norm import Clip
from zero_plugin.optim.plan import BlockPlan, StepPlan, is_same_update
from zero_plugin.runtime.operations import Copy
from zero_plugin.sharding.layout import UNIT
from zero_plugin.store.layout import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.grads.offload import GradientShards
    from zero_plugin.optim.blocks import BlockStates
    from zero_plugin.optim.form import StateForm
    from zero_plugin.optim.pipeline import StepPipeline, Updated
    from zero_plugin.optim.rule import Rule
    from zero_plugin.optim.states import OptimizerStates
    from zero_plugin.runtime.backend import Backend
    from zero_plugin.sharding.partition import Block

_SMALLEST = 64
"""Bytes of the smallest allocation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """One block's speculative update."""

    updated: Updated
    hyper: Tensor
    clip: Clip
    contributions: int
    states: BlockStates


class UndoMemory:
    """Host memory for a second set of states of blocks whose update may have to be undone.

    A block's states and its memory here change roles with every update that begins early: it reads the one and writes the
    other, so that undoing it is to change back.

    Args:
        backend: allocates it.
        limit: most bytes, or None for as many as the blocks take; 0 where nothing is speculated.
    """

    def __init__(self, backend: Backend, limit: int | None) -> None:
        self._backend = backend
        self._limit = limit
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self.nbytes = 0
        """Bytes taken."""

    def planned(self, blocks: Sequence[tuple[Block, StateForm]]) -> int:
        """Bytes that blocks, each with what is kept of it, would take together."""
        return self._fitting(_sizes(blocks[::-1]))[1]

    def add_blocks(self, blocks: Sequence[tuple[Block, StateForm]]) -> None:
        """Reserve memory for new blocks as far as the limit allows, those whose gradients come first before the others."""
        ordered = blocks[::-1]  # Gradients come in the reverse order of the forward.
        fitting, _ = self._fitting(_sizes(ordered))
        for number, (block, form) in enumerate(ordered):
            if number not in fitting:
                continue
            strides = _strides(block, form)
            raw = self._backend.allocate(max(sum(strides), _SMALLEST), "host")
            raw.zero_()  # What lies between the members is never written.
            self._kept[block.index] = tuple(
                raw[start : start + size].view(dtype)
                for start, size, dtype in zip(
                    itertools.accumulate(strides, initial=0),
                    form.sizes(block.chunk),
                    form.dtypes,
                    strict=False,
                )
            )
            self.nbytes += raw.numel()

    def has(self, block: Block) -> bool:
        """Whether there was room for a block."""
        return block.index in self._kept

    def exchange(self, item: BlockStates) -> tuple[Tensor, ...]:
        """Change the roles of a block's states and its memory here; what were the states until now."""
        if item.master is None:
            raise ValueError(f"{item.block.name} has no master of its own to exchange")
        old = (item.master, *item.states)
        item.master, *states = self._kept[item.block.index]
        item.states = tuple(states)
        self._kept[item.block.index] = old
        return old

    def close(self) -> None:
        """Free it."""
        self._kept.clear()
        self.nbytes = 0

    def _fitting(self, sizes: Sequence[int]) -> tuple[Container[int], int]:
        taken, chosen = self.nbytes, set[int]()
        for number, size in enumerate(max(each, _SMALLEST) for each in sizes):
            if self._limit is None or taken + size <= self._limit:
                chosen.add(number)
                taken += size
        return chosen, taken


def _strides(block: Block, form: StateForm) -> list[int]:
    """Bytes of each part of a block's states, up to where the next one may begin: a cache line, as for the states."""
    return [round_up(size, UNIT * 4) for size in form.sizes(block.chunk)]


def _sizes(blocks: Sequence[tuple[Block, StateForm]]) -> list[int]:
    """Bytes of each block's second set of states."""
    return [sum(_strides(block, form)) for block, form in blocks]


class Speculator:
    """Begins updates in backward, and undoes those that a step does not want.

    Args:
        backend: lanes.
        pipeline: runs the updates.
        gradients: the reduced chunks.
        memory: for old states.
        states: of each optimizer.
        loss_scale: the present factor on the loss.
    """

    def __init__(
        self,
        backend: Backend,
        pipeline: StepPipeline,
        gradients: GradientShards,
        memory: UndoMemory,
        states: Sequence[OptimizerStates],
        loss_scale: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._gradients = gradients
        self._memory = memory
        self._states = states
        self._loss_scale = loss_scale
        self._lane = backend.lane("update", "host")
        self._begun: dict[int, _Begun] = {}
        # Of each block: micro-batches in its last step. An update before the last one would be undone.
        self._usual: dict[int, int] = {}
        self.taken = 0
        """Updates that a step took."""
        self.undone = 0
        """Updates that were undone."""

    @property
    def begun(self) -> Container[int]:
        """Blocks whose update has begun before its step."""
        return self._begun.keys()

    def begin(self, block: Block, present: Container[int]) -> None:
        """A block's gradient is complete here: begin its update.

        Args:
            block: the block; its gradient was handed to the gradient shards.
            present: managed indices of the members that have a gradient.
        """
        self.undo([block])
        states = self._states[block.optimizer]
        item = states.blocks.get(block.index)
        contributions = self._gradients.contributions(block)
        if (
            item is None
            or not self._memory.has(block)
            or item.master is None
            or states.rule is None
            or contributions != self._usual.get(block.index, 1)
        ):
            return
        plan = states.peek(block, present.__contains__)
        if plan is None:
            return
        clip = self._unclipped()
        old = self._memory.exchange(item)
        try:
            updated = self._issue(plan, item, states.rule, clip, old)
        except BaseException:
            self._memory.exchange(item)
            raise
        self._begun[block.index] = _Begun(
            updated=updated, hyper=plan.hyper, clip=clip, contributions=contributions, states=item
        )

    def _issue(
        self,
        plan: StepPlan,
        item: BlockStates,
        rule: Rule,
        clip: Clip,
        old: tuple[Tensor, ...],
    ) -> Updated:
        """Issue an update that reads the old states and writes those that are a block's now."""
        block = item.block
        apart = (
            item.moments == "fp32"
            and all(len(each.positions) == len(block.parameters) for each in plan.blocks)
            and all(map(rule.writes_states, plan.hyper.tolist()))
        )
        if not apart:
            # Small moments, members without a gradient and states that a rule does not use now are updated or left where
            # they are: bring them there.
            new = tuple(part for part in (item.master, *item.states) if part is not None)
            copied = self._lane.submit(
                Copy(destinations=new, sources=old, label=f"keep states of {block.name}"),
                after=self._pipeline.running(block),
            )
            self._pipeline.follow(block, copied)
        # The roles may change again before this has run.
        as_issued = {block.index: copy.copy(item)}
        (updated,) = self._pipeline.hold(plan, as_issued, rule, clip, old if apart else None)
        return updated

    def _unclipped(self) -> Clip:
        return Clip(factor=1.0 / self._loss_scale(), value=None)

    def is_wanted(self, plan: StepPlan, clip: Clip) -> bool:
        """Whether the step is one whose updates begin in backward: after as many micro-batches as the last, without a clip.

        The same on all ranks.
        """
        return clip == self._unclipped() and all(
            self._gradients.contributions(item.block) == self._usual.get(item.block.index, 1)
            for item in plan.blocks
        )

    def check(self, plan: StepPlan, clip: Clip) -> None:
        """Nothing can be wrong: what the step does not want is undone."""

    def take(self, plan: BlockPlan, hyper: Tensor, clip: Clip) -> Updated | None:
        """The update of a block that has begun, if it is the one that the step wants; else it is undone.

        Args:
            plan: what the step wants.
            hyper: hyper-parameters by row.
            clip: factor and bound.
        """
        block = plan.block
        contributions = self._gradients.contributions(block)
        self._usual[block.index] = contributions
        begun = self._begun.get(block.index)
        if begun is None:
            return None
        same = (
            contributions == begun.contributions
            and clip == begun.clip
            and is_same_update(plan, hyper, begun.updated.plan, begun.hyper)
        )
        if not same:
            self.undo([block])
            return None
        del self._begun[block.index]
        self.taken += 1
        return begun.updated

    def abandon(self) -> list[Updated]:
        """No step will come: undo all; nothing is left to be shown."""
        self.undo()
        return []

    def undo(self, blocks: Sequence[Block] | None = None) -> None:
        """Bring back the states of some blocks, or of all, whose update has begun."""
        wanted = list(self._begun) if blocks is None else [block.index for block in blocks]
        for index in wanted:
            begun = self._begun.pop(index, None)
            if begun is None:
                continue
            self.undone += 1
            # What has been written is never looked at; the next update of the block comes after it.
            self._memory.exchange(begun.states)
