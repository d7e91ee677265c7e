"""Operations and activation memory of any module, from one forward and backward on the meta device.

A dispatch mode sees every operation and every new tensor's memory, transients included, and when each goes again; so what
hooks on modules alone would miss is counted. Nothing is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from zero_plugin.errors import ConfigError
from zero_plugin.planner.workload import Activity, Batch


class _Memory(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known = known
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        del types
        found = func(*args, **(kwargs or {}))
        for item in tree_iter(found):
            if isinstance(item, Tensor):
                self._count(item)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        nbytes = storage.nbytes()
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def profile(model: nn.Module, inputs: Any, batch: Batch) -> Activity:
    """Run a meta module once.

    Args:
        model: on the meta device, as it will be trained (a checkpointed model computes its forward twice).
        inputs: a tuple of arguments, a mapping of them, or one tensor; of a micro-batch.
        batch: for the number of tokens.

    Raises:
        ConfigError: the module does not run on the meta device.
    """
    moved = tree_map_only(Tensor, lambda item: item.detach().to("meta"), inputs)
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(moved, Mapping):
        named = dict(moved)
    else:
        arguments = tuple(moved) if isinstance(moved, (tuple, list)) else (moved,)
    known = {item.untyped_storage()._cdata for item in (*model.parameters(), *model.buffers())}
    memory = _Memory(known)
    counter = FlopCounterMode(display=False)
    try:
        with counter, memory, torch.enable_grad():
            output = model(*arguments, **named)
            kept, forward = memory.live, counter.get_total_flops()
            forward_peak = memory.peak
            made = memory.peak - memory.live
            total = _loss(output)
            del output
            if total is not None:
                total.backward()
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} does not run on the meta device ({type(error).__name__}: {error}): leave inputs out, or give "
            "a forward that does not look at values"
        ) from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    tokens = batch.batch * (batch.sequence or 1)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    peak = max(forward_peak, memory.peak - gradients, kept)
    return Activity(
        tokens=tokens,
        forward_flops=forward,
        kept=peak,
        checkpoints=0,
        working=made,
        output=0,
    )


def _loss(output: Any) -> Tensor | None:
    """Something to run backward from."""
    tensors = [
        item for item in tree_iter(output) if isinstance(item, Tensor) and item.requires_grad
    ]
    scalars = [item for item in tensors if item.numel() == 1]
    if scalars:
        return scalars[0]
    return (
        sum((item.float().sum() for item in tensors[1:]), tensors[0].float().sum())
        if tensors
        else None
    )
