"""The engine: one model, its optimizers, and the moments at which a framework computes.

It only wires the parts together and says when: `sharding` knows where elements lie, `grads` reduces and keeps
gradients, `optim` updates, `runtime` moves bytes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from zero_plugin.access import make_plain
from zero_plugin.budget import Budget
from zero_plugin.checkpoint.surface import SavesCheckpoints
from zero_plugin.config import ZeroConfig
from zero_plugin.errors import (
    EngineStateError,
    NonFiniteGradientError,
    ZeroError,
)
from zero_plugin.grads.clipping import Clipper
from zero_plugin.grads.nonfinite import NonFinitePolicy
from zero_plugin.grads.norm import Clip
from zero_plugin.grads.scaler import LossScaler
from zero_plugin.grads.sentinel import GradientSentinel
from zero_plugin.inputs import check_arguments, describe, find_device
from zero_plugin.layer_first import RunsLayerFirst
from zero_plugin.optim import facade
from zero_plugin.optim.kept import KeptStates
from zero_plugin.parts import DTYPES, assemble
from zero_plugin.resources import Resources
from zero_plugin.sharding.hooks import GradientHooks, check_unmanaged, untraced
from zero_plugin.sharding.parameters import ManagedParameter, collect_parameters
from zero_plugin.sharding.roster import Roster
from zero_plugin.sharding.setup import check_same_setup
from zero_plugin.updating import UpdatesLate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero_plugin.sharding.sharded import ShardedModel


class ZeroEngine(SavesCheckpoints, UpdatesLate, RunsLayerFirst):
    """Trains a model with sharded, offloaded optimizer states.

    The model stays unwrapped and its parameters keep their identity; each optimizer object stays the user's own and
    acts on the engine from now on. All ranks must build the engine, and call `step`, in the same order.

    Weights that user code writes between steps (`load_state_dict`, `with torch.no_grad(): p.clamp_()`, `p.data = x`) are taken
    into the fp32 masters. Writing *through* `p.data` (`p.data.clamp_()`) leaves no trace that can be seen and is undone by the
    next step.

    Args:
        model: the module to train; its parameters and buffers are made equal to rank 0's.
        optimizer: a torch optimizer built on `model.parameters()`, or several.
        config: every setting.

    Raises:
        ConfigError: the settings do not fit the device.
        ParameterError: a trainable parameter is non-leaf, duplicated, on another device or of an unsupported dtype.
        OptimizerError: an optimizer holds foreign parameters, or is not element-wise.
        BudgetError: the states do not fit a limit; said before anything is allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: ZeroConfig | None = None,
    ) -> None:
        self.optimizers = check_arguments(model, optimizer, config)
        self.model = model
        self.config = config or ZeroConfig()
        members = collect_parameters(model, self.optimizers)
        for member in members:
            check_unmanaged(member)
        self._device = find_device(model, members)
        self._closed = self._learned_order = False
        self._budget = Budget(self.config, self._device)
        self._resources = Resources.open(self.config, self._device)
        self._roster = Roster(model, self.optimizers)
        self._scaler = LossScaler(self.config.loss_scale)
        self._nonfinite = NonFinitePolicy(self.config, self._scaler)
        self._clipper = Clipper(refuses=self.config.update_in_backward)
        try:
            parts = assemble(
                model, self.config, self._resources, self._roster, self._budget, self._scaler
            )
        except BaseException:
            self._resources.close()
            raise
        self._place, self._hooks = parts.place, parts.hooks
        self._gradients, self._buckets = parts.gradients, parts.buckets
        self._reducer, self._agreement = parts.reducer, parts.agreement
        self._replicas, self._activations = parts.replicas, parts.activations
        self._sharded, self._swap = parts.sharded, parts.swap
        self._pipeline, self._undo = parts.pipeline, parts.undo
        self._finalizer = weakref.finalize(
            self, _abandon, self._hooks, self._sharded, self._roster.members, self._resources
        )
        try:
            self._states = parts.make_states(self.optimizers, self.config, self._resources)
            check_same_setup(self._resources.control, describe(self.config, self.optimizers, model))
            self._accounts = parts.make_accounts(self.config, self._states, self._resources)
            self._stepper = parts.make_stepper(
                self.config, self._roster, self._states, self._resources, self._scaler
            )
            self._access = parts.make_access(
                self._roster, self._states, self._scaler, self._stepper, self._resources
            )
            self._checkpoints = parts.make_checkpoints(
                model,
                self.config,
                self._roster,
                self._states,
                self._stepper,
                self._nonfinite,
                self._resources,
            )
            self._replicas.equalise()
            self._manage(members)
            if self._activations is not None:
                self._activations.attach()
            for item in self.optimizers:
                facade.install(item, self)
        except BaseException:
            self.close()
            raise

    # Backward ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """Scale the loss, run backward, and reduce gradients on the way.

        Args:
            loss: a scalar (or any tensor, with `gradient=`).
            **arguments: handed to `Tensor.backward`.
        """
        with untraced(), self.backward_context():
            self.scale_loss(loss).backward(**arguments)

    @contextmanager
    def backward_context(self) -> Generator[None]:
        """What `backward` does around a framework's own call of `loss.backward()`.

        An exception in the backward drops the gradients of the step and is raised on.
        """
        self._check_open("backward")
        self._manage(self._roster.newcomers())
        self._hooks.announced = True
        try:
            yield
        except BaseException:
            self._hooks.announced = False
            self.abort_step()
            raise
        self._hooks.announced = False
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._hooks.end_backward()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale (the loss itself without loss scaling)."""
        if not self._reducer.has_unspent():
            self._scaler.advance()
        self._scaler.applied = True
        return loss if self._scaler.scale == 1.0 else loss * self._scaler.scale

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backwards inside are not the last of their step.

        At stages 0 and 1 their gradients are added up locally and reduced once, with the last. At stage 2 every
        backward is reduced all the same, since only the own part is kept.
        """
        self._check_open("no_sync")
        before = self._reducer.deferred
        self._reducer.deferred = True
        try:
            yield
        finally:
            self._reducer.deferred = before

    # Step --------------------------------------------------------------------------------------------------------

    def step(
        self, optimizer: Optimizer | None = None, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Update the weights of one optimizer, or of all.

        Args:
            optimizer: which one; None for all, in order.
            closure: re-evaluates the model and returns the loss, as in torch.

        Returns:
            The closure's value, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_open("step")
        for number in self._numbers(optimizer):
            self.optimizers[number].step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clear the gradients of all optimizers."""
        for item in self.optimizers:
            item.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        optimizer: Optimizer | None = None,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the coming step by the norm of the averaged, unscaled gradient over all ranks.

        The factor is applied inside the update, so no pass over the gradient is made for it.

        Args:
            max_norm: the norm is at most this after clipping; infinity to measure only.
            norm_type: 2 or infinity.
            optimizer: clip over this one's parameters; None for all together.
            error_if_nonfinite: raise if the norm is NaN or infinite.

        Returns:
            The norm before clipping, fp32 scalar on the model's device.

        Raises:
            ConfigError: another norm, or a negative bound.
            NonFiniteGradientError: see `error_if_nonfinite`.
        """
        self._check_open("clip_grad_norm_")
        numbers = self._numbers(optimizer)
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._manage(self._roster.newcomers())
            summaries = [self._agreement.norm(number) for number in numbers]
        norm = self._clipper.by_norm(
            numbers,
            summaries,
            max_norm=max_norm,
            norm_type=norm_type,
            scale=self._scaler.scale,
        )
        if error_if_nonfinite and not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"the gradient norm is {norm}: {self._agreement.name_nonfinite(numbers)}; lower the learning rate or "
                "the loss scale, or pass error_if_nonfinite=False"
            )
        return torch.tensor(norm, dtype=torch.float32, device=self._device)

    def clip_grad_value_(self, clip_value: float, optimizer: Optimizer | None = None) -> None:
        """Clamp every element of the averaged, unscaled gradient in the coming step.

        Args:
            clip_value: the bound on magnitudes.
            optimizer: clip this one's parameters; None for all.
        """
        self._check_open("clip_grad_value_")
        self._clipper.by_value(self._numbers(optimizer), clip_value)

    # Access ------------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluation_context(self) -> Generator[None]:
        """Around a step without gradients that all ranks take: sharded weights may be used outside their modules."""
        self._check_open("evaluation_context")
        self._stepper.note_evaluation()
        with self._access.computing():
            yield

    def forward_context(self) -> AbstractContextManager[None]:
        """Around a forward that is no module's: its activation checkpoints are offloaded too."""
        return nullcontext() if self._activations is None else self._activations.context()

    @contextmanager
    def full_params(self, *, writeback: bool = False) -> Generator[None]:
        """Inside, every parameter holds its full, finished weights. At stages 0 to 2 they always do after a step.

        A collective at stage 3.

        Args:
            writeback: at stage 3, take what is written inside into the shards and masters; write the same on every rank.

        Raises:
            ParameterError: at stage 3, a parameter was written to without `writeback`.
        """
        self._check_open("full_params")
        self._checkpoints.wait_until_captured()
        with self._access.params(writeback=writeback):
            yield

    @contextmanager
    def full_grads(self) -> Generator[None]:
        """Inside, `Parameter.grad` holds the full averaged, unscaled, unclipped gradient, to read; a collective.

        A gradient no rank has is None. Writes are not carried into the step.
        """
        self._check_open("full_grads")
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._manage(self._roster.newcomers())
        with self._access.grads():
            yield

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state dict on the CPU of rank 0, empty on the others; all ranks call it."""
        self._check_open("full_state_dict")
        return self._access.state_dict(self.model)

    def optimizer_state_dict(
        self, optimizer: Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """An optimizer's full state in torch's format, with the fp32 masters of low-precision weights.

        A collective. Weights that user code wrote since the last step are taken into the masters first.

        Args:
            optimizer: one of the engine's.
            rank0_only: return `{}` on other ranks.
        """
        self._check_open("optimizer_state_dict")
        number = self._number(optimizer)
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._stepper.take_writes(number)
            return self._states[number].state_dict(
                self._pipeline.gather_chunk,
                keep=not rank0_only or self._resources.group.rank == 0,
                ahead=self._stepper.has_held,
            )

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Replace an optimizer's state; every rank gives the full state and keeps its slices.

        Raises:
            CheckpointError: the state does not fit; nothing is changed then.
        """
        self._check_open("load_optimizer_state_dict")
        number = self._number(optimizer)
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._stepper.take_writes(number)
            self._stepper.forget_held(number)
            if self._sharded is not None and self._states[number].shares_weights:
                self._sharded.rest()
            self._states[number].load_state_dict(state)
            for ours, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
                ours.update({key: value for key, value in theirs.items() if key != "params"})

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped for a non-finite gradient."""
        return self._nonfinite.skipped_steps

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was skipped."""
        return self._nonfinite.step_was_skipped

    @property
    def loss_scale(self) -> float:
        """The factor on the present loss; 1 without loss scaling."""
        return self._scaler.scale

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._resources.group.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._resources.group.size

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of each kind of state in each tier, on this rank, staging and padding included."""
        return self._accounts.held(self.model)

    def ledger(self) -> dict[str, int]:
        """Bytes this rank moved since the start, by direction and collective; waits for the last step's."""
        if not self._closed:
            self.wait_for_update()
        return self._resources.ledger.snapshot()

    @property
    def peak_gradient_bytes(self) -> int:
        """Most bytes of device memory that unreduced gradients took at once."""
        return self._reducer.local.peak_bytes

    # Lifetime ----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def drain(self) -> None:
        """Apply a delayed update that is not shown yet, and wait until nothing is in flight; all ranks call it.

        The next step is then like the first delayed one.

        Raises:
            LaneError: an operation failed; the cause is chained.
        """
        self._check_open("drain")
        self._checkpoints.settle()
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._stepper.drain()
        self._resources.backend.drain()

    def abort_step(self) -> None:
        """Drop the gradients of a broken step and bring the lanes to rest.

        Weights and states are those of the last step; if the update itself failed midway, blocks before the failure have
        taken their step and later ones have not, so go on from a checkpoint.
        """
        if self._closed:
            return
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._reducer.abort()
            self._stepper.abandon()
            self._agreement.forget()
            self._clipper.forget()
            if self._sharded is not None:
                self._sharded.gatherer.reset()
            if self._resources.group.size == 1:
                self._resources.backend.settle()
                self._stepper.settle()
                self._gradients.take_back()
            self._gradients.forget_ended()

    def keep_states(self) -> KeptStates:
        """The optimizer states, to read after `close`: call it right before."""
        self._stepper.wait()
        for states in self._states:
            states.keep()
        return KeptStates(
            self._states,
            size=self._resources.group.size if self.config.shards_optimizer else 1,
            timeout_seconds=self.config.timeout_seconds,
        )

    def close(self, *, gather: bool = False) -> None:
        """Stop threads, free buffers and take the hooks off; idempotent. The model is plain afterwards.

        Except for sharded parameters (stage 3) of several processes, or on `nvme`: they stay sharded, and raise when they are
        used.

        Args:
            gather: at stage 3, leave plain parameters with their full weights in host memory, on every rank; a collective.
        """
        if self._closed:
            return
        weights = self._access.copies() if gather else []
        self._closed = True
        with ExitStack() as stack:
            # Last first; each is done whatever the others raise.
            stack.callback(self._finalizer)
            for part in (
                self._pipeline,
                self._gradients,
                self._buckets,
                self._swap,
                self._activations,
                self._undo,
            ):
                if part is not None:
                    stack.callback(part.close)
            stack.callback(self._resources.backend.settle)
            # A lane may be waiting for a rank that will not come.
            stack.callback(self._resources.group.close)
            stack.callback(self._reducer.release)
            stack.callback(self._replicas.close)
            if self._sharded is not None:
                alone = self._resources.group.size == 1
                stack.callback(
                    self._sharded.close,
                    restore=alone and not weights and self.config.params != "nvme",
                )
            for item in self.optimizers:
                if getattr(item, "zero_host", None) is self:
                    facade.release(item)
            stack.callback(self._end_steps)
            stack.callback(self._end_saves)
        make_plain(weights)

    def __enter__(self) -> Self:
        """The engine itself."""
        self._check_open("with")
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # What facades call ---------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """One optimizer's step; `optimizer.step()` comes here."""
        self._check_open("step")
        number = self._number(optimizer)
        if self._activations is not None:
            self._activations.check_seen()
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._checkpoints.before_step()
            self._manage(self._roster.newcomers())
            if self._sharded is not None:
                self._sharded.gatherer.release_all()
            self._reducer.check_cleared(number)
            summary = self._agreement.for_step(number)
            clip = self._clipper.take(number)
            self._learn_order()
            self._scaler.applied = False
            if not summary.present:
                return
            self._reducer.spent.add(number)
            if self._nonfinite.passes(summary.norm.nonfinite if summary.norm else 0):
                scaled = Clip(factor=clip.factor / self._scaler.scale, value=clip.value)
                self._stepper.step(number, summary.present.__contains__, scaled)
            else:
                self._stepper.skip(number)
                self._nonfinite.skip(self._agreement.name_nonfinite([number]))

    def optimizer_zero_grad(self, optimizer: Optimizer, *, set_to_none: bool) -> None:
        """Clear one optimizer's gradients; `optimizer.zero_grad()` comes here."""
        self._check_open("zero_grad")
        number = self._number(optimizer)
        self._clipper.take(number)
        members = [member for member in self._roster.members if member.optimizer == number]
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            if number not in self._reducer.spent:
                self._stepper.undo(number)
            if set_to_none:
                self._reducer.clear([number])
            else:
                for member in members:
                    if self._reducer.local.is_present(member.index):
                        self._reducer.zero(member.index)
        managed = {id(member.parameter) for member in members}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in managed:
                    parameter.grad = None

    def parameters_changed(self, optimizer: Optimizer) -> None:
        """A param group was added to an optimizer."""
        self._number(optimizer)
        self._manage(self._roster.newcomers())

    # Inside ------------------------------------------------------------------------------------------------------

    def _learn_order(self) -> None:
        """After the first backward, launch blocks in the order in which rank 0's gradients completed them."""
        if self._learned_order or len(self.optimizers) > 1:
            return
        self._learned_order = True
        order = self._reducer.completion_order
        if self._resources.group.size > 1:
            mine = torch.tensor(order, dtype=torch.int64, device="cpu")
            order = self._resources.control.exchange(mine, label="bucket order")[0].tolist()
        self._reducer.reorder(order)

    def _manage(self, members: list[ManagedParameter]) -> None:
        """Manage parameters that are new, became trainable, or were added to an optimizer."""
        if not members and (self._sharded is None or self._sharded.is_attached):
            return
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            if self._sharded is not None:
                self._sharded.open(members)
        blocks = self._roster.form(
            members,
            self._place,
            wire_bytes=DTYPES[self.config.reduce_dtype].itemsize,
            limit=self.config.bucket_size,
            device_fraction=self.config.device_fraction,
        )
        self._budget.plan(self._accounts.needed(self.model, self._roster.blocks, blocks))
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._reducer.end_backward()
            self._roster.admit(members, blocks)
            if self._sharded is not None:
                self._sharded.admit(blocks)
            self._gradients.add_blocks(blocks)
            if self._swap is not None:
                self._swap.prepare(self._accounts.formed(self._roster.blocks))
            if self.config.speculate:
                self._undo.add_blocks(self._accounts.with_states(blocks))
            for number, states in enumerate(self._states):
                states.add_blocks([block for block in blocks if block.optimizer == number])
            self._buckets.add_blocks(self._roster.blocks)
            self._reducer.add_blocks(blocks)
            self._pipeline.add_blocks(self._roster.blocks)
            for member in members:
                self._hooks.attach(member)
            if self._sharded is not None:
                self._sharded.seal()

    def broadcast_buffers(self) -> None:
        """Send rank 0's buffers to all ranks; all ranks call it.

        Done before each training forward of the model itself. For a framework that calls submodules in its own order.
        """
        self._replicas.broadcast_buffers()

    def _number(self, optimizer: Optimizer) -> int:
        for number, item in enumerate(self.optimizers):
            if item is optimizer:
                return number
        raise EngineStateError(
            f"{type(optimizer).__name__} is not one of this engine's optimizers: give it to ZeroEngine(model, [...])"
        )

    def _numbers(self, optimizer: Optimizer | None) -> list[int]:
        return list(range(len(self.optimizers))) if optimizer is None else [self._number(optimizer)]

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise EngineStateError(f"{action} was called after engine.close(): build a new engine")


def _abandon(
    hooks: GradientHooks,
    sharded: ShardedModel | None,
    members: Sequence[ManagedParameter],
    resources: Resources,
) -> None:
    """Leave the model plain; also when an engine is collected without `close`."""
    hooks.remove()
    if sharded is not None:
        try:
            sharded.close(restore=resources.group.size == 1)
        except ZeroError:
            # A lane that failed before: what is not here stays guarded.
            sharded.close(restore=False)
    for member in members:
        if isinstance(member.parameter.grad, GradientSentinel):
            member.parameter.grad = None
    resources.close()
