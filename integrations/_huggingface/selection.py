"""Whether the environment selects zero-plugin.

Every process that imports Accelerate imports this, so nothing here imports the rest of the package.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SWITCH = "ACCELERATE_USE_ZERO_PLUGIN"
"""`true`: every Accelerator of the process trains on the engine."""

SETTINGS = "ZERO_PLUGIN_CONFIG"
"""The `ZeroConfig` fields as JSON."""

_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("", "0", "false", "no", "off", "n", "f")


def is_selected(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment selects zero-plugin.

    Raises:
        ConfigError: the switch has a value that is neither true nor false.
    """
    value = (os.environ if environment is None else environment).get(SWITCH)
    return value is not None and read_switch(value)


def read_switch(value: str) -> bool:
    """Read the switch's value.

    Raises:
        ConfigError: it is neither true nor false.
    """
    word = value.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    from zero_plugin.errors import ConfigError

    raise ConfigError(f"{SWITCH}={value!r} is neither true nor false: set it to true, or remove it")
