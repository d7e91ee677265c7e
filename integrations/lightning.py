"""`ZeroOffloadStrategy` for the Trainer and `FabricZeroOffloadStrategy` for Fabric.

`lightning.pytorch` and `pytorch_lightning` have different classes, and often both are installed. The names here mean
the spelling that is imported already; with both, or none, `lightning`. `zero_plugin.integrations.pytorch_lightning`
holds the same names for the other spelling whatever is imported.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zero_plugin.integrations._lightning.checks import load_class

if TYPE_CHECKING:
    from zero_plugin.integrations._lightning.fabric_lightning import FabricZeroOffloadStrategy
    from zero_plugin.integrations._lightning.monitor_lightning import ZeroMonitor
    from zero_plugin.integrations._lightning.trainer_lightning import ZeroOffloadStrategy

__all__ = ["FabricZeroOffloadStrategy", "ZeroMonitor", "ZeroOffloadStrategy"]

# name -> ((framework, module of our class), ...), the preferred one first
_CHOICES: dict[str, tuple[tuple[str, str], ...]] = {
    "ZeroOffloadStrategy": (
        ("lightning.pytorch", "zero_plugin.integrations._lightning.trainer_lightning"),
        ("pytorch_lightning", "zero_plugin.integrations._lightning.trainer_pytorch_lightning"),
    ),
    "ZeroMonitor": (
        ("lightning.pytorch", "zero_plugin.integrations._lightning.monitor_lightning"),
        ("pytorch_lightning", "zero_plugin.integrations._lightning.monitor_pytorch_lightning"),
    ),
    "FabricZeroOffloadStrategy": (
        ("lightning.fabric", "zero_plugin.integrations._lightning.fabric_lightning"),
        ("lightning_fabric", "zero_plugin.integrations._lightning.fabric_lightning_fabric"),
    ),
}


def __getattr__(name: str) -> Any:
    """Import the strategy of the spelling in use; not kept, since which one that is may change."""
    if name not in _CHOICES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    choices = _CHOICES[name]
    for framework, module in choices:
        if framework in sys.modules:
            return load_class(module, name)
    for framework, module in choices:
        if find_spec(framework.partition(".")[0]) is not None:
            return load_class(module, name)
    raise ImportError(
        f"{name} needs Lightning, and neither {choices[0][0]} nor {choices[1][0]} is installed: "
        "pip install 'zero-plugin[lightning]'"
    )
