"""The ranks' small messages, in one order on every rank, whether or not the sender waits for the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.operations import Exchange
from zero_plugin.runtime.ticket import Ticket
from zero_plugin.sharding.group import ProcessGroup

if TYPE_CHECKING:
    from torch import Tensor


class Control:
    """Exchanges and broadcasts of one engine.

    An announcement goes out on a lane and the caller goes on; everything after it waits for it first, so the group sees
    one sequence from one thread at a time.

    Args:
        group: the ranks.
        backend: for the lane.
    """

    def __init__(self, group: ProcessGroup, backend: Backend) -> None:
        self._group = group
        self._lane = backend.lane("control", "host")
        self._pending: Ticket[list[Tensor]] | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    def announce(self, payload: Tensor, *, label: str) -> Ticket[list[Tensor]]:
        """Send a small CPU tensor of the same size on every rank, and go on; the ticket gives every rank's."""
        self._pending = self._lane.submit(
            Exchange(group=self._group, payload=payload, label=label),
            after=() if self._pending is None else (self._pending,),
        )
        return self._pending

    def exchange(self, payload: Tensor, *, label: str) -> list[Tensor]:
        """Every rank's payload, in rank order."""
        self.quiesce()
        return self._group.exchange(payload, label=label)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors equal to rank 0's."""
        self.quiesce()
        self._group.broadcast(tensors)

    def quiesce(self) -> None:
        """Wait until no announcement is under way.

        Raises:
            LaneError: one failed; the cause is chained.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
