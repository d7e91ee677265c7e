"""One safetensors file: written front to back from pieces that are never all in memory, and read by byte range.

The safetensors package writes a file from tensors that are all in memory, and maps a file to read it; both would count as
memory here. The format itself is a length, a JSON header and bytes, so it is written and read by hand.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_plugin.checkpoint.format import BY_NAME, DTYPES
from zero_plugin.errors import CheckpointError

PIECE_BYTES = 16 << 20
"""Most bytes that are moved at once."""

BEHIND_BYTES = 64 << 20
"""Most bytes that are written and not on the disk yet."""

SMALL_BYTES = 1 << 18
"""Pieces below this are put together."""

_LARGEST_HEADER = 1 << 30
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # of sync_file_range


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor of a file that is to be written.

    Attributes:
        name: in the file.
        dtype: of its elements.
        shape: in the file.
        read: gives the elements from one place to another of the flattened tensor, in host memory or elsewhere. Called once
            for each range, in order.
        transient: what `read` gives lasts until the next read of any part.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    transient: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize


def whole(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Part:
    """A part that is a tensor in memory."""
    flat = tensor.detach().reshape(-1)
    return Part(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape) if shape is None else shape,
        read=lambda start, stop: flat[start:stop],
    )


def header_of(parts: Sequence[Part], metadata: Mapping[str, str]) -> bytes:
    """The length and the header of a file of these parts."""
    head: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for part in parts:
        head[part.name] = {
            "dtype": DTYPES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [offset, offset + part.nbytes],
        }
        offset += part.nbytes
    raw = json.dumps(head, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 64)
    return struct.pack("<Q", len(raw)) + raw


def pieces_of(parts: Iterable[Part]) -> Iterator[Tensor]:
    """The bytes of parts in file order, in pieces of host memory; a piece may be a view of what is saved."""
    for part in parts:
        step = max(1, PIECE_BYTES // part.dtype.itemsize)
        for start in range(0, part.numel, step):
            stop = min(start + step, part.numel)
            piece = part.read(start, stop)
            if piece.dtype != part.dtype:
                piece = piece.to(part.dtype)
            yield piece.detach().cpu().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What was written.

    Attributes:
        nbytes: of the file.
        checksum: CRC-32 of all its bytes.
    """

    nbytes: int
    checksum: int


def write_file(
    path: Path, header: bytes, pieces: Iterable[Tensor], *, progress: Callable[[int], None]
) -> Written:
    """Write a file and sync it.

    Args:
        path: a new file.
        header: of `header_of`.
        pieces: bytes that follow it.
        progress: told the bytes written.
    """
    total, checksum = len(header), zlib.crc32(header)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        # The checksum of a piece is taken beside its write: both leave Python.
        behind = _WriteBehind(descriptor)
        with ThreadPoolExecutor(1, "checkpoint checksum") as pool:
            _write_all(descriptor, memoryview(header))
            for view in _gathered(pieces):
                summed = pool.submit(zlib.crc32, view, checksum)
                _write_all(descriptor, view)
                behind.wrote(total, len(view))
                checksum = summed.result()
                total += len(view)
                progress(len(view))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(nbytes=total, checksum=checksum)


def _gathered(pieces: Iterable[Tensor]) -> Iterator[memoryview]:
    """Small pieces put together: a bias is not worth a system call."""
    small = bytearray()
    for piece in pieces:
        array: Any = piece.numpy()
        view = memoryview(array)
        if len(view) < SMALL_BYTES:
            small += view
        if small and (len(view) >= SMALL_BYTES or len(small) >= SMALL_BYTES):
            yield memoryview(small)
            small = bytearray()
        if len(view) >= SMALL_BYTES:
            yield view
    if small:
        yield memoryview(small)


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


class _WriteBehind:
    """Keeps the disk busy while a file is written, and its pages few.

    The system would gather the whole file in memory and write it at the sync. Here each range is sent to the disk at
    once; and a range some way back, once it is there, leaves its pages to the next. All hints: errors are the sync's.

    Args:
        descriptor: the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sync_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
        self._sent: deque[tuple[int, int]] = deque()

    def wrote(self, offset: int, nbytes: int) -> None:
        """A range was written; begin with it, and end one before it."""
        if self._sync_range is None:
            return
        self._sync(offset, nbytes, _WRITE)
        self._sent.append((offset, nbytes))
        while sum(size for _, size in self._sent) > BEHIND_BYTES:
            start, size = self._sent.popleft()
            self._sync(start, size, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_DONTNEED)

    def _sync(self, offset: int, nbytes: int, flags: int) -> None:
        self._sync_range(self._descriptor, ctypes.c_int64(offset), ctypes.c_int64(nbytes), flags)


def sync_folder(path: Path) -> None:
    """Make the names in a folder outlive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_of(path: Path, progress: Callable[[int], None]) -> Written:
    """Read a file through and sum it.

    Raises:
        CheckpointError: it cannot be read.
    """
    total = checksum = 0
    buffer = bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum = zlib.crc32(view[:count], checksum)
                total += count
                progress(count)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): the checkpoint is incomplete; load another one"
        ) from error
    return Written(nbytes=total, checksum=checksum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor of a file.

    Attributes:
        dtype: of its elements.
        shape: in the file.
        offset: byte of the file where it begins.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors and the metadata of a file.

    Raises:
        CheckpointError: it is no safetensors file, or cut short.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(8)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else _LARGEST_HEADER
            if length > min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(
                    f"{path} has {size:,} bytes and no whole safetensors header: it was cut short or is another file"
                )
            head: dict[str, Any] = json.loads(file.read(length))
        metadata = head.pop("__metadata__", {})
        stored = {
            name: Stored(
                dtype=BY_NAME[item["dtype"]],
                shape=tuple(item["shape"]),
                offset=8 + length + item["data_offsets"][0],
            )
            for name, item in head.items()
        }
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): the checkpoint is incomplete; load another one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header ({error!r})") from error
    return stored, metadata


class RangeReader:
    """Reads ranges of files into tensors; keeps a few files open and one small buffer."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._buffer: Tensor | None = None

    def fill(self, path: Path, offset: int, target: Tensor, dtype: torch.dtype) -> None:
        """Read elements of a file into a flat tensor.

        Args:
            path: the file.
            offset: byte where they begin.
            target: flat; any device, and another dtype than the file's, which rounds.
            dtype: of the file's elements.

        Raises:
            CheckpointError: the file ends before them.
        """
        if target.is_cpu and target.dtype == dtype and target.is_contiguous():
            self._read(path, offset, target)
            return
        buffer = self._bounce()
        step = PIECE_BYTES // dtype.itemsize
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            here = buffer[: part.numel() * dtype.itemsize].view(dtype)
            self._read(path, offset + start * dtype.itemsize, here)
            part.copy_(here)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _bounce(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        return self._buffer

    def _read(self, path: Path, offset: int, target: Tensor) -> None:
        array: Any = target.detach().view(torch.uint8).numpy()
        view = memoryview(array)
        descriptor = self._descriptor(path)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + PIECE_BYTES]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{path} ends at byte {offset + done:,}, wanted {offset + len(view):,}: it was cut short; load another "
                    "checkpoint"
                )
            done += count

    def _descriptor(self, path: Path) -> int:
        found = self._open.get(path)
        if found is None:
            if len(self._open) >= 64:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                found = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be read ({error.strerror}): the checkpoint is incomplete; load another one"
                ) from error
        return found
