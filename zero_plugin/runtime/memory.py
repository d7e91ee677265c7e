"""Host memory: exact size, page-aligned, its pages present before the first step."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

PAGE = mmap.PAGESIZE

# Below this size a mapping of its own wastes more than it gives.
_MAP_FROM_BYTES = 8 * PAGE


def allocate_host(nbytes: int) -> Tensor:
    """Zeroed host memory of exactly `nbytes` bytes, at least 64-byte aligned.

    From eight pages on it is a private mapping of its own: page-aligned, rounded up to whole pages
    and no further, huge pages asked for, and every page touched, so that no page fault is left for
    the first step.

    Returns:
        A one-dimensional uint8 CPU tensor that owns the memory.
    """
    if nbytes < _MAP_FROM_BYTES or sys.platform != "linux":
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    pages = map_pages(nbytes)
    return torch.frombuffer(pages, dtype=torch.uint8)


def map_pages(nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """A touched private mapping as a ctypes array, which keeps it alive.

    The array, and not the mapping, is what tensors refer to: its finalizers run before the
    mapping goes, which unpinning needs.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without transparent huge pages refuses; the memory is as usable.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    pages = (ctypes.c_uint8 * nbytes).from_buffer(mapping)
    ctypes.memset(ctypes.addressof(pages), 0, nbytes)
    return pages


def page_aligned(buffer: Tensor) -> Tensor:
    """The part of `buffer` that starts at its first page boundary."""
    return buffer[-buffer.data_ptr() % PAGE :]


def round_to_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
