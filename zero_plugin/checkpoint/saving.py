"""One rank's part of a save, at once or beside the training; and what all ranks do at its end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from zero_plugin.checkpoint.later import LaterReads
from zero_plugin.checkpoint.pieces import Pieces
from zero_plugin.checkpoint.progress import shown
from zero_plugin.checkpoint.shardfile import Written, header_of, read_header, write_file
from zero_plugin.checkpoint.source import BlockParts
from zero_plugin.errors import LaneError
from zero_plugin.runtime.backend import Lane, Ticket
from zero_plugin.runtime.operations import Snapshot
from zero_plugin.sharding.control import Control
from zero_plugin.store.store import NvmeStore

OrderedRead = Callable[[BlockParts, Snapshot], Ticket[None]]
"""Has a lane read a block's states between its last update and its next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taker:
    """Copies the states of one block, or has them held still; an error is the save's and not the lane's."""

    item: BlockParts
    pieces: Pieces
    later: LaterReads | None

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The states."""
        return self.item.reads

    def take(self) -> None:
        """Copy them."""
        extent, parts = self.item.extent, self.item.parts
        try:
            if self.later is not None:
                if extent is not None and self.later.put(extent, parts):
                    return
                self.later.settle()
            self.pieces.read(parts)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that writes
            self.pieces.end(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Last:
    """Follows the last block: says that all are copied, or that an update failed and its block's states are undefined."""

    end: Callable[[], None]
    pieces: Pieces
    taken: list[Ticket[None]]
    captured: threading.Event
    reads: tuple[Tensor, ...] = ()

    def take(self) -> None:
        """Say it."""
        try:
            for ticket in self.taken:
                ticket.wait()
        except LaneError as error:
            self.pieces.end(error)
        else:
            self.end()
        finally:
            self.captured.set()


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
        self._later: LaterReads | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.captured = threading.Event()
        """Set when what is read of the states no longer changes with them."""

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
        pieces = Pieces(self._ended, copied=False)
        reader = threading.Thread(
            target=self._read, args=(capture, pieces), name="checkpoint pieces", daemon=True
        )
        reader.start()
        try:
            total = sum(part.nbytes for part in capture.parts)
            with shown(self.doing, total, quiet=self._control.rank > 0) as progress:
                self._take(capture, pieces, progress)
        finally:
            self._ended.set()
            reader.join()

    def fail(self, error: BaseException) -> None:
        """This rank cannot take part."""
        self._error = error
        self.captured.set()
        self._ended.set()

    def start(
        self, capture: Capture, lane: Lane, read: OrderedRead, store: NvmeStore | None
    ) -> None:
        """Write this rank's file on a thread; returns when what user code may change is copied.

        Args:
            capture: what is saved.
            lane: a host lane, which copies the rest.
            read: puts a copy of a block's states into it, in the order of updates.
            store: holds states in files still while they are read; None where that cannot be done.
        """
        pieces = Pieces(self._ended, copied=True)
        self._thread = threading.Thread(
            target=self._take, args=(capture, pieces), name="checkpoint", daemon=True
        )
        self._thread.start()
        later = None if store is None else LaterReads(pieces, store, self._ended)
        self._later = later
        taken: list[Ticket[None]] = []
        try:
            pieces.read(capture.volatile)
            for item in capture.blocks:
                taker = _Taker(item=item, pieces=pieces, later=later)
                taken.append(read(item, Snapshot(taker=taker, label=f"save {item.block.name}")))
        except BaseException as error:
            pieces.end(error)
            self.captured.set()
            if not isinstance(error, Exception):
                raise
            return
        end = pieces.end if later is None else later.end
        last = _Last(end=end, pieces=pieces, taken=taken, captured=self.captured)
        lane.submit(Snapshot(taker=last, label="end of a save"))

    def abandon(self) -> None:
        """Drop the save; what was there before is there still."""
        self._ended.set()
        self._join()
        self.discard()

    def finish(self) -> None:
        """Wait for every rank's file, and put the checkpoint in its place; a collective.

        Raises:
            CheckpointError: a rank failed; what was there before is there still.
        """
        self._join()
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

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._later is not None:
            self._later.join()

    def _read(self, capture: Capture, pieces: Pieces) -> None:
        """Read everything, on a thread of its own."""
        error: BaseException | None = None
        try:
            pieces.read(capture.parts)
        except BaseException as failure:  # noqa: BLE001 - handed to the thread that writes
            error = failure
        finally:
            self.captured.set()
        pieces.end(error)

    def _take(
        self, capture: Capture, pieces: Pieces, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """Write this rank's file from the pieces; an error is kept for `finish`."""
        self._content = capture.content
        try:
            values = {RANK_VALUES: json.dumps(capture.values)}
            header = header_of(capture.parts, values)
            path = self._path / file_name(self._control.rank, self._control.size)
            self._written = write_file(path, header, pieces, progress=progress)
        except BaseException as error:  # noqa: BLE001 - raised on every rank by `finish`
            self._error = error
        finally:
            self._ended.set()

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
