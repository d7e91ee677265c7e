"""A leaf of its own for each part of a step: the parameters as one micro-batch sees them.

Where the graphs of several micro-batches run backward together, autograd adds up what reaches one parameter, in its own order and
in the parameter's dtype. So each part computes with aliases of the parameters, on the same memory, and each alias gets the
gradient of its part alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.errors import EngineStateError
from zero_plugin.sharding.hooks import after_accumulation, is_own_hook
from zero_plugin.sharding.parameters import RESIDENT, ManagedParameter

Receive = Callable[[int, int, Tensor], None]
"""Called with the index of a parameter, the number of a part, and its gradient."""


class PartLeaves:
    """The leaves of several parts.

    Args:
        model: whose modules hold the parameters.
        members: the parameters; those that are frozen now keep their own.
        parts: how many.
        receive: takes the gradients.

    Raises:
        EngineStateError: a parameter has a hook that would not see its gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Iterable[ManagedParameter],
        parts: int,
        receive: Receive,
    ) -> None:
        self._members = [item for item in members if item.parameter.requires_grad]
        self._receive = receive
        for member in self._members:
            member.leaves = [self._make(member, part) for part in range(parts)]
        self._places = _places(model, self._members)

    @property
    def members(self) -> Sequence[ManagedParameter]:
        """Whose leaves there are."""
        return self._members

    def show(self, part: int | None) -> None:
        """Let the modules hold the leaves of one part, or the parameters themselves."""
        for holder, key, member in self._places:
            holder[key] = member.parameter if part is None else member.leaves[part]

    def retire(self) -> None:
        """Let go of the memory: a graph that somebody keeps holds leaves, and must not hold weights."""
        self.show(None)
        for member in self._members:
            leaves, member.leaves = member.leaves, []
            with (
                torch._C.DisableTorchFunctionSubclass(),
                torch.inference_mode(mode=False),
                torch.no_grad(),
            ):
                for leaf in leaves:
                    leaf.__class__ = nn.Parameter
                    leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
                    leaf.grad = None

    def _make(self, member: ManagedParameter, part: int) -> nn.Parameter:
        parameter: Any = member.parameter
        for hook in _hooks_of(parameter, "_post_accumulate_grad_hooks"):
            if not is_own_hook(hook):
                raise EngineStateError(
                    f"parameter {member.name!r} has a post-accumulate hook ({hook!r}), which layer_first cannot call: take it off, "
                    "or run the micro-batches one after another"
                )
        if member.unit == RESIDENT:
            # Touched, so that an update that still writes it is waited for: its modules look for the parameter, not for this.
            parameter.detach()
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(mode=False):
            leaf: Any = nn.Parameter(parameter.detach())
        leaf.__class__ = type(parameter)
        this, own, index = weakref.ref(self), weakref.ref(leaf), member.index

        def arrived() -> None:
            leaves, found = this(), own()
            if leaves is not None and found is not None:
                leaves.hand_over(index, part, found)

        after_accumulation(leaf, arrived, _hooks_of(parameter, "_backward_hooks"))
        return leaf

    def hand_over(self, index: int, part: int, leaf: Tensor) -> None:
        """A leaf's gradient has come."""
        with torch._C.DisableTorchFunctionSubclass():
            grad, leaf.grad = leaf.grad, None
        if grad is not None:
            self._receive(index, part, grad.detach())


def _hooks_of(parameter: Any, kind: str) -> list[Any]:
    with torch._C.DisableTorchFunctionSubclass():
        return list((getattr(parameter, kind) or {}).values())


def _places(
    model: nn.Module, members: Sequence[ManagedParameter]
) -> list[tuple[Any, Any, ManagedParameter]]:
    """Where the modules hold the parameters: container, key, and whose."""
    member_of = {id(member.parameter): member for member in members}
    found: list[tuple[Any, Any, ManagedParameter]] = []
    for module in model.modules():
        # Recurrent modules of torch keep a list beside.
        flat: Any = getattr(module, "_flat_weights", None)
        own: Any = module._parameters  # noqa: SLF001 - to be exchanged at every turn, which the public way is too slow for
        holders: list[Any] = [(own, list(own.items()))]
        if isinstance(flat, list):
            holders.append((flat, list(enumerate(flat))))
        for holder, entries in holders:
            found += [
                (holder, key, member_of[id(item)]) for key, item in entries if id(item) in member_of
            ]
    return found
