"""What surrounds our code: tracing, modes, hooks and whatever else torch keeps for each thread."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


def hook_stack() -> Any:
    """Where autograd keeps its saved-tensor hooks."""
    native: Any = torch._C
    return native._autograd


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


@contextmanager
def undisturbed() -> Generator[None]:
    """Work on tensors as if no user code were around: no autograd, no tracing, no modes of the dispatcher.

    A selective checkpoint is such a mode: it would record our operations in forward and miss them when it recomputes.
    """
    native: Any = torch._C
    with (
        untraced(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        native._DisableTorchDispatch(),  # noqa: SLF001
        native.DisableTorchFunction(),
    ):
        yield


class Surroundings:
    """What torch and Python keep for the calling thread, to be put on in another one.

    Autocast, the default device, the accelerator's device and stream, the uppermost saved-tensor hooks, context variables. Not modes of
    the dispatcher or of torch functions that user code pushed itself.

    Args:
        device: what is computed on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._casts = [
            (item, torch.get_autocast_dtype(item), torch.is_autocast_enabled(item))
            for item in sorted({"cpu", device.type})
            if torch.amp.is_autocast_available(item)
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._device = torch.get_default_device()
        self._hooks = hook_stack()._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin
        self._variables = contextvars.copy_context()

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function inside them, in a thread of its own."""
        # A context can be entered once at a time.
        return self._variables.copy().run(self._run, function)

    def _run(self, function: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            if self._stream is not None:
                torch.accelerator.set_stream(
                    self._stream
                )  # Its device becomes the present one too.
            if self._device.type != "cpu":
                stack.enter_context(self._device)
            for kind, dtype, enabled in self._casts:
                cast: AbstractContextManager[Any] = torch.autocast(
                    kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches
                )
                stack.enter_context(cast)
            if self._hooks is not None:
                hook_stack()._push_saved_tensors_default_hooks(*self._hooks)
                stack.callback(hook_stack()._pop_saved_tensors_default_hooks)
            return function()


def grow_sequence(target: int) -> None:
    """Let this thread's next autograd node have at least the number `target`.

    Autograd runs the node with the largest number first, and counts in each thread by itself.
    """
    native = hook_stack()
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.empty(0, requires_grad=True, device="cpu")
        while native._get_sequence_nr() < target:  # noqa: SLF001
            leaf.view(0)


def sequence_number() -> int:
    """The number of this thread's next autograd node."""
    return int(hook_stack()._get_sequence_nr())  # noqa: SLF001
