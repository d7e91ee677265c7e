"""Imports go one way between the layers; the contract itself is in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import REPOSITORY

CHECK = "import sys; sys.path.insert(0, {scripts!r}); from check_imports import check; "


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    code = CHECK.format(scripts=str(REPOSITORY / "scripts"))
    code += f"from pathlib import Path; sys.exit(check(Path({str(root)!r})))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("zero_plugin", "integrations"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def test_layers_hold() -> None:
    done = lint(REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("zero_plugin/runtime/backend.py", "from zero_plugin.sharding import layout as _up"),
        ("zero_plugin/engine.py", "import zero_plugin.integrations"),
        ("zero_plugin/errors.py", "import zero_plugin.config"),
        ("zero_plugin/newcomer.py", "# a module that has no layer"),
    ],
)
def test_an_import_upwards_is_seen(checkout: Path, file: str, line: str) -> None:
    with (checkout / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = lint(checkout)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout or "newcomer" in done.stdout
