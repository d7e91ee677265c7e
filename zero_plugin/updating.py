"""The engine's methods for updates that run beside other work, or later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero_plugin.sharding.hooks import untraced
from zero_plugin.stepper import Stepper


class UpdatesLate:
    """Base of the engine."""

    _stepper: Stepper

    def _check_open(self, action: str) -> None:
        raise NotImplementedError(action)

    @property
    def speculation(self) -> dict[str, int]:
        """Blocks whose update began inside backward: how many a step took, and how many were undone."""
        return self._stepper.speculation

    def wait_for_update(self) -> None:
        """Wait until the weights of the last step are written; nothing else changes.

        Whoever reads a parameter waits for it in any case; this is for code that holds another handle on the memory.

        Raises:
            LaneError: the update failed; the cause is chained.
        """
        self._check_open("wait_for_update")
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._stepper.wait_for_weights()

    def delayed_update_state(self) -> list[dict[str, Any]]:
        """Where the delayed update of each optimizer stands, plain values: to save beside weights and optimizer states."""
        self._check_open("delayed_update_state")
        return self._stepper.state_dict()

    def load_delayed_update_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from `delayed_update_state`, after weights and optimizer states were loaded.

        Without `delayed_update` here, an update that was not shown yet is applied at once.

        Raises:
            CheckpointError: it is of other optimizers or another model; nothing is changed then.
        """
        self._check_open("load_delayed_update_state")
        with untraced(), torch.inference_mode(mode=False), torch.no_grad():
            self._stepper.load_state_dict(state)

    def _end_steps(self) -> None:
        """The last update comes to its end before what it needs is taken away."""
        stepper = getattr(self, "_stepper", None)
        if stepper is not None:
            with untraced(), torch.inference_mode(mode=False), torch.no_grad():
                stepper.close()
