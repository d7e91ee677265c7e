"""Check the layers of pyproject.toml with import-linter on the package as it is installed.

In the repository `integrations/` lies beside `zero_plugin/`; installed it is `zero_plugin.integrations`. import-linter
follows files, so it is shown a copy in the installed shape.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def check(root: Path) -> int:
    """Run import-linter on the sources under `root`; returns its exit code."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "zero_plugin"
        shutil.copytree(root / "zero_plugin", package, ignore=ignore)
        shutil.copytree(root / "integrations", package / "integrations", ignore=ignore)
        for directory in (package, *(path for path in package.rglob("*") if path.is_dir())):
            # a folder without __init__.py is a namespace package, which import-linter does not follow
            (directory / "__init__.py").touch()
        command = [
            *(sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"),
            *("--no-cache", str(root / "pyproject.toml")),
        ]
        return subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(check(Path(__file__).resolve().parent.parent))
