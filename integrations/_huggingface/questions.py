"""Our questions in `accelerate config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.blocks import check
from zero_plugin.integrations._huggingface.config_hooks import BLOCK
from zero_plugin.integrations._huggingface.plugin import changed_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_TIERS = ("device", "host", "nvme")
_AUTO = 4
"""The answer after stage 3."""

_TIER_WORDS = ["the device (GPU memory)", "host memory", "files on a fast local disk"]


def ask(config: Any, module: ModuleType) -> Any:
    """Ask whether to use zero-plugin, and how, unless another engine was chosen already.

    Args:
        config: what Accelerate's own questions gave.
        module: `accelerate.commands.config.config`, whose way of asking is used.

    Returns:
        `config`, with our block if it is wanted.
    """
    try:
        check({"stage": 2}, config)
    except ConfigError:
        return config
    field: Callable[..., Any] = module._ask_field  # noqa: SLF001 - Accelerate's own way of asking
    options: Callable[..., Any] = module._ask_options  # noqa: SLF001
    if not field(
        "Do you want to use zero-plugin (ZeRO, ZeRO-Offload, ZeRO-Infinity)? [yes/NO]: ",
        _yes_or_no,
        default=False,
        error_message="Please enter yes or no.",
    ):
        return config
    settings: dict[str, Any] = {
        "stage": options(
            "What should be sharded over the processes?",
            [
                "optimizer states (stage 1)",
                "optimizer states and gradients (stage 2)",
                "optimizer states, gradients and parameters (stage 3)",
                "what this machine's measurements say, tiers too (auto)",
            ],
            lambda number: int(number) + 1,
            default=1,
        )
    }
    if settings["stage"] == _AUTO:
        setattr(config, BLOCK, {"auto": True})
        return config
    if settings["stage"] == 3:
        settings["params"] = options(
            "Where should the shards of the parameters lie?", _TIER_WORDS, _tier, default=0
        )
    settings["optimizer"] = options(
        "Where should optimizer states and fp32 weights lie?", _TIER_WORDS, _tier, default=1
    )
    settings["gradients"] = options(
        "Where should reduced gradients lie?", _TIER_WORDS, _tier, default=1
    )
    if "nvme" in settings.values():
        settings["nvme_path"] = field(
            "Which folder on a fast local disk may hold them? ",
            _folder,
            error_message="Please enter the path of a folder.",
        )
    setattr(config, BLOCK, changed_settings(ZeroConfig.from_dict(settings)))
    return config


def _tier(number: Any) -> str:
    return _TIERS[int(number)]


def _yes_or_no(text: str) -> bool:
    answers = {"yes": True, "y": True, "no": False, "n": False}
    return answers[text.strip().lower()]


def _folder(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text.strip()
