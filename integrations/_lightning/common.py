"""What the Trainer's strategies and Fabric's share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.runtime.memory import available_host_bytes
from zero_plugin.sharding.guard import ReleasedParameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from zero_plugin.engine import ZeroEngine

# What each precision computes in; None: nothing below fp32.
LOW_PRECISION: Mapping[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


# Lightning's callbacks that copy the whole module, or write weights, in the middle of a fit.
_WEIGHT_COPIERS = ("EMAWeightAveraging", "StochasticWeightAveraging", "WeightAveraging")


class EngineSlots:
    """The engines of one strategy, seen by its precision plugin as well.

    Held by both instead of one holding the other, so that either can be pickled into a spawned process.

    Attributes:
        engines: every open engine; the Trainer has one at most, Fabric one for each `setup`.
    """

    def __init__(self) -> None:
        self.engines: list[ZeroEngine] = []

    @property
    def only(self) -> ZeroEngine | None:
        """The Trainer's engine while it fits, else None."""
        return self.engines[0] if self.engines else None

    def of(self, optimizer: Any) -> ZeroEngine | None:
        """The engine that runs an optimizer, or None."""
        for engine in self.engines:
            if any(candidate is optimizer for candidate in engine.optimizers):
                return engine
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPlugins:
    """The precision plugins of one spelling of one framework, stock and ours.

    Attributes:
        plain: the stock plugin of 32-true,
        mixed: of 16-mixed and bf16-mixed,
        half: of 16-true and bf16-true.
        zero_plain: what replaces `plain`,
        zero_mixed: `mixed`,
        zero_half: and `half`.
    """

    plain: type[Any]
    mixed: type[Any]
    half: type[Any]
    zero_plain: type[Any]
    zero_mixed: type[Any]
    zero_half: type[Any]

    def convert(self, plugin: Any, slots: EngineSlots) -> Any:
        """Our plugin in place of a stock one, with access to the engines.

        Raises:
            ConfigError: the plugin is none of the stock ones, or its precision cannot be used.
        """
        converted: Any
        if isinstance(plugin, (self.zero_plain, self.zero_mixed, self.zero_half)):
            converted = plugin
        elif type(plugin) is self.plain:
            converted = self.zero_plain()
        elif type(plugin) is self.mixed:
            check_scaler(plugin)
            converted = self.zero_mixed(plugin.precision, plugin.device)
        elif type(plugin) is self.half:
            converted = self.zero_half(plugin.precision)
        elif plugin.precision == "64-true":
            refuse_precision(plugin, "master weights and optimizer states are fp32")
        else:
            refuse_precision(
                plugin, "only the stock plugins of the precisions below are known to work"
            )
        converted.slots = slots
        return converted


def build_config(config: ZeroConfig | None, settings: Mapping[str, Any]) -> ZeroConfig:
    """The config that a strategy's arguments describe.

    Args:
        config: given whole, or None.
        settings: or field by field.

    Raises:
        ConfigError: both are given, or a setting is unknown or wrong.
    """
    if config is None:
        return ZeroConfig.from_dict(settings)
    if settings:
        raise ConfigError(
            f"a whole config and single settings ({', '.join(settings)}) were given: pass one or the other"
        )
    return config


def take_auto(config: ZeroConfig | None, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The options of a plan, taken out of a strategy's settings where `auto=True` is among them; else None.

    Raises:
        ConfigError: a whole config was given too.
    """
    if not settings.pop("auto", False):
        return None
    if config is not None:
        raise ConfigError("auto=True and a whole config were given: pass one or the other")
    options = dict(settings)
    settings.clear()
    return options


def plan_config(
    model: nn.Module, optimizers: Sequence[Optimizer], options: Mapping[str, Any]
) -> ZeroConfig:
    """The settings of the cheapest placement that fits; all ranks call it.

    Raises:
        BudgetError: nothing fits.
    """
    from zero_plugin.planner.auto import auto_config

    given: dict[str, Any] = {"rule": optimizers[0], **options}
    return auto_config(model, **given)


def config_for(config: ZeroConfig, precision: str) -> ZeroConfig:
    """The config with what a precision needs: fp16 trains with a dynamic loss scale unless one was set."""
    if LOW_PRECISION[precision] is torch.float16 and config.loss_scale is None:
        return dataclasses.replace(config, loss_scale="dynamic")
    return config


def needs_process_group(world_size: int) -> bool:
    """Whether to make the default process group: for several ranks, and for torchrun, which promises one."""
    return world_size > 1 or torch.distributed.is_torchelastic_launched()


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Refuse Lightning's callbacks that cannot work on sharded weights. A subclass of the user's may know better.

    Raises:
        ConfigError: there is one.
    """
    for callback in callbacks:
        kind = type(callback)
        if kind.__name__ in _WEIGHT_COPIERS and kind.__module__.partition(".")[0] in (
            "lightning",
            "pytorch_lightning",
        ):
            raise ConfigError(
                f"callback {kind.__name__} copies and writes weights in the middle of the fit, and at stage 3 they are "
                "sharded: use stage 2 or lower (strategy='zero_2' or 'zero_offload'), or average in a callback of your own "
                "inside `with trainer.strategy.engine.full_params(writeback=True):`"
            )


def is_built_in_shards(module: nn.Module) -> bool:
    """Whether a module was built in `zero_plugin.init_context`, and no engine has taken it over."""
    return any(isinstance(parameter, ReleasedParameter) for parameter in module.parameters())


def fits_in_host_memory(model: nn.Module, local_processes: int) -> bool:
    """Whether each process of this machine can take all weights of a model; True where that is unknown."""
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    available = available_host_bytes()
    return available is None or needed * local_processes <= available


def refuse_precision(plugin: object, reason: str) -> NoReturn:
    """Raise for a precision plugin that cannot run on shards."""
    raise ConfigError(
        f"precision plugin {type(plugin).__name__} (precision={getattr(plugin, 'precision', '?')!r}) cannot be used "
        f"with zero-plugin: {reason}. Use one of {', '.join(LOW_PRECISION)}"
    )


def check_scaler(plugin: object) -> None:
    """Refuse a gradient scaler with settings of its own: it would be ignored.

    Raises:
        ConfigError: the plugin holds one.
    """
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    usual = {
        "_init_scale": 65536.0,
        "_growth_factor": 2.0,
        "_backoff_factor": 0.5,
        "_growth_interval": 2000,
    }
    odd = {
        name: getattr(scaler, name, None)
        for name in usual
        if getattr(scaler, name, None) != usual[name]
    }
    if odd:
        refuse_precision(
            plugin,
            f"its GradScaler has settings of its own ({odd}) and the engine scales the loss itself: leave the scaler "
            "out and give the strategy loss_scale='dynamic' or a number",
        )


def check_device_can(precision: str, device: torch.device) -> None:
    """Try a precision's arithmetic on a device, forward and backward.

    Raises:
        ConfigError: the device cannot, with torch's reason.
    """
    dtype = LOW_PRECISION[precision]
    if dtype is None:
        return
    try:
        with torch.enable_grad():
            weight = torch.ones(2, 2, dtype=dtype, device=device, requires_grad=True)
            torch.nn.functional.linear(
                torch.ones(2, 2, dtype=dtype, device=device), weight
            ).sum().backward()
    except RuntimeError as error:
        raise ConfigError(
            f"precision={precision!r} computes in {dtype}, which device {str(device)!r} cannot do ({error}): "
            "use '32-true' or, where the device has it, 'bf16-mixed'"
        ) from error
