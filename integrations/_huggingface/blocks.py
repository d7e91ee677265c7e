"""The `zero_plugin_config:` block of an Accelerate config file."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.config_hooks import BLOCK
from zero_plugin.integrations._huggingface.plugin import (
    ZeroOffloadPlugin,
    as_settings,
)
from zero_plugin.integrations._huggingface.selection import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

_RIVALS = {
    "deepspeed_config": "DeepSpeed",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "Megatron-LM",
    "parallelism_config": "a parallelism config",
    "fp8_config": "fp8",
}
_RIVAL_TYPES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")
_RIVAL_FLAGS = ("use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "tpu")


def check(block: Any, config: Any = None) -> dict[str, Any]:
    """A block as it is written to a file.

    Args:
        block: what stands in the file.
        config: Accelerate's config around it, if there is one.

    Raises:
        ConfigError: it is not a mapping of `ZeroConfig` fields, or the config selects another engine too.
    """
    if not isinstance(block, dict):
        raise ConfigError(
            f"{BLOCK} is a {type(block).__name__} ({block!r}): give a mapping of ZeroConfig fields, such as "
            f"{BLOCK}: {{stage: 3, params: host}}"
        )
    try:
        settings = ZeroOffloadPlugin(**as_settings(block)).settings()
    except ConfigError as error:
        raise type(error)(f"in {BLOCK}: {error}") from error
    rival = "" if config is None else _rival_of(config)
    if rival:
        raise ConfigError(
            f"the config file holds {BLOCK} and selects {rival}: choose one, and take the other out of the file"
        )
    return settings


def variables(block: Mapping[str, Any], arguments: Any) -> dict[str, str]:
    """The environment that hands a block to the processes that are started.

    Args:
        block: of the config file.
        arguments: of `accelerate launch`.

    Raises:
        ConfigError: an argument selects another engine.
    """
    for flag in _RIVAL_FLAGS:
        if getattr(arguments, flag, False):
            raise ConfigError(
                f"the config file holds {BLOCK} and --{flag} was given: choose one of them"
            )
    found = ZeroOffloadPlugin(**as_settings(block)).to_environment()
    present = os.environ.get(SETTINGS)
    if present and present != found[SETTINGS]:
        logging.getLogger("zero_plugin").warning(
            "%s=%s in the environment differs from the config file, which is used: %s",
            SETTINGS,
            present,
            found[SETTINGS],
        )
    return found


def of_environment() -> dict[str, Any]:
    """The block that says what the environment says."""
    return ZeroOffloadPlugin.from_environment().settings()


def _rival_of(config: Any) -> str:
    kind = str(config.distributed_type).rpartition(".")[2]
    if kind in _RIVAL_TYPES:
        return kind
    return next((name for key, name in _RIVALS.items() if getattr(config, key, None)), "")
