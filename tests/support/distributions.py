"""Build and install the package from a copy of the checkout, without touching the environment the tests run in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from support.sources import REPOSITORY, tracked_files

DEADLINE = 300
"""Seconds one command may take: a build on a busy machine."""


def copy_checkout(folder: Path) -> Path:
    """Copy the files under version control, and new ones that are not ignored, to `folder`."""
    for path in tracked_files(new=True):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / path, target)
    return folder


def environment_without_torch(folder: Path) -> dict[str, str]:
    """Variables under which `import torch` raises in every Python that is started."""
    stub = folder / "no_torch" / "torch"
    stub.mkdir(parents=True, exist_ok=True)
    (stub / "__init__.py").write_text("raise RuntimeError('torch was imported during the build')\n")
    return {**os.environ, "PYTHONPATH": str(stub.parent)}


def run(
    command: list[str | Path], *, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it wrote."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def must_run(
    command: list[str | Path], *, cwd: Path, environment: dict[str, str] | None = None
) -> str:
    """Run a command that has to succeed; returns its standard output."""
    done = run(command, cwd=cwd, environment=environment)
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise AssertionError(f"{shown}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


class FreshEnvironment:
    """A virtual environment with nothing of its own, that sees the packages of the present one.

    It reads their folder through a `.pth` file, which (unlike system-site-packages) does not run the `.pth` files in
    that folder: an editable zero-plugin there is not found.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        self.programs = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.programs / "python"
        query = [self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        self.site_packages = Path(must_run(list(query), cwd=folder).strip())
        present = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site_packages / "present.pth").write_text("\n".join(sorted(present)))

    def pip_install(
        self, *arguments: str | Path, environment: dict[str, str] | None = None
    ) -> None:
        """Install with the present environment's pip, from local files only and without dependencies."""
        command: list[str | Path] = [sys.executable, "-m", "pip", "--python", self.python]
        command += ["install", "--quiet", "--no-deps", "--no-index", *arguments]
        must_run(command, cwd=self.site_packages, environment=environment)

    def own_entries(self) -> set[str]:
        """Names in site-packages that an installation added, without metadata and caches."""
        return {
            path.name
            for path in self.site_packages.iterdir()
            if path.name not in ("present.pth", "__pycache__") and path.suffix != ".dist-info"
        }
