"""The repository as a whole: every test is collected, no file names the machine it was written on."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
from support.sources import REPOSITORY, tracked_files

TESTS = REPOSITORY / "tests"
MAX_FILE_BYTES = 500_000
# In pieces, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|opt|root|home|Users)" + r"/(?!\.\.\.)[\w.-]+")
BINARY = {".png"}
TEST_FUNCTION = re.compile(r"^(?:(?:async )?def test_\w*\(|class Test)", re.MULTILINE)


def holds_tests(path: Path) -> bool:
    return bool(TEST_FUNCTION.search(path.read_text()))


@pytest.mark.parametrize(
    "folder",
    sorted(
        p.name for p in TESTS.iterdir() if p.is_dir() and p.name not in ("support", "__pycache__")
    ),
)
def test_every_folder_has_tests(folder: str) -> None:
    assert any(holds_tests(path) for path in (TESTS / folder).rglob("test_*.py"))


def test_every_test_is_where_pytest_looks(pytestconfig: pytest.Config) -> None:
    skipped = pytestconfig.getini("norecursedirs")
    lost = [
        path.relative_to(TESTS)
        for path in TESTS.rglob("*.py")
        if holds_tests(path)
        and (
            not fnmatch.fnmatch(path.name, "test_*.py")
            or any(
                fnmatch.fnmatch(part, p) for part in path.relative_to(TESTS).parts for p in skipped
            )
        )
    ]
    assert lost == []


def test_test_folders_are_not_packages() -> None:
    # with --import-mode=importlib two files of one name are fine, and a package would hide one of them
    packages = [path.parent for path in TESTS.rglob("__init__.py")]
    assert [path for path in packages if TESTS / "support" not in (path, *path.parents)] == []


def test_no_file_names_a_machine() -> None:
    found = [
        f"{path}: {match.group()}"
        for path in tracked_files()
        if path.suffix not in BINARY
        for match in MACHINE_PATHS.finditer((REPOSITORY / path).read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see /ro" + "ot/notes", True),
        ("'/ho" + "me/me/model'", True),
        ("nvme_path='/nvme'", False),
        ("https://example.org/work" + "/x", False),
        ("relative/opt" + "/x", False),
    ],
)
def test_machine_paths_are_recognised(text: str, expected: bool) -> None:
    assert bool(MACHINE_PATHS.search(text)) is expected


def test_no_tracked_file_is_large() -> None:
    sizes = {path: (REPOSITORY / path).stat().st_size for path in tracked_files()}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_BYTES} == {}
