"""What stands in `Parameter.grad` while the engine owns the gradient.

The gradient itself is sharded, scaled, and perhaps still on its way to the host. A tensor that looked like it would be
read by code that means well (`torch.nn.utils.clip_grad_norm_`, `GradScaler.unscale_`, loggers) and give wrong
numbers, and None would make the same code do nothing, silently. So a stand-in of the true shape answers questions
about itself and raises on everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from zero_plugin.errors import GradientAccessError

_GETTERS: tuple[Any, ...] = (
    Tensor.shape,
    Tensor.dtype,
    Tensor.device,
    Tensor.layout,
    Tensor.ndim,
    Tensor.requires_grad,
    Tensor.is_sparse,
    Tensor.is_cuda,
    Tensor.is_cpu,
    Tensor.is_meta,
    Tensor.is_leaf,
    Tensor.grad_fn,
)
_METADATA: frozenset[Any] = frozenset(
    {
        *(getter.__get__ for getter in _GETTERS),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.element_size,
        Tensor.stride,
        Tensor.__len__,
        torch._has_compatible_shallow_copy_type,  # what `module.to` asks of old and new
    }
)
_CONVERSIONS: frozenset[Any] = frozenset(
    {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double}
)
_DATA: Any = Tensor.data


class GradientSentinel(Tensor):
    """Stand-in for a gradient that the engine owns: true shape and dtype, no readable values."""

    owner: str
    clear: Callable[[], None]

    @classmethod
    def stand_in(cls, like: Tensor, owner: str, clear: Callable[[], None]) -> Self:
        """Make a stand-in.

        Args:
            like: the parameter.
            owner: its name, for the error.
            clear: called when `zero_()` asks for a zero gradient (`zero_grad(set_to_none=False)`).
        """
        # One NaN, expanded: no storage to speak of, and poison should foreign native code read it all the same.
        with torch.inference_mode(mode=False):
            poison = torch.full((1,), float("nan"), dtype=like.dtype, device=like.device)
            sentinel = poison.expand(like.numel()).view(like.shape).as_subclass(cls)
        sentinel.owner = owner
        sentinel.clear = clear
        return sentinel

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata, accept `zero_` and `detach_`, refuse the rest."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        sentinel = next(item for item in _flatten(args, kwargs) if isinstance(item, cls))
        if func is Tensor.zero_:
            sentinel.clear()
            return sentinel
        if func in (Tensor.detach_, Tensor.requires_grad_):
            return sentinel
        # `module.cpu()` converts gradients along with parameters; to what they are, that is nothing.
        if func in _CONVERSIONS and sentinel.is_result_of(func, args[1:], kwargs or {}):
            return sentinel
        if func == _DATA.__set__ and args[1] is sentinel:
            return None
        name = getattr(func, "__name__", str(func))
        raise GradientAccessError(
            f"the gradient of parameter {sentinel.owner!r} was used ({name}), but it is sharded and owned by the "
            "engine: clip with engine.clip_grad_norm_(max_norm) or the framework's own setting, and read averaged "
            "gradients inside `with engine.full_grads():`"
        )

    def is_result_of(self, conversion: Any, args: Any, kwargs: Any) -> bool:
        """Whether a conversion leaves dtype and device what they are."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        after = conversion(probe, *args, **kwargs)
        return after.dtype == probe.dtype and after.device == probe.device

    def __repr__(self, **_: Any) -> str:
        """Shape and owner; never values."""
        return f"GradientSentinel({self.owner!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _flatten(args: Any, kwargs: dict[str, Any] | None) -> list[Any]:
    flat: list[Any] = []
    stack = [*args, *(kwargs or {}).values()]
    while stack:
        item = stack.pop(0)
        if isinstance(item, (list, tuple)):
            stack[:0] = item
        else:
            flat.append(item)
    return flat
