"""The checks `run_tests.py` runs, each a few commands in the test environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import environment
from environment import REPOSITORY, Recipe

PYTEST_NO_TESTS = 5
"""pytest's exit code when its selection is empty."""
PARALLEL = "not serial"
SERIAL = "serial"


@dataclass(frozen=True)
class Command:
    """One command of a check.

    Attributes:
        line: Program and arguments.
        variables: Environment variables to set on top of the present ones.
        accepted: Exit codes that count as passed.
    """

    line: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    accepted: frozenset[int] = frozenset({0})


def style(recipe: Recipe, _: Sequence[str]) -> list[Command]:
    """Lint and format, Python and C++."""
    ruff = str(recipe.program("ruff"))
    commands = [Command([ruff, "check", "."]), Command([ruff, "format", "--check", "."])]
    sources = native_sources(REPOSITORY)
    if sources:
        clang_format = str(recipe.program("clang-format"))
        commands.append(Command([clang_format, "--dry-run", "--Werror", *sources]))
    return commands


def native_sources(root: Path) -> list[str]:
    """The C++ files of the extension, relative to `root`."""
    suffixes = {".cpp", ".h", ".hpp", ".inc"}
    found = (path for path in (root / "native_ext").rglob("*") if path.suffix in suffixes)
    return sorted(path.relative_to(root).as_posix() for path in found)


def imports(recipe: Recipe, _: Sequence[str]) -> list[Command]:
    """The direction of imports between layers."""
    return [Command([str(recipe.python), "scripts/check_imports.py"])]


def types(recipe: Recipe, _: Sequence[str]) -> list[Command]:
    """Static types."""
    return [Command([str(recipe.python), "scripts/check_types.py"])]


def tests(recipe: Recipe, options: Sequence[str]) -> list[Command]:
    """The tests: alone those that measure, then the others in three processes."""
    pytest = str(recipe.program("pytest"))
    # Three workers on two cores: where several ranks wait for one another, a fifth of the time is nobody's. A second thread in
    # each would only be in the others' way.
    parallel = Command(
        [pytest, "-n", "3", "--dist", "worksteal", "-m", PARALLEL, *options],
        {"OMP_NUM_THREADS": "1"},
        accepted=frozenset({0, PYTEST_NO_TESTS}) if options else frozenset({0}),
    )
    serial = Command([pytest, "-m", SERIAL, *options], accepted=frozenset({0, PYTEST_NO_TESTS}))
    return [serial, parallel]


CHECKS: dict[str, Callable[[Recipe, Sequence[str]], list[Command]]] = {
    "style": style,
    "imports": imports,
    "types": types,
    "tests": tests,
}
NAMES = tuple(CHECKS)


def run_all(recipe: Recipe, *, only: Sequence[str], pytest_options: Sequence[str]) -> int:
    """Run the named checks, all of them even after one failed; returns 0 if all passed."""
    verdicts: list[str] = []
    failed = 0
    for name in only:
        start = time.monotonic()
        passed = True
        for command in CHECKS[name](recipe, pytest_options):
            passed = succeeds(command, recipe) and passed
        failed += not passed
        verdict = "passed" if passed else "FAILED"
        verdicts.append(f"{name:8} {verdict}  {time.monotonic() - start:6.0f} s")
    print("\n".join(["", *verdicts]), flush=True)
    return 1 if failed else 0


def succeeds(command: Command, recipe: Recipe) -> bool:
    """Run one command with the environment's programs first on PATH."""
    path = os.pathsep.join([str(recipe.python.parent), os.environ.get("PATH", os.defpath)])
    variables = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(recipe.folder), **command.variables}
    return environment.run(command.line, environment=variables) in command.accepted
