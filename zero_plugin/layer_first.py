"""All micro-batches of a step through one unit before the next: sharded weights come once a step, not once a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError, EngineStateError
from zero_plugin.resources import Resources
from zero_plugin.sharding.hooks import GradientHooks, undisturbed, untraced
from zero_plugin.sharding.leaves import PartLeaves
from zero_plugin.sharding.lockstep import Lockstep
from zero_plugin.sharding.parameters import ManagedParameter
from zero_plugin.sharding.roster import Roster

if TYPE_CHECKING:
    from zero_plugin.grads.reducer import GradientReducer
    from zero_plugin.sharding.sharded import ShardedModel


class RunsLayerFirst:
    """Base of the engine."""

    model: nn.Module
    config: ZeroConfig
    _device: torch.device
    _sharded: ShardedModel | None
    _reducer: GradientReducer
    _hooks: GradientHooks
    _roster: Roster
    _resources: Resources

    def _check_open(self, action: str) -> None:
        raise NotImplementedError(action)

    def _manage(self, members: list[ManagedParameter]) -> None:
        raise NotImplementedError(members)

    def backward_context(self) -> AbstractContextManager[None]:
        """Around a backward."""
        raise NotImplementedError

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        raise NotImplementedError(loss)

    @property
    def loss_scale(self) -> float:
        """The factor on the present loss."""
        raise NotImplementedError

    def layer_first(
        self, step_function: Callable[[Any], Tensor], micro_batches: Iterable[Any]
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches of a step, unit by unit: each unit is gathered once for all of them.

        Leaves the gradients that `engine.backward(step_function(batch))` of one after another would. All their activations are alive at
        once: meant with activation checkpoints. All ranks call it.

        Args:
            step_function: computes the loss of one micro-batch, divided by their number where the mean is wanted. Called once for
                each, in a thread of its own; one thread runs at a time.
            micro_batches: what it is called with; they must use the same units in the same order.

        Returns:
            The losses, detached, in order.

        Raises:
            ConfigError: below stage 3, or where weights are neither sharded over several ranks nor off the device.
            EngineStateError: micro-batches came to different units; no gradient was handed over.
        """
        self._check_open("layer_first")
        sharded = self._checked()
        batches = list(micro_batches)
        if not batches:
            raise EngineStateError("layer_first was given no micro-batches: give it at least one")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise EngineStateError(
                "layer_first computes gradients: call it outside torch.no_grad()"
            )
        self._manage(self._roster.newcomers())
        gatherer = sharded.gatherer
        leaves = PartLeaves(self.model, self._roster.members, len(batches), self._take_part)
        gatherer.know_leaves(leaves.members)
        try:
            together = Lockstep(gatherer, leaves, self._device, len(batches))
            try:
                losses = together.run([partial(step_function, batch) for batch in batches])
            except BaseException:
                with undisturbed():
                    gatherer.release_all()
                raise
            self._backward_of(losses)
        finally:
            gatherer.forget_leaves(leaves.members)
            leaves.retire()
        return [loss.detach() for loss in losses]

    def _backward_of(self, losses: list[Tensor]) -> None:
        sharded = self._checked()
        with untraced(), self.backward_context():
            first = self.scale_loss(losses[0])
            factor = self.loss_scale
            others = [loss if factor == 1.0 else loss * factor for loss in losses[1:]]
            with undisturbed():
                self._reducer.parts.current = lambda: sharded.gatherer.track.part
                self._reducer.begin_parts(len(losses))
            torch.autograd.backward([first, *others])

    def _take_part(self, index: int, part: int, grad: Tensor) -> None:
        with undisturbed():
            self._hooks.watch()
            self._reducer.receive_part(index, part, grad)

    def _checked(self) -> ShardedModel:
        config, sharded = self.config, self._sharded
        if sharded is None:
            raise ConfigError(
                f"layer_first needs stage=3, not {config.stage}: below it the weights are always here, and micro-batches may run one "
                "after another"
            )
        if config.params == "device" and self._resources.group.size == 1:
            raise ConfigError(
                "layer_first with params='device' and one rank would only take memory: the weights are here already. Use "
                "params='host' or 'nvme', or engine.backward for each micro-batch"
            )
        return sharded
