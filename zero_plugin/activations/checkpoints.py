"""Recognises the moment at which `torch.utils.checkpoint` saves the inputs of a checkpointed function.

Autograd calls the pack hook of a tensor from the Python frame that saves it. For a reentrant checkpoint that is `Function.apply` of
torch's own checkpoint function; for a non-reentrant one it is the same (up to torch 2.12) or `save_inputs` of the
checkpoint's frame object (from 2.13), perhaps inside a comprehension there. Everything else that is saved while a checkpoint
runs is saved either under the checkpoint's own hooks or without gradients.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import Tensor

_CHECKPOINT = "torch.utils.checkpoint"
_FUNCTION = "torch.autograd.function"


def checkpoint_inputs(frame: FrameType | None) -> list[Tensor] | None:
    """The tensors that a checkpoint saves in a frame.

    Args:
        frame: where a tensor is saved.

    Returns:
        The tensors among the checkpointed function's positional arguments, in the order in which they are saved; None if no
        checkpoint saves its inputs here.
    """
    while frame is not None and frame.f_code.co_name in ("<listcomp>", "<genexpr>"):
        frame = frame.f_back
    if frame is None:
        return None
    name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
    saves = False
    if name == "apply" and module == _FUNCTION:
        saves = getattr(frame.f_locals.get("cls"), "__module__", None) == _CHECKPOINT
    elif name == "save_inputs" and module == _CHECKPOINT:
        saves = True
    if not saves:
        return None
    arguments: tuple[Any, ...] = frame.f_locals.get("args", ())
    return [item for item in arguments if isinstance(item, Tensor)]
