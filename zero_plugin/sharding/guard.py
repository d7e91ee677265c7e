"""What a sharded parameter is while its full weights are not here.

The storage is empty, and reading an empty storage crashes the process or gives garbage without a word. So the parameter's
class is exchanged, in place, for one that answers questions about itself, gathers the weights for a computation where
that is safe, and raises on everything else. The object, and with it every reference to it, stays the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from zero_plugin.errors import ParameterError

_GETTERS = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "grad",
    "_grad",
    "name",
    "output_nr",
    "is_sparse",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_quantized",
    "is_mkldnn",
    "is_nested",
    "is_sparse_csr",
    "is_xpu",
    "is_mps",
    "_version",
    "_backward_hooks",
    "_base",
    "_post_accumulate_grad_hooks",
    "retains_grad",
    "itemsize",
    "nbytes",
    "grad_dtype",
    "is_xla",
    "is_vulkan",
    "is_ipu",
    "is_maia",
    "is_mtia",
]
_SETTERS = [
    "grad",
    "requires_grad",
    "_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "grad_dtype",
]
_METHODS = [
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "storage_offset",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "is_inference",
    "is_pinned",
    "get_device",
    "__len__",
    "__hash__",
    "__dir__",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "type_as_name",
    "has_names",
    "is_conj",
    "is_neg",
    "is_same_size",
    "is_set_to",
]
_HANDLES = [
    "detach",
    "detach_",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "data_ptr",
    "numpy",
    "__array__",
    "__dlpack__",
    "share_memory_",
    "pin_memory",
    "__deepcopy__",
    "__reduce_ex__",
    "_reduce_ex_internal",
    "__cuda_array_interface__",
    "tolist_",
    "swap_",
    "as_subclass",
]
"""What hands out the memory itself, or a copy of the object: nothing keeps such a handle right once the weights go."""


def _listed(names: Iterable[str]) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name) for name in names if hasattr(Tensor, name))


def _accessors(names: Iterable[str], which: str) -> frozenset[Any]:
    found = (getattr(Tensor, name, None) for name in names)
    return frozenset(getattr(item, which) for item in found if hasattr(item, which))


_METADATA = (
    _listed(_METHODS)
    | _accessors(_GETTERS, "__get__")
    | _accessors(_SETTERS, "__set__")
    | _accessors(("grad",), "__delete__")
)
_REFUSED = _listed(_HANDLES) | _accessors(("data",), "__get__")
_WRITERS = _listed(("__setitem__", "set_", "resize_", "__delitem__")) | _accessors(
    ("data",), "__set__"
)


class Keeper(Protocol):
    """Holds the weights of released parameters."""

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name in the model."""
        ...

    def borrow(self, parameters: Sequence[Tensor], action: str) -> None:
        """Bring the weights of some parameters here.

        Raises:
            ParameterError: it is not safe here, or the weights are gone.
        """
        ...

    def saving(self) -> AbstractContextManager[None]:
        """Inside, autograd keeps no reference to the weights' memory."""
        ...


