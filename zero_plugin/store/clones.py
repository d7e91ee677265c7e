"""What extents held at a moment, kept beside them by sharing their blocks on the disk (XFS, btrfs and others)."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from zero_plugin.errors import StoreError
from zero_plugin.store.faults import clone_fault, error_name
from zero_plugin.store.folder import neighbours
from zero_plugin.store.layout import Extent
from zero_plugin.store.slab import Slab

_logger = logging.getLogger(__name__)

_FICLONERANGE = 0x4020940D
"""Of linux/fs.h: `_IOW(0x94, 13, struct file_clone_range)`."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a write to shared blocks may end with: it needs new ones."""

_COPIES = 2
"""Most bytes that a saved byte takes beside itself: the one that a step writes, and the checkpoint's."""


def share_blocks(source: int, target: int, offset: int, nbytes: int) -> None:
    """Have a range of one open file be that of another, without a copy: a write to either goes elsewhere.

    What is being written to the source is waited for.

    Raises:
        OSError: the file system does not do that (EOPNOTSUPP, ENOTTY, EINVAL, EXDEV), or is full.
    """
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, offset, nbytes, offset))


class Clones:
    """A file without a name beside each of a store's files, which shares blocks with it between `take` and `drop`.

    Nothing is left of it when the process ends, however it does.

    Args:
        slabs: the files.
        alignment: of the store's offsets.

    Attributes:
        refusal: why this cannot be done here, or empty.
        descriptors: the further files, in the order of `slabs`; none where it is refused.
    """

    def __init__(self, slabs: Sequence[Slab], alignment: int) -> None:
        self._slabs = slabs
        self._held: dict[int, Extent] = {}
        self._dropped = threading.Event()
        self._dropped.set()
        self._used = False
        self._waiting = 0
        self._count = threading.Lock()
        self.descriptors: list[int] = []
        self.refusal = ""
        for slab in slabs:
            # Whether it works is known by doing it, not by the file system's name: versions and mounts differ.
            try:
                self.descriptors.append(slab.open_twin())
                slab.grow(alignment)
                share_blocks(slab.descriptor, self.descriptors[-1], 0, alignment)
            except (OSError, StoreError) as error:
                self.refusal = f"{slab.path.parent.parent}: {error_name(error.errno or 0)}"
            slab.shrink(0)
            if self.refusal:
                self.close()
                return
        self._empty()

    def has_room(self, nbytes: Sequence[int]) -> bool:
        """Whether there is space for as many bytes of each file to be written elsewhere, beside the checkpoint.

        Every run in the same folder is taken to do the same now.
        """
        if self.refusal:
            _logger.info(
                "states are read before the next step changes them, and not cloned: %s",
                self.refusal,
            )
            return False
        for slab, size in zip(self._slabs, nbytes, strict=True):
            free, wanted = slab.free_bytes(), _COPIES * size * neighbours(slab.path.parent)
            if free is not None and free < wanted:
                _logger.info(
                    "states in %s are read before the next step changes them: cloning them may take %s bytes, and %s are free",
                    slab.path.parent.parent,
                    f"{wanted:,}",
                    f"{free:,}",
                )
                return False
        return True

    def take(self, extent: Extent, number: int, nbytes: Sequence[int]) -> Extent | None:
        """Hold what an extent has now; no write to it may run.

        Args:
            extent: which.
            number: of the extent that is returned.
            nbytes: its bytes in each file.

        Returns:
            What to read it as; None where the file system refuses this one.
        """
        self._dropped.clear()
        self._used = True
        for slab, target, base, size in zip(
            self._slabs, self.descriptors, extent.bases, nbytes, strict=True
        ):
            if not size:
                continue
            try:
                share_blocks(slab.descriptor, target, base, size)
            except OSError as error:
                _logger.warning("%s", clone_fault(slab.path, extent.label, error.errno or 0))
                return None
        held = replace(extent, number=number, first_file=len(self._slabs))
        self._held[extent.number] = held
        return held

    def of(self, extent: Extent) -> Extent:
        """What to read of an extent: what was held, or itself."""
        return self._held.get(extent.number, extent)

    def drop(self) -> list[Extent]:
        """Let go of all that is held, and of its space; what it was. Nobody may read it any more."""
        held = list(self._held.values())
        self._held.clear()
        self._empty()
        self._dropped.set()
        return held

    @property
    def wanted(self) -> bool:
        """Whether a write waits for the space of what is held."""
        return self._waiting > 0

    def wait_for_space(self, path: object) -> bool:
        """A write found the disk full: wait until nothing is held; False where nothing has been."""
        if not self._used:
            return False
        if not self._dropped.is_set():
            _logger.warning(
                "%s is full: a step's write waits until the asynchronous save has read what it holds there. Free space there, "
                "or save less often",
                path,
            )
        with self._count:
            self._waiting += 1
        try:
            self._dropped.wait()
        finally:
            with self._count:
                self._waiting -= 1
        return True

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._empty()
        while self.descriptors:
            os.close(self.descriptors.pop())
        self._dropped.set()

    def _empty(self) -> None:
        # Not by closing: a process that was forked meanwhile has the file open, too.
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
