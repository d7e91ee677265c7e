"""This machine as `Hardware`: what was measured on it, and cautious guesses where nothing was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from zero_plugin.errors import ConfigError
from zero_plugin.machine.cache import load_measurement
from zero_plugin.machine.hardware import Hardware
from zero_plugin.runtime.memory import available_host_bytes

_GUESSES: Mapping[str, float] = {
    "flops": 5e10,
    "device_bandwidth": 1e10,
    "down": 5e9,
    "up": 5e9,
    "update": 8e9,
    "collective": 1e9,
    "network": 1e9,
}
"""Of a machine nobody has measured: its order is right more often than its numbers."""

_DISK_GUESS = 1e9

_A_GPU: Mapping[str, float] = {
    "flops": 5e13,
    "device_bandwidth": 6e11,
    "down": 1e10,
    "up": 1e10,
    "update": 4e10,
}
"""Of a device that is asked for and is not here."""


def here(
    paths: Sequence[Path] = (),
    *,
    world: int | None = None,
    pretends_gpu: bool = False,
    cache: str | Path | None = None,
) -> Hardware:
    """This machine, with its ranks.

    Args:
        paths: folders of the `nvme` tier.
        world: ranks; None: the accelerators, or one process on a machine without.
        pretends_gpu: whether a device of a given size is planned for that may not be here.
        cache: folder with what `zero-plugin bench` measured; None: the user's.

    Raises:
        ConfigError: a path is no folder, or a cache was named that has nothing of this machine.
    """
    accelerators = torch.accelerator.device_count()
    measured = load_measurement(None if cache is None else Path(cache))
    if measured is None and cache is not None:
        raise ConfigError(
            f"{cache} has no measurement of this machine that is less than a month old: zero-plugin bench --cache {cache}"
        )
    measured = measured or {}
    values: dict[str, Any] = dict(_GUESSES)
    if pretends_gpu and not accelerators:
        values |= {**_A_GPU, **{key: measured[key] for key in ("update",) if key in measured}}
    else:
        known = {field.name for field in fields(Hardware)}
        values |= {key: value for key, value in measured.items() if key in known}
    values |= _disks(paths, measured)
    host = available_host_bytes() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = _device_bytes() if accelerators else 0
    return Hardware(
        name="this machine" + ("" if measured else ", not measured (zero-plugin bench)"),
        devices=world or max(1, accelerators),
        device_bytes=device or host,
        host_bytes=host,
        device_is_host=not accelerators and not pretends_gpu,
        **values,
    )


def _device_bytes() -> int:
    free, _ = torch.accelerator.get_memory_info()
    return int(free)


def _disks(paths: Sequence[Path], measured: Mapping[str, Any]) -> dict[str, Any]:
    if not paths:
        return {}
    free = 0
    devices: set[int] = set()
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"nvme path {str(path)!r} is not a folder: name one on a fast local disk"
            )
        device = path.stat().st_dev
        free += 0 if device in devices else shutil.disk_usage(path).free
        devices.add(device)
    found: dict[str, Any] = dict(measured.get("disks") or {})
    rates = [found.get(str(path.resolve()), {}) for path in paths]
    return {
        "nvme_bytes": free,
        "nvme_read": sum(rate.get("mixed_read", _DISK_GUESS) for rate in rates),
        "nvme_write": sum(rate.get("mixed_write", _DISK_GUESS) for rate in rates),
        "nvme_read_alone": sum(rate.get("read", _DISK_GUESS) for rate in rates),
        "nvme_write_alone": sum(rate.get("write", _DISK_GUESS) for rate in rates),
    }
