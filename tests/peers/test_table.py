"""Every case has a row in docs/differences.md, and every test that a row names is there."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

# The cases that were collected; a few numbers were given to none.
CASES = {
    *range(1, 3), *range(4, 11), 12, 13, 14, *range(16, 24), *range(25, 30), *range(31, 39), *range(40, 47),
    *range(48, 53), 55, 57, 58, 60, 62, *range(64, 68), 69, 70,
}  # fmt: skip

# Of them those that users of one of these libraries reported, or that its own code decides.
REPORTED_FOR = {
    "tests/lightning/": {27, 32, 33, 38, 40, 41, 42, 55, 57, 60, 67, 69},
    "tests/accelerate/": {31, 32, 33, 35, 38, 43, 57, 58, 60, 62, 64, 65, 66, 67, 70},
}

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


def rows() -> dict[int, str]:
    """The line of each case, by its number; a line may stand for several."""
    found: dict[int, str] = {}
    for line in (ROOT / "docs" / "differences.md").read_text().splitlines():
        numbers = re.match(r"\| (\d[\d, -]*) \|", line)
        for part in numbers[1].split(",") if numbers else ():
            first, _, last = part.strip().partition("-")
            for number in range(int(first), int(last or first) + 1):
                assert number not in found, f"case {number} has two rows"
                found[number] = line
    return found


def test_every_case_has_a_row_with_a_test() -> None:
    found = rows()
    assert found.keys() == CASES
    assert [number for number, line in found.items() if not NAMED.search(line)] == []


@pytest.mark.parametrize("folder", REPORTED_FOR)
def test_a_report_against_a_library_is_tried_with_that_library(folder: str) -> None:
    lacking = [n for n in REPORTED_FOR[folder] if f"`{folder}test_" not in rows()[n]]
    assert lacking == []


def test_a_test_that_carries_a_number_is_named_by_the_row_of_that_number() -> None:
    """In the folder of the cases, and in the files of the libraries that are named after it."""
    found = rows()
    files = [
        *(ROOT / "tests" / "peers").glob("test_*.py"),
        *(ROOT / "tests").glob("*/test_peers.py"),
    ]
    lacking: list[str] = []
    for file in files:
        own = file.relative_to(ROOT).as_posix().removeprefix("tests/peers/")
        for name, numbers in re.findall(
            r"^def (test_((?:\d+_)(?:(?:and_)?\d+_)*)\w+)", file.read_text(), re.MULTILINE
        ):
            for number in map(int, re.findall(r"\d+", numbers)):
                stated = [
                    pattern or "test_*"
                    for place, pattern in NAMED.findall(found[number])
                    if place == own
                ]
                if not any(fnmatch.fnmatch(name, pattern) for pattern in stated):
                    lacking.append(f"{number}: {own}::{name}")
    assert lacking == []


def test_the_document_names_tests() -> None:
    assert len(named()) > 40


@pytest.mark.parametrize(("file", "pattern"), named())
def test_a_case_has_its_test(file: str, pattern: str) -> None:
    functions = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    assert fnmatch.filter(functions, pattern), f"{file} has no {pattern}"