class ReleasedParameter(nn.Parameter):
    """A parameter whose weights are sharded: true shape, dtype and `requires_grad`, no memory."""

    keeper_reference: ClassVar[weakref.ref[Keeper] | None] = None

    @classmethod
    def keeper(cls) -> Keeper | None:
        """Who holds the weights; None once it is gone."""
        return None if cls.keeper_reference is None else cls.keeper_reference()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata; compute with gathered weights; refuse writes and handles on the memory."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        released = [item for item in _tensors(args, kwargs) if isinstance(item, ReleasedParameter)]
        name = _name_of(func)
        if _writes(func, name, args, kwargs):
            raise ParameterError(
                f"{_names(released)} is sharded and was written to ({name}): write inside "
                "`with engine.full_params(writeback=True):`, on every rank"
            )
        if func in _REFUSED:
            raise ParameterError(
                f"{_names(released)} is sharded and its memory was asked for ({name}): read it inside "
                "`with engine.full_params():`, or take engine.full_state_dict()"
            )
        return _compute(func, name, args, kwargs, released)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Name, shape and dtype; never values."""
        del tensor_contents
        return (
            f"Parameter({_names([self])}, sharded, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: object) -> Any:
        """Refuse: a copy would have no weights."""
        del memo
        raise ParameterError(
            f"{_names([self])} is sharded and cannot be copied: copy the model inside `with engine.full_params():`"
        )

    def __reduce_ex__(self, proto: object) -> Any:
        """Refuse: what would be saved has no weights."""
        del proto
        raise ParameterError(
            f"{_names([self])} is sharded and cannot be pickled: save engine.full_state_dict(), or pickle inside "
            "`with engine.full_params():`"
        )


def guard_of(keeper: Keeper) -> type[ReleasedParameter]:
    """The class of one keeper's released parameters."""
    return type(
        "ReleasedParameter",
        (ReleasedParameter,),
        {"keeper_reference": weakref.ref(keeper), "__module__": __name__},
    )


def _keeper_of(parameter: ReleasedParameter) -> Keeper:
    keeper = type(parameter).keeper()
    if keeper is None:
        raise ParameterError(
            f"a sharded parameter of shape {tuple(parameter.shape)} was used after its engine was closed or collected: take "
            "engine.full_state_dict() first and load it into a new model"
        )
    return keeper


def _names(parameters: Sequence[ReleasedParameter]) -> str:
    found: list[str] = []
    for item in parameters:
        keeper = type(item).keeper()
        found.append(
            repr(keeper.name_of(item)) if keeper else f"of shape {tuple(item.shape)} (engine gone)"
        )
    return f"parameter {', '.join(found)}"


def _compute(
    func: Any, name: str, args: Any, kwargs: Any, released: Sequence[ReleasedParameter]
) -> Any:
    keepers: dict[int, tuple[Keeper, list[Tensor]]] = {}
    for item in released:
        keeper = _keeper_of(item)
        keepers.setdefault(id(keeper), (keeper, []))[1].append(item)
    for keeper, items in keepers.values():
        keeper.borrow(items, name)
    saver = _keeper_of(released[0])
    with torch._C.DisableTorchFunctionSubclass(), saver.saving():
        result = func(*args, **kwargs)
        return _apart(result, released)


def _apart(result: Any, released: Sequence[ReleasedParameter]) -> Any:
    """The result, with views of a released parameter replaced by copies: its memory will go."""
    if isinstance(result, (list, tuple)):
        items: Any = result
        parts = [_apart(item, released) for item in items]
        if isinstance(result, tuple) and hasattr(items, "_fields"):
            return type(items)(*parts)
        return type(items)(parts) if type(items) in (list, tuple) else parts
    if not isinstance(result, Tensor) or any(result is item for item in released):
        return result
    memory = storage_key(result)
    if all(storage_key(item) != memory for item in released):
        return result
    if torch.is_grad_enabled() and result.requires_grad:
        return result.clone()
    # Read-only: a write to a copy would be lost without a word, and an inference tensor refuses it.
    with torch.inference_mode():
        return result.clone()


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's memory, the same while it is empty."""
    return tensor.untyped_storage()._cdata


def _writes(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _WRITERS:
        return True
    out = kwargs.get("out")
    if isinstance(out, ReleasedParameter):
        return True
    if isinstance(out, (list, tuple)):
        items: Any = out
        if any(isinstance(item, ReleasedParameter) for item in items):
            return True
    in_place = (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name in _IN_PLACE
    )
    if name == "copy_" or in_place:
        return bool(args) and isinstance(args[0], ReleasedParameter)
    return False


_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ]
)


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    flat: list[Any] = []
    stack = [*args, *kwargs.values()]
    while stack:
        item = stack.pop(0)
        if isinstance(item, (list, tuple)):
            stack[:0] = item
        elif isinstance(item, dict):
            values: Any = item
            stack[:0] = values.values()
        else:
            flat.append(item)
    return flat
