"""File systems that share blocks between files: one in a file, where this machine can make and mount it; and a stand-in."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

KINDS = {"xfs": (["mkfs.xfs", "-q", "-f"], 320), "btrfs": (["mkfs.btrfs", "-q", "-f"], 256)}
"""How each is made, and the MiB that it needs at least."""


def copy_range(source: int, target: int, offset: int, nbytes: int) -> None:
    """In place of `share_blocks`, on any file system: the same bytes at the same place, by copying them."""
    with mmap.mmap(-1, nbytes) as memory:  # Direct I/O wants whole pages.
        assert os.preadv(source, [memory], offset) == nbytes
        assert os.pwritev(target, [memory], offset) == nbytes


@contextlib.contextmanager
def cloning_disk(kind: str, folder: Path, mebibytes: int | None = None) -> Generator[Path]:
    """A fresh file system of a kind, in a file; skips the test where it cannot be had, and says why."""
    make, least = KINDS[kind]
    if shutil.which(make[0]) is None:
        pytest.skip(f"{make[0]} is not installed")
    image, place = folder / f"{kind}.img", folder / kind
    image.touch()
    os.truncate(image, (mebibytes or least) << 20)
    for command in ([*make, str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        place.mkdir(exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{' '.join(command)} is refused here (it needs root): {done.stderr}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        image.unlink()
