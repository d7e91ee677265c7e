"""`zero-plugin launch`: `accelerate launch` where the automatic registration is switched off."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.entry import enter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_RUN = "zero_plugin.run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after the command's name is `accelerate launch`'s."""
    parser.prefix_chars = "\0"
    parser.add_argument(
        "arguments", nargs="...", help="the arguments of accelerate launch, and the script's"
    )


def run(arguments: argparse.Namespace, _say: Callable[[str], None]) -> int:
    """Start the script as `accelerate launch` would, with zero-plugin registered in every process."""
    launch = enter_commands()
    parsed = launch.launch_command_parser().parse_args(arguments.arguments)
    launch.launch_command(through_run(parsed))
    return 0


def enter_commands() -> Any:
    """Enter Accelerate's commands; returns the module of `accelerate launch`.

    Raises:
        ConfigError: Accelerate is not installed.
        FrameworkError: its release lacks what is entered.
    """
    try:
        enter(import_module("accelerate.commands.config.config_args"))
    except ModuleNotFoundError as error:
        raise ConfigError(
            "this command needs Accelerate: pip install 'zero-plugin[accelerate]'"
        ) from error
    enter(import_module("accelerate.commands.config.default"))
    enter(import_module("accelerate.commands.config.config"))
    launch = import_module("accelerate.commands.launch")
    enter(launch)
    return launch


def through_run(parsed: Any) -> Any:
    """Have the script run by `python -m zero_plugin.run`, which registers us whatever is switched off."""
    if parsed.no_python:
        return parsed
    module = ["-m"] if parsed.module else []
    parsed.training_script_args = [
        *module,
        parsed.training_script,
        *parsed.training_script_args,
    ]
    parsed.training_script, parsed.module = _RUN, True
    return parsed
