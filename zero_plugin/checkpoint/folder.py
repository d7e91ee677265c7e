"""The folder of a checkpoint: made beside its place, put there in one act, and its older siblings removed.

A save writes into a hidden folder beside the place, syncs it, and renames it. Where a checkpoint is at the place already, the two are
exchanged in one call (Linux), so that at every moment the place holds a whole checkpoint. Where the file system cannot
exchange, the old one is moved aside first, and a reader that finds the place empty takes that one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero_plugin.checkpoint.format import INDEX, open_index
from zero_plugin.checkpoint.shardfile import sync_folder
from zero_plugin.errors import CheckpointError

_PARTIAL, _OLD, _GONE = "partial", "old", "gone"
_AT_FDCWD, _EXCHANGE = -100, 2


class PartialFolder:
    """A checkpoint that is being written; rank 0's.

    Args:
        target: the checkpoint's place.

    Raises:
        CheckpointError: something else is there.
        OSError: the folder cannot be made.
    """

    def __init__(self, target: Path) -> None:
        check_place(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(target)
        self.token = secrets.randbits(48)
        """Names the folder to the other ranks."""
        self.target = target
        self.path = partial_path(target, self.token)
        """Where files are written."""
        self.path.mkdir()
        # Held while this process lives: what is not locked was left by one that died.
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self) -> None:
        """Put the folder in its place; everything in it must be synced."""
        sync_folder(self.path)
        old: Path | None = None
        if not self.target.exists():
            self.path.rename(self.target)
        elif _exchange(self.path, self.target):
            old = self.path
        else:
            old = _hidden(self.target, _OLD, self.token)
            self.target.rename(old)
            self.path.rename(self.target)
        sync_folder(self.target.parent)
        self._unlock()
        if old is not None:
            remove(old)

    def discard(self) -> None:
        """Remove what was written."""
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def partial_path(target: Path, token: int) -> Path:
    """The hidden folder that a checkpoint is written into."""
    return _hidden(target, _PARTIAL, token)


def check_place(target: Path) -> None:
    """Refuse a place that holds something else than a checkpoint.

    Raises:
        CheckpointError: it does.
    """
    if target.is_dir() and ((target / INDEX).exists() or not any(target.iterdir())):
        return
    if target.exists() or target.is_symlink():
        what = "a folder of other files" if target.is_dir() else "a file"
        raise CheckpointError(
            f"{target} is {what}, wanted a new place or an earlier checkpoint: name a folder for this checkpoint alone"
        )


def find(directory: str | Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint's folder and index.

    Raises:
        CheckpointError: there is none, it was never finished, or its index is damaged.
    """
    path = Path(directory)
    if not path.exists():
        path = _moved_aside(path)
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, wanted the folder of a checkpoint"
            + (f": name {path.parent}" if (path.parent / INDEX).exists() else "")
        )
    if _kind_of(path) == _PARTIAL:
        raise CheckpointError(
            f"{path} was left by a save that did not end: load the checkpoint beside it, and remove this folder"
        )
    file = path / INDEX
    try:
        raw = file.read_bytes()
    except OSError as error:
        inside = sorted(
            item.name
            for item in path.iterdir()
            if not item.name.startswith(".") and (item / INDEX).exists()
        )
        hint = f": it holds the checkpoints {', '.join(inside[:8])}" if inside else ""
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}), so {path} is not a checkpoint of zero-plugin{hint}"
        ) from error
    return path, open_index(raw, str(file))


def prune(target: Path, keep_last: int) -> None:
    """Remove the oldest checkpoints beside one, until `keep_last` are left with it.

    Only those whose names differ from its name in numbers alone.
    """
    found: list[tuple[int, Path]] = []
    for item in target.parent.iterdir():
        if _pattern(item.name) != _pattern(target.name) or item == target:
            continue
        with suppress(CheckpointError):
            found.append((int(find(item)[1].get("saved_ns", 0)), item))
    found.sort()
    for _, item in found[: max(0, len(found) - keep_last + 1)]:
        logging.getLogger(__name__).info("removing the older checkpoint %s", item)
        remove(item)


def check_keep_last(target: Path, keep_last: int | None) -> None:
    """Refuse a number of kept checkpoints that can mean nothing.

    Raises:
        CheckpointError: it is below 1, or the name has no number.
    """
    if keep_last is None:
        return
    if type(keep_last) is not int or keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last!r} must be a whole number above 0, or None")
    if not re.search(r"\d", target.name):
        raise CheckpointError(
            f"keep_last={keep_last} removes older checkpoints whose names differ from {target.name!r} in numbers, and it has "
            "none: save to a name such as 'step-1000', or leave keep_last out"
        )


def remove(path: Path) -> None:
    """Remove a checkpoint; never leaves half of one under its name."""
    gone = path
    if not path.name.startswith("."):
        gone = _hidden(path, _GONE, secrets.randbits(48))
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _hidden(target: Path, kind: str, token: int) -> Path:
    return target.with_name(f".{target.name}.{kind}-{token:012x}")


def _kind_of(path: Path) -> str:
    found = re.fullmatch(r"\..+\.(\w+)-[0-9a-f]{12}", path.name)
    return found.group(1) if found else ""


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _moved_aside(target: Path) -> Path:
    """The whole checkpoint that a save moved aside just before the process ended."""
    beside = (
        sorted(target.parent.glob(f".{_escape(target.name)}.{_OLD}-*"))
        if target.parent.is_dir()
        else []
    )
    for path in beside:
        if (path / INDEX).exists():
            logging.getLogger(__name__).warning(
                "%s was being replaced when its process ended; the checkpoint before it, %s, is used",
                target,
                path,
            )
            return path
    unfinished = (
        sorted(target.parent.glob(f".{_escape(target.name)}.{_PARTIAL}-*"))
        if target.parent.is_dir()
        else []
    )
    hint = (
        f": the save to it did not end ({unfinished[0].name} is what it left)" if unfinished else ""
    )
    raise CheckpointError(f"{target} does not exist{hint}; load another checkpoint")


def _escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _remove_left_over(target: Path) -> None:
    """Remove what saves of ended processes left beside a place."""
    for path in target.parent.glob(".*"):
        kind = _kind_of(path)
        own = path.name[1:].rpartition(f".{kind}-")[0] if kind else ""
        if not own or _pattern(own) != _pattern(target.name):
            continue
        if (
            kind == _GONE
            or (kind == _OLD and target.with_name(own).exists())
            or (kind == _PARTIAL and not _is_locked(path))
        ):
            shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one act; False where the system cannot."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, "renameat2", None)
    if function is None:
        return False
    done = function(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_EXCHANGE)
    )
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))
