"""Check the types with pyright on the package as it is installed.

Strict for what is shipped (pyproject.toml), standard for everything else (pyright-standard.json).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from installed_shape import IGNORED, copy_installed_shape

OTHER_FOLDERS = ("scripts", "examples", "tests", "benchmarks")
PROJECTS = ("pyproject.toml", "pyright-standard.json")


def check(root: Path) -> int:
    """Run pyright on the sources under `root` with the present interpreter's packages; returns 0 if all is well."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_installed_shape(root, folder)
        for other in OTHER_FOLDERS:
            if (root / other).exists():
                shutil.copytree(root / other, folder / other, ignore=IGNORED)
        for project in PROJECTS:
            shutil.copy(root / project, folder)
        return max([run_pyright(folder, project) for project in PROJECTS])


def run_pyright(folder: Path, project: str) -> int:
    """Run pyright with one project file and show its report with the repository's paths."""
    pyright = Path(sys.executable).with_name("pyright")
    command = [str(pyright), "--pythonpath", sys.executable, "--project", str(folder / project)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = (done.stdout + done.stderr).replace(
        f"{folder}/zero_plugin/integrations", "integrations"
    )
    print(f"{project}:\n{report.replace(f'{folder}/', '')}", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(check(Path(__file__).resolve().parent.parent))
