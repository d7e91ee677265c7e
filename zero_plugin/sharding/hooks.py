"""The one file that hooks into autograd and modules.

`GradientHooks` turns "autograd accumulated a gradient into this parameter" into a call of the receiver, however often
it happens: a weight used in two reentrant checkpoints and once outside fires three times in one backward.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from zero_plugin.errors import EngineStateError
from zero_plugin.sharding.guard import (
    ReleasedParameter,
    copy_to_read,
    map_tensors,
    storage_key,
)
from zero_plugin.sharding.parameters import ManagedParameter
from zero_plugin.sharding.surroundings import hook_stack
from zero_plugin.sharding.surroundings import undisturbed as undisturbed  # noqa: PLC0414 - for others
from zero_plugin.sharding.surroundings import untraced as untraced  # noqa: PLC0414 - for others

if TYPE_CHECKING:
    from types import FrameType

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
        self.ended: Callable[[], None] | None = None
        """Called after the receiver at the end of the outermost backward."""
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
        with undisturbed():
            self.watch()
            self._receiver.receive(index)

    def watch(self) -> None:
        """Inside a backward: see to it that its end is noticed."""
        if not self.announced:
            self._watch_for_the_end()

    def end_backward(self) -> None:
        """The outermost backward has ended."""
        self._receiver.end_backward()
        if self.ended is not None:
            self.ended()

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
        with undisturbed():
            self.end_backward()


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
    return any(is_own_hook(hook) for hook in hooks.values())


def is_own_hook(hook: object) -> bool:
    """Whether a hook is what hands an engine its gradients."""
    return isinstance(hook, _AfterAccumulate)


class _ModuleHook(functools.partial[Any]):
    """A hook on a module's forward that does not outlive its engine: a copy of the module gets an inert one.

    A partial, since it is called without a frame of its own, which Dynamo would compile.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as an inert hook."""
        return _ModuleHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    """What an inert hook does."""


class ForwardHook:
    """Calls a function before every forward of a module; removable.

    Args:
        module: the module.
        function: what to call.
    """

    def __init__(self, module: nn.Module, function: Callable[[], None]) -> None:
        def before(*_: Any) -> None:
            function()

        self._handle = module.register_forward_pre_hook(_ModuleHook(_not_compiled(before)))

    def remove(self) -> None:
        """Take the hook off; idempotent."""
        self._handle.remove()


class WaitHooks:
    """Hooks on the modules that hold certain parameters, on for one forward: each waits for its own.

    They are entered beside torch's own and taken out again after each step, since a hook that stayed would cost at every call
    and break compiled graphs.

    Args:
        model: its modules are hooked. Without gradients its forward waits for everything: some modules of torch ask a
            parameter for its class then, and go another way for a class they do not know.
        wait: called with the parameters of a module whose forward begins.
        wait_all: called when the model's forward begins without gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        wait: Callable[[Sequence[Tensor]], None],
        wait_all: Callable[[], None],
    ) -> None:
        self.model = model
        self._holders: dict[int, list[nn.Module]] = {}
        self._armed: dict[int, nn.Module] = {}
        self._key: Any = f"zero_plugin.wait.{id(self)}"
        this = weakref.ref(self)

        def before(entered: nn.Module, *_: Any) -> None:
            hooks = this()
            if hooks is None:
                return
            hooks.disarm(entered)
            if entered is hooks.model and not torch.is_grad_enabled():
                wait_all()
            else:
                wait(list(entered.parameters(recurse=False)))

        self._hook = _ModuleHook(_not_compiled(before))

    def arm(self, parameters: Sequence[Tensor]) -> None:
        """Hook the modules that hold these parameters, and the model."""
        if any(id(item) not in self._holders for item in parameters):
            self._find_holders()
        self._put(self.model)
        for item in parameters:
            for module in self._holders.get(id(item), ()):
                self._put(module)

    def disarm(self, module: nn.Module | None = None) -> None:
        """Take the hook off one module, or off all."""
        for item in [module] if module is not None else list(self._armed.values()):
            self._armed.pop(id(item), None)
            _forward_hooks_of(item).pop(self._key, None)

    def _put(self, module: nn.Module) -> None:
        if id(module) not in self._armed:
            self._armed[id(module)] = module
            _forward_hooks_of(module)[self._key] = self._hook

    def _find_holders(self) -> None:
        self._holders = {}
        for module in self.model.modules():
            for item in module.parameters(recurse=False):
                self._holders.setdefault(id(item), []).append(module)


