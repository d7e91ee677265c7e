"""`from_pretrained` straight into shards, for a run that asked for stage 3."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.plugin import ZeroOffloadPlugin
from zero_plugin.integrations.building import init_context

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = logging.getLogger("zero_plugin")


def load(
    plain: Callable[..., Any],
    in_use: ZeroOffloadPlugin | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `from_pretrained`; at stage 3 no rank ever holds the whole model.

    Args:
        plain: the stock `from_pretrained`, bound to its class.
        in_use: the plugin of the process's Accelerator; None for what the environment says.
        args: of `from_pretrained`,
        kwargs: and by name.

    Raises:
        ConfigError: a `device_map` over several devices was given.
    """
    plugin = ZeroOffloadPlugin.from_environment() if in_use is None else in_use
    if not plugin.config.shards_parameters or kwargs.get("quantization_config") is not None:
        return plain(*args, **kwargs)
    _check_device_map(kwargs)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
        _LOG.warning(
            "from_pretrained was called before the process group was made, so every process loads the whole model: make "
            "the Accelerator, or TrainingArguments, first"
        )
        return plain(*args, **kwargs)
    with init_context(plugin.config):
        return plain(*args, **kwargs)


def _check_device_map(kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("device_map")
    if wanted == "auto":
        _LOG.warning(
            "device_map='auto' was left out: at stage 3 each process holds a slice of every weight"
        )
        kwargs["device_map"] = None
    elif wanted in ("balanced", "balanced_low_0", "sequential") or (
        isinstance(wanted, dict) and len(set(wanted.values())) > 1
    ):
        raise ConfigError(
            f"device_map={wanted!r} places whole layers on several devices, and at stage 3 each process holds a slice of "
            "every weight: leave device_map out"
        )
