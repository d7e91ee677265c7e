"""ZeRO, ZeRO-Offload and ZeRO-Infinity for Lightning, Accelerate and plain PyTorch.

The names below are loaded on first use (PEP 562). Importing this package must stay cheap and must not import
torch: torch itself imports it, through the `torch.backends` entry point, at the end of its own import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_plugin import errors
    from zero_plugin._autoload import register
    from zero_plugin.config import ZeroConfig
    from zero_plugin.engine import ZeroEngine
    from zero_plugin.errors import ZeroError
    from zero_plugin.integrations.building import init_context
    from zero_plugin.optim.lion import Lion
    from zero_plugin.planner.plan import plan
    from zero_plugin.tiling.convert import tile_linears
    from zero_plugin.tiling.loss import tiled_cross_entropy

    __version__: str

__all__ = [
    "Lion",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroError",
    "__version__",
    "errors",
    "init_context",
    "plan",
    "register",
    "tile_linears",
    "tiled_cross_entropy",
]

# name -> (module that holds it, attribute there; None: the module itself)
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "Lion": ("zero_plugin.optim.lion", "Lion"),
    "ZeroConfig": ("zero_plugin.config", "ZeroConfig"),
    "ZeroEngine": ("zero_plugin.engine", "ZeroEngine"),
    "ZeroError": ("zero_plugin.errors", "ZeroError"),
    "errors": ("zero_plugin.errors", None),
    "init_context": ("zero_plugin.integrations.building", "init_context"),
    "plan": ("zero_plugin.planner.plan", "plan"),
    "register": ("zero_plugin._autoload", "register"),
    "tile_linears": ("zero_plugin.tiling.convert", "tile_linears"),
    "tiled_cross_entropy": ("zero_plugin.tiling.loss", "tiled_cross_entropy"),
}


def __getattr__(name: str) -> object:
    """Load a public name on first use and keep it in the module."""
    value: object
    if name == "__version__":
        # importlib.metadata costs more than the rest of this module, so it too waits for its first use
        value = import_module("importlib.metadata").version("zero-plugin")
    elif name in _EXPORTS:
        module_name, attribute = _EXPORTS[name]
        module = import_module(module_name)
        value = module if attribute is None else getattr(module, attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Names for completion: the public ones, loaded or not."""
    return sorted({*globals(), *__all__})