def _forward_hooks_of(module: Any) -> dict[Any, Any]:
    return module._forward_pre_hooks  # noqa: SLF001 - to register and remove them takes torch ten times as long


class UnitKeeper(Protocol):
    """Gathers and releases units (`zero_plugin.sharding.gather`)."""

    saver: Any

    track: Any
    """Holds `inside`, a list of the forwards that run: module, units, what `enter` returned, whether hooks were put on."""

    @property
    def members(self) -> Mapping[int, tuple[Any, ManagedParameter]]:
        """Units and parameters by the identity of the parameter's memory."""
        ...

    @property
    def current_call(self) -> Any:
        """The innermost forward."""
        ...

    def enter(self, units: Sequence[Any]) -> Any:
        """A module's forward begins."""
        ...

    def leave(self, units: Sequence[Any], call: Any) -> None:
        """A module's forward ended."""
        ...

    def passed(self, call: Any) -> None:
        """A backward runs a node made in `call`."""
        ...

    def reached(self, call: Any, unit: Any) -> None:
        """A backward needs the unit."""
        ...


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """What autograd saves instead of a weight's memory."""

    unit: Any
    member: ManagedParameter
    call: Any
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """Any other tensor, with its version: autograd itself checks versions only where no hooks are."""

    tensor: Tensor
    version: int
    call: Any


@dataclass(frozen=True, slots=True)
class _SavedBelow:
    """What the hooks below made of a tensor."""

    packed: Any
    call: Any


class SavedWeights:
    """Saved-tensor hooks that replace weights by handles and pass everything else on.

    Autograd asks only the innermost pair of hooks, so ours call the pair below for what is not a weight: with a
    checkpoint around a unit it goes on working. The checkpoint counts what is saved, in forward and again when it recomputes,
    so it is shown the weights too.

    Args:
        keeper: gathers a weight when it is unpacked.
        before: called before a weight is unpacked, inside a backward.
    """

    def __init__(self, keeper: UnitKeeper, before: Callable[[], None]) -> None:
        self._keeper = keeper
        self._before = before
        self._last_call: Any = None

    @contextmanager
    def saving(self) -> Generator[None]:
        """Inside, weights are saved as handles."""
        pushed = self.push()
        try:
            yield
        finally:
            if pushed:
                self.pop()

    def push(self) -> bool:
        """Put the hooks on top; False where they are already."""
        native = hook_stack()
        below = native._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin
        if below is not None and getattr(below[0], "saved_weights", None) is self:
            return False
        pack, unpack = self._make_hooks(below)
        native._push_saved_tensors_default_hooks(pack, unpack)
        return True

    @staticmethod
    def pop() -> None:
        """Take the hooks off the top."""
        hook_stack()._pop_saved_tensors_default_hooks()

    def _make_hooks(self, below: Any) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        members, keeper = self._keeper.members, self._keeper
        pack_below, unpack_below = below or (None, None)
        counts = pack_below is not None and pack_below.__module__ == "torch.utils.checkpoint"

        def pack(tensor: Tensor) -> Any:
            found = members.get(storage_key(tensor))
            if found is None:
                if pack_below is not None:
                    return _SavedBelow(pack_below(tensor), keeper.current_call)
                version = 0 if tensor.is_inference() else tensor._version
                return _SavedTensor(tensor, version, keeper.current_call)
            if counts and pack_below is not None:
                pack_below(tensor)
            unit, member = found
            return _SavedWeight(
                unit,
                member,
                keeper.current_call,
                member.parameter._version,
                tensor.shape,
                tensor.stride(),
                int(tensor.storage_offset()),
            )

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _SavedWeight):
                return self._open(saved)
            self._pass(saved.call)
            if isinstance(saved, _SavedTensor):
                check_version(saved.tensor, saved.version)
                return saved.tensor
            return unpack_below(saved.packed) if unpack_below is not None else saved.packed

        function: Any = pack
        function.saved_weights = self
        function.is_lowest = below is None
        return pack, unpack

    def _pass(self, call: Any) -> None:
        if call is not self._last_call:
            self._last_call = call
            with undisturbed():
                self._keeper.passed(call)

    def _open(self, saved: _SavedWeight) -> Tensor:
        version = saved.member.parameter._version
        if version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: parameter "
                f"{saved.member.name!r} is at version {version}; expected version {saved.version} instead (an optimizer "
                "step between a forward and its backward does this)"
            )
        inside_backward = torch._C._current_graph_task_id() != -1
        if inside_backward and torch.is_grad_enabled():
            # create_graph: what this node saves for the next backward. Autograd itself takes the hooks off after the node.
            self.push()
        with undisturbed():
            if inside_backward:
                self._before()
            self._last_call = saved.call
            self._keeper.reached(saved.call, saved.unit)
            return saved.member.alias.as_strided(saved.size, saved.stride, saved.offset)


