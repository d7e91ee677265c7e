"""The bytes of a save on their way from the states to the thread that writes; a bounded number of them."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from zero_plugin.checkpoint.shardfile import PIECE_BYTES, SMALL_BYTES, Part, pieces_of
from zero_plugin.errors import CheckpointError

SNAPSHOT_BYTES = 256 << 20
"""Most bytes that an asynchronous save has copied and not written yet."""

AHEAD_BYTES = 64 << 20
"""Most bytes that a save has read and not written yet, where nothing runs beside it."""


class Pieces:
    """A line of pieces between one thread that reads and one that writes.

    Args:
        ended: set when nobody writes any more.
        copied: every piece is a copy; else only those whose memory is used again.
    """

    def __init__(self, ended: threading.Event, *, copied: bool) -> None:
        self._ended = ended
        self._copied = copied
        # New pages cost as much as the copy: buffers go round.
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._line: queue.Queue[_Piece | BaseException | None] = queue.Queue(
            max(1, (SNAPSHOT_BYTES if copied else AHEAD_BYTES) // PIECE_BYTES)
        )

    def read(self, parts: Iterable[Part]) -> None:
        """Put the bytes of parts into the line, as long as somebody writes them."""
        with torch.no_grad():
            for part in parts:
                for content in pieces_of((part,)):
                    if self._ended.is_set():
                        return
                    copied = self._copied or part.transient
                    self._put(self._copy(content) if copied else _Piece(content))

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes: all is read, or reading failed."""
        self._put(error)

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

    def _copy(self, content: Tensor) -> _Piece:
        if content.numel() < SMALL_BYTES:
            return _Piece(content.clone())
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        target = buffer[: content.numel()]
        ctypes.memmove(target.data_ptr(), content.data_ptr(), content.numel())
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
