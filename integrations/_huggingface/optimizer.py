"""Accelerate's wrapper of an optimizer whose states lie with an engine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    from collections.abc import Generator

    from zero_plugin.integrations._huggingface.prepared import Prepared


class ZeroAcceleratedOptimizer(AcceleratedOptimizer):
    """Steps on the engine; everything else is the stock wrapper.

    Args:
        optimizer: the user's own.
        prepared: knows its engine.
    """

    def __init__(self, optimizer: Any, prepared: Prepared) -> None:
        # Placing the states on a device is the engine's business, and so is the loss scale.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._prepared = prepared
        self._shown: dict[str, Any] | None = None

    def step(self, closure: Any = None) -> Any:
        """Step, unless gradients are still being accumulated."""
        self._prepared.settle()
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The full state in torch's format; all ranks call it."""
        if self._shown is not None:
            return self._shown
        engine = self._prepared.engine_of(self.optimizer)
        if engine is not None and self._prepared.saves_on_rank_0:
            return engine.optimizer_state_dict(self.optimizer, rank0_only=True)
        return super().state_dict()

    def belongs_to(self, prepared: Prepared) -> None:
        """Act on another Accelerator's engines from now on."""
        self._prepared = prepared

    @contextmanager
    def showing(self, state: dict[str, Any]) -> Generator[None]:
        """Inside, `state_dict` returns a state that was gathered before, so that one rank may ask alone."""
        self._shown = state
        try:
            yield
        finally:
            self._shown = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped for a gradient that is not finite."""
        engine = self._prepared.engine_of(self.optimizer)
        return engine is not None and engine.step_was_skipped

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an optimizer on an engine cannot be copied or pickled, since its states are sharded: save "
            "optimizer.state_dict()"
        )
