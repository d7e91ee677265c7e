"""The parts of an engine, wired together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from zero_plugin.access import FullAccess
from zero_plugin.accounts import Accounts
from zero_plugin.activations.offload import ActivationOffload
from zero_plugin.budget import Budget
from zero_plugin.checkpoint.checkpoints import Checkpoints
from zero_plugin.checkpoint.source import Holdings
from zero_plugin.config import ZeroConfig
from zero_plugin.grads.agreement import GradientAgreement
from zero_plugin.grads.buckets import Buckets
from zero_plugin.grads.nonfinite import NonFinitePolicy
from zero_plugin.grads.offload import GradientShards
from zero_plugin.grads.reducer import GradientReducer
from zero_plugin.grads.scaler import LossScaler
from zero_plugin.grads.swapped import SwappedGradients
from zero_plugin.optim.eager import EagerUpdater
from zero_plugin.optim.form import StateForms
from zero_plugin.optim.pipeline import StepPipeline
from zero_plugin.optim.speculation import Speculator, UndoMemory
from zero_plugin.optim.states import OptimizerStates
from zero_plugin.optim.swap import SwappedStates
from zero_plugin.resources import Resources
from zero_plugin.sharding.hooks import GradientHooks
from zero_plugin.sharding.partition import ShardPlace
from zero_plugin.sharding.pending import PendingWeights
from zero_plugin.sharding.replicas import Replicas
from zero_plugin.sharding.roster import Roster
from zero_plugin.sharding.sharded import ShardedModel
from zero_plugin.stepper import Stepper

if TYPE_CHECKING:
    from torch.optim import Optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by the names that settings use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What an engine directs.

    Attributes:
        place: over how many ranks states are cut, and which part is this rank's.
        gradients: the reduced chunks in their tier.
        buckets: device buffers of reductions and gathers.
        reducer: turns gradients into reduced chunks.
        agreement: what all ranks know before a step.
        replicas: the ranks' copies of the model.
        hooks: on the gradients.
        sharded: sharded weights, or None.
        swap: optimizer states on NVMe, or None.
        activations: inputs of checkpoints away from the device, or None.
        pipeline: updates blocks and publishes their weights.
        pending: weights that updates are writing.
        undo: memory for updates that may have to be undone.
    """

    place: ShardPlace
    gradients: GradientShards
    buckets: Buckets
    reducer: GradientReducer
    agreement: GradientAgreement
    replicas: Replicas
    hooks: GradientHooks
    sharded: ShardedModel | None
    swap: SwappedStates | None
    activations: ActivationOffload | None
    pipeline: StepPipeline
    pending: PendingWeights
    undo: UndoMemory

    def make_stepper(
        self,
        config: ZeroConfig,
        roster: Roster,
        states: Sequence[OptimizerStates],
        resources: Resources,
        scaler: LossScaler,
    ) -> Stepper:
        """What runs steps."""
        return Stepper(
            config,
            resources.backend,
            resources.control,
            roster,
            states,
            self.pipeline,
            self.pending,
            self._make_early(config, states, resources, scaler),
        )

    def _make_early(
        self,
        config: ZeroConfig,
        states: Sequence[OptimizerStates],
        resources: Resources,
        scaler: LossScaler,
    ) -> Speculator | EagerUpdater | None:
        """What begins updates inside backward."""
        if config.update_in_backward:
            eager = EagerUpdater(self.pipeline, states, lambda: scaler.scale)
            self.reducer.reduced = eager.begin
            return eager
        if not config.speculate:
            return None
        speculator = Speculator(
            resources.backend,
            self.pipeline,
            self.gradients,
            self.undo,
            states,
            lambda: scaler.scale,
        )
        self.reducer.reduced = speculator.begin
        return speculator

    def make_states(
        self, optimizers: Sequence[Optimizer], config: ZeroConfig, resources: Resources
    ) -> list[OptimizerStates]:
        """The states of each optimizer, without blocks yet."""
        shards = self.sharded.shards if self.sharded else None
        forms = StateForms(
            optimizer=config.optimizer,
            params=config.params,
            splits=config.split_master,
            holds=config.holds_updates,
            moments=config.moment_dtype,
        )
        return [
            OptimizerStates(item, resources.backend, forms, shards, self.swap)
            for item in optimizers
        ]

    def make_accounts(
        self, config: ZeroConfig, states: Sequence[OptimizerStates], resources: Resources
    ) -> Accounts:
        """What adds up the bytes of all parts."""
        group = resources.group
        return Accounts(
            config,
            states,
            self.gradients,
            self.buckets,
            self.pipeline,
            lambda: group.workspace_bytes,
            self.sharded,
            self.swap,
            self.activations,
            self.undo if config.speculate else None,
        )

    def make_checkpoints(  # noqa: PLR0913, PLR0917 - the parts it looks at
        self,
        model: nn.Module,
        config: ZeroConfig,
        roster: Roster,
        states: Sequence[OptimizerStates],
        stepper: Stepper,
        nonfinite: NonFinitePolicy,
        resources: Resources,
    ) -> Checkpoints:
        """What saves and loads."""
        return Checkpoints(
            holdings=Holdings(
                model=model,
                optimizers=[item.optimizer for item in states],
                roster=roster,
                states=states,
                sharded=self.sharded,
                store=resources.store,
                rank=resources.group.rank,
                size=resources.group.size,
            ),
            config=config,
            control=resources.control,
            backend=resources.backend,
            nonfinite=nonfinite,
            delayed=stepper,
        )

    def make_access(
        self,
        roster: Roster,
        states: Sequence[OptimizerStates],
        scaler: LossScaler,
        stepper: Stepper,
        resources: Resources,
    ) -> FullAccess:
        """What gathers full tensors for user code."""
        return FullAccess(
            roster=roster,
            sharded=self.sharded,
            states=states,
            reducer=self.reducer,
            agreement=self.agreement,
            gradients=self.gradients,
            pipeline=self.pipeline,
            stepper=stepper,
            scaler=scaler,
            is_first=resources.group.rank == 0,
        )


