"""`ZeroOffloadStrategy` for `pytorch_lightning.Trainer` and `FabricZeroOffloadStrategy` for `lightning_fabric.Fabric`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero_plugin.integrations._lightning.checks import load_class

if TYPE_CHECKING:
    from zero_plugin.integrations._lightning.fabric_lightning_fabric import (
        FabricZeroOffloadStrategy,
    )
    from zero_plugin.integrations._lightning.monitor_pytorch_lightning import ZeroMonitor
    from zero_plugin.integrations._lightning.trainer_pytorch_lightning import ZeroOffloadStrategy

__all__ = ["FabricZeroOffloadStrategy", "ZeroMonitor", "ZeroOffloadStrategy"]

_MODULES = {
    "ZeroMonitor": "zero_plugin.integrations._lightning.monitor_pytorch_lightning",
    "ZeroOffloadStrategy": "zero_plugin.integrations._lightning.trainer_pytorch_lightning",
    "FabricZeroOffloadStrategy": "zero_plugin.integrations._lightning.fabric_lightning_fabric",
}


def __getattr__(name: str) -> Any:
    """Import a strategy when it is asked for: the Trainer's does not need Fabric's."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load_class(_MODULES[name], name)
