"""What we override, call and import in Lightning and Fabric: a release that lacks some of it is refused by name, on import."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from zero_plugin.errors import FrameworkError
from zero_plugin.versions import cure

if TYPE_CHECKING:
    from collections.abc import Mapping

TRAINER: Mapping[str, tuple[str, ...]] = {
    "__init__": (
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
        "timeout",
        "start_method",
    ),
    "block_backward_sync": (),
    "broadcast": ("obj",),
    "configure_ddp": (),
    "lightning_module_state_dict": (),
    "load_checkpoint": ("checkpoint_path", "weights_only"),
    "load_model_state_dict": ("checkpoint", "strict"),
    "load_optimizer_state_dict": ("checkpoint",),
    "model_to_device": (),
    "on_exception": ("exception",),
    "on_validation_end": (),
    "on_validation_start": (),
    "optimizer_state": ("optimizer",),
    "precision_plugin": (),
    "reduce_boolean_decision": ("decision",),
    "restore_checkpoint_after_setup": (),
    "save_checkpoint": ("checkpoint", "filepath", "storage_options"),
    "set_world_ranks": (),
    "setup": ("trainer",),
    "setup_distributed": (),
    "setup_optimizers": ("trainer",),
    "setup_precision_plugin": (),
    "teardown": (),
    "training_step": (),
    "validation_step": (),
    "_reset_optimizers_and_schedulers": (),
}
"""Of the Trainer's DDPStrategy: method or property -> parameters that have to be there."""

FABRIC: Mapping[str, tuple[str, ...]] = {
    "__init__": (
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision",
        "process_group_backend",
        "timeout",
        "start_method",
    ),
    "backward": ("tensor", "module"),
    "broadcast": ("obj",),
    "clip_gradients_norm": (
        "module",
        "optimizer",
        "max_norm",
        "norm_type",
        "error_if_nonfinite",
    ),
    "clip_gradients_value": ("module", "optimizer", "clip_val"),
    "get_module_state_dict": ("module",),
    "get_optimizer_state": ("optimizer",),
    "load_checkpoint": ("path", "state", "strict", "weights_only"),
    "load_module_state_dict": ("module", "state_dict", "strict"),
    "precision": (),
    "save_checkpoint": ("path", "state", "storage_options", "filter"),
    "setup_module": ("module",),
    "setup_module_and_optimizers": ("module", "optimizers", "scheduler"),
    "setup_optimizer": ("optimizer",),
    "teardown": (),
    "_convert_stateful_objects_in_state": ("state", "filter"),
    "_set_world_ranks": (),
    "_setup_distributed": (),
}
"""Of Fabric's DDPStrategy."""


def check_supported(stock: type[Any], members: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a release whose strategy is not the one that we override.

    Args:
        stock: DDPStrategy, of either framework and spelling.
        members: `TRAINER` or `FABRIC`.

    Raises:
        FrameworkError: a method is missing, or lacks a parameter.
    """
    for name, parameters in members.items():
        member = getattr(stock, name, None)
        present = set(inspect.signature(member).parameters) if callable(member) else set[str]()
        missing = [parameter for parameter in parameters if parameter not in present]
        if member is None or missing:
            called = f"({', '.join(missing)})" if missing else ""
            raise FrameworkError(
                f"{_named(stock.__module__)} has no {stock.__name__}.{name}{called} as zero-plugin overrides it: "
                f"{_cure(stock.__module__)}"
            )


def load_class(module: str, name: str) -> Any:
    """Import one of our classes over Lightning's.

    Args:
        module: of ours.
        name: of the class.

    Raises:
        FrameworkError: this release of Lightning lacks something that the class is made of.
    """
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        place = error.name or ""
        lacks = place.partition(".")[0] in _DISTRIBUTIONS and "." in place
        if isinstance(error, FrameworkError) or not lacks:
            raise
        raise FrameworkError(
            f"{_named(place)} lacks what zero-plugin's {name} is made of ({error.msg}): {_cure(place)}"
        ) from error


def refuse(module: str, name: str) -> NoReturn:
    """Say that a module lacks what the registration enters.

    Raises:
        FrameworkError: always.
    """
    raise FrameworkError(
        f"{_named(module)} has no {module}.{name}, where zero-plugin registers itself: {_cure(module)}"
    )


_DISTRIBUTIONS = {
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "lightning_fabric": "lightning-fabric",
}


def _named(module: str) -> str:
    """The distribution that a module is in, with its version."""
    root = module.partition(".")[0]
    version = getattr(import_module(root), "__version__", "of an unknown version")
    return f"{_DISTRIBUTIONS.get(root, root)} {version}"


def _cure(module: str) -> str:
    return cure(_DISTRIBUTIONS.get(module.partition(".")[0], "lightning"))
