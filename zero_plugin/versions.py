"""The releases of other packages that zero-plugin runs on: the one place that says them.

`zero-plugin doctor`, the refusals of a release that lacks a function we override, `pyproject.toml` and the README all say these
numbers; `tests/arch/test_versions.py` compares the last two with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Range:
    """Releases of one package.

    Attributes:
        oldest: the first that is admitted.
        newest: the last that the tests have run on. Newer ones are not refused.
    """

    oldest: str
    newest: str


RANGES: Mapping[str, Range] = {
    "torch": Range(oldest="2.11", newest="2.13.0"),
    "numpy": Range(oldest="1.26", newest="2.4.6"),
    "lightning": Range(oldest="2.6", newest="2.6.6"),
    "accelerate": Range(oldest="1.15", newest="1.15.0"),
    "transformers": Range(oldest="5.0", newest="5.24.0"),
    "peft": Range(oldest="0.19", newest="0.21.2"),
    "trl": Range(oldest="1.0", newest="1.16.0"),
}
"""All but the first two are optional."""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def cure(package: str) -> str:
    """What to do about a release that is not known, as the end of an error message.

    Args:
        package: of `RANGES`; `pytorch-lightning` and `lightning-fabric` are Lightning by another name.
    """
    found = RANGES[package if package in RANGES else "lightning"]
    return f"install {package}>={found.oldest} (the tests have run on it up to {found.newest}), or a newer zero-plugin"
