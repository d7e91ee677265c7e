"""`zero-plugin config`: `accelerate config` with our questions, and the way from a DeepSpeed config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_plugin.errors import ConfigError
from zero_plugin.integrations._huggingface.deepspeed import translate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--config_file", help="the Accelerate config file to write; its default place if left out"
    )
    parser.add_argument(
        "--from-deepspeed", metavar="DS_CONFIG_JSON", help="translate this file instead of asking"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Ask, or translate; write the config file."""
    if arguments.from_deepspeed is None:
        from zero_plugin.integrations._huggingface.launch import enter_commands

        enter_commands()
        from accelerate.commands.config.config import config_command

        config_command(arguments)
        return 0
    source = Path(arguments.from_deepspeed)
    try:
        values: Any = json.loads(source.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} holds a JSON {type(values).__name__}: give a DeepSpeed config")
    found = translate(values)
    for line in found.notes:
        say(line)
    text = found.as_yaml()
    if arguments.config_file is None:
        say(text)
    else:
        Path(arguments.config_file).write_text(text)
        say(f"accelerate configuration saved at {arguments.config_file}")
    return 0
