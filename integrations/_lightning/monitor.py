"""A callback that gives each step's figures to the logger, for either spelling of Lightning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from zero_plugin.machine.figures import StepFigures, tokens_of

_logger = logging.getLogger("zero_plugin")


class MonitorCallback:
    """Mixin: tier bytes, bytes moved and seconds of each step to the logger; one line at the end.

    Args:
        folder: where the figures are written too, for `zero-plugin report`; None: nowhere.
        every: steps between two entries in the logger.
    """

    def __init__(self, folder: str | Path | None = None, *, every: int = 1) -> None:
        super().__init__()
        self._folder = folder
        self._every = max(1, every)
        self._figures: StepFigures | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The engine is there."""
        engine: Any = getattr(trainer.strategy, "engine", None)
        self._figures = None if engine is None else StepFigures(engine, self._folder)
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step may have ended."""
        if self._figures is None or trainer.global_step == self._step:
            return
        accumulated = max(1, int(getattr(trainer, "accumulate_grad_batches", 1)))
        self._figures.note_tokens(accumulated * tokens_of(batch))
        self._step = trainer.global_step
        figures = self._figures.step()
        if trainer.is_global_zero and self._step % self._every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=self._step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say what it took."""
        if self._figures is not None and trainer.is_global_zero:
            _logger.info("%s", self._figures.summary())
        self._figures = None
