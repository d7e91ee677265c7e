"""What a NaN or infinite gradient does to a step."""

from __future__ import annotations

import warnings

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import NonFiniteGradientError
from zero_plugin.grads.scaler import LossScaler

_CURE = (
    "look for the first operation that overflows (torch.autograd.set_detect_anomaly), lower the learning rate, or set "
    "nonfinite='propagate' for plain torch's behaviour"
)


class NonFinitePolicy:
    """Counts skipped steps and stops a run that does nothing else.

    Args:
        config: `nonfinite` and `nonfinite_patience`.
        scaler: told of every step's outcome.
    """

    def __init__(self, config: ZeroConfig, scaler: LossScaler) -> None:
        self._config = config
        self._scaler = scaler
        self._consecutive = 0
        self.skipped_steps = 0
        """Optimizer steps skipped so far."""
        self.step_was_skipped = False
        """Whether the last optimizer step was skipped."""

    @property
    def scaler(self) -> LossScaler:
        """The loss scale."""
        return self._scaler

    def passes(self, nonfinite: int) -> bool:
        """Whether a step whose gradients have that many non-finite elements goes on."""
        self.step_was_skipped = bool(nonfinite) and self._config.nonfinite != "propagate"
        if not self.step_was_skipped:
            self._consecutive = 0
            self._scaler.record(overflow=False)
        return not self.step_was_skipped

    def skip(self, where: str) -> None:
        """Note a skipped step.

        Args:
            where: which gradients, as a clause.

        Raises:
            NonFiniteGradientError: `nonfinite="raise"`, or nothing but skipped steps while the loss scale cannot be
                lowered further.
        """
        scale, exhausted = self._scaler.scale, self._scaler.exhausted
        self._scaler.record(overflow=True)
        self.skipped_steps += 1
        self._consecutive += 1
        if self._config.nonfinite == "raise":
            raise NonFiniteGradientError(f"{where}; no weight was changed; {_CURE}")
        if not exhausted:
            return
        if self._consecutive >= self._config.nonfinite_patience:
            raise NonFiniteGradientError(
                f"{where}, for {self._consecutive} steps in a row at loss scale {scale:g}; no weight was changed in them; "
                f"{_CURE}"
            )
        warnings.warn(f"step skipped: {where} (loss scale {scale:g})", RuntimeWarning, stacklevel=5)
