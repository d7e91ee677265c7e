"""What a run is told of before it loses hours: a slow place for files, a disk that slows down, memory that others take, a small batch.

Each thing is said once, by the logger `zero_plugin`, with the value seen and the cure.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from zero_plugin.runtime.memory import available_host_bytes

if TYPE_CHECKING:
    from zero_plugin.trace import Meter

_logger = logging.getLogger("zero_plugin")

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "fuse", "9p", "ceph", "lustre", "afs", "overlay"}
)
"""File systems that are not a local disk's."""

IN_MEMORY = frozenset({"tmpfs", "ramfs"})

_WINDOW = 16
"""Steps that are looked at together; the first window is left out: it holds what is done once."""

_THROTTLED = 0.4
"""Of the rate before."""

_STALLED = 0.25
"""Of the time of a window, for updates and files."""

_LITTLE = 0.05
"""Of the machine's memory."""

_FASTEST_SPINNING_MB = 400

_GIB = 2**30


def disk_trouble(path: Path, file_system: str, read_mb: float | None = None) -> str | None:
    """What is wrong with a folder of the `nvme` tier, or None.

    Args:
        path: the folder.
        file_system: its kind.
        read_mb: MB/s it was found to read at. Virtual disks often say that they rotate; one that is fast does not.
    """
    if file_system in IN_MEMORY:
        return f"{file_system} is memory, not a disk: states there take what the tier is meant to spare"
    if file_system in NETWORK or file_system.startswith("fuse"):
        return f"{file_system} is not a local disk: every step moves all states over it"
    if (read_mb is None or read_mb < _FASTEST_SPINNING_MB) and is_spinning(path):
        return "the system takes it for a spinning disk: every step reads and writes all states"
    return None


def is_spinning(path: Path, devices: Path = Path("/sys/dev/block")) -> bool:
    """Whether the kernel says that a folder's disk rotates."""
    if sys.platform != "linux":
        return False
    number = path.stat().st_dev
    device = devices / f"{os.major(number)}:{os.minor(number)}"
    files = [folder / "queue" / "rotational" for folder in (device, device.resolve().parent)]
    said = next((file.read_text(encoding="ascii") for file in files if file.is_file()), "0")
    return said.strip() == "1"


def warn_of_disk(path: Path, file_system: str, read_mb: float | None = None) -> None:
    """Say at the start what a folder costs."""
    trouble = disk_trouble(path, file_system, read_mb)
    if trouble is not None:
        _logger.warning(
            "nvme_path %r: %s; name a folder on a fast local disk (zero-plugin doctor --nvme PATH)",
            str(path),
            trouble,
        )


class _Reading(NamedTuple):
    """Counters at one moment."""

    at: float
    stalled: float
    updating: float
    nbytes: int
    file_seconds: float


class Alarms:
    """Looks at a run every few steps.

    Args:
        available: bytes of host memory that are left, or None where unknown.
        own: bytes that this process holds.
        total: of the machine.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        available: Callable[[], int | None] = available_host_bytes,
        own: Callable[[], int] | None = None,
        total: int | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._available = available
        self._own = own or _resident_bytes
        self._total = total or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._clock = clock
        self._steps = 0
        self._last: _Reading | None = None
        self._memory: tuple[int, int] | None = None
        self._file_rate = 0.0
        self._said: set[str] = set()

    def __call__(self, meter: Meter) -> None:
        """A step begins."""
        self._steps += 1
        if self._steps % _WINDOW:
            return
        now, last = self._read(meter), self._last
        self._last = now
        self._look_at_memory()
        if last is not None:
            self._look_at_files(now, last)
            self._look_at_batch(now, last, meter.tokens)

    def _read(self, meter: Meter) -> _Reading:
        stalls, (nbytes, seconds) = meter.stalls(), meter.transfers()
        return _Reading(
            at=self._clock(),
            stalled=stalls.get("update", 0.0) + stalls.get("files", 0.0),
            updating=meter.updates()[1] + seconds,
            nbytes=nbytes,
            file_seconds=seconds,
        )

    def _look_at_memory(self) -> None:
        left, own = self._available(), self._own()
        if left is None:
            return
        if self._memory is None:
            self._memory = (left, own)
        gone = self._memory[0] - left - max(0, own - self._memory[1])
        if left < _LITTLE * self._total and gone > left:
            self._say(
                "memory",
                f"{left / _GIB:.2f} GiB of host memory are left, and other processes took {gone / _GIB:.2f} GiB since the run "
                "began: end them, or place the optimizer on nvme, before the system ends this one",
            )

    def _look_at_files(self, now: _Reading, last: _Reading) -> None:
        seconds = now.file_seconds - last.file_seconds
        if seconds <= 0:
            return
        rate = (now.nbytes - last.nbytes) / seconds
        if rate < _THROTTLED * self._file_rate:
            self._say(
                "files",
                f"files of the nvme tier are read and written at {rate / 1e6:.0f} MB/s, after {self._file_rate / 1e6:.0f} before: "
                "the disk is throttled (its cache is full, or it is hot) or shared: use another, several (nvme_path takes a "
                "tuple), or nvme_cache_bytes to write less",
            )
        self._file_rate = max(self._file_rate, rate)

    def _look_at_batch(self, now: _Reading, last: _Reading, tokens: int) -> None:
        every, stalled = now.at - last.at, now.stalled - last.stalled
        computing = every - stalled
        if computing <= 0 or stalled < _STALLED * every:
            return
        factor = every / computing
        needed = f"{factor:.1f} times the tokens"
        if tokens:
            needed = f"{factor * tokens:,.0f} tokens instead of {tokens:,}"
        self._say(
            "batch",
            f"{stalled / every:.0%} of the time this rank waits for the update and its files: a step of {needed} would hide "
            "it: raise the batch, or accumulate gradients; delayed_update=True hides it too, one step late",
        )

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.warning("%s", text)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
