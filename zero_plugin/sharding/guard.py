"""What a sharded parameter is while its full weights are not here.

The storage is empty, and reading an empty storage crashes the process or gives garbage without a word. So the parameter's
class is exchanged, in place, for one that answers questions about itself, gathers the weights for a computation where
that is safe, and raises on everything else. The object, and with it every reference to it, stays the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from functools import partial
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
    "const_data_ptr",
    "mutable_data_ptr",
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
    | frozenset({torch._has_compatible_shallow_copy_type})  # what `module.to` asks of old and new
)
_REFUSED = (
    _listed(_HANDLES)
    | _accessors(("data",), "__get__")
    # Private methods hand out parts of a tensor, or change what it is (`_lazy_clone`).
    | _listed(name for name in dir(Tensor) if name.startswith("_") and name[1] != "_")
) - _METADATA
_WRITERS = _listed(("__setitem__", "set_", "resize_", "__delitem__", "module_load")) | _accessors(
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

    def discard(self, parameters: Sequence[Tensor]) -> None:
        """Drop the weights that were brought here: they were written to."""
        ...

    def saving(self) -> AbstractContextManager[None]:
        """Inside, autograd keeps no reference to the weights' memory."""
        ...


class WeightCopy(Tensor):
    """A copy made where plain torch gives a view of a weight: to read, since a write would be lost without a word."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse writes; views of the copy are such copies too, everything else is a plain tensor."""
        kwargs = kwargs or {}
        name = _name_of(func)
        if _writes(func, name, args, kwargs, WeightCopy):
            raise ParameterError(
                f"a view of a sharded parameter, of shape {tuple(args[0].shape)}, was written to ({name}): write to the "
                "parameter, inside `with engine.full_params(writeback=True):`, on every rank"
            )
        released = [item for item in _tensors(args, kwargs) if isinstance(item, ReleasedParameter)]
        if released:
            return ReleasedParameter.__torch_function__(func, types, args, kwargs)
        copies = [item for item in _tensors(args, kwargs) if isinstance(item, WeightCopy)]
        with torch._C.DisableTorchFunctionSubclass():
            memory = {storage_key(item) for item in copies}
            return map_tensors(
                func(*args, **kwargs),
                lambda item: _read_only(item) if storage_key(item) in memory else item,
            )

    def __deepcopy__(self, memo: Any) -> Any:
        """A plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        """As a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(proto)


def _read_only(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, WeightCopy) else tensor.as_subclass(WeightCopy)


def copy_to_read(view: Tensor) -> Tensor:
    """A copy that stands for a view of a weight whose memory goes; differentiable."""
    with torch._C.DisableTorchFunctionSubclass():
        return view.clone().as_subclass(WeightCopy)


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
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if _changes_nothing(name, args, kwargs):
                return args[0]
        released = [item for item in _tensors(args, kwargs) if isinstance(item, ReleasedParameter)]
        if _writes(func, name, args, kwargs, ReleasedParameter):
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

    def set_(self, *_: object, **__: object) -> Any:
        """Refuse a write; without arguments torch does not ask `__torch_function__`."""
        raise ParameterError(
            f"{_names([self])} is sharded and was written to (set_): write inside "
            "`with engine.full_params(writeback=True):`, on every rank"
        )

    def as_subclass(self, cls: Any) -> Any:
        """Refuse: torch does not ask `__torch_function__`, and the result would have no weights."""
        raise ParameterError(
            f"{_names([self])} is sharded and cannot become a {cls.__name__}: convert it inside "
            "`with engine.full_params():`"
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
        versions = [item._version for item in released]
        result = func(*args, **kwargs)
        if [item._version for item in released] != versions:
            for keeper, items in keepers.values():
                keeper.discard(items)
            raise ParameterError(
                f"{_names(released)} is sharded and was written to ({name}): write inside "
                "`with engine.full_params(writeback=True):`, on every rank"
            )
        memory = {storage_key(item) for item in released}

        def apart(item: Tensor) -> Tensor:
            is_view = storage_key(item) in memory and all(item is not one for one in released)
            return copy_to_read(item) if is_view else item

        return map_tensors(result, apart)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A nest of tuples, lists, dicts and dataclasses with `function` applied to its tensors.

    What can be changed in place is, and what has nothing to change stays the same object.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items: Any = value
        parts = [map_tensors(item, function) for item in items]
        if all(new is old for new, old in zip(parts, items, strict=True)):
            return items
        if isinstance(items, list):
            items[:] = parts
            return items
        return type(items)(*parts) if hasattr(items, "_fields") else type(items)(parts)
    if isinstance(value, MutableMapping):
        mapping: Any = value
        _map_entries(list(mapping.items()), function, mapping.__setitem__)
    elif is_dataclass(value) and not isinstance(value, type):
        entries = [(entry.name, getattr(value, entry.name, None)) for entry in fields(value)]
        _map_entries(entries, function, partial(object.__setattr__, value))
    return value


def _map_entries(
    entries: Iterable[tuple[Any, Any]],
    function: Callable[[Tensor], Tensor],
    store: Callable[[Any, Any], None],
) -> None:
    for key, old in entries:
        new = map_tensors(old, function)
        if new is not old:
            store(key, new)


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's memory, the same while it is empty; 0 for one that has none (sparse, opaque, under vmap)."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0  # A tensor that torch.func made of another one.


def _writes(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Tensor]
) -> bool:
    """Whether a function writes to a tensor of `kind`."""
    if func in _WRITERS:
        return bool(args) and isinstance(args[0], kind)
    if any(isinstance(item, kind) for item in _tensors((kwargs.get("out"),), {})):
        return True
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return in_place and any(isinstance(item, kind) for item in _tensors(args[:1], {}))


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


_CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}


def _changes_nothing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `module.to(...)` asks a parameter to be what it is: no weights are needed for that."""
    parameter = args[0] if args else None
    if not isinstance(parameter, ReleasedParameter):
        return False
    if name == "data":
        return len(args) == 2 and args[1] is parameter
    if name == "to":
        return _is_already(parameter, [*args[1:], *kwargs.values()])
    if len(args) > 1 or kwargs:
        return False
    return parameter.is_cpu if name == "cpu" else parameter.dtype == _CASTS.get(name)


def _is_already(parameter: Tensor, wanted: Sequence[Any]) -> bool:
    """Whether a parameter has each device and dtype; False for what else `Tensor.to` takes."""
    for item in wanted:
        if isinstance(item, torch.dtype):
            same = item == parameter.dtype
        elif isinstance(item, (torch.device, str)):
            same = torch.empty(0, device=item).device == parameter.device
        else:
            same = item is None or item is False
        if not same:
            return False
    return True


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


def is_metadata(func: Any) -> bool:
    """Whether a torch function asks about a tensor only, not for its values."""
    return func in _METADATA


def name_of(func: Any) -> str:
    """A torch function's name; for an attribute, the attribute's."""
    return _name_of(func)


def tensors_in(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """What a torch function was given, flattened."""
    return _tensors(args, kwargs)
