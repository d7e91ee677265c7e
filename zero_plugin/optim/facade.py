"""The user's own optimizer object, acting on the engine.

The object is re-classed in place, so everything that holds it (schedulers, callbacks, frameworks) goes on working and
there are never two optimizers of which one silently does nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from typing_extensions import Self

from zero_plugin.errors import EngineStateError


class OptimizerHost(Protocol):
    """What a facade asks of the engine."""

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Update the optimizer's parameters."""
        ...

    def optimizer_zero_grad(self, optimizer: Optimizer, *, set_to_none: bool) -> None:
        """Clear its gradients."""
        ...

    def optimizer_state_dict(
        self, optimizer: Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Its full state in torch's format; a collective."""
        ...

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Replace its state from torch's format; a collective."""
        ...

    def parameters_changed(self, optimizer: Optimizer) -> None:
        """A param group was added."""
        ...


class FacadeMixin(Optimizer):
    """Overrides that send an optimizer's work to the engine."""

    zero_plain_class: type[Optimizer]
    zero_host: OptimizerHost | None = None
    zero_identity: weakref.ref[FacadeMixin]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if any, with gradients on, then the engine's step."""
        host = self._host("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        host.optimizer_step(self._real())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clear the gradients that the engine owns, and plain ones of parameters it does not manage."""
        self._host("zero_grad").optimizer_zero_grad(self._real(), set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The full state in torch's format, the same on every rank; all ranks must call it."""
        host = self._host("state_dict")
        real = self._real()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(real)
        state = host.optimizer_state_dict(real)
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(real, state)
            if changed is not None:
                state = changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's format; every rank gives the full state and keeps its slices."""
        host = self._host("load_state_dict")
        real = self._real()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(real, state_dict)
            if changed is not None:
                state_dict = changed
        host.load_optimizer_state_dict(real, state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(real)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are managed from the next backward on."""
        host = self._host("add_param_group")
        super().add_param_group(param_group)
        try:
            host.parameters_changed(self._real())
        except BaseException:
            self.param_groups.pop()
            raise

    def _real(self) -> FacadeMixin:
        """The optimizer itself, also where a wrapper stands for `self`.

        Lightning's and Fabric's wrappers derive from the class of what they wrap and forward missing attributes to it,
        so a method inherited from here runs with the wrapper for `self`.
        """
        identity: weakref.ref[FacadeMixin] | None = getattr(self, "zero_identity", None)
        return (None if identity is None else identity()) or self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: the states lie with the engine, not with the object.

        Raises:
            EngineStateError: always.
        """
        raise EngineStateError(
            f"this {self.zero_plain_class.__name__} belongs to an engine and cannot be copied or pickled: its states are "
            "sharded; save optimizer.state_dict(), and load it into an optimizer of the copied model"
        )

    def _host(self, action: str) -> OptimizerHost:
        host = self._real().zero_host
        if host is None:
            raise EngineStateError(
                f"{self.zero_plain_class.__name__}.{action}() was called after its engine was closed: the optimizer "
                "states are gone; build a new optimizer, or save optimizer.state_dict() before engine.close()"
            )
        return host

    @classmethod
    def over(cls, plain: type[Optimizer]) -> type[Self]:
        """The facade class of a torch optimizer class."""
        made: Any = type(
            f"Zero{plain.__name__}",
            (cls, plain),
            {
                "zero_plain_class": plain,
                "__module__": __name__,
                "__doc__": f"{plain.__name__} on sharded states.",
            },
        )
        # torch wraps `step` once a class, to run step hooks and name the profiler range.
        step: Any = Optimizer.profile_hook_step(made.step)
        step.hooked = True
        made.step = step
        return made


def install(optimizer: Optimizer, host: OptimizerHost) -> None:
    """Re-class an optimizer onto the engine."""
    if isinstance(optimizer, FacadeMixin):
        if optimizer.zero_host is not None:
            raise EngineStateError(
                f"{optimizer.zero_plain_class.__name__} already belongs to an engine: close that engine first, or "
                "build a new optimizer"
            )
        optimizer.zero_host = host
        return
    facade: Any = FacadeMixin.over(type(optimizer))
    optimizer.__class__ = facade
    optimizer.__dict__["zero_host"] = host
    optimizer.__dict__["zero_identity"] = weakref.ref(optimizer)
    if "step" in optimizer.__dict__:
        # A scheduler made earlier has put a wrapper of the old step on the instance; it counts calls.
        optimizer.__dict__["step"] = _counting_step(optimizer)


def release(optimizer: Optimizer) -> None:
    """Detach an optimizer from a closed engine; its calls then raise."""
    if isinstance(optimizer, FacadeMixin):
        optimizer.zero_host = None


def _counting_step(optimizer: Optimizer) -> Callable[..., Any]:
    plain = type(optimizer).step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer.__dict__["_opt_called"] = True
        return plain(optimizer, *args, **kwargs)

    step.__dict__["_wrapped_by_lr_sched"] = True
    return step
