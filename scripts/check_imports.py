"""Check the layers of pyproject.toml with import-linter on the package as it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from installed_shape import copy_installed_shape


def check(root: Path) -> int:
    """Run import-linter on the sources under `root`; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        package = copy_installed_shape(root, Path(folder))
        for directory in (package, *(path for path in package.rglob("*") if path.is_dir())):
            # a folder without __init__.py is a namespace package, which import-linter does not follow
            (directory / "__init__.py").touch()
        # -S: an editable install's finder would put the checkout before the copy
        path = os.pathsep.join([folder, sysconfig.get_path("purelib")])
        command = [
            *(
                sys.executable,
                "-S",
                "-c",
                "from importlinter.cli import lint_imports_command as c; c()",
            ),
            *("--no-cache", str(root / "pyproject.toml")),
        ]
        return subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(check(Path(__file__).resolve().parent.parent))
