"""The split form of a master: a bf16 compute weight and a 16-bit remainder that give the fp32 master exactly.

The remainder is the low half of the master's bits, taken as a signed number. The weight is the high half, rounded to
nearest so that the sum of both gives the master's bits again. 16 bits of remainder can tell 65,536 differences apart;
rounding ties to even would leave 65,537 (a tie above or below an even weight). So ties round away from zero here, and a weight
is another one than `Tensor.to(torch.bfloat16)` gives only where a master lies exactly between two bf16 numbers.

The largest finite masters round to an infinite weight, as they do to nearest even, and come back finite. A NaN stays one and
loses its low half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def join(weights: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of bf16 weights and int16 remainders of the same shape; a new tensor."""
    # As integers, which no thread's flushing of subnormal numbers changes.
    high = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 weights and int16 remainders of a fp32 master."""
    bits = master.view(torch.int32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    # The shift is of signed numbers: int16 then takes the low half of what is left, whatever is above it.
    high = torch.where(is_nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16).to(torch.int16)
    low = torch.where(is_nan, 0, bits).to(torch.int16)
    return high.view(torch.bfloat16), low


def follow(before: Tensor, after: Tensor, remainder: Tensor) -> None:
    """Let remainders follow a write of user code to their weights.

    Where a weight is what it was, the master keeps its low bits; so it does where the weight is the master rounded to
    nearest even, which is then replaced by its rounding here. Anything else is a new master.

    Args:
        before: bf16 weights before the write.
        after: the same after it; changed.
        remainder: int16, of `before` and then of `after`; changed.
    """
    old, new = before.view(torch.int16), after.view(torch.int16)
    nearest = join(before, remainder).to(torch.bfloat16).view(torch.int16)
    kept = (new == old) | (new == nearest)
    new.copy_(torch.where(kept, old, new))
    remainder.mul_(kept)
