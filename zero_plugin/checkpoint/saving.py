"""One rank's part of a save, at once or beside the training; and what all ranks do at its end."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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


class _Copies:
    """Copies of states on their way to the thread that writes; a bounded number of them.

    Args:
        capture: what is copied.
        ended: set when nobody writes any more.
        captured: set here when everything is copied.
    """

    def __init__(self, capture: Capture, ended: threading.Event, captured: threading.Event) -> None:
        self._capture = capture
        self._ended = ended
        self._captured = captured
        self._first = threading.Event()
        self._line: queue.Queue[Tensor | BaseException | None] = queue.Queue(
            max(1, SNAPSHOT_BYTES // PIECE_BYTES)
        )
        self._thread = threading.Thread(target=self._copy, name="checkpoint copies", daemon=True)

    def start(self) -> None:
        """Begin; returns when what user code may change is copied."""
        self._thread.start()
        self._first.wait()

    def pieces(self) -> Iterator[Tensor]:
        """The copies in order; raises what copying raised."""
        while (item := self._next()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
        self._thread.join()

    def _next(self) -> Tensor | BaseException | None:
        while not self._ended.is_set():
            with suppress(queue.Empty):
                return self._line.get(timeout=0.1)
        return CheckpointError("the save was dropped")

    def _copy(self) -> None:
        end: BaseException | None = None
        try:
            with torch.no_grad():
                for parts in (self._capture.volatile, self._capture.parts):
                    for piece in pieces_of(parts):
                        self._put(piece.clone())
                    self._first.set()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that writes
            end = error
        finally:
            self._first.set()
            self._captured.set()
        self._put(end)

    def _put(self, item: Tensor | BaseException | None) -> None:
        while not self._ended.is_set():
            try:
                self._line.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


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
        self._content = capture.content
        try:
            parts = [*capture.volatile, *capture.parts]
            total = sum(part.nbytes for part in parts)
            with shown(self.doing, total, quiet=self._control.rank > 0) as progress:
                self._write(self._header(capture), pieces_of(parts), progress)
        except BaseException as error:  # noqa: BLE001 - raised on every rank by `finish`
            self._error = error
        finally:
            self.captured.set()
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        """This rank cannot take part."""
        self._error = error
        self.captured.set()
        self._ended.set()

    def start(self, capture: Capture) -> None:
        """Write this rank's file on a thread; returns when what user code may change is copied."""
        self._content = capture.content
        copies = _Copies(capture, self._ended, self.captured)

        def write() -> None:
            try:
                self._write(self._header(capture), copies.pieces())
            except BaseException as error:  # noqa: BLE001 - raised on every rank by `finish`
                self._error = error
            finally:
                self._ended.set()

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        copies.start()

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

    @staticmethod
    def _header(capture: Capture) -> bytes:
        values = json.dumps(capture.values)
        return header_of([*capture.volatile, *capture.parts], {RANK_VALUES: values})

    def _write(
        self,
        header: bytes,
        pieces: Iterator[Tensor],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        path = self._path / file_name(self._control.rank, self._control.size)
        self._written = write_file(path, header, pieces, progress=progress)

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
