"""The engine's methods for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_plugin.checkpoint.checkpoints import Checkpoints
from zero_plugin.grads.scaler import LossScaler


class SavesCheckpoints:
    """Base of the engine."""

    _checkpoints: Checkpoints
    _scaler: LossScaler

    def _check_open(self, action: str) -> None:
        raise NotImplementedError(action)

    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        extra: Any = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
        weights_only: bool = False,
    ) -> None:
        """Save weights, optimizer states, loss scale and random states to a folder; all ranks call it.

        Every rank writes its own slices, in bounded buffers. The folder is complete when it appears under its name; one that is
        there already is replaced then. Gradients of an unfinished step are not saved.

        Args:
            directory: the checkpoint's folder, on a file system that all ranks see.
            extra: tensors, numbers, text, lists, tuples and dicts of yours, handed back by `load_checkpoint`; rank 0's.
            keep_last: then remove the oldest checkpoints beside it whose names differ from this one's in numbers alone, such as
                `step-1000`, until this many are left.
            asynchronous: return as soon as what your code may change is copied, and write the state of this moment beside the
                training. The next step waits for what is not copied yet; the checkpoint appears, or its error is raised, in a
                later step, save, load, `drain` or `close`.
            weights_only: leave masters and optimizer states out; compute weights and buffers are saved.

        Raises:
            CheckpointError: on every rank, if one fails. An earlier checkpoint of this name is still there, the training state is as
                it was, and training may go on.
        """
        self._check_open("save_checkpoint")
        self._checkpoints.save(
            directory,
            extra=extra,
            keep_last=keep_last,
            asynchronous=asynchronous,
            optimizer=not weights_only,
        )

    def load_checkpoint(
        self,
        directory: str | Path,
        *,
        strict: bool = True,
        random_states: bool = True,
        weights_only: bool = False,
    ) -> Any:
        """Load what `save_checkpoint` saved, at any number of ranks, stage and placement; all ranks call it.

        Every rank reads what its slices need. The sums of all files are checked first.

        Args:
            directory: the checkpoint's folder.
            strict: whether everything must fit; else what fits is loaded, and what was left out is logged as a warning.
            random_states: whether the random number generators of torch, Python and NumPy go on as saved. With another number of
                ranks each rank takes the states of the saved rank of its number, and ranks beyond keep their own.
            weights_only: load weights and buffers alone and begin anew: moments as at the start, step counts zero.

        Returns:
            The `extra` of the save.

        Raises:
            CheckpointError: on every rank, if one finds the checkpoint damaged, incomplete or unfit; nothing is changed then.
        """
        self._check_open("load_checkpoint")
        return self._checkpoints.load(
            directory, strict=strict, random_states=random_states, weights_only=weights_only
        )

    def _end_saves(self) -> None:
        """End an asynchronous save; an engine that never came up has none."""
        checkpoints: Checkpoints | None = getattr(self, "_checkpoints", None)
        if checkpoints is not None:
            checkpoints.close()

    def loss_scale_state(self) -> dict[str, Any]:
        """The loss scaler's state, plain values."""
        return self._scaler.state_dict()

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        """Restore the loss scaler."""
        self._scaler.load_state_dict(state)
