"""Run a script with the strategy names registered: `python -m zero_plugin.run script.py [arguments]`.

The explicit route where the automatic registration is switched off (docs/autoload.md). `-m package.module` in place of
`script.py` runs a module, as Python's own option does. With several processes: `torchrun -m zero_plugin.run script.py`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from zero_plugin._autoload import register_here_and_in_children

USAGE = "usage: python -m zero_plugin.run (script.py | -m module) [arguments]"


def main(arguments: list[str]) -> None:
    """Run what `arguments` name as `__main__`.

    Args:
        arguments: the command line after `-m zero_plugin.run`.

    Raises:
        SystemExit: nothing to run was given, or the script ended that way.
    """
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest or rest[0].startswith("-"):
        sys.exit(USAGE)
    register_here_and_in_children()
    sys.argv = rest
    if as_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    script = Path(rest[0])
    if not script.is_file():
        sys.exit(f"{script} is not a file\n{USAGE}")
    # `python script.py` puts the script's folder there; `python -m` has put the current one.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
