"""Where zero-plugin enters Accelerate: `Accelerator.__init__`, and nothing else of the class.

Imported into every process that imports Accelerate, so nothing here imports torch or the engine before a run asks for us.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_plugin.integrations._huggingface.config_hooks import (
    enter_config_file,
    enter_default,
    enter_estimate,
    enter_launch,
    enter_questions,
)
from zero_plugin.integrations._huggingface.hooked import check_hooked
from zero_plugin.integrations._huggingface.selection import is_selected

if TYPE_CHECKING:
    from types import ModuleType

STATE = "zero_plugin"
"""Attribute of the process-wide `AcceleratorState` that holds the plugin in use."""


def enter(module: ModuleType) -> None:
    """Enter one of the modules that the registration knows.

    Raises:
        FrameworkError: its release lacks what is entered.
    """
    check_hooked(module)
    _ENTRANCES[module.__name__](module)


def enter_accelerate() -> None:
    """Enter Accelerate, where the automatic registration has not; imports it.

    Raises:
        ImportError: Accelerate is not installed, or its release is not one that can be entered.
    """
    try:
        module = import_module("accelerate.accelerator")
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        raise ImportError(
            "zero_plugin.integrations.accelerate needs Accelerate: pip install 'zero-plugin[accelerate]'"
        ) from error
    enter(module)


def enter_accelerator(module: ModuleType) -> None:
    """Let `Accelerator` take `zero_plugin=`, and look at the environment.

    An Accelerator that is not asked to be ours is made by the stock code alone.

    Args:
        module: `accelerate.accelerator`.
    """
    stock: type[Any] = module.Accelerator
    plain: Callable[..., None] = stock.__init__
    if getattr(plain, "of_zero_plugin", False):
        return

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the method's place
        given = kwargs.pop("zero_plugin", None)
        if given is None and not is_selected() and _in_use(module) is None:
            plain(self, *args, **kwargs)
            return
        _make(self, plain, given or _in_use(module), args, kwargs)

    __init__.__dict__["of_zero_plugin"] = True
    stock.__init__ = __init__


def enter_trainer(module: ModuleType) -> None:
    """Let a Trainer whose Accelerator is ours become ours.

    Args:
        module: `transformers.trainer`.
    """
    stock: type[Any] = module.Trainer
    plain: Callable[[Any], None] = stock.create_accelerator_and_postprocess
    if getattr(plain, "of_zero_plugin", False):
        return

    @functools.wraps(plain)
    def create_accelerator_and_postprocess(self: Any) -> None:
        plain(self)
        if getattr(self.accelerator, STATE, None) is not None:
            import_module("zero_plugin.integrations._huggingface.trainer").adopt(self)

    create_accelerator_and_postprocess.__dict__["of_zero_plugin"] = True
    stock.create_accelerator_and_postprocess = create_accelerator_and_postprocess


def enter_loading(module: ModuleType) -> None:
    """Let `from_pretrained` build straight into shards where stage 3 was asked for.

    Args:
        module: `transformers.modeling_utils`.
    """
    stock: type[Any] = module.PreTrainedModel
    plain: Callable[..., Any] = stock.from_pretrained.__func__
    if getattr(plain, "of_zero_plugin", False):
        return

    @functools.wraps(plain)
    def from_pretrained(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        state = sys.modules.get("accelerate.state")
        in_use = None if state is None else state.AcceleratorState._shared_state.get(STATE)  # noqa: SLF001
        if in_use is None and not is_selected():
            return plain(cls, *args, **kwargs)
        loading = import_module("zero_plugin.integrations._huggingface.loading")
        return loading.load(functools.partial(plain, cls), in_use, args, kwargs)

    from_pretrained.__dict__["of_zero_plugin"] = True
    stock.from_pretrained = classmethod(from_pretrained)


def _in_use(module: ModuleType) -> Any:
    """The plugin of the Accelerator that this process made first, as its other settings are shared."""
    return module.AcceleratorState._shared_state.get(STATE)  # noqa: SLF001


def _make(self: Any, plain: Callable[..., None], chosen: Any, args: Any, kwargs: Any) -> None:
    # Only now, in a run that asked for us, is the engine imported.
    ours = import_module("zero_plugin.integrations._huggingface.accelerator")
    ours.make(self, plain, chosen, args, kwargs)


_ENTRANCES: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.accelerator": enter_accelerator,
    "accelerate.commands.config.config_args": enter_config_file,
    "accelerate.commands.config.config": enter_questions,
    "accelerate.commands.config.default": enter_default,
    "accelerate.commands.estimate": enter_estimate,
    "accelerate.commands.launch": enter_launch,
    "transformers.modeling_utils": enter_loading,
    "transformers.trainer": enter_trainer,
}
