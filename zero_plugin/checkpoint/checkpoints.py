"""Saves and loads of one engine."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_plugin.checkpoint import folder
from zero_plugin.checkpoint.agreement import agree
from zero_plugin.checkpoint.capture import Capture, capture
from zero_plugin.checkpoint.folder import PartialFolder
from zero_plugin.checkpoint.loading import DelayedUpdate, Load
from zero_plugin.checkpoint.saving import Save
from zero_plugin.checkpoint.source import BlockParts, Holdings
from zero_plugin.config import ZeroConfig
from zero_plugin.grads.nonfinite import NonFinitePolicy
from zero_plugin.runtime.backend import Backend, Lane, Ticket
from zero_plugin.runtime.operations import Snapshot
from zero_plugin.sharding.control import Control
from zero_plugin.sharding.hooks import untraced
from zero_plugin.store.store import NvmeStore


class Checkpoints:
    """Saves and loads of one engine, one at a time.

    Args:
        holdings: its model and states.
        config: its settings.
        control: the ranks.
        backend: its lanes.
        nonfinite: the loss scale, and the count of skipped steps.
        delayed: knows which updates are not shown yet.
    """

    def __init__(
        self,
        *,
        holdings: Holdings,
        config: ZeroConfig,
        control: Control,
        backend: Backend,
        nonfinite: NonFinitePolicy,
        delayed: DelayedUpdate,
    ) -> None:
        self._holdings = holdings
        self._config = config
        self._device = next(
            (m.parameter.device for m in holdings.roster.members), torch.device("cpu")
        )
        self._control = control
        self._backend = backend
        self._nonfinite = nonfinite
        self._delayed = delayed
        self._running: Save | None = None

    def save(
        self,
        directory: str | Path,
        *,
        extra: Any = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
        optimizer: bool = True,
    ) -> None:
        """See `ZeroEngine.save_checkpoint`; `optimizer=False` saves compute weights and buffers only."""
        self.settle()
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._import_weights(beside=asynchronous and optimizer and self._holdings.are_apart)
            save = self._begin(Path(os.path.abspath(directory)), keep_last)  # noqa: PTH100 - keeps links
            try:
                found = capture(
                    self._holdings,
                    config=self._config,
                    device=self._device,
                    counters=self._counters(),
                    pending=self._delayed.state_dict() if optimizer else (),
                    extra=extra,
                    optimizer=optimizer,
                    ahead=() if optimizer else self._delayed.held_chunks(),
                )
                store = self._store_that_clones(found) if asynchronous else None
            except Exception as error:  # noqa: BLE001 - raised on every rank by `finish`
                save.fail(error)
            else:
                if asynchronous:
                    self._running = save
                    lane = self._backend.lane("checkpoint", "host")
                    save.start(found, lane, partial(self._read_states, lane), store)
                    return
                save.write(found)
            save.finish()

    def load(
        self,
        directory: str | Path,
        *,
        strict: bool = True,
        random_states: bool = True,
        weights_only: bool = False,
    ) -> Any:
        """See `ZeroEngine.load_checkpoint`."""
        self.settle()
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._import_weights()
            load = Load(
                self._holdings,
                self._control,
                Path(directory),
                strict=strict,
                weights_only=weights_only,
            )
            load.check()
            for number in range(len(self._holdings.states)):
                self._delayed.forget_held(number)
            load.fill(self._delayed)
            counters = load.counters()
            if counters and not weights_only:
                self._nonfinite.scaler.load_state_dict(counters["loss_scale"])
                self._nonfinite.skipped_steps = counters["skipped_steps"]
            self._holdings.roster.note_published(self._holdings.roster.members)
            extra = load.extra()
            if random_states and not weights_only:
                load.restore_random_states(self._device)
            load.close()
            return extra

    def settle(self) -> None:
        """Wait for an asynchronous save; a collective if one is under way.

        Raises:
            CheckpointError: it failed on some rank.
        """
        running, self._running = self._running, None
        if running is not None:
            running.finish()

    def wait_until_captured(self) -> None:
        """The caller is about to change states: wait until a running save has copied them."""
        if self._running is not None:
            self._running.captured.wait()

    def close(self) -> None:
        """End a running save; drop it where an exception ends the run, since other ranks may not be there."""
        if sys.exc_info()[0] is None:
            self.settle()
        elif self._running is not None:
            running, self._running = self._running, None
            running.abandon()

    def before_step(self) -> None:
        """A step begins: end a save whose files are written. What is not copied yet, the step's updates come after.

        Raises:
            CheckpointError: the save failed on some rank.
        """
        running = self._running
        if running is None:
            return
        mine = 2 if running.failed else int(running.ended)
        rows = self._control.exchange(
            torch.tensor([mine], dtype=torch.int64, device="cpu"), label="asynchronous save"
        )
        found = [int(row[0]) for row in rows]
        if 2 in found or 0 not in found:
            self.settle()

    def _counters(self) -> dict[str, Any]:
        return {
            "loss_scale": self._nonfinite.scaler.state_dict(),
            "skipped_steps": self._nonfinite.skipped_steps,
        }

    # Inside ------------------------------------------------------------------------------------------------------

    def _import_weights(self, *, beside: bool = False) -> None:
        """Take in weights that user code wrote; bring everything in files to its file.

        Args:
            beside: the last step's update goes on; else lanes are at rest afterwards.
        """
        holdings = self._holdings
        for number, states in enumerate(holdings.states):
            if beside:
                self._delayed.take_writes_beside(number)
            else:
                self._delayed.take_writes(number)
            if states.swap is not None:
                states.swap.forget_cache()
        if not beside:
            self._backend.drain()

    def _store_that_clones(self, found: Capture) -> NvmeStore | None:
        """The files, where states in them can be held still while they are read, at no cost."""
        store = self._holdings.store
        extents = [item.extent for item in found.blocks if item.extent is not None]
        return store if store is not None and extents and store.begin_clones(extents) else None

    def _read_states(self, lane: Lane, item: BlockParts, operation: Snapshot) -> Ticket[None]:
        return self._delayed.read_states(item.block, lane, operation, item.after)

    def _begin(self, target: Path, keep_last: int | None) -> Save:
        made: PartialFolder | None = None
        error: Exception | None = None
        try:
            folder.check_keep_last(target, keep_last)
            if self._control.rank == 0:
                made = PartialFolder(target)
        except Exception as failure:  # noqa: BLE001 - raised on every rank
            error = failure
        try:
            agree(self._control, error, f"saving {target}")
            token = 0 if made is None else made.token
            rows = self._control.exchange(
                torch.tensor([token], dtype=torch.int64, device="cpu"), label="checkpoint"
            )
        except BaseException:
            if made is not None:
                made.discard()
            raise
        return Save(
            self._control,
            target,
            made,
            folder.partial_path(target, int(rows[0][0])),
            keep_last=keep_last,
        )
