"""What `accelerate estimate-memory` adds: the bytes of a process in each tier, under the settings that were chosen.

They are asked of the engine's own parts (`zero_plugin.planner.dry`), so buffers and padding are among them. Activations are not, as in
Accelerate's own table.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from zero_plugin.integrations._huggingface.config_hooks import BLOCK
from zero_plugin.integrations._huggingface.plugin import ZeroOffloadPlugin, as_settings
from zero_plugin.planner.dry import DryModel, meta_twin

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import nn

_DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""Of the command's dtypes those that are trained."""

_TIERS = ("device", "host", "nvme")


def estimate(module: ModuleType, plain: Callable[[Any], Any], arguments: Any, config: Any) -> None:
    """Print Accelerate's table, and ours below it.

    Args:
        module: `accelerate.commands.estimate`.
        plain: its command.
        arguments: of the command.
        config: Accelerate's default config with our block, or None where the environment selects us.

    Raises:
        ConfigError: the settings are wrong.
    """
    if config is None:
        plugin, processes = ZeroOffloadPlugin.from_environment(), 1
    else:
        plugin = ZeroOffloadPlugin(**as_settings(getattr(config, BLOCK)))
        processes = max(1, int(config.num_processes))
    made: list[nn.Module] = []
    names: Any = module
    create: Callable[..., nn.Module] = names.create_empty_model

    def create_and_keep(*args: Any, **options: Any) -> nn.Module:
        made.append(create(*args, **options))
        return made[-1]

    names.create_empty_model = create_and_keep
    try:
        plain(arguments)
    finally:
        names.create_empty_model = create
    settings = ", ".join(f"{key}={value}" for key, value in plugin.settings().items())
    if plugin.options is not None:
        said = f"zero-plugin ({settings}): `zero-plugin plan {arguments.model_name}` finds the placement."
    else:
        title = f"Training with zero-plugin, each of {processes} processes"
        rows = _rows(made[-1], plugin, processes, arguments.dtypes, names.convert_bytes)
        table = names.create_ascii_table(["weights", *_TIERS], rows, title)
        said = f"{table}\n{settings}; AdamW, without activations"
    sys.stdout.write(f"{said}\n")


def _rows(
    model: nn.Module,
    plugin: ZeroOffloadPlugin,
    processes: int,
    dtypes: list[str],
    say: Callable[[float], str],
) -> list[list[str]]:
    found: list[list[str]] = []
    for name in dtypes:
        if name in _DTYPES:
            dry = DryModel(meta_twin(model, _DTYPES[name]))
            footprint = dry.footprint(plugin.config, processes)
            found.append([name, *(say(footprint.tier(tier)) for tier in _TIERS)])
    return found
