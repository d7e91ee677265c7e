"""The compiled update in plain torch, for tensors on any device.

It runs when the optimizer's states live on a device other than the CPU, and it is the oracle of the compiled
kernels: the same operations in the same order, each rounded to fp32 on its own, so both give the same bits.
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


def _adam(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    average, square = states
    weight = torch.tensor(hyper[3], dtype=torch.float32).item()
    difference = gradient - average
    # torch.lerp measures from the nearer end.
    if weight < 0.5:
        average.add_(difference * weight)
    else:
        back = (torch.tensor(weight, dtype=torch.float32) - 1.0).item()
        average.copy_(gradient + difference * back)
    square.mul_(hyper[4]).add_((gradient * hyper[5]).mul_(gradient))
    # A 0-d tensor on the same device, since division by a number is a multiplication on CUDA.
    correction = torch.tensor(hyper[6], dtype=torch.float32, device=master.device)
    denominator = _sqrt(square).div_(correction).add_(hyper[7])
    master.mul_(hyper[1]).add_((average * hyper[8]).div_(denominator))


def _adagrad(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    (total,) = states
    total.add_(gradient * gradient)
    master.add_((gradient * hyper[3]).div_(_sqrt(total).add_(hyper[4])))


def _lion(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    (average,) = states
    direction = (average * hyper[3]).add_(gradient * hyper[4]).sign_()
    master.mul_(hyper[1]).sub_(direction.mul_(hyper[7]))
    average.mul_(hyper[5]).add_(gradient * hyper[6])


def _sgd(master: Tensor, states: Sequence[Tensor], gradient: Tensor, hyper: _Hyper) -> None:
    if not hyper[8]:
        master.add_(gradient * hyper[7])
        return
    (buffer,) = states
    if hyper[6]:
        buffer.copy_(gradient)
    else:
        buffer.mul_(hyper[3]).add_(gradient * hyper[4])
    direction = gradient + buffer * hyper[3] if hyper[5] else buffer
    master.add_(direction * hyper[7])


_STEPS: Mapping[int, _Step] = {0: _adam, 1: _adagrad, 2: _lion, 3: _sgd}


@torch.no_grad()
def update(
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
    factor = torch.tensor(hyper[0] * scale, dtype=torch.float32).item()
    effective = gradient.to(torch.float32) * factor
    if clip_value is not None:
        effective.clamp_(-clip_value, clip_value)
    if hyper[2]:
        effective.add_(master * hyper[2])
    _STEPS[rule.native_id](master, states, effective, hyper)
    if output is not None:
        output.copy_(master)
