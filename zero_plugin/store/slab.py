"""One path's file: how it is opened, and the space it holds."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from zero_plugin.kernels import _native
from zero_plugin.store.faults import reservation_fault

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_ALIGNMENT = 4096
_LARGEST_ALIGNMENT = 65536


class Slab:
    """A file that grows while space is reserved and then keeps its size.

    Args:
        folder: this run's own folder.

    Attributes:
        path: the file.
        descriptor: open for reading and writing, past the page cache where the file system allows.
        file_system: its name, such as "ext4".
        direct: whether I/O goes past the page cache.
        alignment: of offsets and sizes.
        memory_alignment: of addresses; 1 where any will do.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "slab"
        self._plain = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.descriptor = self._plain
        self.file_system = _native.file_system(self._plain)
        self.alignment = _ALIGNMENT
        self.memory_alignment = 1
        self.size = 0
        # A tmpfs takes the flag since Linux 6.6, and copies all the same.
        self.direct = self.file_system not in _IN_MEMORY and self._open_direct()

    def grow(self, nbytes: int) -> int:
        """Reserves `nbytes` more bytes, on the disk and not only in name; returns where they begin.

        Raises:
            StoreError: the system does not give them; what was reserved before stays as it was.
        """
        start = self.size
        if nbytes == 0:
            return start
        free = self.free_bytes()
        if free is not None and nbytes > free:
            raise reservation_fault(self.path.parent, wanted=nbytes, free=free, code=errno.ENOSPC)
        try:
            self._allocate(start, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._plain, start)
            raise reservation_fault(
                self.path.parent, wanted=nbytes, free=self.free_bytes(), code=error.errno or 0
            ) from error
        self.size = start + nbytes
        return start

    def shrink(self, size: int) -> None:
        """Gives back what lies past `size`."""
        os.ftruncate(self._plain, size)
        self.size = size

    def open_twin(self) -> int:
        """A further file in the folder, opened alike, that has no name and ends with the last process that has it open.

        Returns:
            A descriptor, the caller's to close.

        Raises:
            OSError: the folder takes no more files.
        """
        path = self.path.with_name("clones")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.direct else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            path.unlink()
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def free_bytes(self) -> int | None:
        """Bytes this user can still take on the file system; None where it does not say."""
        status = os.fstatvfs(self._plain)
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def close(self) -> None:
        """Closes the file. Idempotent."""
        for descriptor in {self.descriptor, self._plain}:
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._plain = -1

    def _allocate(self, start: int, nbytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._plain, start, nbytes)
        else:
            os.ftruncate(self._plain, start + nbytes)

    def _open_direct(self) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | flag)
        except OSError:
            return False
        memory, offset = _native.direct_alignment(descriptor)
        alignment = _probe(descriptor, max(_ALIGNMENT, offset, memory))
        os.ftruncate(self._plain, 0)
        if alignment is None:
            os.close(descriptor)
            return False
        self.descriptor = descriptor
        self.alignment, self.memory_alignment = alignment, memory or alignment
        return True


def _probe(descriptor: int, alignment: int) -> int | None:
    """The smallest alignment from `alignment` on that a direct write succeeds with; None for none."""
    with mmap.mmap(-1, 2 * _LARGEST_ALIGNMENT) as pages:
        while alignment <= _LARGEST_ALIGNMENT:
            with contextlib.suppress(OSError), memoryview(pages)[:alignment] as block:
                # At an offset, too: not only the size has to suit.
                if os.pwrite(descriptor, block, alignment) == alignment:
                    return alignment
            alignment *= 2
    return None
