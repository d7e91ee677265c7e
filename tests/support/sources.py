"""The repository's own files, for tests that read them."""

from __future__ import annotations

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("zero_plugin", "integrations")


def package_files() -> list[Path]:
    """Every Python file that is shipped, relative to the repository."""
    return sorted(
        path.relative_to(REPOSITORY)
        for folder in PACKAGE_FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
    )


def tracked_files(*, new: bool = False) -> list[Path]:
    """Every file under version control, relative to the repository; those of an unpacked sdist if there is no git.

    Args:
        new: Also files that are not under version control yet and not ignored either.
    """
    command = ["git", "ls-files", "-z", "--cached"]
    command += ["--others", "--exclude-standard"] if new else []
    if (REPOSITORY / ".git").exists():
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
        names = [name for name in listed.decode().split("\0") if name]
        return [path for path in map(Path, names) if (REPOSITORY / path).is_file()]
    hidden = {"build", "dist", "outputs", "__pycache__"}
    return [
        path.relative_to(REPOSITORY)
        for path in REPOSITORY.rglob("*")
        if path.is_file() and not hidden & set(path.parts) and ".venv" not in str(path)
    ]
