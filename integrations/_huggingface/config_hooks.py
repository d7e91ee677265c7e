"""Where zero-plugin enters `accelerate config`, `accelerate launch` and `accelerate estimate-memory`.

Accelerate imports its configuration code into every process, so nothing here imports torch, the engine or the checks of a
config before a file or an answer asks for us.
"""

from __future__ import annotations

import functools
import os
from dataclasses import field, make_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_plugin.integrations._huggingface.selection import SETTINGS, SWITCH, is_selected

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

BLOCK = "zero_plugin_config"
"""The key of our block in Accelerate's YAML and JSON files."""


def enter_config_file(module: ModuleType) -> None:
    """Let a config file have our block.

    Args:
        module: `accelerate.commands.config.config_args`.
    """
    config: type[Any] = module.ClusterConfig
    plain: Callable[..., None] = config.__init__
    if _is_ours(plain):
        return
    made: Any = make_dataclass("made", [(BLOCK, "dict | None", field(default=None))])
    config.__dataclass_fields__[BLOCK] = made.__dataclass_fields__[BLOCK]

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the method's place
        block = kwargs.pop(BLOCK, None)
        plain(self, *args, **kwargs)
        if block is not None:
            setattr(self, BLOCK, _checked(block, self))

    config.__init__ = _mark(__init__)


def enter_questions(module: ModuleType) -> None:
    """Ask for us in `accelerate config`, after its own questions.

    Args:
        module: `accelerate.commands.config.config`.
    """
    plain: Callable[[], Any] = module.get_cluster_input
    if _is_ours(plain):
        return

    @functools.wraps(plain)
    def get_cluster_input() -> Any:
        config = plain()
        return import_module("zero_plugin.integrations._huggingface.questions").ask(config, module)

    setattr(module, "get_cluster_input", _mark(get_cluster_input))  # noqa: B010 - a module has no such attribute for a type checker


def enter_default(module: ModuleType) -> None:
    """Let `accelerate config default` write our block where the environment selects us.

    Args:
        module: `accelerate.commands.config.default`.
    """
    plain: Callable[..., Any] = module.write_basic_config
    if _is_ours(plain):
        return

    @functools.wraps(plain)
    def write_basic_config(*args: Any, **kwargs: Any) -> Any:
        place = plain(*args, **kwargs)
        if place and is_selected():
            config = module.ClusterConfig.from_json_file(place)
            setattr(config, BLOCK, _settings_of_environment())
            config.to_json_file(place)
        return place

    setattr(module, "write_basic_config", _mark(write_basic_config))  # noqa: B010 - a module has no such attribute for a type checker


def enter_launch(module: ModuleType) -> None:
    """Let `accelerate launch` hand a config file's block to the processes it starts.

    Args:
        module: `accelerate.commands.launch`.
    """
    plain: Callable[[Any], Any] = module.launch_command
    if _is_ours(plain):
        return

    @functools.wraps(plain)
    def launch_command(args: Any) -> Any:
        block = _block_for(module, args)
        if block is None:
            return plain(args)
        before = {name: os.environ.get(name) for name in (SWITCH, SETTINGS)}
        os.environ.update(_variables(block, args))
        import_module("zero_plugin.integrations._huggingface.packaged").replace(args, block)
        try:
            return plain(args)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    setattr(module, "launch_command", _mark(launch_command))  # noqa: B010 - a module has no such attribute for a type checker


def enter_estimate(module: ModuleType) -> None:
    """Let `accelerate estimate-memory` add our figures where the environment or the default config file selects us.

    Args:
        module: `accelerate.commands.estimate`.
    """
    plain: Callable[[Any], Any] = module.estimate_command
    if _is_ours(plain):
        return

    @functools.wraps(plain)
    def estimate_command(args: Any) -> Any:
        config = _default_config()
        if config is None and not is_selected():
            return plain(args)
        ours = import_module("zero_plugin.integrations._huggingface.estimate")
        return ours.estimate(module, plain, args, config)

    setattr(module, "estimate_command", _mark(estimate_command))  # noqa: B010 - a module has no such attribute for a type checker


def _default_config() -> Any:
    """Accelerate's default config where it has our block, else None; a file without it is not even parsed."""
    files = import_module("accelerate.commands.config.config_args")
    try:
        with open(files.default_config_file, encoding="utf-8") as file:  # noqa: PTH123 - pathlib is not imported here
            if BLOCK not in file.read():
                return None
    except OSError:
        return None
    config = files.load_config_from_file(None)
    return None if getattr(config, BLOCK, None) is None else config


def _block_for(module: ModuleType, args: Any) -> Any:
    """The block of the config file that `accelerate launch` is going to read."""
    is_default = os.path.isfile(module.default_config_file) and not args.cpu  # noqa: PTH113 - as it stands there
    if args.config_file is None and not is_default:
        return None
    return getattr(module.load_config_from_file(args.config_file), BLOCK, None)


def _variables(block: Any, args: Any) -> dict[str, str]:
    ours = import_module("zero_plugin.integrations._huggingface.blocks")
    variables: dict[str, str] = ours.variables(block, args)
    return variables


def _checked(block: Any, config: Any) -> Any:
    return import_module("zero_plugin.integrations._huggingface.blocks").check(block, config)


def _settings_of_environment() -> Any:
    return import_module("zero_plugin.integrations._huggingface.blocks").of_environment()


def _mark(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__dict__["of_zero_plugin"] = True
    return function


def _is_ours(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "of_zero_plugin", False))
