"""A copy of the sources laid out as they are installed.

In the repository `integrations/` lies beside `zero_plugin/`; installed it is `zero_plugin.integrations`. Tools that follow
files, not imports, are shown this copy.
"""

from __future__ import annotations

import shutil
from pathlib import Path

IGNORED = shutil.ignore_patterns("__pycache__", "*.so")


def copy_installed_shape(root: Path, folder: Path) -> Path:
    """Copy the package of the checkout at `root` to `folder`; returns the package's folder there."""
    package = folder / "zero_plugin"
    shutil.copytree(root / "zero_plugin", package, ignore=IGNORED)
    shutil.copytree(root / "integrations", package / "integrations", ignore=IGNORED)
    return package
