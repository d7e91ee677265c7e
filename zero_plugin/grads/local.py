"""Full gradients on this rank, from autograd until they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from zero_plugin.errors import EngineStateError
from zero_plugin.grads.sentinel import GradientSentinel
from zero_plugin.sharding.parameters import ManagedParameter


class LocalGradients:
    """What autograd made and no reduction has taken yet, and which parameters have a gradient at all.

    Args:
        zero: called with a parameter's index when user code zeroes its gradient in place.
    """

    def __init__(self, zero: Callable[[int], None]) -> None:
        self._zero = zero
        self._members: dict[int, ManagedParameter] = {}
        self._held: dict[int, Tensor] = {}
        self._late: dict[int, list[Tensor]] = {}
        self._present: set[int] = set()
        self._cleared: set[int] = set()
        self._live = 0
        self._stand_ins: dict[int, GradientSentinel] = {}
        self.generation = 0
        """Changes whenever a gradient arrives or is cleared."""
        self.peak_bytes = 0
        """Most device bytes that gradients held here or packed into buckets took at once."""

    def add_members(self, members: Iterable[ManagedParameter]) -> None:
        """Take on parameters."""
        self._members.update((member.index, member) for member in members)

    def __bool__(self) -> bool:
        """Whether any gradient is held."""
        return bool(self._held or self._late)

    def is_present(self, index: int) -> bool:
        """Whether this rank has a gradient of the parameter, held or reduced."""
        return index in self._present

    def any_present(self, indices: Iterable[int] | None = None) -> bool:
        """Whether any of some parameters (all, if None) has a gradient."""
        if indices is None:
            return bool(self._present)
        return any(index in self._present for index in indices)

    def held(self, index: int) -> Tensor | None:
        """The gradient held, any shape, or None."""
        return self._held.get(index)

    def make_room(self, index: int) -> None:
        """Before autograd accumulates: it must not add to a stand-in."""
        parameter = self._members[index].parameter
        grad = parameter.grad
        if grad is None:
            if index in self._present:
                self._cleared.add(index)
        elif isinstance(grad, GradientSentinel):
            parameter.grad = None
        elif index in self._present:
            # User code replaced the gradient; autograd adds to what it put there.
            self._cleared.add(index)

    def take(self, index: int) -> Tensor | None:
        """Take the gradient out of `Parameter.grad` and leave a stand-in; None if there is none to take.

        Raises:
            EngineStateError: the gradient is sparse.
        """
        member = self._members[index]
        grad = member.parameter.grad
        if grad is None or isinstance(grad, GradientSentinel):
            return None
        if grad.layout != torch.strided:
            member.parameter.grad = None
            raise EngineStateError(
                f"parameter {member.name!r} received a {grad.layout} gradient: sharded reduction needs dense ones; "
                "use sparse=False in its embedding"
            )
        return self._taken(member, grad.detach())

    def adopt(self, index: int, grad: Tensor) -> Tensor:
        """Take a gradient that came elsewhere than in `Parameter.grad`; returns it with what user code put there added."""
        member = self._members[index]
        own = member.parameter.grad
        if own is not None and not isinstance(own, GradientSentinel):
            grad = own.detach() + grad
        return self._taken(member, grad)

    def _taken(self, member: ManagedParameter, grad: Tensor) -> Tensor:
        member.parameter.grad = self._stand_in(member)
        self._present.add(member.index)
        self.generation += 1
        self.track(_bytes(grad))
        return grad

    def _stand_in(self, member: ManagedParameter) -> GradientSentinel:
        stand_in = self._stand_ins.get(member.index)
        if stand_in is None:
            stand_in = GradientSentinel.stand_in(
                member.parameter, member.name, lambda: self._zero(member.index)
            )
            self._stand_ins[member.index] = stand_in
        return stand_in

    def foreign(self) -> list[int]:
        """Parameters whose `Parameter.grad` user code set itself."""
        return [
            index
            for index, member in self._members.items()
            if member.parameter.grad is not None
            and not isinstance(member.parameter.grad, GradientSentinel)
        ]

    def hold(self, index: int, grad: Tensor) -> None:
        """Keep a gradient taken before; a second one is added in fp32."""
        held = self._held.get(index)
        if held is None:
            self._held[index] = grad
            return
        total = held.float().add_(grad)
        self._held[index] = total
        self.track(_bytes(total) - _bytes(held) - _bytes(grad))

    def hold_late(self, index: int, grad: Tensor) -> None:
        """Keep a further gradient of one backward apart: it is added after the first, as autograd would."""
        self._late.setdefault(index, []).append(grad)

    def next_late(self) -> list[int]:
        """Make the next late gradient of each parameter the held one; returns whose."""
        indices = list(self._late)
        for index in indices:
            waiting = self._late[index]
            self.hold(index, waiting.pop(0))
            if not waiting:
                del self._late[index]
        return indices

    def drop(self, index: int) -> None:
        """Let go of a held gradient."""
        held = self._held.pop(index, None)
        if held is not None:
            self.track(-_bytes(held))

    def track(self, nbytes: int) -> None:
        """Count device bytes of unreduced gradients that came or went."""
        self._live += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live)

    def touch(self) -> None:
        """Note that gradients changed."""
        self.generation += 1

    def forget(self, index: int, *, clear: bool) -> None:
        """The parameter has no gradient any more.

        Args:
            index: which parameter.
            clear: set `Parameter.grad` to None too.
        """
        self._present.discard(index)
        self.drop(index)
        for grad in self._late.pop(index, ()):
            self.track(-_bytes(grad))
        if clear:
            self._members[index].parameter.grad = None

    def take_cleared(self, arriving: int = -1) -> set[int]:
        """Parameters whose gradient user code dropped or replaced (`Parameter.grad = ...`) since they had it.

        Args:
            arriving: a parameter whose gradient is being accumulated just now, known already.
        """
        cleared = self._cleared | {
            index
            for index in self._present
            if index != arriving
            and not isinstance(self._members[index].parameter.grad, GradientSentinel)
        }
        self._cleared = set()
        return cleared


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
