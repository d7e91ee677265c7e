"""What is refused before an engine is made, each with the reason and the cure."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import accelerate

from zero_plugin.errors import ConfigError, FrameworkError
from zero_plugin.integrations._huggingface.selection import SWITCH
from zero_plugin.versions import cure

if TYPE_CHECKING:
    from collections.abc import Mapping

# What we override or call in Accelerate: method -> parameters that have to be there.
_METHODS: Mapping[str, tuple[str, ...]] = {
    "prepare": ("device_placement",),
    "prepare_model": ("model", "device_placement", "evaluation_mode"),
    "prepare_optimizer": ("optimizer", "device_placement"),
    "backward": ("loss",),
    "no_sync": ("model",),
    "join_uneven_inputs": ("joinables", "even_batches"),
    "unscale_gradients": ("optimizer",),
    "clip_grad_norm_": ("parameters", "max_norm", "norm_type"),
    "clip_grad_value_": ("parameters", "clip_value"),
    "get_state_dict": ("model", "unwrap"),
    "save_state": ("output_dir", "safe_serialization"),
    "load_state": ("input_dir",),
    "register_load_state_pre_hook": ("hook",),
    "free_memory": (),
    "end_training": (),
}
# What an instance has that we read or change.
_ATTRIBUTES = (
    "_dataloaders",
    "_models",
    "_optimizers",
    "_save_model_state_pre_hook",
    "ddp_handler",
    "distributed_type",
    "even_batches",
    "fp8_enabled",
    "is_main_process",
    "num_processes",
    "project_configuration",
    "scaler",
    "state",
)

_RIVALS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
_RIVAL_ARGUMENTS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)


def check_supported(stock: type[Any]) -> None:
    """Refuse a release of Accelerate whose methods are not the ones we override.

    Raises:
        FrameworkError: one is missing, or lacks a parameter.
    """
    for name, parameters in _METHODS.items():
        method = getattr(stock, name, None)
        present = set() if method is None else set(inspect.signature(method).parameters)
        missing = [parameter for parameter in parameters if parameter not in present]
        if method is None or missing:
            raise FrameworkError(
                f"accelerate {accelerate.__version__} has no {stock.__name__}.{name}"
                f"({', '.join(missing) if missing else ''}) as zero-plugin overrides it: {cure('accelerate')}"
            )


def check_attributes(accelerator: Any) -> None:
    """Refuse a release of Accelerate whose instances lack what we read or change.

    Raises:
        FrameworkError: one is missing.
    """
    for name in _ATTRIBUTES:
        if not hasattr(accelerator, name):
            raise FrameworkError(
                f"accelerate {accelerate.__version__} has no {type(accelerator).__name__}.{name}, which zero-plugin uses: "
                f"{cure('accelerate')}"
            )


def check_alone(arguments: Mapping[str, Any]) -> None:
    """Refuse another engine beside ours.

    Args:
        arguments: of the Accelerator.

    Raises:
        ConfigError: the environment or an argument selects one.
    """
    for variable, name in _RIVALS.items():
        if os.environ.get(variable, "false").strip().lower() == "true":
            raise ConfigError(
                f"zero-plugin and {name} were both asked for ({variable}=true): choose one; unset {variable}, or "
                f"{SWITCH} and zero_plugin="
            )
    for name in _RIVAL_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"zero-plugin was asked for together with Accelerator({name}=...): choose one of them"
            )


def check_ddp(handler: Any) -> None:
    """Refuse settings of DistributedDataParallel that an engine cannot honour.

    Raises:
        ConfigError: there is a communication hook.
    """
    hook = getattr(handler, "comm_hook", None)
    if hook is not None and str(hook).rpartition(".")[2].lower() != "no":
        raise ConfigError(
            f"DistributedDataParallelKwargs(comm_hook={hook!s}) was given, and zero-plugin reduces gradients itself: leave "
            "it out, and set reduce_dtype='bf16' or 'fp16' to send fewer bytes"
        )


def check_scaler(scaler: Any) -> None:
    """Refuse a gradient scaler with settings of its own: it would be ignored.

    Raises:
        ConfigError: it has some.
    """
    usual = {
        "_init_scale": 65536.0,
        "_growth_factor": 2.0,
        "_backoff_factor": 0.5,
        "_growth_interval": 2000,
        "_enabled": True,
    }
    odd = {
        name.lstrip("_"): getattr(scaler, name)
        for name, value in usual.items()
        if getattr(scaler, name, value) != value
    }
    if odd:
        raise ConfigError(
            f"GradScalerKwargs has settings of its own ({odd}) and zero-plugin scales the loss itself: leave it out, and "
            "set loss_scale='dynamic' or a power of two in the plugin"
        )
