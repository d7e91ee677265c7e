"""The gradient's norm and the factor that clips by it.

Partials are exact sums of squares (see `kernels.NormPartial`), merged over blocks and ranks and rounded once, so every stage, placement and bucket size gives the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_plugin.errors import ConfigError
from zero_plugin.kernels import SQUARE_EXPONENT, NormPartial

NormSummary = NormPartial
"""A merged partial: sum of squares, largest magnitude, count of non-finite elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """What a step applies to a gradient before the update: `clamp(g * factor, -value, value)`."""

    factor: float = 1.0
    value: float | None = None


def merge_partials(partials: Iterable[NormPartial]) -> NormSummary:
    """Merge partials in order."""
    total = NormPartial()
    for partial in partials:
        total = total.merge(partial)
    return total


def read_partial(partial: NormPartial | Tensor) -> NormPartial:
    """A partial as `NormPartials` gives it, exact from the host or in float64 from a device."""
    if isinstance(partial, NormPartial):
        return partial
    squares, largest, nonfinite = partial.tolist()
    numerator, denominator = squares.as_integer_ratio()
    return NormPartial(
        sum_squares=(numerator << SQUARE_EXPONENT) // denominator,
        absmax=largest,
        nonfinite=int(nonfinite),
    )


def norm_of(summary: NormSummary, norm_type: float, scale: float) -> float:
    """The norm of the unscaled gradient.

    Args:
        summary: merged over blocks and ranks, of gradients multiplied by `scale`.
        norm_type: 2 or infinity.
        scale: the loss scale.

    Raises:
        ConfigError: any other norm.
    """
    if norm_type == 2.0:
        return summary.norm() / scale
    if math.isinf(norm_type) and norm_type > 0:
        return summary.absmax / scale
    raise ConfigError(
        f"norm_type={norm_type!r} is not supported on sharded gradients: use 2 or infinity, or read the gradients "
        "inside `with engine.full_grads():`"
    )


def clip_factor(norm: float, max_norm: float) -> float:
    """Torch's clip coefficient, in fp32: `min(1, max_norm / (norm + 1e-6))`."""
    coefficient = torch.tensor(max_norm, dtype=torch.float32, device="cpu") / (
        torch.tensor(norm, dtype=torch.float32, device="cpu") + 1e-6
    )
    return float(torch.clamp(coefficient, max=1.0))
