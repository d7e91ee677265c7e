"""When updates run and when their weights are shown: at once, beside the next forward, or one step late.

The delayed update follows ZeRO-Offload (ATC'21, section 5.2 and figure 6): steps 1 to N-1 are plain, step N starts the update of
its gradient and shows nothing, and every later step first shows the weights of the update before and then starts its own.
So the update of step i-1 runs beside the forward and backward of step i, which see the weights of step i-2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import CheckpointError
from zero_plugin.grads.norm import Clip
from zero_plugin.optim.eager import EagerUpdater
from zero_plugin.optim.pipeline import Published, StepPipeline, Updated
from zero_plugin.optim.plan import BlockPlan
from zero_plugin.optim.speculation import Speculator
from zero_plugin.optim.states import OptimizerStates
from zero_plugin.runtime.backend import Backend, Lane, Ticket
from zero_plugin.runtime.operations import Snapshot
from zero_plugin.sharding.control import Control
from zero_plugin.sharding.parameters import RESIDENT, ManagedParameter
from zero_plugin.sharding.partition import Block
from zero_plugin.sharding.pending import PendingWeights
from zero_plugin.sharding.roster import Roster

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True)
class _Line:
    """One optimizer's place in time.

    Attributes:
        steps: taken so far, skipped ones included.
        held: updates whose weights are not shown yet.
        told: the step after which an evaluation was last told of.
    """

    steps: int = 0
    held: Sequence[Updated] = ()
    told: int = 0


class Stepper:
    """Runs the steps of one engine's optimizers.

    Args:
        config: whether updates overlap and whether they are delayed.
        backend: what computes waits.
        control: the ranks.
        roster: managed parameters.
        states: of each optimizer.
        pipeline: updates and publishes.
        pending: weights that updates are writing.
        early: begins updates in backward, or None.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts it connects
        self,
        config: ZeroConfig,
        backend: Backend,
        control: Control,
        roster: Roster,
        states: Sequence[OptimizerStates],
        pipeline: StepPipeline,
        pending: PendingWeights,
        early: Speculator | EagerUpdater | None = None,
    ) -> None:
        self._early = early
        self._delays = config.delayed_update
        self._warmup = config.delayed_update_warmup
        self._overlaps = config.overlap
        self._backend = backend
        self._control = control
        self._roster = roster
        self._states = states
        self._pipeline = pipeline
        self._pending = pending
        self._lines = [_Line() for _ in states]

    @property
    def speculation(self) -> dict[str, int]:
        """Blocks whose update began before its step: taken, and undone."""
        found = self._early
        return {"taken": found.taken if found else 0, "undone": found.undone if found else 0}

    @property
    def has_held(self) -> bool:
        """Whether an update's weights are not shown yet."""
        return any(line.held for line in self._lines)

    def step(self, number: int, is_present: Callable[[int], bool], clip: Clip) -> None:
        """Take one optimizer's step; all ranks call it.

        Args:
            number: the optimizer.
            is_present: whether a parameter (by managed index) has a gradient on some rank.
            clip: factor and bound on the gradients.

        Raises:
            LaneError: the last step's update failed, or this one's where it could not overlap.
            EngineStateError: an update that has run inside backward is not the one that is asked for.
        """
        line, states = self._lines[number], self._states[number]
        self._begin(number)
        plan = states.plan(is_present)
        if self._early is not None:
            self._early.check(plan, clip)
        states.count(plan.blocks)
        if self._delays and line.steps >= self._warmup:
            line.held = self._pipeline.hold(plan, states.blocks, states.rule, clip)
            return
        early = self._early
        begun = None if early is None else partial(early.take, hyper=plan.hyper, clip=clip)
        backwards = early is not None and early.is_wanted(plan, clip)
        self._show(
            self._pipeline.run(plan, states.blocks, states.rule, clip, begun, backwards=backwards)
        )
        self.undo(number)

    def skip(self, number: int) -> None:
        """Leave one step's gradients out: only what was held is shown."""
        self.undo(number)
        self._begin(number)

    def undo(self, number: int | None = None) -> None:
        """Undo the updates that began before their step, of one optimizer or of all."""
        if self._early is not None:
            chosen = range(len(self._states)) if number is None else [number]
            self._early.undo(
                [item.block for each in chosen for item in self._states[each].blocks.values()]
            )

    def abandon(self) -> None:
        """No step will come for what has begun before its step: undo it, or show it where that cannot be done."""
        if self._early is None:
            return
        left = self._early.abandon()
        if not left:
            return
        logging.getLogger(__name__).warning(
            "a step was broken off after %d of its blocks had been updated inside backward (update_in_backward=True): these keep "
            "their update, the others have none",
            len(left),
        )
        for item in left:
            self._states[item.plan.block.optimizer].count([item.plan])
        self._show(self._pipeline.publish(left))

    def wait(self) -> None:
        """Wait until weights and states are those of the last step; what is held stays so.

        Raises:
            LaneError: an update failed.
            EngineStateError: an update that cannot be undone has begun before its step.
        """
        self.undo()
        self.wait_for_weights()

    def wait_for_weights(self) -> None:
        """As `wait`, but updates that began before their step, of which no weight shows anything, go on."""
        try:
            self._pending.finish_all()
        finally:
            self._pipeline.wait(but=() if self._early is None else self._early.begun)

    def settle(self) -> None:
        """After an exception, once the lanes are at rest: show every weight, whether its update failed or not."""
        self._pending.forget()
        self._pipeline.forget()

    def close(self) -> None:
        """Show the weights of every update, and let go of them; raises what nobody has been told of.

        Raises:
            LaneError: an update failed.
        """
        self.abandon()
        try:
            if self.has_held:
                self.drain()
        finally:
            try:
                self._pipeline.wait(again=False)
            finally:
                self._pending.forget()

    def drain(self) -> None:
        """Show the weights of every update; the next step is then like the first delayed one.

        All ranks call it.
        """
        self.wait()
        for number in range(len(self._lines)):
            self._take_writes(number)
            self._publish(number)
        self.wait()

    def take_writes(self, number: int) -> None:
        """Take weights that user code wrote since the last step into the masters; all ranks call it."""
        self.wait()
        self._take_writes(number)

    def take_writes_beside(self, number: int) -> None:
        """As `take_writes`, but the last step's update goes on where user code wrote nothing; weights that are shown are there."""
        self.undo()
        if self.has_held:
            self._pending.finish_all()
        self._take_writes(number)

    def read_states(
        self, block: Block, lane: Lane, operation: Snapshot, after: Sequence[Ticket[Any]]
    ) -> Ticket[None]:
        """Have a lane read a block's states as the last step's update leaves them; its next update comes after that.

        Args:
            block: the block.
            lane: a host lane.
            operation: what reads them.
            after: what must have ended, too.
        """
        ticket = lane.submit(operation, after=(*after, *self._pipeline.running(block)))
        self._pipeline.follow(block, ticket)
        return ticket

    def import_weights(self, indices: set[int]) -> None:
        """Take weights that user code wrote, already known on all ranks, into the masters."""
        if not indices:
            return
        self.wait()
        for states, line in zip(self._states, self._lines, strict=True):
            states.import_weights(indices)
            self._replace_held(line, indices)

    # Delayed updates ---------------------------------------------------------------------------------------------

    def note_evaluation(self) -> None:
        """Say, once a step, which weights an evaluation sees while an update is not shown yet."""
        for number, line in enumerate(self._lines):
            if line.held and line.told != line.steps:
                line.told = line.steps
                logging.getLogger(__name__).info(
                    "evaluation after step %d of optimizer %d sees the weights before that step's update, which is delayed",
                    line.steps,
                    number,
                )

    def held_chunks(self) -> list[tuple[BlockPlan, Tensor]]:
        """Which members' new weights are not shown yet, and this rank's chunk with them, finished; to look at."""
        self.wait()
        found: list[tuple[BlockPlan, Tensor]] = []
        for line in self._lines:
            for item in line.held:
                chunk = item.states.master if item.output is None else item.output
                if chunk is not None:
                    found.append((item.plan, chunk))
        return found

    def state_dict(self) -> list[dict[str, Any]]:
        """Of each optimizer: steps taken, and the parameters whose present weights are one update old; plain values."""
        return [
            {
                "steps": line.steps,
                "held": sorted(
                    item.plan.block.parameters[position].name
                    for item in line.held
                    for position in item.plan.positions
                ),
            }
            for line in self._lines
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict` was taken: weights and optimizer states must have been loaded before.

        Raises:
            CheckpointError: it is of another number of optimizers, or names unknown parameters.
        """
        if len(state) != len(self._lines):
            raise CheckpointError(
                f"the checkpoint's delayed update is of {len(state)} optimizers, this engine has {len(self._lines)}: build it "
                "with the same optimizers"
            )
        known = {member.name for member in self._roster.members}
        unknown = sorted({str(name) for item in state for name in item["held"]} - known)
        if unknown:
            raise CheckpointError(
                f"the checkpoint's delayed update names parameter {unknown[0]!r}, which is not trained here: load it into the "
                "same model"
            )
        self.wait()
        for number, (line, item) in enumerate(zip(self._lines, state, strict=True)):
            line.steps = int(item["steps"])
            names = set(item["held"])
            line.held = self._restore_held(self._states[number], names)
            if not self._delays:
                self._publish(number)
        self.wait()

    def forget_held(self, number: int) -> None:
        """Drop updates that are not shown: the masters are about to be loaded; the present weights replace them first."""
        line = self._lines[number]
        if not line.held:
            return
        indices = {member.index for item in line.held for member in item.plan.block.parameters}
        self._states[number].import_weights(indices)
        line.held = ()

    # Inside ------------------------------------------------------------------------------------------------------

    def _restore_held(self, states: OptimizerStates, names: set[str]) -> list[Updated]:
        """The updates that gave the present masters, as if their weights were still to be shown."""
        held: list[Updated] = []
        for item in states.blocks.values():
            members = item.block.parameters
            positions = tuple(i for i, member in enumerate(members) if member.name in names)
            if not positions:
                continue
            output = self._pipeline.held_output(item.block)
            if output is not None:
                states.read_master(item, output)
            plan = BlockPlan(
                block=item.block, positions=positions, rows=np.zeros(0, dtype=np.int64), groups=()
            )
            ticket = self._backend.mark(f"update {item.block.name}")
            held.append(Updated(plan=plan, states=item, output=output, lease=None, ticket=ticket))
        return held

    def _begin(self, number: int) -> None:
        self._backend.meter.step()
        self.wait_for_weights()
        self._take_writes(number)
        self._publish(number)
        line = self._lines[number]
        line.steps += 1
        if self._delays and line.steps == self._warmup:
            logging.getLogger(__name__).info(
                "from step %d on updates are delayed by one step", line.steps
            )

    def _take_writes(self, number: int) -> None:
        written = self._roster.take_foreign_writes(number, self._control)
        if written:
            self.undo(number)
            self.wait_for_weights()
            self._states[number].import_weights(written)
            self._replace_held(self._lines[number], written)

    @staticmethod
    def _replace_held(line: _Line, indices: set[int]) -> None:
        """What user code wrote takes the place of weights that are not shown yet."""
        for item in line.held:
            if item.output is None:
                continue
            block = item.plan.block
            for position, member in enumerate(block.parameters):
                if member.index in indices:
                    block.own_view(item.output, position).copy_(item.states.weights_view(position))

    def _publish(self, number: int) -> None:
        line = self._lines[number]
        held, line.held = line.held, ()
        self._show(self._pipeline.publish(held))

    def _show(self, published: Sequence[Published]) -> None:
        """Let the weights be used once they are written: each waits for its own update where that can be seen."""
        self._roster.note_published(member for item in published for member in _members(item))
        waits_here = not (self._overlaps and self._pending.can_wait)
        for item in published:
            if waits_here:
                item.ticket.on(self._backend.compute)
                item.ticket.wait()
            elif item.plan.block.unit == RESIDENT:
                self._pending.expect(_members(item), item.ticket)


def _members(item: Published) -> list[ManagedParameter]:
    block = item.plan.block
    return [block.parameters[position] for position in item.plan.positions]
