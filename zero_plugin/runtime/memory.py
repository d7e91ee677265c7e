"""Host memory: exact size, page-aligned, its pages present before the first step."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zero_plugin.errors import BudgetError

if TYPE_CHECKING:
    from torch import Tensor

PAGE = mmap.PAGESIZE

# Below this size a mapping of its own wastes more than it gives.
_MAP_FROM_BYTES = 8 * PAGE

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call, by processor."""

_PREFERRED = 1
"""MPOL_PREFERRED: another node serves where this one is full."""

_DONT_NEED = 4
"""MADV_DONTNEED of Linux; on a shared mapping of a file nothing is lost."""


def allocate_host(nbytes: int, node: int | None = None) -> Tensor:
    """Zeroed host memory of exactly `nbytes` bytes, at least 64-byte aligned.

    From eight pages on it is a private mapping of its own: page-aligned, rounded up to whole pages
    and no further, huge pages asked for, and every page touched, so that no page fault is left for
    the first step.

    Args:
        nbytes: its size.
        node: memory node that its pages should lie in, or None for any.

    Returns:
        A one-dimensional uint8 CPU tensor that owns the memory.
    """
    if nbytes < _MAP_FROM_BYTES or sys.platform != "linux":
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    pages = map_pages(nbytes, node)
    return torch.frombuffer(pages, dtype=torch.uint8)


def allocate_file(folder: str | Path, nbytes: int) -> Tensor:
    """Memory that is a file without a name in `folder`: the system writes it to disk and takes its pages at will.

    Returns:
        A one-dimensional uint8 CPU tensor; the file goes with it.

    Raises:
        OSError: the folder does not take a file of this size.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="zero-plugin-build-") as file:
        # A write through a mapping cannot report a full disk: the room is taken first.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)
        return torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")


def forget_pages(buffer: Tensor) -> None:
    """Let go of the resident pages of an `allocate_file` tensor; what they hold stays in the file."""
    advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if advise is not None:
        advise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.nbytes), _DONT_NEED)


def mappings_of(place: str | Path) -> list[tuple[int, int]]:
    """Addresses and sizes at which a file, or files of a folder, are mapped into this process; empty where that is not known."""
    wanted = Path(place).resolve()
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            fields = line.split(maxsplit=5)
            path = Path(fields[5]) if len(fields) == 6 else None
            if path is not None and (path == wanted or wanted in path.parents):
                start, stop = (int(address, 16) for address in fields[0].split("-"))
                found.append((start, stop - start))
    return found


def forget_mappings(mappings: Sequence[tuple[int, int]]) -> None:
    """Let go of the resident pages of mapped files that nobody has written to; they are read again when they are looked at."""
    advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if advise is None:
        return
    for address, nbytes in mappings:
        advise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _DONT_NEED)


def map_pages(nbytes: int, node: int | None = None) -> ctypes.Array[ctypes.c_uint8]:
    """A touched private mapping as a ctypes array, which keeps it alive.

    The array, and not the mapping, is what tensors refer to: its finalizers run before the
    mapping goes, which unpinning needs.
    """
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetError(
            f"the system refused {nbytes:,} bytes of host memory ({error}): free some, use more processes or another tier, or "
            "raise the limit on this process (ulimit -v)"
        ) from error
    # A kernel without transparent huge pages refuses; the memory is as usable.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    pages = (ctypes.c_uint8 * nbytes).from_buffer(mapping)
    if node is not None:
        prefer_node(ctypes.addressof(pages), nbytes, node)
    ctypes.memset(ctypes.addressof(pages), 0, nbytes)
    return pages


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Ask for the pages of a fresh mapping to come from a memory node, while it has some; mbind(2).

    Args:
        address: start of the mapping, before any of it was touched.
        nbytes: its size.
        node: the node's number.

    Returns:
        Whether the system took it. Where it did not (no such call, not allowed) pages lie where they are touched first.
    """
    number = _MBIND.get(platform.machine())
    call = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None)
    if number is None or call is None or sys.platform != "linux":
        return False
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    taken = call(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED),
        mask,
        # The kernel looks at one bit less than it is told of.
        ctypes.c_ulong(len(mask) * bits + 1),
        ctypes.c_uint(0),
    )
    return taken == 0


def available_host_bytes() -> int | None:
    """Bytes that this process can still take, by the kernel's estimate and its control group; None if unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            found.append(int(limit) - used)
    return min(found) if found else None


def page_aligned(buffer: Tensor) -> Tensor:
    """The part of `buffer` that starts at its first page boundary."""
    return buffer[-buffer.data_ptr() % PAGE :]


def round_to_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def trim_heap() -> None:
    """Give freed memory back to the system.

    glibc keeps what was freed below 32 MiB, and weights that are cut one after another leave gaps that the next one does
    not fit.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
