"""Accelerate's wrapper of an optimizer whose states lie with an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
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

    def step(self, closure: Any = None) -> Any:
        """Step, unless gradients are still being accumulated."""
        self._prepared.settle()
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The full state in torch's format; all ranks call it."""
        engine = self._prepared.engine_of(self.optimizer)
        if engine is not None and self._prepared.saves_on_rank_0:
            return engine.optimizer_state_dict(self.optimizer, rank0_only=True)
        return super().state_dict()

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
