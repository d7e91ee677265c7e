"""Reserved space on fast disks, read and written past the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from zero_plugin.errors import BudgetError, ConfigError, EngineStateError, StoreError
from zero_plugin.kernels import _native
from zero_plugin.runtime.memory import allocate_host, page_aligned
from zero_plugin.store.clones import FULL, Clones
from zero_plugin.store.faults import checksum_fault, transfer_fault
from zero_plugin.store.folder import RunFolder
from zero_plugin.store.layout import Extent, Stripes, round_up, weights_for
from zero_plugin.store.slab import Slab

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.trace import Ledger

_logger = logging.getLogger(__name__)

EngineName = Literal["auto", "uring", "threads"]

_MEASURED_BYTES = 8 << 20
_BOUNCE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PathDescription:
    """One path of a store.

    Attributes:
        path: the folder that was named.
        folder: this run's own folder in it.
        file_system: such as "ext4".
        direct: whether I/O goes past the page cache.
        alignment: bytes that offsets and sizes are multiples of.
        read_mb: MB/s measured at the start; None where there was no space for it.
        write_mb: the same for writing.
        weight: its share of every extent, in units.
        clones: whether the file system shares blocks between files, so that a save need not read before the next step writes.
    """

    path: Path
    folder: Path
    file_system: str
    direct: bool
    alignment: int
    read_mb: float | None
    write_mb: float | None
    weight: int
    clones: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreDescription:
    """What a store uses.

    Attributes:
        engine: "uring" or "threads".
        reason: why that one.
        queue_depth: operations of one transfer in flight at once.
        block_bytes: largest operation.
        checksum: whether what is read is compared with what was written.
        paths: where the bytes lie.
    """

    engine: str
    reason: str
    queue_depth: int
    block_bytes: int
    checksum: bool
    paths: tuple[PathDescription, ...]

    def __str__(self) -> str:
        """One line for the log."""
        paths = "; ".join(
            f"{path.path} ({path.file_system}, {'direct' if path.direct else 'through the page cache'}, "
            f"{_rate(path.read_mb)} read, {_rate(path.write_mb)} written, share {path.weight}"
            f"{', cloned by asynchronous saves' if path.clones else ''})"
            for path in self.paths
        )
        return f"NVMe tier: {self.engine} engine ({self.reason}), {paths}"


def _rate(mb: float | None) -> str:
    return "unmeasured" if mb is None else f"{mb:,.0f} MB/s"


@dataclass(kw_only=True, slots=True)
class _Parts:
    """What has to be closed; apart from the store, so that its finalizer can hold it."""

    process: int = field(default_factory=os.getpid)
    engine: _native.IoEngine | None = None
    slabs: list[Slab] = field(default_factory=list[Slab])
    clones: Clones | None = None
    folders: list[RunFolder] = field(default_factory=list[RunFolder])

    def close(self) -> None:
        # A forked child must not remove its parent's files.
        if self.process != os.getpid():
            return
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
        if self.clones is not None:
            self.clones.close()
        while self.slabs:
            self.slabs.pop().close()
        while self.folders:
            self.folders.pop().close()


class NvmeStore:
    """Files of fixed size in a folder of this run's own, one on each path.

    Space is reserved at the start (`reserve`) and never grows later. `read` and `write` block until the bytes are
    there, with the GIL released; lanes call them through `runtime.io.Read` and `Write`, several at once. The store
    does not order them: two transfers of the same bytes are ordered by tickets.

    Bytes move straight between the disk and the tensor when the tensor's address is a multiple of
    `memory_alignment` (slabs of `SlabPool` are) and its size one of `alignment`; anything else goes through a small
    aligned buffer, which is slower.

    Args:
        paths: folders on the disks to use; bytes are striped over them by their measured speed.
        rank: this process's rank.
        limit: most bytes that may be reserved, or None.
        engine: "auto" takes io_uring where it works and the thread pool elsewhere.
        queue_depth: operations of one transfer in flight at once.
        block_bytes: size of one operation, a multiple of 4096; with several paths also the stripe.
        checksum: keep a checksum of every 4096 bytes (`alignment`) written, in memory, and check it when they are read.
        ledger: counts bytes moved as "nvme_read" and "nvme_write", or None.

    Raises:
        ConfigError: no path, one twice, or one that is missing, no folder or not writable; an engine that cannot be had.
    """

    def __init__(  # noqa: PLR0913 - named settings
        self,
        paths: Sequence[str | Path],
        *,
        rank: int = 0,
        limit: int | None = None,
        engine: EngineName = "auto",
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
        checksum: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.is_kept = False
        """True where the files outlive who opened the store: they go with the last reference to it."""
        self._limit = limit
        self._ledger = ledger
        self._lock = threading.Lock()
        self._bounces: list[Tensor] = []
        self._registered: list[Tensor] = []
        self._extents = 0
        self._reserved = 0
        self._sums: dict[int, Tensor] | None = {} if checksum else None
        self._parts = _Parts()
        self._finalizer = weakref.finalize(self, self._parts.close)
        try:
            self._open(_distinct(paths), rank, engine, queue_depth, block_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def alignment(self) -> int:
        """Bytes that offsets, and sizes other than an extent's last, are multiples of."""
        return self._alignment

    @property
    def memory_alignment(self) -> int:
        """Bytes that a tensor's address is a multiple of to be read and written without a copy."""
        return self._memory_alignment

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved so far, padding included."""
        return self._reserved

    def reserve(self, nbytes: int, label: str) -> Extent:
        """Reserves space on the disks for `nbytes` bytes.

        Args:
            nbytes: how many.
            label: names the extent in errors.

        Raises:
            BudgetError: the limit would be passed; nothing was reserved.
            StoreError: a file system does not have the space; nothing was reserved.
        """
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes for {label!r}")
        padded = round_up(nbytes, self._alignment)
        with self._lock:
            self._opened()
            if self._limit is not None and self._reserved + padded > self._limit:
                raise BudgetError(
                    f"{label!r} needs {padded:,} bytes of the NVMe tier beside {self._reserved:,} in use, and "
                    f"nvme_limit={self._limit:,}: raise it, or place less on 'nvme'"
                )
            bases = self._grow(self._sizes(padded))
            extent = Extent(
                number=self._extents, label=label, nbytes=nbytes, padded=padded, bases=bases
            )
            self._extents += 1
            self._reserved += padded
            if self._sums is not None:
                self._sums[extent.number] = torch.zeros(
                    padded // self._alignment, dtype=torch.int32, device="cpu"
                )
        return extent

    def register(self, tensor: Tensor) -> None:
        """Tells the system of memory that will be read into and written from often, which spares it work each time.

        The store keeps the tensor until it is closed. Where the system refuses, I/O works as before. Processes forked
        meanwhile do not get this memory, so that a fork during a transfer (a data loader starting its workers) cannot
        part the disk's bytes from this process's.
        """
        with self._lock:
            engine = self._opened()
            self._registered.append(tensor)
        engine.register_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def read(self, extent: Extent, offset: int, destination: Tensor) -> None:
        """Fills `destination`, a contiguous CPU tensor, from the bytes at `offset` of `extent`.

        Raises:
            StoreError: reading failed, or the bytes are not those written; `destination` is undefined then.
            ValueError: the range is not within the extent, or `offset` not a multiple of `alignment`.
        """
        self._move(extent, offset, destination, write=False)

    def write(self, extent: Extent, offset: int, source: Tensor) -> None:
        """Writes `source`, a contiguous CPU tensor, at `offset` of `extent`.

        Its size is a multiple of `alignment` unless it reaches the extent's end. The bytes are for this process to read back: they are not forced onto the medium.

        Raises:
            StoreError: writing failed; the range is undefined then.
            ValueError: the range is not within the extent, or not aligned.
        """
        self._move(extent, offset, source, write=True)

    def begin_clones(self, extents: Sequence[Extent]) -> bool:
        """Whether `clone` can be asked for some extents: the file systems do it, and have room for what is written meanwhile."""
        self._opened()
        sizes = [self._sizes(extent.padded) for extent in extents]
        return self._clones.has_room([sum(each) for each in zip(*sizes, strict=True)])

    def clone(self, extent: Extent) -> bool:
        """Hold what an extent has now, without a copy, until `drop_clones`; what is written to it goes elsewhere meanwhile.

        No write to it may run. A write that then finds the disk full waits for `drop_clones`.

        Returns:
            False where the system refuses; the log then says why.
        """
        with self._lock:
            self._opened()
            number, self._extents = self._extents, self._extents + 1
        sums = None if self._sums is None else self._sums[extent.number].clone()
        if self._clones.take(extent, number, self._sizes(extent.padded)) is None:
            return False
        if self._sums is not None and sums is not None:
            self._sums[number] = sums
        return True

    def clone_of(self, extent: Extent) -> Extent:
        """What was held of an extent, to read; itself where nothing was."""
        return self._clones.of(extent)

    @property
    def wants_space(self) -> bool:
        """Whether a write waits for `drop_clones`."""
        return self._clones.wanted

    def drop_clones(self) -> None:
        """Give the space of all clones back; nobody may be reading them. Idempotent."""
        for clone in self._clones.drop():
            if self._sums is not None:
                self._sums.pop(clone.number, None)

    def describe(self) -> StoreDescription:
        """Which engine and which paths, and how fast they were found to be."""
        return self._description

    def registration(self) -> str:
        """Why registered memory is of no use, or empty; known after a transfer."""
        return self._opened().registration

    def close(self) -> None:
        """Waits for running transfers and removes the files. Idempotent."""
        self._finalizer.detach()
        self._parts.close()
        self._registered.clear()
        self._bounces.clear()

    # ------------------------------------------------------------------ opening

    def _open(
        self, paths: list[Path], rank: int, engine: str, queue_depth: int, block_bytes: int
    ) -> None:
        parts = self._parts
        for path in paths:
            parts.folders.append(RunFolder(path, rank=rank))
            parts.slabs.append(Slab(parts.folders[-1].path))
        native = parts.engine = _make_engine(engine, queue_depth, block_bytes)
        self._alignment = max(slab.alignment for slab in parts.slabs)
        self._memory_alignment = max(slab.memory_alignment for slab in parts.slabs)
        self._clones = parts.clones = Clones(parts.slabs, self._alignment)
        # Known from the start: a ring's files are registered anew when one is added.
        files = [slab.descriptor for slab in parts.slabs] + self._clones.descriptors
        for descriptor, slab in zip(files, parts.slabs * 2, strict=False):
            native.add_file(descriptor, self._alignment if slab.direct else 1)
        measured = [self._measure(file) for file in range(len(parts.slabs))]
        speeds = [None if pair is None else 2 / (1 / pair[0] + 1 / pair[1]) for pair in measured]
        unit = round_up(block_bytes, self._alignment)
        self._stripes = Stripes(unit=unit, weights=weights_for(speeds))
        self._description = StoreDescription(
            engine=native.name,
            reason=native.reason,
            queue_depth=queue_depth,
            block_bytes=block_bytes,
            checksum=self._sums is not None,
            paths=tuple(
                PathDescription(
                    path=folder.parent,
                    folder=folder.path,
                    file_system=slab.file_system,
                    direct=slab.direct,
                    alignment=slab.alignment,
                    read_mb=None if pair is None else pair[0] / 1e6,
                    write_mb=None if pair is None else pair[1] / 1e6,
                    weight=weight,
                    clones=not self._clones.refusal,
                )
                for folder, slab, pair, weight in zip(
                    parts.folders, parts.slabs, measured, self._stripes.weights, strict=True
                )
            ),
        )
        _logger.info("%s", self._description)
        for path in self._description.paths:
            if not path.direct:
                _logger.warning(
                    "nvme_path %s lies on %s, which has no direct I/O: its bytes pass through host memory, which the tier is "
                    "meant to spare; name a folder on a local disk's file system to avoid that",
                    path.path,
                    path.file_system,
                )

    def _measure(self, file: int) -> tuple[float, float] | None:
        """Bytes a second read from and written to a file; None where there is no space for it."""
        slab = self._parts.slabs[file]
        room = _MEASURED_BYTES if self._limit is None else min(_MEASURED_BYTES, self._limit)
        nbytes = room - room % self._alignment
        try:
            slab.grow(nbytes)
        except StoreError:
            return None
        memory = _aligned_bytes(nbytes, self._memory_alignment)
        if nbytes:
            # Not zeros: some file systems store none.
            memory.copy_(torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8))
        address = memory.data_ptr()
        seconds: list[float] = []
        # The first writing of new space costs more than every later one, and is not what counts.
        for write in (True, True, False):
            begin = time.perf_counter()
            self._transfer([(write, file, 0, address, nbytes)])
            seconds.append(time.perf_counter() - begin)
        slab.shrink(0)
        return (nbytes / seconds[2], nbytes / seconds[1]) if nbytes else None

    def _grow(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Grows every path's file or none."""
        before = [slab.size for slab in self._parts.slabs]
        try:
            return tuple(
                slab.grow(size) for slab, size in zip(self._parts.slabs, sizes, strict=True)
            )
        except StoreError:
            for slab, size in zip(self._parts.slabs, before, strict=True):
                slab.shrink(size)
            raise

    def _sizes(self, padded: int) -> tuple[int, ...]:
        """Bytes that an extent of a size takes of each path's file."""
        return tuple(round_up(size, self._alignment) for size in self._stripes.sizes(padded))

    # ------------------------------------------------------------------ moving

    def _opened(self) -> _native.IoEngine:
        engine = self._parts.engine
        if engine is None:
            raise EngineStateError("this NVMe store is closed; make a new one")
        if self._parts.process != os.getpid():
            raise EngineStateError(
                "this NVMe store belongs to the process that forked this one; make a new one after forking"
            )
        return engine

    def _move(self, extent: Extent, offset: int, tensor: Tensor, *, write: bool) -> None:
        self._opened()
        nbytes = tensor.numel() * tensor.element_size()
        self._check(extent, offset, tensor, nbytes, write=write)
        address = tensor.data_ptr()
        straight = nbytes if address % self._memory_alignment == 0 else 0
        straight -= straight % self._alignment
        self._move_aligned(extent, offset, address, straight, write=write)
        if straight < nbytes:
            with self._bounce() as buffer:
                while straight < nbytes:
                    part = min(buffer.numel(), nbytes - straight)
                    self._move_part(
                        extent, offset + straight, address + straight, part, buffer, write=write
                    )
                    straight += part

    def _check(
        self, extent: Extent, offset: int, tensor: Tensor, nbytes: int, *, write: bool
    ) -> None:
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(
                f"{extent.label!r} is read and written from contiguous CPU tensors, not from one of shape "
                f"{list(tensor.shape)} and strides {list(tensor.stride())} on {tensor.device}; copy it first"
            )
        if offset < 0 or offset + nbytes > extent.padded:
            raise ValueError(
                f"bytes {offset:,} to {offset + nbytes:,} are not within the {extent.nbytes:,} bytes of {extent.label!r}"
            )
        ragged = write and nbytes % self._alignment and offset + nbytes < extent.nbytes
        if offset % self._alignment or ragged:
            raise ValueError(
                f"{nbytes:,} bytes at offset {offset:,} of {extent.label!r} do not begin and end at multiples of "
                f"{self._alignment:,}: place blocks at such offsets (only an extent's last may end elsewhere)"
            )

    def _move_part(
        self,
        extent: Extent,
        offset: int,
        address: int,
        nbytes: int,
        buffer: Tensor,
        *,
        write: bool,
    ) -> None:
        """Moves at most a buffer's worth through an aligned buffer."""
        middle, padded = buffer.data_ptr(), round_up(nbytes, self._alignment)
        if write:
            ctypes.memmove(middle, address, nbytes)
            ctypes.memset(middle + nbytes, 0, padded - nbytes)
        self._move_aligned(extent, offset, middle, padded, write=write)
        if not write:
            ctypes.memmove(address, middle, nbytes)

    def _move_aligned(
        self, extent: Extent, offset: int, address: int, nbytes: int, *, write: bool
    ) -> None:
        if nbytes == 0:
            return
        sums = self._sums_of(extent, offset)
        if write and sums:
            _native.block_sums(address, nbytes, self._alignment, sums)
        self._transfer(
            [
                (
                    write,
                    extent.first_file + span.path,
                    extent.bases[span.path] + span.position,
                    address + span.start - offset,
                    span.nbytes,
                )
                for span in self._stripes.spans(offset, offset + nbytes)
            ]
        )
        if not write and sums:
            wrong = _native.first_mismatch(address, nbytes, self._alignment, sums)
            if wrong >= 0:
                raise self._mismatch(extent, offset + wrong * self._alignment)
        if self._ledger is not None:
            self._ledger.add("nvme_write" if write else "nvme_read", nbytes)

    def _transfer(self, requests: list[tuple[bool, int, int, int, int]]) -> None:
        engine, slabs = self._opened(), self._parts.slabs
        fault = engine.transfer(requests)
        if fault is None:
            return
        path = slabs[fault[0] % len(slabs)].path
        # Space for it was reserved; a clone shares that. All is written again, to where it lies then.
        if fault[1] and fault[5] in FULL and self._clones.wait_for_space(path):
            fault = engine.transfer(requests)
        if fault is not None:
            raise transfer_fault(path, fault)

    def _sums_of(self, extent: Extent, offset: int) -> int:
        """Address of the checksum of the block at `offset`; 0 for none."""
        if self._sums is None:
            return 0
        return self._sums[extent.number].data_ptr() + offset // self._alignment * 4

    def _mismatch(self, extent: Extent, place: int) -> StoreError:
        span = next(self._stripes.spans(place, place + self._alignment))
        path = self._parts.slabs[span.path].path
        position = extent.bases[span.path] + span.position
        return checksum_fault(path, position, self._alignment, extent.label)

    @contextlib.contextmanager
    def _bounce(self) -> Generator[Tensor]:
        with self._lock:
            buffer = self._bounces.pop() if self._bounces else None
        if buffer is None:
            buffer = _aligned_bytes(
                round_up(_BOUNCE_BYTES, self._alignment), self._memory_alignment
            )
        try:
            yield buffer
        finally:
            with self._lock:
                self._bounces.append(buffer)


def _distinct(paths: Sequence[str | Path]) -> list[Path]:
    if isinstance(paths, (str, Path)):
        paths = (paths,)
    found = [Path(path).expanduser() for path in paths]
    if not found:
        raise ConfigError("nvme_path is empty: name a folder on a fast disk")
    resolved = [path.resolve() for path in found]
    for place, path in enumerate(resolved):
        if path in resolved[:place]:
            raise ConfigError(f"nvme_path names {str(path)!r} twice: name every folder once")
    return found


def _make_engine(kind: str, queue_depth: int, block_bytes: int) -> _native.IoEngine:
    try:
        return _native.IoEngine(kind, queue_depth, block_bytes)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the I/O engine cannot be had: {error}") from error


def _aligned_bytes(nbytes: int, alignment: int) -> Tensor:
    """Host memory that starts at a multiple of `alignment`, at least of a page."""
    memory = page_aligned(allocate_host(nbytes + max(alignment, 4096) + 4096))
    skip = -memory.data_ptr() % max(alignment, 1)
    return memory[skip : skip + nbytes]
