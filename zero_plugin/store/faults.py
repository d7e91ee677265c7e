"""What went wrong with a file, as an error that names the place and the cure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from zero_plugin.errors import StoreError

_FULL = "free space there, lower nvme_limit, or name a larger or a further folder in nvme_path"
_CURES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "the quota is used up: raise it, or name another folder in nvme_path",
    errno.EFBIG: "the file may not grow so large: raise `ulimit -f`, or use another file system",
    errno.EROFS: "the file system is mounted read-only, as after a disk error: see `dmesg`, or name another folder in nvme_path",
    errno.EIO: "the device reports a hardware or connection error: see `dmesg` and replace it, or name another folder in nvme_path",
    errno.ENODEV: "the device is gone: mount it again and restart, or name another folder in nvme_path",
    errno.ENXIO: "the device is gone: mount it again and restart, or name another folder in nvme_path",
    errno.ESTALE: "the network file system lost the file: use a local disk in nvme_path",
    errno.EINVAL: "the file system refuses direct I/O of this alignment: name a folder on another one in nvme_path",
    errno.EAGAIN: "the system put the operation off again and again: it is out of memory or requests; use a smaller queue depth",
    errno.ENOMEM: "the system is out of memory for I/O: use a smaller queue depth, or free some",
    errno.EPERM: "something forbids I/O that was allowed at the start, such as a new seccomp filter",
}
_OTHER = "see errno(3); name another folder in nvme_path"
_CHANGED = "something truncated the file or moved its space: let nothing else touch the folder, and restart"


def error_name(code: int) -> str:
    """`ENOSPC (No space left on device)` for its number."""
    return f"{errno.errorcode.get(code, f'errno {code}')} ({os.strerror(code)})"


def reservation_fault(path: Path, *, wanted: int, free: int | None, code: int) -> StoreError:
    """The error for space that the system does not give."""
    known = "" if free is None else f", where {free:,} are free"
    error = StoreError(
        f"cannot reserve {wanted:,} bytes in {path}{known}: {error_name(code)}; {_CURES.get(code, _OTHER)}"
    )
    error.errno = code
    return error


def clone_fault(path: Path, label: str, code: int) -> str:
    """What to say of an extent whose blocks the system did not share."""
    if code in (errno.ENOSPC, errno.EDQUOT):
        cure = "free space there, and the next save's will be"
    else:
        cure = "nothing is lost by it, see `dmesg` if it goes on"
    return (
        f"the {label} in {path} could not be cloned for an asynchronous save: {error_name(code)}; they are read before the next "
        f"step changes them, which waits for that ({cure})"
    )


def transfer_fault(path: Path, fault: tuple[int, bool, int, int, int, int]) -> StoreError:
    """The error for what the native engine reports: (file, write, offset, wanted, got, errno)."""
    _, write, offset, wanted, got, code = fault
    act = "writing" if write else "reading"
    if code:
        reason, cure = error_name(code), _CURES.get(code, _OTHER)
    elif write:
        reason, cure = "the system wrote no further and named no reason", _FULL
    else:
        reason, cure = "the file ends there", _CHANGED
    error = StoreError(
        f"{act} {wanted:,} bytes at offset {offset:,} of {path} stopped after {got:,}: {reason}; {cure}"
    )
    error.errno = code or None
    return error


def checksum_fault(path: Path, offset: int, nbytes: int, label: str) -> StoreError:
    """The error for bytes that are not those written."""
    return StoreError(
        f"{nbytes:,} bytes at offset {offset:,} of {path} ({label}) are not those written there: the checksum differs. The "
        "device, its cable or memory is faulty, or something else wrote to the file: restart from a checkpoint on another disk"
    )
