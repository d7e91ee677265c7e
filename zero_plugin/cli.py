"""The command line: `zero-plugin COMMAND`. Each command is a module of its own; this file lists them and prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol, cast

from zero_plugin.errors import ZeroError

COMMANDS: dict[str, tuple[str, str]] = {
    "checkpoint": ("zero_plugin.checkpoint.command", "look at a checkpoint, check it, export it"),
    "plan": ("zero_plugin.planner.command", "find where a model's states should lie"),
    "config": (
        "zero_plugin.integrations._huggingface.configure",
        "write an Accelerate config that selects zero-plugin",
    ),
    "launch": (
        "zero_plugin.integrations._huggingface.launch",
        "accelerate launch, where the automatic registration is off",
    ),
    "bench": ("zero_plugin.integrations.bench", "measure this machine for the planner"),
    "doctor": ("zero_plugin.machine.doctor", "say what this machine and its packages can do"),
    "report": ("zero_plugin.machine.report", "draw what a run left in a folder"),
}
"""Name of a command: its module (a `Command`), loaded only when it is used, and a line of help."""

Say = Callable[[str], None]
"""Prints a line to standard output."""


class Command(Protocol):
    """What a command's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace, say: Say) -> int:
        """Do it; returns the exit status. A `ZeroError` becomes one line on standard error and status 2."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `zero-plugin` program; returns its exit status: 0 if nothing is wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="zero-plugin", description="ZeRO, ZeRO-Offload and ZeRO-Infinity for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    loaded: dict[str, Command] = {}
    for name, (module, line) in COMMANDS.items():
        own = commands.add_parser(name, help=line, description=line)
        if given[:1] == [name]:
            loaded[name] = cast("Command", import_module(module))
            loaded[name].add_arguments(own)
    chosen = parser.parse_args(given)
    try:
        return loaded[chosen.command].run(chosen, print)
    except ZeroError as error:
        print(f"zero-plugin {chosen.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
