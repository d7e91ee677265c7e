"""What a file of states costs its owner once a save has shared its blocks (`FICLONE`: XFS, btrfs), against reading or copying it.

A step reads the file tile by tile with direct I/O, and writes each tile back in its place. Measured in turn, on the same file:

- step: such a pass over a file whose blocks are its own;
- share: the clone itself;
- step after: the first pass over it afterwards, each of whose writes the file system puts elsewhere;
- later steps: one more pass, with the clone removed;
- read: reading the file once, which is what a save does elsewhere before the next step may write;
- copy: copying it inside the system instead (`copy_file_range`), as far as the page cache;
- read the copy: through the page cache, as the save would then have to;
- write out: what of the copy is not on the disk yet, which the disk does beside the next steps.

Where the file system shares no blocks (ext4), "share" and the acts after it until "read" are left out.

    python benchmarks/reflink_states.py --folder /mnt/xfs --size 1e9
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _report import Report, machine, write_json

TILE_BYTES = 16 << 20
FICLONE = 0x40049409
SHARING = ("share", "step after", "later steps")
ACTS = ("step", *SHARING, "read", "copy", "read the copy", "write out")


def one_pass(descriptor: int, size: int, memory: mmap.mmap, *, write: bool) -> None:
    """Read each tile, and write it back."""
    for offset in range(0, size, TILE_BYTES):
        if os.preadv(descriptor, [memory], offset) != TILE_BYTES:
            raise OSError(f"the file ends before byte {offset + TILE_BYTES:,}")
        if write:
            os.pwritev(descriptor, [memory], offset)


def copy(source: int, target: int, size: int) -> None:
    """Copy a file inside the system."""
    done = 0
    while done < size:
        done += os.copy_file_range(source, target, size - done, done, done)


def can_share(source: int, target: int) -> bool:
    """Whether the file system shares blocks."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    os.ftruncate(target, 0)
    return True


def extents(path: Path) -> int:
    """Pieces that the file lies in, or -1 where `filefrag` is missing."""
    if shutil.which("filefrag") is None:
        return -1
    shown = subprocess.run(["filefrag", path], check=True, capture_output=True, text=True).stdout
    return int(shown.rsplit(":", 1)[1].split()[0])


def measure(folder: Path, size: int, rounds: int) -> Report:
    """The table."""
    path, clone = folder / "states", folder / "clone"
    memory = mmap.mmap(-1, TILE_BYTES)
    memory.write(os.urandom(TILE_BYTES))
    seconds: dict[str, list[float]] = {act: [] for act in ACTS}
    pieces: list[int] = []
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    target = os.open(clone, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        for offset in range(0, size, TILE_BYTES):
            os.pwritev(descriptor, [memory], offset)
        os.fsync(descriptor)
        pieces.append(extents(path))
        acts: dict[str, Callable[[], object]] = {
            "step": lambda: one_pass(descriptor, size, memory, write=True),
            "share": lambda: fcntl.ioctl(target, FICLONE, descriptor),
            "step after": lambda: one_pass(descriptor, size, memory, write=True),
            "later steps": lambda: one_pass(descriptor, size, memory, write=True),
            "read": lambda: one_pass(descriptor, size, memory, write=False),
            "copy": lambda: copy(descriptor, target, size),
            "read the copy": lambda: one_pass(target, size, memory, write=False),
            "write out": lambda: os.fsync(target),
        }
        if not can_share(descriptor, target):
            for act in SHARING:
                del acts[act]
        for _ in range(rounds):
            for act, run in acts.items():
                if act in {"later steps", "copy"}:
                    os.ftruncate(target, 0)
                if act not in {"read the copy", "write out"}:
                    os.sync()
                start = time.perf_counter()
                run()
                seconds[act].append(time.perf_counter() - start)
            pieces.append(extents(path))
    finally:
        os.close(descriptor)
        os.close(target)
    medians = [statistics.median(seconds[act]) if seconds[act] else "" for act in ACTS]
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True
    ).stdout.strip()
    return Report(
        benchmark="a step over states whose blocks a save has shared",
        settings={"size": size, "rounds": rounds, "load": round(machine()["load"], 1)},
        columns=("file system", *ACTS, "pieces before", "pieces after"),
        rows=[[kind, *medians, pieces[0], pieces[-1]]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="on the file system to measure")
    parser.add_argument("--size", type=float, default=1e9, help="bytes of states")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    args = parser.parse_args()
    size = int(args.size) // TILE_BYTES * TILE_BYTES
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="zero-plugin-bench-") as folder:
        report = measure(Path(folder), size, args.rounds)
    report.show()
    write_json(args.json, [report])


if __name__ == "__main__":
    main()
