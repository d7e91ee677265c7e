"""The strategy of Lightning Fabric, for either spelling of the package."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import CheckpointError, EngineStateError
from zero_plugin.integrations._lightning.common import (
    EngineSlots,
    PrecisionPlugins,
    build_config,
    check_device_can,
    config_for,
    needs_process_group,
    plan_config,
    take_auto,
)
from zero_plugin.integrations._lightning.folders import ENGINE_KEYS, CheckpointForm, Folders

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lightning.fabric.plugins.precision import Precision
    from lightning.fabric.strategies.ddp import DDPStrategy as Base
    from torch.optim import Optimizer

    from zero_plugin.config import ZeroConfig
else:
    Base = object


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The classes of one spelling of Fabric that the strategy needs.

    Attributes:
        precision: the precision plugins, stock and ours.
        sync_control: makes `Fabric.no_backward_sync` work.
    """

    precision: PrecisionPlugins
    sync_control: type[Any]


class FabricStrategy(Base):
    """Mixin that turns Fabric's DDPStrategy into ours; modules stay unwrapped, each `setup` gets an engine."""

    spelling: Spelling

    def __init__(
        self,
        config: ZeroConfig | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Any = "popen",
        checkpoint: CheckpointForm = "auto",
        **settings: Any,
    ) -> None:
        self._auto = take_auto(config, settings)
        self._config = build_config(config, settings)
        self._folders = Folders(checkpoint, self._config)
        self._slots = EngineSlots()
        # Modules of `setup_module`, whose engines are made when their optimizer comes.
        self._waiting: list[weakref.ref[nn.Module]] = []
        optional: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **optional,
        )
        self._backward_sync_control = self.spelling.sync_control(self._slots)

    # ------------------------------------------------------------------ what users may look at

    @property
    def config(self) -> ZeroConfig:
        """The settings; fp16 precisions add a dynamic loss scale when none was set."""
        return self._config

    @property
    def engines(self) -> tuple[ZeroEngine, ...]:
        """The open engines, in the order of the `setup` calls that made them."""
        return tuple(self._slots.engines)

    # ------------------------------------------------------------------ precision

    @property
    def precision(self) -> Precision:
        """The precision plugin; never the stock one, once Fabric has given it."""
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._precision = (
            None if precision is None else self.spelling.precision.convert(precision, self._slots)
        )

    # ------------------------------------------------------------------ set-up

    def _setup_distributed(self) -> None:
        """Make the default process group, unless this is the only process and nothing else suggests one."""
        self._set_world_ranks()
        if needs_process_group(self.world_size):
            super()._setup_distributed()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Give a module and its optimizers to a new engine; the objects returned are those passed in."""
        precision = str(self.precision.precision)
        check_device_can(precision, self.root_device)
        self._make_engine(module, optimizers)
        return module, optimizers, scheduler

    def _make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        if self._auto is not None:
            self._config = plan_config(module, optimizers, self._auto)
        config = config_for(self._config, str(self.precision.precision))
        engine = ZeroEngine(module, optimizers, config)
        self._waiting = [item for item in self._waiting if item() not in (None, module)]
        if not self._slots.engines:
            # Fabric never tears a strategy down, so the engines go when the strategy or the process does.
            weakref.finalize(self, _close_all, self._slots)
        self._slots.engines.append(engine)

    def setup_module(self, module: nn.Module) -> Any:
        """Give every rank the same weights. The engine is made with the module's optimizer; for inference there is none."""
        check_device_can(str(self.precision.precision), self.root_device)
        if torch.distributed.is_initialized():
            for tensor in (*module.parameters(), *module.buffers()):
                torch.distributed.broadcast(tensor.detach(), 0)
        self._waiting.append(weakref.ref(module))
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make the engine of a module that was set up before, and of its one optimizer.

        Raises:
            EngineStateError: no such module holds its parameters, or it has an engine already.
        """
        for module in (item() for item in self._waiting):
            if module is not None and _holds_all(module, optimizer):
                self._make_engine(module, [optimizer])
                return optimizer
        raise EngineStateError(
            f"{type(optimizer).__name__} was set up without its module, or after another optimizer of it, but its states are "
            "sharded together with the module's gradients: call fabric.setup(module, optimizer, ...)"
        )

    # ------------------------------------------------------------------ steps

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward so that the engines see every gradient.

        Raises:
            EngineStateError: there are several ranks and no engine that would average their gradients.
        """
        if not self._slots.engines and self.world_size > 1:
            raise EngineStateError(
                f"fabric.backward was called on {self.world_size} ranks with no optimizer set up, so nothing would "
                "average the gradients: call fabric.setup(module, optimizer, ...)"
            )
        super().backward(tensor, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the global norm over all ranks' parts; returns the norm before clipping.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set, as `torch.nn.utils` does.
        """
        engine = self._engine_of(optimizer)
        norm = engine.clip_grad_norm_(max_norm, norm_type, optimizer=optimizer)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped: "
                "pass error_if_nonfinite=False to let the step skip or scale them"
            )
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clip every averaged gradient to `[-clip_val, clip_val]`."""
        self._engine_of(optimizer).clip_grad_value_(clip_val, optimizer=optimizer)

    def _engine_of(self, optimizer: Optimizer) -> ZeroEngine:
        engine = self._slots.of(optimizer)
        if engine is None:
            raise EngineStateError(
                f"{type(optimizer).__name__} has not been set up: pass it to fabric.setup(module, optimizer, ...) first"
            )
        return engine

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        """Write a file, or the folder that every rank writes its part of; all ranks call it.

        Raises:
            CheckpointError: a folder takes one module that was set up and all its optimizers, and neither `filter` nor
                `storage_options`.
        """
        if not any(map(self._folders.wants, self._slots.engines)):
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        if filter or storage_options is not None:
            raise CheckpointError(
                "filter and storage_options are for files: leave them out, or give the strategy checkpoint='file'"
            )
        engine = self._engine_in(state)
        rest = {key: value for key, value in state.items() if not _is_of(value, engine)}
        extra = self._convert_stateful_objects_in_state(rest, filter={})
        engine.save_checkpoint(self.broadcast(path), extra=extra)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a file or a folder into the objects of `state`; returns what is left."""
        found = self._folders.open(path)
        if found is None:
            return super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        extra = {key: value for key, value in found.items() if key not in ENGINE_KEYS}
        if not state:
            return extra
        if not isinstance(state, dict):
            state = {"module": state}
        engine = self._engine_in(state)
        own = {key for key, value in state.items() if _is_of(value, engine)}
        self._folders.load_model(engine.model, engine, strict=strict)
        missing = [key for key in state if key not in own and key not in extra]
        if strict and missing:
            raise KeyError(
                f"the checkpoint {path} has no {missing[0]!r}, it has {sorted(extra)}: to load without it, pass strict=False"
            )
        for key in [key for key in state if key not in own and key in extra]:
            if callable(getattr(state[key], "load_state_dict", None)):
                state[key].load_state_dict(extra.pop(key))
            else:
                state[key] = extra.pop(key)
        return extra

    def _engine_in(self, state: dict[str, Any]) -> ZeroEngine:
        """The one engine whose module and optimizers are in a state."""
        engines = [
            engine
            for engine in self._slots.engines
            if any(_is_of(value, engine) for value in state.values())
        ]
        if len(engines) == 1:
            held = {id(value) for value in state.values()}
            if all(id(item) in held for item in (engines[0].model, *engines[0].optimizers)):
                return engines[0]
        raise CheckpointError(
            f"a folder holds one module that was set up, with its optimizers, and the state ({', '.join(state)}) has "
            f"{'parts of ' if engines else ''}{len(engines)}: save each module with all its optimizers, or give the strategy "
            "checkpoint='file'"
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state of a module or of a part of it; all ranks must call.

        Up to stage 2 on every rank, at stage 3 on rank 0, empty on the others.
        """
        found = self._engine_and_place(module)
        if found is None or not found[0].config.shards_parameters:
            return super().get_module_state_dict(module)
        engine, place = found
        prefix = f"{place}." if place else ""
        return {
            name.removeprefix(prefix): value
            for name, value in engine.full_state_dict().items()
            if name.startswith(prefix)
        }

    def load_module_state_dict(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        strict: bool = True,
    ) -> None:
        """Load the full state of a module or of a part of it; every rank gives it."""
        found = self._engine_and_place(module)
        with nullcontext() if found is None else found[0].full_params(writeback=True):
            super().load_module_state_dict(module, state_dict, strict=strict)

    def _engine_and_place(self, module: nn.Module) -> tuple[ZeroEngine, str] | None:
        """The engine whose model is or contains a module, and its name there."""
        for engine in self._slots.engines:
            for name, part in engine.model.named_modules():
                if part is module:
                    return engine, name
        return None

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state in torch's format on rank 0, empty on the others; all ranks must call."""
        engine = self._slots.of(optimizer)
        if engine is None:
            return super().get_optimizer_state(optimizer)
        return engine.optimizer_state_dict(optimizer, rank0_only=True)

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        """Close the engines, then do what DDPStrategy does."""
        _close_all(self._slots)
        super().teardown()


class SyncControl:
    """Mixin behind `Fabric.no_backward_sync`.

    Args:
        slots: the strategy's engines.
    """

    def __init__(self, slots: EngineSlots) -> None:
        self._slots = slots

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Inside: backward adds to the gradients of a step that is not complete yet.

        Raises:
            EngineStateError: the module was set up without optimizers.
        """
        if not enabled:
            return nullcontext()
        for engine in self._slots.engines:
            if engine.model is module:
                return engine.no_sync()
        raise EngineStateError(
            f"{type(module).__name__} was set up without an optimizer, so there is no reduction to hold back: "
            "call fabric.setup(module, optimizer, ...)"
        )


def _holds_all(module: nn.Module, optimizer: Optimizer) -> bool:
    held = {id(parameter) for parameter in module.parameters()}
    return all(id(p) in held for group in optimizer.param_groups for p in group["params"])


def _is_of(value: object, engine: ZeroEngine) -> bool:
    """Whether a value is an engine's module or one of its optimizers."""
    return value is engine.model or any(value is optimizer for optimizer in engine.optimizers)


def _close_all(slots: EngineSlots) -> None:
    while slots.engines:
        slots.engines.pop().close()
