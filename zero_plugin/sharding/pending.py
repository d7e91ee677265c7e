"""Weights that an update is still writing: whoever touches one waits for it, and for no other.

Between a step and the next use of a weight its update may run beside other work. Until then its parameter is of a class that
stands for "on its way": metadata is answered at once, anything else waits for the update first. A module waits for its own
parameters before its forward, so that what it does with them (compiled code of others included) meets plain parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.sharding.guard import is_metadata, tensors_in
from zero_plugin.sharding.hooks import WaitHooks, undisturbed
from zero_plugin.sharding.parameters import ManagedParameter


class PendingParameter(nn.Parameter):
    """A parameter whose new weights are on their way; it becomes a plain one when it is touched."""

    waiter_reference: ClassVar[weakref.ref[PendingWeights] | None] = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata at once; wait for the weights before anything else."""
        kwargs = kwargs or {}
        if is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for item in tensors_in(args, kwargs):
            if isinstance(item, PendingParameter):
                item.arrive()
        return func(*args, **kwargs)

    def arrive(self) -> None:
        """Wait for the weights; a plain parameter afterwards."""
        reference = type(self).waiter_reference
        waiter = None if reference is None else reference()
        if waiter is None:
            _make_plain(self)
        else:
            waiter.wait_for(self)

    # What torch does not ask `__torch_function__` about.

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The weights, once they are here."""
        self.arrive()
        return repr(self)

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of the new weights."""
        self.arrive()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle the new weights."""
        self.arrive()
        return self.__reduce_ex__(proto)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Write once the new weights are here."""
        self.arrive()
        return self.set_(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Convert the new weights."""
        self.arrive()
        return self.as_subclass(cls)


class PendingWeights:
    """The weights of one model that updates are writing.

    Args:
        model: whose modules wait before their forward.
        backend: what computes waits.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self._backend = backend
        self._tickets: dict[int, tuple[Ticket[Any], tuple[ManagedParameter, ...]]] = {}
        self._hooks = WaitHooks(model, self.finish, self.finish_all)
        self._class = type(
            "PendingParameter",
            (PendingParameter,),
            {"waiter_reference": weakref.ref(self), "__module__": __name__},
        )
        self._opaque = any(isinstance(item, torch.jit.ScriptModule) for item in model.modules())

    @property
    def can_wait(self) -> bool:
        """Whether every use of a weight can be seen: not inside compiled code that holds it."""
        return not self._opaque and not _compiles()

    def expect(self, members: Iterable[ManagedParameter], ticket: Ticket[Any]) -> None:
        """An update writes the weights of some parameters until `ticket` ends."""
        if ticket.done:
            ticket.on(self._backend.compute)
            return
        group = tuple(members)
        if any(type(member.parameter) is not nn.Parameter for member in group):
            ticket.on(self._backend.compute)
            return
        for member in group:
            self._tickets[id(member.parameter)] = (ticket, group)
            member.parameter.__class__ = self._class
        self._hooks.arm([member.parameter for member in group])

    def wait_for(self, parameter: Tensor) -> None:
        """Wait for one parameter's weights, and show those that came with them."""
        found = self._tickets.get(id(parameter))
        if found is None:
            _make_plain(parameter)
            return
        ticket, group = found
        with undisturbed():
            self._show(group)
            ticket.on(self._backend.compute)

    def finish(self, parameters: Sequence[Tensor]) -> None:
        """Wait for some parameters' weights."""
        for parameter in parameters:
            if id(parameter) in self._tickets:
                self.wait_for(parameter)

    def finish_all(self) -> None:
        """Wait for all weights.

        Raises:
            LaneError: an update failed; the others are waited for all the same.
        """
        failure: BaseException | None = None
        while self._tickets:
            ticket, group = next(iter(self._tickets.values()))
            try:
                with undisturbed():
                    self._show(group)
                    ticket.on(self._backend.compute)
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        self._hooks.disarm()
        if failure is not None:
            raise failure

    def forget(self) -> None:
        """Show every parameter without waiting: the lanes were brought to rest."""
        for _, group in list(self._tickets.values()):
            self._show(group)
        self._hooks.disarm()

    def _show(self, group: Sequence[ManagedParameter]) -> None:
        for member in group:
            self._tickets.pop(id(member.parameter), None)
            _make_plain(member.parameter)


def _make_plain(parameter: Any) -> None:
    parameter.__class__ = nn.Parameter


def _compiles() -> bool:
    """Whether Dynamo compiles in this process: its guards look at the class of a parameter."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends: dict[int, Any] = getattr(frames, "cached_backends", {})
    return any(backend is not None for backend in backends.values())
