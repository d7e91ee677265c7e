"""The one file that hooks into autograd and modules.

`GradientHooks` turns "autograd accumulated a gradient into this parameter" into a call of the receiver, however often
it happens: a weight used in two reentrant checkpoints and once outside fires three times in one backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from zero_plugin.errors import EngineStateError
from zero_plugin.sharding.parameters import ManagedParameter

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class GradientReceiver(Protocol):
    """Takes gradients as autograd makes them."""

    def expect(self, index: int) -> None:
        """A gradient of parameter `index` is about to be accumulated into `Parameter.grad`."""
        ...

    def receive(self, index: int) -> None:
        """A gradient of parameter `index` now stands in `Parameter.grad`."""
        ...

    def end_backward(self) -> None:
        """The outermost backward has ended."""
        ...


class _AfterAccumulate:
    """The hook that takes a gradient; its class marks a parameter as managed."""

    def __init__(self, hooks: GradientHooks, index: int) -> None:
        # Autograd keeps its hooks where Python's collector cannot see: a strong reference would be for good.
        self._hooks = weakref.ref(hooks)
        self._index = index

    def __call__(self, _: Tensor) -> None:
        """Hand the gradient over."""
        hooks = self._hooks()
        if hooks is not None:
            hooks.receive(self._index)


class GradientHooks:
    """Hooks on the AccumulateGrad of every managed parameter.

    Args:
        receiver: what the gradients are given to.
    """

    def __init__(self, receiver: GradientReceiver) -> None:
        self._receiver = receiver
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []
        self._task = -1
        self.announced = False
        """True while a caller that ends the backward itself is inside one (`engine.backward`)."""

    def attach(self, managed: ManagedParameter) -> None:
        """Hook one parameter.

        Raises:
            EngineStateError: another engine manages it.
        """
        check_unmanaged(managed)
        index, parameter, this = managed.index, managed.parameter, weakref.ref(self)

        def before(_: object) -> None:
            hooks = this()
            if hooks is not None:
                hooks.expect(index)

        # On the node, not the tensor: a tensor's hook also fires for torch.autograd.grad, which accumulates nothing.
        with torch.inference_mode(mode=False), torch.enable_grad():
            node: Any = parameter.view_as(parameter).grad_fn
        node = node.next_functions[0][0]
        self._nodes.append(node)
        self._handles.append(node.register_prehook(before))
        self._handles.append(
            parameter.register_post_accumulate_grad_hook(_AfterAccumulate(self, index))
        )

    def expect(self, index: int) -> None:
        """A gradient of parameter `index` is about to be accumulated."""
        self._receiver.expect(index)

    def receive(self, index: int) -> None:
        """A gradient of parameter `index` was accumulated."""
        with torch.inference_mode(mode=False), torch.no_grad():
            if not self.announced:
                self._watch_for_the_end()
            self._receiver.receive(index)

    def remove(self) -> None:
        """Take every hook off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _watch_for_the_end(self) -> None:
        # queue_callback fires at the end of the *current* graph task, which inside a reentrant checkpoint is an inner
        # one. An inner task runs below a custom Function's backward, so the stack tells the two apart; it is walked
        # once a task.
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        if not _inside_custom_backward():
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._end)

    def _end(self) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._receiver.end_backward()


def _inside_custom_backward() -> bool:
    marker = torch.autograd.function.BackwardCFunction.apply.__code__
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is marker:
            return True
        frame = frame.f_back
    return False


def check_unmanaged(managed: ManagedParameter) -> None:
    """Refuse a parameter that another engine manages.

    Raises:
        EngineStateError: its gradients already go to an engine.
    """
    if is_managed(managed.parameter):
        raise EngineStateError(
            f"parameter {managed.name!r} already belongs to a live engine: close that one first (engine.close()), or give "
            "all optimizers of the model to one engine"
        )


def is_managed(parameter: nn.Parameter) -> bool:
    """Whether the gradients of a parameter go to a live engine."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, _AfterAccumulate) for hook in hooks.values())


class _BeforeForward:
    """A forward pre-hook that does not outlive its engine: a copy of the module gets an inert one."""

    def __init__(self, function: Callable[[], None] | None) -> None:
        self._function = function

    def __call__(self, _: nn.Module, __: Any) -> None:
        """Call the function, if it is still wanted."""
        if self._function is not None:
            self._function()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[None]]:
        """Copy and pickle as an inert hook."""
        return _BeforeForward, (None,)


class ForwardHook:
    """Calls a function before every forward of a module; removable.

    Args:
        module: the module.
        function: what to call.
    """

    def __init__(self, module: nn.Module, function: Callable[[], None]) -> None:
        # Inlined into a compiled forward, the function would be traced.
        untraced: Any = torch.compiler.disable(function)
        self._handle = module.register_forward_pre_hook(_BeforeForward(untraced))

    def remove(self) -> None:
        """Take the hook off; idempotent."""
        self._handle.remove()


@contextmanager
def untraced() -> Generator[None]:
    """Keep Dynamo from compiling what runs inside.

    What `torch.compiler.disable` does, without importing Dynamo where nobody uses it.
    """
    native: Any = torch._C
    frames = native._dynamo.eval_frame
    before = frames.set_eval_frame(None)
    try:
        yield
    finally:
        frames.set_eval_frame(before)


def bump_versions(parameters: Sequence[nn.Parameter]) -> None:
    """Tell autograd that the weights changed, so that a backward through the old ones raises as in plain torch."""
    if parameters:
        torch.autograd.graph.increment_version(parameters)
