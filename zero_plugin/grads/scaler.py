"""The factor on the loss that keeps fp16 gradients in range.

Dynamic scaling follows torch's GradScaler: halve when a gradient overflows, double after 2000 steps without. The scale
is always a power of two, so that scaling and unscaling round nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from zero_plugin.errors import CheckpointError, EngineStateError

_INITIAL = 65536.0
_GROWTH_INTERVAL = 2000
_LARGEST = 2.0**24
_SMALLEST = 1.0


class LossScaler:
    """The loss scale and its history.

    Args:
        setting: `ZeroConfig.loss_scale`.
    """

    def __init__(self, setting: float | Literal["dynamic"] | None) -> None:
        self._dynamic = setting == "dynamic"
        self._scale = _INITIAL if self._dynamic else float(setting or 1.0)
        self._good_steps = 0
        self._outcomes: set[bool] = set()
        self.applied = False
        """Whether a loss was scaled since the last step."""

    @property
    def scale(self) -> float:
        """The factor on the present loss."""
        return self._scale

    @property
    def dynamic(self) -> bool:
        """Whether an overflow lowers the scale."""
        return self._dynamic

    @property
    def exhausted(self) -> bool:
        """Whether the scale cannot be lowered any further."""
        return not self._dynamic or self._scale <= _SMALLEST

    def check_applied(self) -> None:
        """Refuse a gradient of a loss that was not scaled: the step would divide it all the same.

        Raises:
            EngineStateError: the scale is not 1 and no loss was scaled since the last step.
        """
        if self._scale != 1.0 and not self.applied:
            raise EngineStateError(
                f"a backward ran on an unscaled loss while the loss scale is {self._scale:g}: call engine.backward(loss), "
                "or engine.scale_loss(loss).backward()"
            )

    def record(self, *, overflow: bool) -> None:
        """Note the outcome of one optimizer's step; several steps on the gradients of one scale count once."""
        self._outcomes.add(overflow)

    def advance(self) -> None:
        """Take the outcomes in; only while no gradient of the old scale waits for its step."""
        self._scale, self._good_steps = self._following()
        self._outcomes.clear()

    def _following(self) -> tuple[float, int]:
        if not self._dynamic or not self._outcomes:
            return self._scale, self._good_steps
        if True in self._outcomes:
            return max(self._scale / 2, _SMALLEST), 0
        if self._good_steps + 1 < _GROWTH_INTERVAL:
            return self._scale, self._good_steps + 1
        return min(self._scale * 2, _LARGEST), 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values that restore the scaler."""
        scale, good_steps = self._following()
        return {"scale": scale, "good_steps": good_steps, "dynamic": self._dynamic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore.

        Raises:
            CheckpointError: the state lacks a key or holds a scale that is not a positive number.
        """
        try:
            scale, good_steps = float(state["scale"]), int(state["good_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"loss scale state {dict(state)!r} lacks a usable 'scale' or 'good_steps'"
            ) from error
        if not scale > 0:
            raise CheckpointError(f"loss scale state holds scale={scale!r}: it must be above 0")
        if self._dynamic:
            self._scale, self._good_steps = scale, good_steps
            self._outcomes.clear()
