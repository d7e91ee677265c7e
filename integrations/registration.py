"""The strategy names that Lightning and Fabric know us by, and the loader of `load_from_checkpoint`.

Nothing here imports torch or Lightning: a name costs a dictionary entry until someone asks for it.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "zero_1": {"stage": 1, "optimizer": "device", "gradients": "device"},
    "zero_2": {"stage": 2, "optimizer": "device", "gradients": "device"},
    "zero_offload": {"stage": 2, "optimizer": "host", "gradients": "host"},
    "zero_3": {"stage": 3, "params": "device", "optimizer": "device", "gradients": "device"},
    "zero_3_offload": {"stage": 3, "params": "host", "optimizer": "host", "gradients": "host"},
    "zero_infinity": {"stage": 3, "params": "nvme", "optimizer": "nvme", "gradients": "nvme"},
    "zero_auto": {"auto": True},
}
"""Registered name -> the `ZeroConfig` fields it stands for; every other field keeps its default. `auto` has them planned."""

DESCRIPTIONS: Mapping[str, str] = {
    "zero_1": "ZeRO stage 1: optimizer states sharded, on the device",
    "zero_2": "ZeRO stage 2: optimizer states and gradients sharded, on the device",
    "zero_offload": "ZeRO-Offload: stage 2 with optimizer states and gradients in host memory",
    "zero_3": "ZeRO stage 3: parameters, optimizer states and gradients sharded, on the device",
    "zero_3_offload": "ZeRO stage 3 with the shards of parameters, optimizer states and gradients in host memory",
    "zero_infinity": "ZeRO-Infinity: stage 3 with all shards in files (needs nvme_path)",
    "zero_auto": "the cheapest stage and tiers that fit, found when the fit begins (zero_plugin.plan)",
}

# module of the registry -> (its attribute, the module of our class for this framework, the class)
_REGISTRIES: Mapping[str, tuple[str, str, str]] = {
    "lightning.pytorch.strategies": (
        "StrategyRegistry",
        "zero_plugin.integrations._lightning.trainer_lightning",
        "ZeroOffloadStrategy",
    ),
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        "zero_plugin.integrations._lightning.trainer_pytorch_lightning",
        "ZeroOffloadStrategy",
    ),
    "lightning.fabric.strategies": (
        "STRATEGY_REGISTRY",
        "zero_plugin.integrations._lightning.fabric_lightning",
        "FabricZeroOffloadStrategy",
    ),
    "lightning_fabric.strategies": (
        "STRATEGY_REGISTRY",
        "zero_plugin.integrations._lightning.fabric_lightning_fabric",
        "FabricZeroOffloadStrategy",
    ),
}


_LOADERS = frozenset({"lightning.pytorch.core.saving", "pytorch_lightning.core.saving"})


class StrategyFactory:
    """Stands in a registry for a class that is imported when the registry is asked for it.

    Args:
        module: the class's module.
        name: the class's name there.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __call__(self, **settings: Any) -> Any:
        """Make the strategy; `settings` are `ZeroConfig` fields."""
        checks = import_module("zero_plugin.integrations._lightning.checks")
        return checks.load_class(self.module, self.name)(**settings)

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}, not imported yet>"


def register_strategies(module: ModuleType) -> None:
    """Add our names to the registry in `module`, once; or let its loader of checkpoint files take our folders.

    A name that someone else has registered is left to them, and this is said in the log.

    Args:
        module: one of the four modules that hold a registry, or of the two that hold a loader.

    Raises:
        FrameworkError: this release of Lightning has neither under the name that we know.
    """
    if module.__name__ in _LOADERS:
        loaders: Any = module
        loaders.pl_load = load_folders_too(_hooked(module, "pl_load"))
        return
    attribute, strategy_module, strategy_name = _REGISTRIES[module.__name__]
    registry = _hooked(module, attribute)
    for name, fields in STRATEGIES.items():
        if name not in registry:
            registry.register(
                name,
                StrategyFactory(strategy_module, strategy_name),
                description=DESCRIPTIONS[name],
                **fields,
            )
        elif not isinstance(registry[name]["strategy"], StrategyFactory):
            import logging

            logging.getLogger("zero_plugin").warning(
                "strategy name %r is taken by %r in %s: use zero_plugin.integrations.lightning.ZeroOffloadStrategy",
                name,
                registry[name]["strategy"],
                module.__name__,
            )


def _hooked(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        import_module("zero_plugin.integrations._lightning.checks").refuse(module.__name__, name)
    return found


def load_folders_too(load: Callable[..., Any]) -> Callable[..., Any]:
    """Lightning's loader of checkpoint files, for `load_from_checkpoint`, that takes our folders too."""
    if getattr(load, "loads_folders", False):
        return load

    @wraps(load)
    def either(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, (str, Path)) and (Path(path).is_dir() or Path(path).is_file()):
            from zero_plugin.integrations._lightning.folders import read_folder

            found = read_folder(path)
            if found is not None:
                return found
        return load(path, *arguments, **options)

    either.__dict__["loads_folders"] = True
    return either
