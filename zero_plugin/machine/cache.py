"""Measurements of this machine, kept in the user's cache folder until they are a month old or the machine changes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_plugin.errors import ConfigError

EXPIRY = timedelta(days=30)
_VERSION = 2


def cache_folder() -> Path:
    """Where measurements are kept: in the user's cache folder, `XDG_CACHE_HOME` if that is set."""
    # By name: only integrations read the environment.
    base: Path | None = import_module("zero_plugin.integrations.caches").cache_home()
    if base is None:
        home = Path.home()
        base = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return base / "zero_plugin"


def fingerprint() -> dict[str, Any]:
    """What makes another machine of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "version": _VERSION,
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": cores,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save_measurement(values: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Keep what was measured; figures of other disks that are there already stay.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    folder = folder or cache_folder()
    try:
        return _save(values, folder)
    except OSError as error:
        raise ConfigError(
            f"what was measured cannot be kept in {folder} ({error}): name another folder with --cache"
        ) from error


def _save(values: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    before = load_measurement(folder) or {}
    disks = {**before.get("disks", {}), **values.get("disks", {})}
    record = {
        "machine": fingerprint(),
        "at": datetime.now(timezone.utc).isoformat(),
        "values": {**before, **values, "disks": disks},
    }
    path = folder / "bench.json"
    # Another process may read it at any moment.
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2))
    Path(file.name).replace(path)
    return path


def load_measurement(folder: Path | None = None) -> dict[str, Any] | None:
    """What was measured on this machine, or None where nothing was, lately."""
    path = (folder or cache_folder()) / "bench.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        age = datetime.now(timezone.utc) - datetime.fromisoformat(record["at"])
        if record["machine"] != fingerprint() or age > EXPIRY:
            return None
        return dict(record["values"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
