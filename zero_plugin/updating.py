"""The engine's methods for updates that run beside other work, or later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zero_plugin.sharding.hooks import untraced
from zero_plugin.stepper import Stepper

if TYPE_CHECKING:
    from zero_plugin.resources import Resources
    from zero_plugin.sharding.sharded import ShardedModel


class UpdatesLate:
    """Base of the engine."""

    _stepper: Stepper
    _resources: Resources
    _sharded: ShardedModel | None

    def _check_open(self, action: str) -> None:
        raise NotImplementedError(action)

    @property
    def speculation(self) -> dict[str, int]:
        """Blocks whose update began inside backward: how many a step took, and how many were undone."""
        return self._stepper.speculation

    def figures(self) -> dict[str, Any]:
        """What this rank did since the start; unlike `ledger()`, waits for nothing.

        Returns:
            "stall_seconds": how long the program was blocked, by cause (gather, gradients, update, files, activations, ranks,
            other; on CUDA only what blocks the host, since there a stream waits for a stream); "prefetch_misses": gathers of
            sharded weights that were not foreseen; "updated_parameters" and "update_seconds": of updates on the host; "moved":
            bytes so far, by direction and collective.
        """
        meter = self._resources.backend.meter
        elements, seconds = meter.updates()
        return {
            "stall_seconds": meter.stalls(),
            "prefetch_misses": 0 if self._sharded is None else self._sharded.gatherer.missed,
            "updated_parameters": elements,
            "update_seconds": seconds,
            "moved": self._resources.ledger.snapshot(),
        }

    def note_tokens(self, tokens: int) -> None:
        """Say how many tokens (or samples) a step of this rank has, for the warning that they are too few."""
        self._resources.backend.meter.tokens = tokens

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
