"""The compiled update in plain torch, for tensors on any device.

It runs when the optimizer's states live on a device other than the CPU, and it is the oracle of the compiled
kernels: the same operations in the same order, fused at the same places, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zero_plugin.errors import OptimizerError

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.optim.rule import Rule

_Hyper = Sequence[float]
_Step = Callable[["Tensor", Sequence["Tensor"], "Tensor", _Hyper], None]


def _sqrt(values: Tensor) -> Tensor:
    # torch's fp32 square root on the CPU is one unit off for every fifth argument (a vector maths library); rounded from
    # float64 it is the correctly rounded one of the kernels, and of CUDA.
    if values.device.type == "cpu":
        return values.to(torch.float64).sqrt_().to(torch.float32)
    return values.sqrt()


def _fused(factor: Tensor | float, values: Tensor, addend: Tensor) -> Tensor:
    """Factor * values + addend rounded once to fp32, for finite and other values, on any device.

    The sum is made in float64 and its last bit set to odd where it is inexact; rounding that to fp32 rounds the
    exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    wide = torch.float64
    if not isinstance(factor, torch.Tensor):
        factor = torch.tensor(factor, dtype=torch.float32, device=values.device)
    product = factor.to(wide) * values.to(wide)
    other = addend.to(wide)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)
    bits = total.view(torch.int64)
    inexact_even = ((error < 0) | (error > 0)) & ((bits & 1) == 0)
    outward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + outward, bits).view(wide).to(torch.float32)


def _adam(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    average, square = states
    weight = torch.tensor(hyper[3], dtype=torch.float32, device="cpu").item()
    difference = gradient - average
    # torch.lerp measures from the nearer end.
    if weight < 0.5:
        average.copy_(_fused(weight, difference, average))
    else:
        average.copy_(_fused(weight - 1.0, difference, gradient))
    square.copy_(_fused(gradient * hyper[5], gradient, square * hyper[4]))
    # A 0-d tensor on the same device, since division by a number is a multiplication on CUDA.
    correction = torch.tensor(hyper[6], dtype=torch.float32, device=master.device)
    denominator = _sqrt(square).div_(correction).add_(hyper[7])
    master.mul_(hyper[1]).add_((average * hyper[8]).div_(denominator))


def _adagrad(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    (total,) = states
    total.copy_(_fused(gradient, gradient, total))
    master.add_((gradient * hyper[3]).div_(_sqrt(total).add_(hyper[4])))


def _lion(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    (average,) = states
    direction = (average * hyper[3]).add_(gradient * hyper[4]).sign_()
    master.mul_(hyper[1]).sub_(direction.mul_(hyper[7]))
    average.mul_(hyper[5]).add_(gradient * hyper[6])


def _sgd(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    direction = gradient
    if hyper[8]:
        (buffer,) = states
        buffer.copy_(gradient if hyper[6] else _fused(hyper[4], gradient, buffer * hyper[3]))
        direction = _fused(hyper[3], buffer, gradient) if hyper[5] else buffer
    master.copy_(_fused(hyper[7], direction, master))


_STEPS: Mapping[int, _Step] = {0: _adam, 1: _adagrad, 2: _lion, 3: _sgd}


@torch.no_grad()
def update(  # noqa: PLR0913 - one argument a state, as the kernel's table has a column
    rule: Rule,
    *,
    master: Tensor,
    states: Sequence[Tensor],
    gradient: Tensor,
    output: Tensor | None,
    hyper: Sequence[float],
    scale: float,
    clip_value: float | None,
) -> None:
    """Updates `master` and `states` in place and writes the rounded master into `output`.

    Args:
        rule: the update rule.
        master: fp32 weights, any shape.
        states: fp32, one a name in `rule.state_names`, shaped like `master`.
        gradient: fp32, bf16 or fp16, shaped like `master`; not changed.
        output: fp32, bf16 or fp16, or None.
        hyper: a row made by `rule.hyper`.
        scale: factor on the gradient, rounded to fp32.
        clip_value: bound on each scaled gradient element, or None.

    Raises:
        OptimizerError: the number of states is not the rule's.
    """
    if len(states) != len(rule.state_names):
        raise OptimizerError(
            f"rule {rule.name} has the states {rule.state_names}, but {len(states)} were passed"
        )
    factor = torch.tensor(hyper[0] * scale, dtype=torch.float32, device="cpu").item()
    effective = gradient.to(torch.float32) * factor
    if clip_value is not None:
        # As the kernels compare; clamp leaves the sign of a zero open where the bound is zero.
        effective = torch.where(effective < -clip_value, -clip_value, effective)
        effective = torch.where(effective > clip_value, clip_value, effective)
    if hyper[2]:
        effective = _fused(hyper[2], master, effective)
    _STEPS[rule.native_id](master, states, effective, hyper)
    if output is not None:
        output.copy_(master)
