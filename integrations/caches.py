"""Where the user keeps caches; asked by `zero_plugin.machine.cache`, since what reads the environment lies here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path | None:
    """`XDG_CACHE_HOME`, or None where it is not set; a relative path is ignored, as the XDG specification asks."""
    value = os.environ.get("XDG_CACHE_HOME", "")
    return Path(value) if Path(value).is_absolute() else None
