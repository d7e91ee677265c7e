"""Reads of a save that nobody waits for: what they read is held still by clones on the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from zero_plugin.checkpoint.shardfile import Part
from zero_plugin.store.layout import Extent


class HoldsStill(Protocol):
    """Files whose content can be held as it is while they are written to: `NvmeStore`."""

    def clone(self, extent: Extent) -> bool:
        """Hold what an extent has now; False where the system refuses."""
        ...

    @property
    def wants_space(self) -> bool:
        """Whether a write waits for `drop_clones`."""
        ...

    def drop_clones(self) -> None:
        """Let go of all that is held."""
        ...


class Line(Protocol):
    """Where what is read goes: `Pieces`."""

    def read(self, parts: Iterable[Part]) -> None:
        """Read parts into it."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        ...


class LaterReads:
    """Clones blocks' states when told to, and reads them in that order on a thread of its own; drops the clones after that.

    Args:
        pieces: where the bytes go, in the order of the file.
        store: has the files.
        ended: set when nobody writes any more.
    """

    def __init__(self, pieces: Line, store: HoldsStill, ended: threading.Event) -> None:
        self._pieces = pieces
        self._store = store
        self._ended = ended
        self._line: queue.SimpleQueue[Sequence[Part] | threading.Event | None] = queue.SimpleQueue()
        self._over = threading.Event()
        # What is held after the end would be held for ever.
        self._holding = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="checkpoint clones", daemon=True)
        self._thread.start()

    def put(self, extent: Extent, parts: Sequence[Part]) -> bool:
        """Hold an extent still, and have the parts of it read later; False where it cannot be held."""
        with self._holding:
            if self._over.is_set() or not self._store.clone(extent):
                return False
            self._line.put(parts)
            return True

    def settle(self) -> None:
        """Wait until all is read that was put: what comes now follows it in the file."""
        reached = threading.Event()
        self._line.put(reached)
        while not reached.wait(0.1):
            if self._over.is_set():
                return

    def end(self) -> None:
        """Nothing more comes."""
        self._line.put(None)

    def join(self) -> None:
        """Wait until the clones are dropped, once the save has ended."""
        self._thread.join()

    # Inside ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while (item := self._next()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self._pieces.read(item)
        except BaseException as failure:  # noqa: BLE001 - handed to the thread that writes
            error = failure
        finally:
            with self._holding:
                self._over.set()
                self._store.drop_clones()
        self._pieces.end(error)

    def _next(self) -> Sequence[Part] | threading.Event | None:
        while not self._ended.is_set():
            with suppress(queue.Empty):
                return self._line.get(timeout=0.1)
            with self._holding:
                # All that is held has been read. What is to be held next may come after the very write that waits.
                if self._line.empty() and self._store.wants_space:
                    self._store.drop_clones()
        return None