class UnitHooks:
    """Hooks on the modules whose forward needs units.

    Args:
        keeper: gathers and releases.
        before_unpack: called before a weight is unpacked inside a backward.
    """

    def __init__(self, keeper: UnitKeeper, before_unpack: Callable[[], None]) -> None:
        self._keeper = keeper
        self.saved = SavedWeights(keeper, before_unpack)
        self._handles: list[RemovableHandle] = []
        keeper.saver = self.saved

    def attach(self, module: nn.Module, units: Sequence[Any]) -> None:
        """Hook one module."""
        this = weakref.ref(self)

        def before(entered: nn.Module, *_: Any) -> None:
            hooks = this()
            if hooks is not None:
                hooks.enter(entered, units)

        def after(left: nn.Module, _: Any, output: Any) -> Any:
            hooks = this()
            return output if hooks is None else hooks.leave(left, output)

        enter = _ModuleHook(_not_compiled(before))
        leave = _ModuleHook(_not_compiled(after))
        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def enter(self, module: nn.Module, units: Sequence[Any]) -> None:
        """A forward begins."""
        grad = torch.is_grad_enabled()
        with undisturbed(), torch.set_grad_enabled(grad):
            call = self._keeper.enter(units)
        self._keeper.track.inside.append((module, units, call, bool(units) and self.saved.push()))

    def leave(self, module: nn.Module, output: Any) -> Any:
        """A forward ended, well or not; returns its output, with copies instead of views of weights that go."""
        if not any(item[0] is module for item in self._keeper.track.inside):
            return output  # It did not begin: an earlier hook raised.
        while True:
            inside, units, call, pushed = self._keeper.track.inside.pop()
            if units:
                output = self._keep_apart(output)
            if pushed:
                self.saved.pop()
            with undisturbed():
                self._keeper.leave(units, call)
            if inside is module:
                return output

    def _keep_apart(self, output: Any) -> Any:
        members = self._keeper.members

        def apart(item: Tensor) -> Tensor:
            if isinstance(item, ReleasedParameter):
                return item
            found = members.get(storage_key(item))
            if found is None or isinstance(item, nn.Parameter) or found[0].stays:
                return item
            return copy_to_read(item)

        return map_tensors(output, apart)

    def remove(self) -> None:
        """Take every hook off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class InputKeeper(Protocol):
    """Keeps the inputs of checkpoints elsewhere (`zero_plugin.activations`)."""

    def begin(self) -> None:
        """An outermost forward begins."""
        ...

    def keep(self, tensor: Tensor, frame: FrameType | None) -> object | None:
        """What to save in place of a tensor that is saved in `frame`; None to leave it."""
        ...

    def give(self, handle: object) -> Tensor:
        """The tensor again."""
        ...


@dataclass(frozen=True, slots=True)
class _SavedInput:
    """What the keeper made of a checkpoint's input."""

    handle: object


