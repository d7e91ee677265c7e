"""Any element-wise torch optimizer, run as it is on this rank's slices; and the probe that refuses the others.

It is slower than a compiled rule: one pass over memory for every tensor operation of its step.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.errors import OptimizerError

_STEPS = 3


def clone_optimizer(
    optimizer: torch.optim.Optimizer, params: list[Tensor], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """A torch optimizer of the same class and attributes over other tensors, without state or hooks."""
    clone = object.__new__(_plain_class(optimizer))
    clone.__dict__.update(
        {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    )
    clone.state = defaultdict(dict)
    clone.param_groups = [{**options, "params": params}]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if name in clone.__dict__:
            setattr(clone, name, OrderedDict())
    return clone


def _plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    return getattr(type(optimizer), "zero_plain_class", type(optimizer))


class ForeignBlock:
    """A torch optimizer over one block's master slices.

    Args:
        optimizer: the user's optimizer, whose class and options are used.
        masters: position in the block to this rank's fp32 slice, which may be empty.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[int, Tensor]) -> None:
        self._members: dict[int, tuple[nn.Parameter, torch.optim.Optimizer]] = {}
        for position, master in masters.items():
            # An empty slice still has the scalars that go with each step (counts, products of betas): an element of its own
            # keeps them the same as on the ranks that hold the parameter.
            held = master if master.numel() else torch.zeros(1, device=master.device)
            parameter = nn.Parameter(held, requires_grad=True)
            self._members[position] = (parameter, clone_optimizer(optimizer, [parameter], {}))

    @property
    def state_bytes(self) -> int:
        """Bytes of the states so far; a torch optimizer makes them at its first step."""
        return sum(
            value.numel() * value.element_size()
            for parameter, optimizer in self._members.values()
            for value in optimizer.state[parameter].values()
            if isinstance(value, Tensor)
        )

    def step(
        self, gradients: Mapping[int, Tensor], groups: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Step the members that have a gradient, with their groups' present options."""
        for position, gradient in gradients.items():
            parameter, optimizer = self._members[position]
            parameter.grad = gradient if gradient.numel() else torch.zeros_like(parameter)
            optimizer.param_groups[0] = {**groups[position], "params": [parameter]}
            optimizer.step()
            parameter.grad = None

    def state(self, position: int) -> dict[str, Any]:
        """State of one member's slice, torch's names; empty before its first step."""
        parameter, optimizer = self._members[position]
        return dict(optimizer.state[parameter])

    def load(self, position: int, state: Mapping[str, Any]) -> None:
        """Replace the state of one member's slice."""
        parameter, optimizer = self._members[position]
        optimizer.state[parameter] = {
            key: self._own(value, parameter) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    @staticmethod
    def _own(value: Tensor, parameter: Tensor) -> Tensor:
        if value.dim() == 1 and value.numel() == 0:
            return torch.zeros_like(parameter)
        return value.clone()


def check_element_wise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements.

    Steps a small matrix whole and the same matrix cut into flat pieces, three times, and compares.

    Raises:
        OptimizerError: the two differ, or the optimizer cannot step without a closure or on a flat slice.
    """
    name = _plain_class(optimizer).__name__
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    cure = (
        "use an element-wise optimizer (the compiled Adam, AdamW, Adagrad, Lion, SGD, or another of torch.optim), or "
        "train without zero-plugin"
    )
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(6, 4, generator=generator, device="cpu")
    whole = nn.Parameter(start.clone())
    pieces = [nn.Parameter(piece.clone()) for piece in start.reshape(-1).split([5, 12, 7])]
    try:
        stepped = clone_optimizer(optimizer, [whole], options)
        split = clone_optimizer(optimizer, list(pieces), options)
        for _ in range(_STEPS):
            gradient = torch.randn(6, 4, generator=generator, device="cpu")
            whole.grad = gradient.clone()
            for piece, part in zip(pieces, gradient.reshape(-1).split([5, 12, 7]), strict=True):
                piece.grad = part.clone()
            stepped.step()
            split.step()
    except Exception as error:
        raise OptimizerError(
            f"{name} cannot run on shards: it failed on a flat slice without a closure "
            f"({type(error).__name__}: {error}); {cure}"
        ) from error
    joined = torch.cat([piece.detach() for piece in pieces]).view(6, 4)
    if not torch.allclose(whole.detach(), joined, rtol=1e-5, atol=1e-6, equal_nan=True):
        worst = (whole.detach() - joined).abs().max().item()
        raise OptimizerError(
            f"{name} cannot run on shards: its update of one element depends on the others (stepping a matrix whole "
            f"and in pieces differed by {worst:.3g}); {cure}"
        )
