"""The byte limits of each tier, and what is taken of them."""

from __future__ import annotations

from collections.abc import Mapping

from zero_plugin.config import Tier, ZeroConfig
from zero_plugin.errors import BudgetError
from zero_plugin.runtime.memory import available_host_bytes


class Budget:
    """What one rank's engine may allocate in each tier.

    Args:
        config: the limits.
    """

    def __init__(self, config: ZeroConfig) -> None:
        self._limits: dict[Tier, int | None] = {
            "device": config.limit("device"),
            "host": config.limit("host"),
            "nvme": config.limit("nvme"),
        }
        self._taken: dict[Tier, int] = dict.fromkeys(self._limits, 0)

    def plan(self, need: Mapping[Tier, int]) -> None:
        """Replace what is taken by a new total, before it is allocated.

        Args:
            need: bytes of all states and buffers in each tier.

        Raises:
            BudgetError: a limit, or what the machine has left, is exceeded; nothing is taken then.
        """
        for tier, nbytes in need.items():
            self._check(tier, nbytes)
        available = available_host_bytes()
        more = need.get("host", 0) - self._taken["host"]
        if available is not None and more > available:
            raise BudgetError(
                f"the states and buffers need {more:,} more bytes of host memory on this rank, and the system has "
                f"{available:,} left: use more processes, a smaller bucket_bytes, or place optimizer or gradients elsewhere"
            )
        self._taken.update(need)

    def take(self, tier: Tier, nbytes: int) -> None:
        """Take more of a tier, for a buffer that is needed after all.

        Raises:
            BudgetError: the limit is exceeded; nothing is taken then.
        """
        self._check(tier, self._taken[tier] + nbytes)
        self._taken[tier] += nbytes

    def _check(self, tier: Tier, nbytes: int) -> None:
        limit = self._limits[tier]
        if limit is not None and nbytes > limit:
            raise BudgetError(
                f"the states and buffers need {nbytes:,} bytes of {tier} memory on this rank, and {tier}_limit is "
                f"{limit:,}: raise it, use more processes, a smaller bucket_bytes, or place optimizer or gradients elsewhere"
            )
