"""What user code reads and writes in full: weights, gradients and the state dict, each a collective."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zero_plugin.grads.agreement import GradientAgreement
from zero_plugin.grads.offload import GradientShards
from zero_plugin.grads.reducer import GradientReducer
from zero_plugin.grads.scaler import LossScaler
from zero_plugin.optim.pipeline import StepPipeline
from zero_plugin.optim.states import OptimizerStates
from zero_plugin.sharding.hooks import untraced
from zero_plugin.sharding.parameters import ManagedParameter
from zero_plugin.sharding.roster import Roster
from zero_plugin.sharding.sharded import ShardedModel
from zero_plugin.stepper import Stepper

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAccess:
    """Full tensors of one engine.

    Attributes:
        roster: managed parameters.
        sharded: sharded weights, or None.
        states: of each optimizer.
        reducer: knows which gradients are shown.
        agreement: knows which gradients exist.
        gradients: the reduced chunks.
        pipeline: gathers chunks.
        stepper: knows which weights are on their way.
        scaler: the factor on gradients.
        is_first: whether this is rank 0.
    """

    roster: Roster
    sharded: ShardedModel | None
    states: Sequence[OptimizerStates]
    reducer: GradientReducer
    agreement: GradientAgreement
    gradients: GradientShards
    pipeline: StepPipeline
    stepper: Stepper
    scaler: LossScaler
    is_first: bool

    @contextmanager
    def params(self, *, writeback: bool) -> Generator[None]:
        """Inside, every parameter holds its full weights; see `ZeroEngine.full_params`."""
        self.stepper.wait()
        if self.sharded is None:
            yield
            return
        with ExitStack() as stack:
            written = stack.enter_context(_as_engine(self.sharded.full(writeback=writeback)))
            yield
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self.stepper.import_weights(written)
        self.roster.note_written(written)

    @contextmanager
    def computing(self) -> Generator[None]:
        """Inside, sharded weights may be used outside their modules; see `ZeroEngine.evaluation_context`."""
        if self.sharded is None:
            yield
            return
        gatherer = self.sharded.gatherer
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            call = gatherer.enter(())
        try:
            yield
        finally:
            with untraced(), torch.inference_mode(mode=False), torch.no_grad():
                gatherer.leave((), call)

    def copies(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Every sharded parameter and its full weights in host memory, on every rank; gathered one unit at a time."""
        if self.sharded is None:
            return []
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            return [
                (member.parameter, _copy(member.parameter))
                for unit in self.sharded.gathered_units()
                for member in unit.members
            ]

    @contextmanager
    def grads(self) -> Generator[None]:
        """Inside, `Parameter.grad` holds the full gradient; see `ZeroEngine.full_grads`."""
        if self.reducer.showing:
            yield
            return
        stand_ins: list[tuple[ManagedParameter, Tensor | None]] = []
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            numbers = range(len(self.states))
            present = {i for number in numbers for i in self.agreement.summarise(number).present}
            for block in self.roster.blocks:
                if not any(member.index in present for member in block.parameters):
                    continue
                chunk, after = self.gradients.chunk(block)
                for ticket in after:
                    ticket.wait()
                fulls = self.pipeline.gather_chunk(block, chunk)
                for member, full in zip(block.parameters, fulls, strict=True):
                    stand_ins.append((member, member.parameter.grad))
                    grad = full.to(block.device, torch.float32).div_(self.scaler.scale)
                    seen = member.index in present
                    member.parameter.grad = grad.to(block.dtype) if seen else None
        self.reducer.showing = True
        try:
            yield
        finally:
            self.reducer.showing = False
            for member, stand_in in stand_ins:
                member.parameter.grad = stand_in

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The model's state dict on the CPU of rank 0, one unit gathered at a time; empty on the others.

        The weights after every update, those that are not shown yet included.
        """
        self.stepper.wait()
        full: dict[int, Tensor] = {}
        if self.sharded is not None:
            with untraced(), torch.inference_mode(mode=False), torch.no_grad():
                for unit in self.sharded.gathered_units():
                    for member in unit.members if self.is_first else ():
                        full[id(member.parameter)] = _copy(member.parameter)
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            for plan, chunk in self.stepper.held_chunks():
                gathered = self.pipeline.gather_chunk(plan.block, chunk)
                for position in plan.positions if self.is_first else ():
                    member = plan.block.parameters[position]
                    full[id(member.parameter)] = gathered[position].view(member.shape)
        if not self.is_first:
            return {}
        found: dict[str, Any] = model.state_dict(keep_vars=True)
        return {
            name: full[id(value)] if id(value) in full else _copy(value)
            for name, value in found.items()
        }


def make_plain(weights: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Give parameters of a closed engine memory of their own again."""
    with untraced(), torch.inference_mode(mode=False), torch.no_grad():
        for parameter, value in weights:
            parameter.__class__ = nn.Parameter
            parameter.data = value


@contextmanager
def _as_engine(inner: AbstractContextManager[T]) -> Generator[T]:
    """Enter and leave `inner` as the engine works: untraced, without gradients; what is inside runs as it would."""
    with untraced(), torch.inference_mode(mode=False), torch.no_grad():
        value = inner.__enter__()
    try:
        yield value
    except BaseException as error:
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            inner.__exit__(type(error), error, error.__traceback__)
        raise
    with untraced(), torch.inference_mode(mode=False), torch.no_grad():
        inner.__exit__(None, None, None)


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
