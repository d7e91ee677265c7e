"""What we enter in Accelerate and transformers, looked for as each module is imported, so that a release that changed is named."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_plugin.integrations._huggingface.selection import is_selected

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from zero_plugin.errors import FrameworkError

HOOKED: Mapping[str, tuple[str, ...]] = {
    "accelerate.accelerator": ("Accelerator.__init__", "AcceleratorState._shared_state"),
    "accelerate.commands.config.config_args": (
        "ClusterConfig.__init__",
        "ClusterConfig.__dataclass_fields__",
        "load_config_from_file",
    ),
    "accelerate.commands.config.config": ("get_cluster_input", "_ask_field", "_ask_options"),
    "accelerate.commands.config.default": (
        "write_basic_config",
        "ClusterConfig.from_json_file",
        "ClusterConfig.to_json_file",
    ),
    "accelerate.commands.estimate": (
        "estimate_command",
        "create_empty_model",
        "create_ascii_table",
        "convert_bytes",
    ),
    "accelerate.commands.launch": (
        "launch_command",
        "load_config_from_file",
        "default_config_file",
    ),
    "transformers.modeling_utils": ("PreTrainedModel.from_pretrained",),
    "transformers.trainer": ("Trainer.create_accelerator_and_postprocess",),
}
"""Module -> the names in it that an entrance needs."""

_USERS: Mapping[str, str] = {
    "accelerate.accelerator": "Accelerator",
    "transformers.modeling_utils": "PreTrainedModel",
    "transformers.trainer": "Trainer",
}
"""The class whose instances a run that asked for us must not make, where its module could not be entered."""


def check_hooked(module: ModuleType) -> None:
    """Refuse a release whose module lacks what we enter.

    A run that did not ask for us goes on as without us: the refusal is logged by the registration. In one that did, making the
    class that we could not enter raises it, since training would go on without us.

    Args:
        module: one of `HOOKED`.

    Raises:
        FrameworkError: something is missing.
    """
    missing = [path for path in HOOKED[module.__name__] if not _has(module, path)]
    if not missing:
        return
    package = module.__name__.partition(".")[0]
    # Not before: this module is imported into every process that imports Accelerate.
    error: FrameworkError = import_module("zero_plugin.errors").FrameworkError(
        f"{package} {import_module(package).__version__} has no {module.__name__}.{missing[0]}, where zero-plugin enters it: "
        f"{import_module('zero_plugin.versions').cure(package)}"
    )
    user = getattr(module, _USERS.get(module.__name__, ""), None)
    if user is not None:
        _refuse_instances(user, error)
    raise error


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _refuse_instances(stock: type[Any], error: FrameworkError) -> None:
    plain: Any = stock.__init__

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the method's place
        if is_selected():
            raise error
        plain(self, *args, **kwargs)

    setattr(stock, "__init__", __init__)  # noqa: B010 - a plain assignment is an override to a type checker
