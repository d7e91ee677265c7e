"""The byte limits of each tier, and what is taken of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zero_plugin.config import Tier, ZeroConfig, parse_bytes
from zero_plugin.errors import BudgetError, ConfigError
from zero_plugin.runtime.memory import available_host_bytes

if TYPE_CHECKING:
    import torch


class Budget:
    """What one rank's engine may allocate in each tier.

    Args:
        config: the limits.
        device: where the model computes; host memory is pinned for a CUDA device.

    Raises:
        ConfigError: `pinned_limit` is set where nothing is pinned.
    """

    def __init__(self, config: ZeroConfig, device: torch.device) -> None:
        self._pinned: int | None = None
        if config.pinned_limit is not None:
            if device.type != "cuda":
                raise ConfigError(
                    f"pinned_limit={config.pinned_limit!r} has no effect on {device}: only memory for a CUDA device is "
                    "pinned; use host_limit"
                )
            self._pinned = parse_bytes(config.pinned_limit, "pinned_limit")
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
        limits = {f"{tier}_limit": self._limits[tier]}
        if tier == "host":
            limits["pinned_limit"] = self._pinned
        for name, limit in limits.items():
            if limit is not None and nbytes > limit:
                raise BudgetError(
                    f"the states and buffers need {nbytes:,} bytes of {tier} memory on this rank, and {name} is {limit:,}: "
                    "raise it, use more processes, a smaller bucket_bytes, or place optimizer or gradients elsewhere"
                )
