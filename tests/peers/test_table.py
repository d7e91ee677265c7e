"""Every test that docs/differences.md names for a case is there."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:tests/\w+/)?test_\w+\.py)(?:::(test_[\w*]+))?`")


def named() -> list[tuple[str, str]]:
    """File and pattern of every test in the document."""
    text = (ROOT / "docs" / "differences.md").read_text()
    return sorted(
        {
            (file if "/" in file else f"tests/peers/{file}", pattern or "test_*")
            for file, pattern in NAMED.findall(text)
        }
    )


def test_the_document_names_tests() -> None:
    assert len(named()) > 40


@pytest.mark.parametrize(("file", "pattern"), named())
def test_a_case_has_its_test(file: str, pattern: str) -> None:
    functions = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    assert fnmatch.filter(functions, pattern), f"{file} has no {pattern}"
