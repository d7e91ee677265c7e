"""`zero-plugin doctor` says whether this machine and its packages can run zero-plugin."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from zero_plugin.errors import ZeroError

if TYPE_CHECKING:
    import argparse

DISTRIBUTION = "zero-plugin"
FRAMEWORKS = ("torch", "numpy", "lightning", "accelerate")
"""The packages whose versions decide whether we work; all but the first two are optional."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: What was looked at.
        value: What was seen.
        problem: Why that does not work and what to do; empty if it works.
    """

    subject: str
    value: str
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    del parser


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Print the findings; returns 0 if nothing is wrong."""
    del arguments
    findings = [python(), *versions(metadata.requires(DISTRIBUTION) or [], installed), kernels()]
    for finding in findings:
        say(f"{finding.subject:12} {finding.value}")
        if finding.problem:
            say(f"{'':12} problem: {finding.problem}")
    return 1 if any(finding.problem for finding in findings) else 0


def python() -> Finding:
    """The interpreter and the machine it runs on."""
    return Finding(
        subject="python",
        value=f"{platform.python_version()} on {platform.machine()}, {sys.platform}",
    )


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(requirements: Iterable[str], version_of: Callable[[str], str | None]) -> list[Finding]:
    """Compare the frameworks' versions with the lowest ones the package's own metadata admits.

    Args:
        requirements: The package's requirements, as its metadata lists them.
        version_of: Gives a distribution's version, or None where it is not installed.
    """
    return [_version(name, _lowest(name, requirements), version_of(name)) for name in FRAMEWORKS]


def _version(name: str, lowest: str, present: str | None) -> Finding:
    if present is None:
        return Finding(subject=name, value="not installed")
    value = f"{present} (needs {lowest} or newer)"
    if _release(present) >= _release(lowest):
        return Finding(subject=name, value=value)
    return Finding(subject=name, value=value, problem=f"install {name}>={lowest}")


def _lowest(name: str, requirements: Iterable[str]) -> str:
    for requirement in requirements:
        found = re.match(rf"{re.escape(name)}\s*>=\s*([0-9.]+)", requirement)
        if found:
            return found.group(1)
    return "0"


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def kernels() -> Finding:
    """The compiled extension: instruction set and threads it would use."""
    try:
        from zero_plugin.kernels import Kernels

        handle = Kernels()
    except (ZeroError, ImportError) as error:
        return Finding(
            subject="kernels",
            value="not usable",
            problem=f"{error}; reinstall with: pip install --force-reinstall --no-deps zero-plugin",
        )
    try:
        return Finding(subject="kernels", value=f"{handle.isa}, {handle.threads} threads")
    finally:
        handle.close()
