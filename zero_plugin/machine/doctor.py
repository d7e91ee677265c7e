"""`zero-plugin doctor` says whether this machine and its packages can run zero-plugin."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from zero_plugin.errors import ZeroError
from zero_plugin.versions import RANGES, Range, release

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: What was looked at.
        value: What was seen.
        problem: Why that does not work and what to do; empty if it works.
        note: What it costs, where it works all the same.
    """

    subject: str
    value: str
    problem: str = ""
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--nvme",
        metavar="PATH",
        action="append",
        default=[],
        help="look at a folder of the nvme tier too",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Print the findings; returns 0 if nothing is wrong."""
    findings = [
        python(),
        *versions(installed),
        kernels(),
        *system(),
        *(disk(path) for path in arguments.nvme),
    ]
    bad = any(finding.problem for finding in findings)
    if arguments.json:
        say(json.dumps({"ok": not bad, "findings": [asdict(item) for item in findings]}, indent=2))
        return int(bad)
    for finding in findings:
        say(f"{finding.subject:12} {finding.value}")
        if finding.note:
            say(f"{'':12} note: {finding.note}")
        if finding.problem:
            say(f"{'':12} problem: {finding.problem}")
    return int(bad)


def system() -> list[Finding]:
    """What the system allows: memory, pinning, huge pages, io_uring, accelerators."""
    from zero_plugin.machine import system as seen

    return [
        Finding(subject=name, value=value, note=note)
        for name, value, note in (
            seen.memory(),
            seen.pinning(),
            seen.huge_pages(),
            seen.io_engine(),
            seen.accelerators(),
        )
    ]


def disk(path: str) -> Finding:
    """A folder of the `nvme` tier: direct I/O, free space, and whether it is a disk at all."""
    from zero_plugin.machine import system as seen

    if not path:
        return Finding(subject="nvme", value="", problem="--nvme '' is no folder: name one")
    try:
        value, note = seen.disk(path)
    except ZeroError as error:
        return Finding(subject="nvme", value=path, problem=str(error))
    return Finding(subject="nvme", value=f"{path}: {value}", note=note)


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


def versions(version_of: Callable[[str], str | None]) -> list[Finding]:
    """Compare the frameworks' versions with `zero_plugin.versions.RANGES`.

    Args:
        version_of: Gives a distribution's version, or None where it is not installed.
    """
    return [_version(name, known, version_of(name)) for name, known in RANGES.items()]


def _version(name: str, known: Range, present: str | None) -> Finding:
    if present is None:
        return Finding(subject=name, value="not installed")
    value = f"{present} (needs {known.oldest} or newer)"
    if release(present) < release(known.oldest):
        return Finding(subject=name, value=value, problem=f"install {name}>={known.oldest}")
    newer = release(present)[:2] > release(known.newest)[:2]
    note = f"newer than {known.newest}, the last version the tests have run on" if newer else ""
    return Finding(subject=name, value=value, note=note)


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
