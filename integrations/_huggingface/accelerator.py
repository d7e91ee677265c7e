"""The methods of an Accelerator that trains on engines."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import OrderedDict
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import SCALER_NAME
from torch import Tensor, nn

from zero_plugin.errors import ConfigError, EngineStateError
from zero_plugin.integrations._huggingface import shards
from zero_plugin.integrations._huggingface.checks import (
    check_alone,
    check_attributes,
    check_ddp,
    check_scaler,
    check_supported,
)
from zero_plugin.integrations._huggingface.entry import STATE
from zero_plugin.integrations._huggingface.files import load_weights
from zero_plugin.integrations._huggingface.optimizer import ZeroAcceleratedOptimizer
from zero_plugin.integrations._huggingface.plugin import ZeroOffloadPlugin
from zero_plugin.integrations._huggingface.prepared import Prepared, Together, models_of
from zero_plugin.integrations._lightning.common import is_built_in_shards
from zero_plugin.integrations._lightning.precision import from_grad_scaler, to_grad_scaler
from zero_plugin.runtime.memory import available_host_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from accelerate import Accelerator as Base

    from zero_plugin.engine import ZeroEngine
else:
    Base = object

_PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")


class ZeroAccelerator(Base):
    """Mixin over Accelerate's class, or a user's subclass of it, put on an instance after its `__init__`."""

    zero_plugin: ZeroOffloadPlugin
    _zero: Prepared

    @property
    def zero_engines(self) -> tuple[ZeroEngine, ...]:
        """The engines, in the order in which they were made."""
        return tuple(self._zero.engines)

    # ------------------------------------------------------------------ prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order and in one call or several.

        Models and optimizers are those that were given: a model is not wrapped, an optimizer gets Accelerate's own wrapper.
        """
        result = super().prepare(*args, device_placement=device_placement)
        self._zero.settle_complete()
        return result

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Place a model, and apply autocast and compilation; it is trained by an engine once its optimizer is prepared.

        A model that was prepared for evaluation is trained all the same when it comes with an optimizer.
        """
        inner = original(model)
        in_shards = is_built_in_shards(inner)
        if not in_shards and not self._zero.knows(inner) and torch.distributed.is_initialized():
            _make_equal(inner)
        prepared = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=True
        )
        if not evaluation_mode:
            self._zero.add_model(inner)
        elif in_shards and not self._zero.knows(inner):
            self._zero.add_frozen(inner)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer; it acts on an engine once its model is prepared."""
        if isinstance(optimizer, ZeroAcceleratedOptimizer):
            # Prepared before `free_memory`, as the Trainer's is when it trains again.
            self._zero.add_optimizer(optimizer.optimizer)
            optimizer.belongs_to(self._zero)
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        self._zero.add_optimizer(optimizer)
        wrapped = ZeroAcceleratedOptimizer(optimizer, self._zero)
        self._optimizers.append(wrapped)
        return wrapped

    # ------------------------------------------------------------------ steps

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide the loss by the accumulation steps, scale it, and run backward under the engines.

        Raises:
            EngineStateError: there are several ranks, and no engine that would average their gradients.
        """
        self._zero.settle()
        engines = self._zero.engines
        if not engines and self.num_processes > 1:
            raise EngineStateError(
                f"accelerator.backward was called on {self.num_processes} ranks with no model and optimizer prepared, so "
                "nothing would average the gradients: call accelerator.prepare(model, optimizer)"
            )
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.backward_context())
            super().backward(_scaled(loss, engines), **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Backwards inside are not the last of their step; see `ZeroEngine.no_sync`."""
        self._zero.settle()
        engine = self._zero.engine_of_model(original(model))
        with nullcontext() if engine is None else engine.no_sync():
            yield

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Generator[None]:
        """For a loop in which all ranks have as many batches; there is nothing to join then.

        Args:
            joinables: the prepared models, which are not looked at.
            even_batches: whether data loaders give all ranks as many batches inside; None: as they were made.

        Raises:
            ConfigError: ranks may run out of batches at different times. An engine's steps are all ranks' together, and none can
                stand in for one that has left.
        """
        del joinables
        found: list[Any] = [getattr(loader, "batch_sampler", None) for loader in self._dataloaders]
        samplers = [sampler for sampler in found if hasattr(sampler, "even_batches")]
        even = even_batches if even_batches is not None else self.even_batches
        if self.num_processes > 1 and not even:
            raise ConfigError(
                f"join_uneven_inputs on {self.num_processes} ranks with even_batches={even}: every rank has to take the same steps, "
                "since each holds a part of the optimizer's states. Leave even_batches at True (the last batches are then filled "
                "from the first ones), or give all ranks the same number of batches"
            )
        before = [sampler.even_batches for sampler in samplers]
        try:
            for sampler in samplers:
                sampler.even_batches = even
            yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: clipping and steps see unscaled gradients."""

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the coming step by the norm of the averaged gradients over all ranks.

        Args:
            parameters: all trainable weights of one optimizer or of several.
            max_norm: the norm is at most this after clipping; infinity to measure only.
            norm_type: 2 or infinity.

        Returns:
            The norm before clipping.

        Raises:
            ConfigError: `parameters` holds some of an optimizer's weights and not others.
        """
        self._zero.settle()
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        chosen = self._zero.chosen_by(given)
        if not chosen:
            stock: Any = super()
            return stock.clip_grad_norm_(given, max_norm, norm_type=norm_type)
        if len(chosen) == 1 and len(chosen[0][1]) in (1, len(chosen[0][0].optimizers)):
            return _clip(*chosen[0], max_norm, norm_type)
        return _clip_together(chosen, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every element of the averaged gradients in the coming step.

        Raises:
            ConfigError: `parameters` holds some of an optimizer's weights and not others.
        """
        self._zero.settle()
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        chosen = self._zero.chosen_by(given)
        if not chosen:
            super().clip_grad_value_(given, clip_value)
        for engine, optimizers in chosen:
            for optimizer in optimizers:
                engine.clip_grad_value_(clip_value, optimizer=optimizer)

    # ------------------------------------------------------------------ states

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full state dict; all ranks call it.

        Up to stage 2 on every rank; at stage 3, and with a delayed update, on rank 0, empty on the others. The weights after every
        update, also one that is not shown yet.
        """
        engine = self._zero.engine_of_model(original(model))
        if engine is None or not (engine.config.shards_parameters or engine.config.delayed_update):
            return super().get_state_dict(model, unwrap=unwrap)
        prefix = ""
        if isinstance(engine.model, Together):
            number = next(n for n, item in enumerate(models_of(engine)) if item is original(model))
            prefix = f"models.{number}."
        # Ordered as torch's own, by which Accelerate knows a state dict in which tied weights are to be written once.
        return OrderedDict(
            (name.removeprefix(prefix), value)
            for name, value in engine.full_state_dict().items()
            if name.startswith(prefix)
        )

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """Save everything; all ranks call it.

        Models and optimizers go into a sharded checkpoint of each engine, or full tensors into Accelerate's own files, as the
        plugin's `checkpoint` says. Everything else is in Accelerate's own files.
        """
        self._zero.settle()
        engines = self._zero.engines if self._saves_shards() else []
        everywhere = self.project_configuration.save_on_each_node
        with (
            self._zero.only_on_rank_0(enabled=not everywhere),
            self._without_engines(enabled=bool(engines)),
        ):
            place = super().save_state(
                output_dir, safe_serialization=safe_serialization, **save_model_func_kwargs
            )
        if engines:
            shards.save(engines, place, first=self.is_main_process)
        elif self.is_main_process:
            shards.forget(place)
        engine = self._scaling_engine()
        if engine is not None and self.is_main_process:
            torch.save(to_grad_scaler(engine.loss_scale_state()), Path(place, SCALER_NAME))
        return place

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` wrote, ours of either form or a stock run's; all ranks call it."""
        self._zero.settle()
        options = {k: v for k, v in load_model_func_kwargs.items() if k == "strict"}

        def before(models: list[nn.Module], folder: str) -> None:
            engine = self._scaling_engine()
            scaler_file = Path(folder, SCALER_NAME)
            if engine is not None and scaler_file.is_file():
                state = torch.load(scaler_file, weights_only=True)
                engine.load_loss_scale_state(from_grad_scaler(state))
            if shards.holds_shards(folder):
                shards.load(self._zero.engines, folder, **options)
                hidden = stack.enter_context(self._without_engines(enabled=True))
                models[:] = [model for model in models if not any(model is one for one in hidden)]
            for number, model in enumerate(models):
                engine = self._zero.engine_of_model(original(model))
                with nullcontext() if engine is None else engine.full_params(writeback=True):
                    load_weights(original(model), folder, number, **options)
            models.clear()  # so that Accelerate does not load them again

        handle = self.register_load_state_pre_hook(before)
        with ExitStack() as stack:
            stack.callback(handle.remove)
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)

    def _saves_shards(self) -> bool:
        reasons = {
            "a hook of register_save_state_pre_hook is given them": self._save_model_state_pre_hook,
            "save_on_each_node writes whole files on each node": self.project_configuration.save_on_each_node,
        }
        because = next((reason for reason, present in reasons.items() if present), "")
        return shards.wants_folder(
            self.zero_plugin.checkpoint, self._zero.config, full_because=because
        )

    @contextmanager
    def _without_engines(self, *, enabled: bool) -> Generator[list[Any]]:
        """Inside, Accelerate does not know the models and optimizers of engines; gives the models."""
        known = self._zero
        models = [m for m in self._models if known.engine_of_model(original(m)) is not None]
        optimizers = [o for o in self._optimizers if known.engine_of(o.optimizer) is not None]
        with (
            shards.without(self._models, models if enabled else []),
            shards.without(self._optimizers, optimizers if enabled else []),
        ):
            yield models

    def _scaling_engine(self) -> ZeroEngine | None:
        """The engine whose loss scale is the Accelerator's."""
        return next((e for e in self._zero.engines if e.config.loss_scale == "dynamic"), None)

    # ------------------------------------------------------------------ end

    def free_memory(self, *objects: Any) -> list[Any]:
        """Close the engines, then do what Accelerate does.

        Sharded weights come back to host memory, on every rank, where they fit. All ranks call it.
        """
        self._close_engines()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Close the engines, then do what Accelerate does: end trackers and the process group."""
        self._close_engines()
        super().end_training()

    def _close_engines(self) -> None:
        for engine in self._zero.forget():
            gather = engine.config.shards_parameters and self._fits(engine.model)
            engine.close(gather=gather)
            self._zero.settle_kept(engine)

    def _fits(self, model: nn.Module) -> bool:
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        available = available_host_bytes()
        local = int(self.num_processes)
        fits = torch.tensor(int(available is None or needed * local <= available))
        if self.num_processes > 1:
            torch.distributed.all_reduce(fits, torch.distributed.ReduceOp.MIN)
        if not fits:
            logging.getLogger("zero_plugin").warning(
                "the weights stay sharded, since host memory does not hold all of them for each process: save them before "
                "accelerator.free_memory()"
            )
        return bool(fits)


def make(
    accelerator: Any,
    plain: Callable[..., None],
    given: ZeroOffloadPlugin | None,
    args: Any,
    kwargs: Any,
) -> None:
    """Run the stock `__init__`, then make the instance ours.

    Args:
        accelerator: the instance.
        plain: the stock `__init__`.
        given: the plugin; None for what the environment says.
        args: of `__init__`,
        kwargs: and by name.

    Raises:
        ConfigError: other settings ask for another engine, or for what an engine cannot do.
    """
    plugin = ZeroOffloadPlugin.from_environment() if given is None else given
    if not isinstance(plugin, ZeroOffloadPlugin):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"zero_plugin is a {type(plugin).__name__}: give a ZeroOffloadPlugin(stage=..., ...)"
        )
    check_supported(type(accelerator))
    check_alone(kwargs)
    plain(accelerator, *args, **kwargs)
    check_attributes(accelerator)
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in _PLAIN_TYPES:
        raise ConfigError(
            f"zero-plugin and Accelerate's distributed_type {kind} were both asked for: choose one; zero-plugin runs on "
            f"{', '.join(_PLAIN_TYPES)}"
        )
    if accelerator.fp8_enabled:
        raise ConfigError(
            "mixed_precision='fp8' is not supported: use 'bf16', 'fp16' or 'no' with zero-plugin"
        )
    accelerator.zero_plugin = plugin
    setattr(accelerator.state, STATE, plugin)
    config = plugin.config
    check_ddp(accelerator.ddp_handler)
    if accelerator.ddp_handler is not None and not accelerator.ddp_handler.broadcast_buffers:
        config = dataclasses.replace(config, broadcast_buffers=False)
    if accelerator.scaler is not None:
        check_scaler(accelerator.scaler)
        accelerator.scaler = None
        if config.loss_scale is None:
            config = dataclasses.replace(config, loss_scale="dynamic")
    accelerator._zero = Prepared(config, plugin.options)  # noqa: SLF001
    accelerator.__class__ = class_over(ZeroAccelerator, type(accelerator))


@functools.cache
def class_over(ours: type[Any], stock: type[Any]) -> type[Any]:
    """Our class over one of a library's; it keeps that one's name."""
    if issubclass(stock, ours):
        return stock
    return type(
        stock.__name__,
        (ours, stock),
        {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
        },
    )


def original(model: nn.Module) -> nn.Module:
    """The user's module behind `torch.compile`."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _make_equal(model: nn.Module) -> None:
    """Rank 0's weights and buffers on every rank, as DistributedDataParallel makes them when it wraps."""
    for tensor in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(tensor.detach(), 0)


def _scaled(loss: Tensor, engines: list[ZeroEngine]) -> Tensor:
    if not engines:
        return loss
    scaled = engines[0].scale_loss(loss)
    for other in engines[1:]:
        other.scale_loss(loss)
        if other.loss_scale != engines[0].loss_scale:
            raise ConfigError(
                f"{len(engines)} models were prepared and have a loss scale each, by now {engines[0].loss_scale:g} and "
                f"{other.loss_scale:g}, so one loss cannot be scaled for both: train them with an Accelerator each, or "
                "with mixed_precision='bf16', or with a fixed loss_scale"
            )
    return scaled


def _clip(engine: ZeroEngine, optimizers: list[Any], max_norm: float, norm_type: float) -> Tensor:
    if len(optimizers) == len(engine.optimizers):
        return engine.clip_grad_norm_(max_norm, norm_type)
    (optimizer,) = optimizers
    return engine.clip_grad_norm_(max_norm, norm_type, optimizer=optimizer)


def _clip_together(
    chosen: Sequence[tuple[ZeroEngine, list[Any]]], max_norm: float, norm_type: float
) -> Tensor:
    """Clip the weights of several optimizers by their common norm."""
    single = [(engine, [optimizer]) for engine, optimizers in chosen for optimizer in optimizers]
    norms = [_clip(engine, optimizers, math.inf, norm_type) for engine, optimizers in single]
    total = torch.linalg.vector_norm(torch.stack(norms).double(), norm_type)
    # torch's own formula, with its 1e-6; each optimizer is given the bound at which its factor is the common one.
    factor = min(1.0, float(max_norm) / (float(total) + 1e-6))
    for (engine, optimizers), norm in zip(single, norms, strict=True):
        if factor < 1.0:
            _clip(engine, optimizers, factor * (float(norm) + 1e-6), norm_type)
    return total.to(norms[0].dtype)
