"""One rank's part of a save, at once or beside the training; and what all ranks do at its end."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_plugin.checkpoint import folder
from zero_plugin.checkpoint.agreement import agree
from zero_plugin.checkpoint.capture import Capture
from zero_plugin.checkpoint.folder import PartialFolder
from zero_plugin.checkpoint.format import INDEX, file_name, seal_index
from zero_plugin.checkpoint.index import RANK_VALUES, complete
from zero_plugin.checkpoint.progress import shown
from zero_plugin.checkpoint.shardfile import (
    PIECE_BYTES,
    SMALL_BYTES,
    Written,
    header_of,
    pieces_of,
    read_header,
    write_file,
)
from zero_plugin.errors import CheckpointError
from zero_plugin.sharding.control import Control

SNAPSHOT_BYTES = 256 << 20
"""Most bytes that an asynchronous save has copied and not written yet."""

AHEAD_BYTES = 64 << 20
"""Most bytes that a save has read and not written yet, where nothing runs beside it."""


class _Pieces:
    """The bytes of a save on their way to the thread that writes; a bounded number of them.

    Args:
        capture: what is read.
        ended: set when nobody writes any more.
        captured: set here when everything is read.
        copied: every piece is a copy; else only those whose memory is used again.
    """

    def __init__(
        self,
        capture: Capture,
        ended: threading.Event,
        captured: threading.Event,
        *,
        copied: bool,
    ) -> None:
        self._capture = capture
        self._ended = ended
        self._captured = captured
        self._copied = copied
        self._first = threading.Event()
        # New pages cost as much as the copy: buffers go round.
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._line: queue.Queue[_Piece | BaseException | None] = queue.Queue(
            max(1, (SNAPSHOT_BYTES if copied else AHEAD_BYTES) // PIECE_BYTES)
        )
        self._thread = threading.Thread(target=self._read, name="checkpoint pieces", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait_for_volatile(self) -> None:
        """Wait until what user code may change is read."""
        self._first.wait()

    def join(self) -> None:
        """Wait until nothing of the states is read any more, after `ended` is set."""
        self._thread.join()

    def __iter__(self) -> Iterator[Tensor]:
        """The pieces in order, each until the next is asked for; raises what reading raised."""
        while (item := self._next()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item.content
            if item.buffer is not None:
                self._free.put(item.buffer)

    def _next(self) -> _Piece | BaseException | None:
        while not self._ended.is_set():
            with suppress(queue.Empty):
                return self._line.get(timeout=0.1)
        return CheckpointError("the save was dropped")

    def _read(self) -> None:
        end: BaseException | None = None
        try:
            with torch.no_grad():
                for parts in (self._capture.volatile, self._capture.parts):
                    for part in parts:
                        for content in pieces_of((part,)):
                            if self._ended.is_set():
                                return
                            copied = self._copied or part.transient
                            self._put(self._copy(content) if copied else _Piece(content))
                    self._first.set()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that writes
            end = error
        finally:
            self._first.set()
            self._captured.set()
        self._put(end)

    def _copy(self, content: Tensor) -> _Piece:
        if content.numel() < SMALL_BYTES:
            return _Piece(content.clone())
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        target = buffer[: content.numel()]
        target.copy_(content)
        return _Piece(target, buffer)

    def _put(self, item: _Piece | BaseException | None) -> None:
        while not self._ended.is_set():
            try:
                self._line.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


class _Piece(NamedTuple):
    """Bytes, and the buffer that is free again once they are written."""

    content: Tensor
    buffer: Tensor | None = None


class Save:
    """A save that has begun on every rank.

    Args:
        control: the ranks.
        target: the checkpoint's place.
        partial: the folder it is written into, on rank 0.
        path: the same folder's path, on every rank.
        keep_last: how many checkpoints to keep, or None.
    """

    def __init__(
        self,
        control: Control,
        target: Path,
        partial: PartialFolder | None,
        path: Path,
        *,
        keep_last: int | None,
    ) -> None:
        self._control = control
        self._target = target
        self._partial = partial
        self._path = path
        self._keep_last = keep_last
        self._content: Mapping[str, Any] = {}
        self._written: Written | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.captured = threading.Event()
        """Set when nothing of the states is read any more."""

    @property
    def doing(self) -> str:
        """For errors."""
        return f"saving {self._target}"

    @property
    def ended(self) -> bool:
        """Whether this rank's file is written, or failed."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether this rank's file failed."""
        return self._ended.is_set() and self._error is not None

    def write(self, capture: Capture) -> None:
        """Write this rank's file now; an error is kept for `finish`."""
        pieces = _Pieces(capture, self._ended, self.captured, copied=False)
        pieces.start()
        total = sum(part.nbytes for part in (*capture.volatile, *capture.parts))
        with shown(self.doing, total, quiet=self._control.rank > 0) as progress:
            self._take(capture, pieces, progress)

    def fail(self, error: BaseException) -> None:
        """This rank cannot take part."""
        self._error = error
        self.captured.set()
        self._ended.set()

    def start(self, capture: Capture) -> None:
        """Write this rank's file on a thread; returns when what user code may change is copied."""
        pieces = _Pieces(capture, self._ended, self.captured, copied=True)
        pieces.start()
        self._thread = threading.Thread(
            target=self._take, args=(capture, pieces), name="checkpoint", daemon=True
        )
        self._thread.start()
        pieces.wait_for_volatile()

    def abandon(self) -> None:
        """Drop the save; what was there before is there still."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.discard()

    def finish(self) -> None:
        """Wait for every rank's file, and put the checkpoint in its place; a collective.

        Raises:
            CheckpointError: a rank failed; what was there before is there still.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            agree(self._control, self._error, self.doing)
            written = self._written or Written(nbytes=0, checksum=0)
            rows = self._control.exchange(
                torch.tensor([written.nbytes, written.checksum], dtype=torch.int64, device="cpu"),
                label="files of a checkpoint",
            )
            error: BaseException | None = None
            try:
                if self._partial is not None:
                    self._commit(self._partial, [row.tolist() for row in rows])
            except BaseException as failure:  # noqa: BLE001 - raised on every rank
                error = failure
            agree(self._control, error, self.doing)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        if self._partial is not None:
            self._partial.discard()

    # Inside ------------------------------------------------------------------------------------------------------

    def _take(
        self, capture: Capture, pieces: _Pieces, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Write this rank's file from the pieces; an error is kept for `finish`."""
        self._content = capture.content
        try:
            values = {RANK_VALUES: json.dumps(capture.values)}
            header = header_of([*capture.volatile, *capture.parts], values)
            path = self._path / file_name(self._control.rank, self._control.size)
            self._written = write_file(path, header, pieces, progress=progress)
        except BaseException as error:  # noqa: BLE001 - raised on every rank by `finish`
            self._error = error
        finally:
            self._ended.set()
            pieces.join()

    def _commit(self, partial: PartialFolder, rows: list[list[int]]) -> None:
        size = len(rows)
        files = {
            file_name(rank, size): Written(nbytes=nbytes, checksum=checksum)
            for rank, (nbytes, checksum) in enumerate(rows)
        }
        values = [
            json.loads(read_header(self._path / name)[1].get(RANK_VALUES, "null")) for name in files
        ]
        raw = seal_index(complete(self._content, files, self._path, values))
        with (self._path / INDEX).open("xb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        partial.commit()
        if self._keep_last is not None:
            folder.prune(self._target, self._keep_last)
