"""What the system under a run allows, read from where it says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from zero_plugin.kernels import _native
from zero_plugin.runtime.alarms import IN_MEMORY, NETWORK, is_spinning
from zero_plugin.runtime.memory import available_host_bytes
from zero_plugin.store.store import NvmeStore

_GIB = 2**30


class Seen(NamedTuple):
    """A line of a report.

    Attributes:
        subject: what was looked at.
        value: what was seen.
        note: what it costs; empty if nothing.
    """

    subject: str
    value: str
    note: str = ""


def memory() -> Seen:
    """Host memory, and whether others have taken most of it."""
    every = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = available_host_bytes()
    if left is None:
        return Seen("host memory", f"{every / _GIB:.1f} GiB")
    note = ""
    if left < every / 2:
        note = "more than half is taken, by other processes or a control group's limit: states on 'host' have the rest"
    return Seen("host memory", f"{left / _GIB:.1f} GiB free of {every / _GIB:.1f}", note)


def pinning() -> Seen:
    """How much memory a process may lock, which pinning for CUDA needs on some systems."""
    try:
        import resource
    except ImportError:
        return Seen("pinning", "unknown on this system")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Seen("pinning", "unlimited (ulimit -l)")
    cuda = torch.accelerator.device_count() > 0
    note = "raise it with `ulimit -l unlimited` if pinned memory is refused" if cuda else ""
    return Seen("pinning", f"{soft / 2**20:,.0f} MiB (ulimit -l)", note)


def huge_pages() -> Seen:
    """Whether large host buffers get huge pages when they ask."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return Seen("huge pages", "unknown on this system")
    chosen = text.partition("[")[2].partition("]")[0]
    note = (
        ""
        if chosen in ("always", "madvise")
        else (
            "off: updates touch memory through small pages, which is slower; "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    )
    return Seen("huge pages", chosen or text.strip(), note)


def io_engine() -> Seen:
    """io_uring, or what stands in for it and why."""
    engine = _native.IoEngine("auto", 4, 1 << 20)
    try:
        return Seen("file I/O", f"{engine.name} ({engine.reason})")
    finally:
        engine.close()


def accelerators() -> Seen:
    """Devices to train on."""
    count = torch.accelerator.device_count()
    if not count:
        return Seen("accelerator", "none: models train on the CPU")
    kind = torch.accelerator.current_accelerator()
    _, every = torch.accelerator.get_memory_info()
    return Seen("accelerator", f"{count} x {kind}, {every / _GIB:.1f} GiB")


def disk(path: str | Path) -> tuple[str, str]:
    """A folder of the `nvme` tier, opened as a run would: what it is, and what it costs.

    Raises:
        ConfigError: it is no folder, or cannot be written to.
    """
    store = NvmeStore([path])
    try:
        seen = store.describe().paths[0]
    finally:
        store.close()
    free = shutil.disk_usage(path).free
    value = (
        f"{seen.file_system}, {'O_DIRECT' if seen.direct else 'no O_DIRECT'}, {free / _GIB:.1f} GiB free, "
        f"blocks of {seen.alignment}{', cloned by asynchronous saves' if seen.clones else ''}"
    )
    return value, "; ".join(_costs(Path(path), seen.file_system, direct=seen.direct, free=free))


def _costs(path: Path, file_system: str, *, direct: bool, free: int) -> list[str]:
    found: list[str] = []
    if file_system in IN_MEMORY:
        found.append("this is memory, not a disk: states here take what the tier is meant to spare")
    elif file_system in NETWORK or file_system.startswith("fuse"):
        found.append(f"{file_system} is not a local disk: every step moves the states over it")
    elif not direct:
        found.append("bytes pass through the page cache, in host memory")
    if is_spinning(path):
        found.append(
            "the system takes it for a spinning disk (of virtual disks this may be wrong: zero-plugin bench): every step "
            "reads and writes all states"
        )
    if free < _GIB:
        found.append("less than 1 GiB is free")
    return found