def assemble(
    model: nn.Module,
    config: ZeroConfig,
    resources: Resources,
    roster: Roster,
    budget: Budget,
    scaler: LossScaler,
) -> Parts:
    """Make and connect the parts; nothing is allocated for a parameter yet."""
    group, backend, control = resources.group, resources.backend, resources.control
    place = ShardPlace(
        shards=group.size if config.shards_optimizer else 1,
        rank=group.rank if config.shards_optimizer else 0,
        world_size=group.size,
    )
    gradients = _gradients(config, resources, budget)
    buckets = Buckets(backend, DTYPES[config.reduce_dtype], group.size)
    reducer = GradientReducer(backend, group, control, gradients, buckets, config, scaler)
    hooks = GradientHooks(reducer)
    sharded = _sharded(model, config, resources, place, hooks)
    swap = _swap(config, resources)
    return Parts(
        place=place,
        gradients=gradients,
        buckets=buckets,
        reducer=reducer,
        agreement=GradientAgreement(
            control,
            reducer,
            gradients,
            roster.of,
            sharded=config.shards_optimizer,
            looks=config.nonfinite != "propagate",
        ),
        replicas=Replicas(model, control, config),
        hooks=hooks,
        sharded=sharded,
        swap=swap,
        activations=_activations(model, config, resources, budget),
        pipeline=StepPipeline(
            backend,
            group,
            gradients,
            config.optimizer,
            buckets,
            sharded=config.shards_optimizer,
            holds=config.holds_updates,
            weights=sharded.shards if sharded else None,
            swap=swap,
        ),
        pending=PendingWeights(model, backend),
        undo=UndoMemory(backend, config.undo_size),
    )


def _gradients(config: ZeroConfig, resources: Resources, budget: Budget) -> GradientShards:
    dtype = DTYPES[config.gradient_dtype] if config.gradient_dtype else None
    twice = config.delayed_update
    if config.gradients == "nvme" and resources.store is not None:
        return SwappedGradients(resources.backend, resources.store, dtype, budget, doubled=twice)
    return GradientShards(resources.backend, config.gradients, dtype, budget, doubled=twice)


def _sharded(
    model: nn.Module,
    config: ZeroConfig,
    resources: Resources,
    place: ShardPlace,
    hooks: GradientHooks,
) -> ShardedModel | None:
    if resources.weight_group is None:
        return None
    sharded = ShardedModel(
        model,
        resources.backend,
        resources.weight_group,
        place,
        config,
        hooks.watch,
        resources.store if config.params == "nvme" else None,
    )
    hooks.ended = sharded.gatherer.end_backward
    return sharded


def _swap(config: ZeroConfig, resources: Resources) -> SwappedStates | None:
    if config.optimizer != "nvme" or resources.store is None:
        return None
    return SwappedStates(
        resources.backend,
        resources.store,
        buffer_bytes=config.nvme_buffer_size,
        cache_bytes=config.nvme_cache_size,
    )


def _activations(
    model: nn.Module, config: ZeroConfig, resources: Resources, budget: Budget
) -> ActivationOffload | None:
    if config.activations == "device":
        return None
    store = resources.store if config.activations == "nvme" else None
    return ActivationOffload(model, resources.backend, budget, store)
