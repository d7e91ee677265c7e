"""The models and optimizers that an Accelerator has prepared, and the engines they got."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import SGD

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import ConfigError, EngineStateError
from zero_plugin.integrations._huggingface.generation import keep_in_step
from zero_plugin.optim.facade import FacadeMixin
from zero_plugin.sharding.hooks import before_forwards

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from zero_plugin.config import ZeroConfig
    from zero_plugin.optim.kept import KeptStates


_KEPT = "zero_kept"
"""Attribute of an optimizer whose engine was closed: its states."""


class Together(nn.Module):
    """Holds models that one optimizer updates; they are called one by one, never through this.

    Args:
        models: the models.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)


class Prepared:
    """Gives engines to models and optimizers that come in any order.

    An engine is made when all trainable weights of its models have an optimizer. Where the optimizers hold only some of
    them, it is made at the first forward, since another optimizer may come until then; at stage 3, where the engine has to
    see every forward whole, at the end of the call that prepared the optimizer.

    Args:
        config: of every engine.
        plan: options of a plan, where the first engine's model decides the placement.
    """

    def __init__(self, config: ZeroConfig, plan: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self._plan = plan
        self.engines: list[ZeroEngine] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._watches: dict[int, RemovableHandle] = {}
        self._generation: list[nn.Module] = []
        self.saves_on_rank_0 = False
        """Whether an optimizer's state is wanted on rank 0 alone."""

    def add_model(self, model: nn.Module) -> None:
        """Note a model, unless it is known."""
        if self.knows(model):
            return
        self._models.append(model)
        self._watches[id(model)] = before_forwards(model, self.settle)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer, unless it is known.

        Raises:
            EngineStateError: the model of its parameters has an engine already.
        """
        if any(known is optimizer for known in self._optimizers) or self.engine_of(optimizer):
            return
        if isinstance(optimizer, FacadeMixin) and optimizer.zero_host is None:
            # Of an engine that was closed: as before it, so that its compiled rule is found again.
            restored: Any = optimizer
            restored.__class__ = optimizer.zero_plain_class
        held = _held(optimizer)
        for engine in self.engines:
            if any(id(parameter) in held for parameter in engine.model.parameters()):
                raise EngineStateError(
                    f"{type(optimizer).__name__} was prepared after the model of its parameters was used with another "
                    "optimizer: prepare all optimizers of a model before its first forward, or together in one call of "
                    "accelerator.prepare(...)"
                )
        self._optimizers.append(optimizer)

    def add_frozen(self, model: nn.Module) -> None:
        """Give a model that was built in shards, and is only evaluated, an engine that gathers its weights."""
        model.requires_grad_(requires_grad=False)
        # An engine takes an optimizer; one of frozen weights keeps no states.
        self.engines.append(ZeroEngine(model, SGD(model.parameters(), lr=0.0), self.config))
        self._generation.extend(keep_in_step(self.engines[-1]))

    def settle_complete(self) -> None:
        """Make the engines to which no further optimizer can come."""
        for models, optimizers in self._groups():
            held = {key for optimizer in optimizers for key in _held(optimizer)}
            wanted = {id(p) for model in models for p in model.parameters() if p.requires_grad}
            if wanted <= held or self.config.shards_parameters:
                self._make(models, optimizers)

    def settle(self) -> None:
        """Make every engine that can be made."""
        for models, optimizers in self._groups():
            self._make(models, optimizers)

    def engine_of(self, optimizer: Any) -> ZeroEngine | None:
        """The engine that runs an optimizer, or None."""
        for engine in self.engines:
            if any(known is optimizer for known in engine.optimizers):
                return engine
        return None

    def engine_of_model(self, model: nn.Module) -> ZeroEngine | None:
        """The engine that trains a model, or None."""
        return next((e for e in self.engines if any(m is model for m in models_of(e))), None)

    def knows(self, model: nn.Module) -> bool:
        """Whether a model was added before."""
        return (
            any(known is model for known in self._models) or self.engine_of_model(model) is not None
        )

    def chosen_by(self, parameters: Sequence[Tensor]) -> list[tuple[ZeroEngine, list[Optimizer]]]:
        """The engines, and of each the optimizers, whose weights are among `parameters`.

        Raises:
            ConfigError: some of an optimizer's trainable weights are, and others are not.
        """
        given = {id(parameter) for parameter in parameters}
        found: list[tuple[ZeroEngine, list[Optimizer]]] = []
        for engine in self.engines:
            chosen: list[Optimizer] = []
            for optimizer in engine.optimizers:
                held = _held(optimizer, trainable=True)
                if held & given:
                    if not held <= given:
                        raise ConfigError(
                            f"clipping was asked for {len(held & given)} of the {len(held)} trainable weights of one "
                            f"{type(optimizer).__name__}: its gradients are clipped together, so give all of them (model."
                            "parameters()), or give each set of weights an optimizer of its own"
                        )
                    chosen.append(optimizer)
            if chosen:
                found.append((engine, chosen))
        return found

    @contextmanager
    def only_on_rank_0(self, *, enabled: bool) -> Generator[None]:
        """Inside, optimizer states are gathered on rank 0 and are empty on the others."""
        before, self.saves_on_rank_0 = self.saves_on_rank_0, enabled
        try:
            yield
        finally:
            self.saves_on_rank_0 = before

    def forget(self) -> list[ZeroEngine]:
        """Let go of everything; the engines are the caller's to close.

        The states of their optimizers stay with the optimizers, so that one that is prepared again goes on from them.
        """
        engines, self.engines = self.engines, []
        for engine in engines:
            if engine.config.delayed_update:
                engine.drain()
            kept = engine.keep_states()
            for optimizer in engine.optimizers:
                optimizer.__dict__[_KEPT] = kept
        self._models, self._optimizers = [], []
        for handle in self._watches.values():
            handle.remove()
        self._watches = {}
        for module in self._generation:
            module.__dict__.pop("generate", None)
        self._generation = []
        return engines

    @staticmethod
    def settle_kept(engine: ZeroEngine) -> None:
        """Free the device memory of the states that outlive a closed engine."""
        for optimizer in engine.optimizers:
            kept: KeptStates = optimizer.__dict__[_KEPT]
            kept.move_to_cpu()

    def _make(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        for model in models:
            self._watches.pop(id(model)).remove()
        model = models[0] if len(models) == 1 else Together(models)
        self._models = [m for m in self._models if not any(m is taken for taken in models)]
        self._optimizers = [o for o in self._optimizers if not any(o is t for t in optimizers)]
        if self._plan is not None:
            options, self._plan = self._plan, None
            from zero_plugin.planner.auto import auto_config

            given: dict[str, Any] = {"rule": optimizers[0], **options}
            planned = auto_config(model, **given)
            # What Accelerate's own settings asked for stays.
            self.config = dataclasses.replace(
                planned,
                broadcast_buffers=self.config.broadcast_buffers,
                loss_scale=planned.loss_scale or self.config.loss_scale,
            )
        engine = ZeroEngine(model, optimizers, self.config)
        self.engines.append(engine)
        self._generation.extend(keep_in_step(engine))
        for optimizer in optimizers:
            kept = optimizer.__dict__.pop(_KEPT, None)
            if kept is not None and kept.holds(optimizer):
                engine.load_optimizer_state_dict(optimizer, kept.state_dict(optimizer))

    def _groups(self) -> list[tuple[list[nn.Module], list[Optimizer]]]:
        """Models and optimizers that share parameters, directly or through others; none without an optimizer."""
        groups: list[tuple[list[nn.Module], list[Optimizer], set[int]]] = [
            *(([], [optimizer], _held(optimizer)) for optimizer in self._optimizers),
            *(([model], [], {id(p) for p in model.parameters()}) for model in self._models),
        ]
        joined: list[tuple[list[nn.Module], list[Optimizer], set[int]]] = []
        for models, optimizers, keys in groups:
            for other in [known for known in joined if known[2] & keys]:
                joined.remove(other)
                models, optimizers, keys = (  # noqa: PLW2901 - the group grows
                    [*other[0], *models],
                    [*other[1], *optimizers],
                    other[2] | keys,
                )
            joined.append((models, optimizers, keys))
        return [(models, opts) for models, opts, _ in joined if models and opts]


def models_of(engine: ZeroEngine) -> list[nn.Module]:
    """The prepared models that an engine trains."""
    return list(engine.model.models) if isinstance(engine.model, Together) else [engine.model]


def _held(optimizer: Optimizer, *, trainable: bool = False) -> set[int]:
    return {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad or not trainable
    }
