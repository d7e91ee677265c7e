"""One run's own folder under a path that runs share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path

from zero_plugin.errors import ConfigError
from zero_plugin.store.faults import error_name

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"zero-plugin-run-[0-9a-f]{16}-rank[0-9]+")
_LOCK = "lock"
_ATTEMPTS = 20
_ABANDONED_SECONDS = 3600.0
"""Age of a folder without a lock file from which on its maker is taken to be gone; making one takes milliseconds."""


class RunFolder:
    """A new folder of mode 0700 with a lock held while this process lives.

    The lock (`flock`) is what tells a running owner from a killed one: the kernel drops it when the process and the
    children it forked have ended. Folders whose lock is free are leftovers; they are removed before a new one is made.

    Args:
        parent: an existing folder that this process may write to.
        rank: this process's rank, part of the name.

    Raises:
        ConfigError: `parent` is missing, not a folder, or not writable.
    """

    def __init__(self, parent: Path, *, rank: int) -> None:
        self.parent = _checked(parent)
        self.removed = remove_leftovers(self.parent)
        self.path, self._lock = _create(self.parent, rank)

    def close(self) -> None:
        """Removes the folder and lets the lock go. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        # While the lock is held nobody else removes it; a folder already gone is no error.
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(lock)


def neighbours(folder: Path) -> int:
    """Runs' folders beside one, itself included: ranks that share a file system."""
    return max(1, sum(bool(_NAME.fullmatch(path.name)) for path in folder.parent.iterdir()))


def remove_leftovers(parent: Path) -> list[Path]:
    """Removes the folders that killed runs of this user left in `parent`, and returns them."""
    removed: list[Path] = []
    for folder in sorted(parent.iterdir()):
        if not _NAME.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                nbytes = _remove_if_abandoned(folder, status)
                if nbytes is not None:
                    removed.append(folder)
                    _logger.warning(
                        "removed %s: %s bytes left by a run that was killed", folder, f"{nbytes:,}"
                    )
    return removed


def _checked(parent: Path) -> Path:
    if not parent.exists():
        raise ConfigError(
            f"nvme_path={str(parent)!r} does not exist: create the folder, or name one that exists"
        )
    if not parent.is_dir():
        raise ConfigError(f"nvme_path={str(parent)!r} is not a folder: name one on the fast disk")
    if not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"nvme_path={str(parent)!r} is not writable for this user: change its owner or mode, or name another folder"
        )
    return parent.resolve()


def _create(parent: Path, rank: int) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        folder = parent / f"zero-plugin-run-{secrets.token_hex(8)}-rank{rank}"
        try:
            folder.mkdir(mode=0o700)
            # The umask may have taken the owner's own rights.
            folder.chmod(0o700)
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOENT):
                continue
            raise ConfigError(
                f"nvme_path={str(parent)!r} does not take a new folder: {error_name(error.errno or 0)}; name one on a file "
                "system that is writable and has space"
            ) from error
        if _take(lock, folder):
            return folder, lock
        os.close(lock)
    raise ConfigError(
        f"nvme_path={str(parent)!r}: a new folder was taken away {_ATTEMPTS} times; let no other program remove files there"
    )


def _take(lock: int, folder: Path) -> bool:
    """Locks, and checks that another run did not remove the folder between its making and now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named, held = (folder / _LOCK).stat(), os.fstat(lock)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def _remove_if_abandoned(folder: Path, status: os.stat_result) -> int | None:
    """Removes the folder when nobody holds its lock; the bytes that were in it, or None when it stays."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # In the making, or its maker or remover was killed half-way.
        if time.time_ns() / 1e9 - status.st_mtime < _ABANDONED_SECONDS:
            return None
        nbytes = _bytes_in(folder)
        shutil.rmtree(folder)
        return nbytes
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nbytes = _bytes_in(folder)
        shutil.rmtree(folder)
    except BlockingIOError:
        return None
    finally:
        os.close(lock)
    return nbytes


def _bytes_in(folder: Path) -> int:
    return sum(entry.lstat().st_size for entry in folder.iterdir())