class InputHooks:
    """Saved-tensor hooks by which the inputs of checkpoints go to a keeper, and nothing else does.

    They are on while the outermost forward of the model or of a module in it runs with gradients, below the hooks of units and of
    checkpoints. Where other hooks are on already they stay off: a tensor belongs to whoever asked for it first.

    Args:
        keeper: takes the inputs.
    """

    def __init__(self, keeper: InputKeeper) -> None:
        self._keeper = weakref.ref(keeper)
        self._local = threading.local()
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        """Hook the model and every module in it that has modules of its own, before and after what other hooks do."""
        self.remove()
        this = weakref.ref(self)

        def before(entered: nn.Module, *_: Any) -> None:
            hooks = this()
            if hooks is not None:
                hooks.enter(entered)

        def after(left: nn.Module, *_: Any) -> None:
            hooks = this()
            if hooks is not None:
                hooks.leave(left)

        enter = _ModuleHook(_not_compiled(before))
        leave = _ModuleHook(_not_compiled(after))
        for module in model.modules():
            if module is model or next(module.children(), None) is not None:
                self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def enter(self, holder: object) -> None:
        """A forward begins; the first in a thread with gradients puts the hooks on."""
        local = self._local
        inside = getattr(local, "holder", None)
        if inside is None:
            if self._push():
                local.holder, local.depth = holder, 1
        elif inside is holder:
            local.depth += 1

    def leave(self, holder: object) -> None:
        """A forward ended, well or not; the one that put the hooks on takes them off."""
        local = self._local
        if getattr(local, "holder", None) is not holder:
            return
        local.depth -= 1
        if local.depth == 0:
            local.holder = None
            hook_stack()._pop_saved_tensors_default_hooks()

    @contextmanager
    def active(self) -> Generator[None]:
        """Inside, the hooks are on."""
        holder = object()
        self.enter(holder)
        try:
            yield
        finally:
            self.leave(holder)

    def remove(self) -> None:
        """Take every hook off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _push(self) -> bool:
        native, keeper = hook_stack(), self._keeper()
        if keeper is None or not torch.is_grad_enabled():
            return False
        if torch._C._current_graph_task_id() != -1 or not native._saved_tensors_hooks_is_enabled():
            return False  # What a backward computes again it uses at once.
        below = native._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin
        if below is not None and not getattr(below[0], "is_lowest", False):
            return False
        keeper.begin()
        native._push_saved_tensors_default_hooks(*_make_input_hooks(keeper, below))
        return True


def _make_input_hooks(
    keeper: InputKeeper, below: Any
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    pack_below, unpack_below = below or (None, None)

    def pack(tensor: Tensor) -> Any:
        frame = sys._getframe().f_back
        while frame is not None and frame.f_globals is globals():
            frame = frame.f_back  # The hooks above.
        handle = keeper.keep(tensor, frame)
        if handle is not None:
            return _SavedInput(handle)
        if pack_below is not None:
            return pack_below(tensor)
        return _SavedTensor(tensor, 0 if tensor.is_inference() else tensor._version, None)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _SavedInput):
            return keeper.give(saved.handle)
        if unpack_below is not None:
            return unpack_below(saved)
        check_version(saved.tensor, saved.version)
        return saved.tensor

    return pack, unpack


def check_version(tensor: Tensor, version: int, shape: torch.Size | None = None) -> None:
    """Refuse a saved tensor that was changed in place since, in autograd's words.

    Args:
        tensor: has the version counter.
        version: when the tensor was saved.
        shape: of the saved tensor, where `tensor` only shares its counter.

    Raises:
        RuntimeError: the version is another one.
    """
    if not tensor.is_inference() and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape if shape is None else shape)}] is at version {tensor._version}; expected "
            f"version {version} instead"
        )


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inlined into a compiled forward, the function would be traced."""
    disabled: Any = torch.compiler.disable(function)
    return disabled


def before_forwards(module: nn.Module, action: Callable[[], None]) -> RemovableHandle:
    """Have `action` called before each forward of `module`, until the handle is removed."""

    def before(_module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        action()

    return module.register_forward_pre_hook(_not_compiled(before))


def after_accumulation(
    leaf: Tensor, action: Callable[[], None], before: Iterable[Callable[..., Any]]
) -> None:
    """Have `action` called whenever autograd has accumulated a gradient into a leaf, and hooks `before` on the gradient."""
    for hook in before:
        leaf.register_hook(hook)
    leaf.register_post_accumulate_grad_hook(lambda _: action())


def bump_versions(parameters: Sequence[nn.Parameter]) -> None:
    """Tell autograd that the weights changed, so that a backward through the old ones raises as in plain torch."""
    if parameters:
        torch.autograd.graph.increment_version(parameters)
