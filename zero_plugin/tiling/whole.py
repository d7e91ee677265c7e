"""A tiled weight read as one tensor.

`layer.weight` of a tiled layer is a `TiledTensor`: it answers shape, dtype, device and the like without touching a tile
(models read `weight.dtype` in every forward), is put together when it is computed with, and hands in-place writes on to
the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from zero_plugin.errors import ParameterError
from zero_plugin.sharding.guard import storage_key

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], list[Tensor]]

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "names", "requires_grad", "is_leaf"),
    *("itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized"),
    *("is_nested", "is_mps", "is_xpu", "is_mkldnn", "_version", "output_nr", "grad_fn"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous"),
    *("storage_offset", "element_size", "is_floating_point", "is_complex", "is_signed"),
    *("get_device", "is_inference", "is_conj", "is_neg", "__len__", "__hash__"),
)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


_METADATA: frozenset[Any] = frozenset(
    [_getter(name) for name in _PROPERTIES if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
_COPIED: frozenset[Any] = frozenset([Tensor.__deepcopy__, Tensor.__reduce_ex__])
_LIKE_WRITES = frozenset(
    ["__setitem__", "__set__", "__delete__"]
    + [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")]
    + [f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")]
)
_NO_MEANING = frozenset(
    [
        *("data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "set_"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "detach_"),
        *("resize_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_"),
        "as_strided_",
    ]
)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


def _writes(function: Any) -> bool:
    name = _name(function)
    return name in _LIKE_WRITES or (name.endswith("_") and not name.endswith("__"))


def _target(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an in-place function writes to."""
    if args:
        return args[0]
    return next((kwargs[name] for name in ("tensor", "input", "self") if name in kwargs), None)


def _same_storage(one: object, other: Tensor) -> bool:
    return (
        isinstance(one, Tensor)
        and one.layout == torch.strided
        and storage_key(one) == storage_key(other)
    )


class ReadOnlyView(Tensor):
    """A view of a whole weight that was put together from tiles: a write to it would be lost, so it is refused."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse writes; everything else runs as on a plain tensor, and views of a view are views."""
        kwargs = kwargs or {}
        written = [_target(args, kwargs)] if _writes(func) else []
        written.append(kwargs.get("out"))
        if any(isinstance(item, cls) for item in written):
            raise ParameterError(
                f"{_name(func)} would write to a view of a tiled weight, which is a copy: write to the weight itself "
                "(layer.weight[index] = value, layer.weight.copy_(value)) or use layer.load_state_dict"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            base = next((item for item in args if isinstance(item, cls)), None)
            return result if base is None else protect_views(result, base)


def protect_views(result: Any, base: Tensor) -> Any:
    """Make what shares memory with `base` a `ReadOnlyView`."""
    if type(result) in (tuple, list):
        # Only these hold views: a named tuple (`weight.max(dim=0)`) holds results.
        return type(result)(protect_views(item, base) for item in result)
    return result.as_subclass(ReadOnlyView) if _same_storage(result, base) else result


class TiledTensor(Tensor):
    """The whole of a tiled weight or bias, without storage of its own.

    Reading metadata costs nothing. Computing with it puts a copy together from the tiles, differentiably. In-place
    writes of the whole or of an index, assignments to `.data`, `requires_grad_` and the functions of `torch.nn.init`
    act on the tiles. Writes to views of it, and what needs an address or a storage, are refused.

    Args:
        tiles: parameters it consists of.
        shape: its shape.
        join: puts tiles together.
        split: views of a whole tensor, one a tile.
        tracked: whether autograd sees what is computed with it.
    """

    tiles: tuple[nn.Parameter, ...]
    tracked: bool
    join_tiles: Join
    cut_whole: Split

    def __new__(
        cls,
        tiles: Sequence[nn.Parameter],
        shape: Sequence[int],
        join: Join,
        split: Split,
        *,
        tracked: bool = True,
    ) -> Self:
        """Make the handle."""
        first = tiles[0]
        this: Any = Tensor._make_wrapper_subclass(  # noqa: SLF001 (torch's name)
            cls,
            torch.Size(shape),
            dtype=first.dtype,
            device=first.device,
            requires_grad=tracked and any(tile.requires_grad for tile in tiles),
        )
        this.tiles, this.tracked = tuple(tiles), tracked
        this.join_tiles, this.cut_whole = join, split
        return this

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in `__new__`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer, pass on or refuse one function of torch."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(kwargs.get("out"), cls):
            raise _refusal(f"{_name(func)}(out=...)")
        target = _target(args, kwargs)
        if isinstance(target, cls):
            special = target.intercept(func, args, kwargs)
            if special is not NotImplemented:
                return special
        bases: list[Tensor] = []

        def whole(item: TiledTensor) -> Tensor:
            bases.append(item.whole())
            return bases[-1]

        plain: Any = tree_map_only(TiledTensor, whole, (args, kwargs))
        result = func(*plain[0], **plain[1])
        return protect_views(result, bases[0]) if bases else result

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What reaches torch below `__torch_function__`: only reads."""
        if func._schema.is_mutable:  # noqa: SLF001 (torch has no public name for it)
            raise _refusal(str(func))

        def whole(item: TiledTensor) -> Tensor:
            return item.whole().detach()

        args, kwargs = tree_map_only(TiledTensor, whole, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def whole(self) -> Tensor:
        """A plain tensor copied together from the tiles; differentiable if this is tracked."""
        if self.tracked:
            return self.join_tiles(self.tiles)
        with torch.no_grad():
            return self.join_tiles(self.tiles).detach()

    def untracked(self) -> TiledTensor:
        """A handle that autograd does not follow, as `.data` gives it."""
        return TiledTensor(self.tiles, self.shape, self.join_tiles, self.cut_whole, tracked=False)

    def same_as(self, other: object) -> bool:
        """Whether `other` is a handle on the same tiles."""
        return (
            isinstance(other, TiledTensor)
            and len(self.tiles) == len(other.tiles)
            and all(a is b for a, b in zip(self.tiles, other.tiles, strict=True))
        )

    def write(self, value: Tensor) -> None:
        """Copy a whole tensor into the tiles.

        Raises:
            ParameterError: the shape is another.
        """
        if tuple(value.shape) != tuple(self.shape):
            raise ParameterError(
                f"a tensor of shape {tuple(value.shape)} cannot be written to a tiled weight of shape "
                f"{tuple(self.shape)}: the shape of a tiled layer is fixed"
            )
        with torch.no_grad():
            for tile, piece in zip(self.tiles, self.cut_whole(value), strict=True):
                tile.copy_(piece)

    def intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is not computed on a whole copy; NotImplemented for the rest."""
        name = _name(func)
        if name in _NO_MEANING:
            raise _refusal(name)
        if func in (_getter("data"), Tensor.detach):
            return self.untracked()
        if func == _getter("grad"):
            return self._gradient()
        if func in _COPIED:
            with torch.no_grad():
                copied = self.join_tiles(self.tiles).detach().clone()
            return func(copied.requires_grad_(self.requires_grad), *args[1:], **kwargs)
        if name == "__set__":
            return self._set(func, args[1])
        if func == Tensor.requires_grad_:
            self._track(*args[1:], **kwargs)
            return self
        return self._write_through(func, args, kwargs) if _writes(func) else NotImplemented

    def _gradient(self) -> Tensor | None:
        gradients = [tile.grad for tile in self.tiles if self.tracked]
        if not gradients or any(item is None for item in gradients):
            return None
        with torch.no_grad():
            joined = self.join_tiles([item for item in gradients if item is not None])
        return joined.as_subclass(ReadOnlyView)

    def _set(self, func: Any, value: Any) -> None:
        if func == _setter("requires_grad"):
            self._track(requires_grad=value)
        elif func == _setter("data"):
            if not self.same_as(value):
                if value.dtype != self.dtype or value.device != self.device:
                    raise ParameterError(
                        f"a tensor of {value.dtype} on {value.device} cannot become the data of a tiled weight of "
                        f"{self.dtype} on {self.device}: convert the whole layer with layer.to(...)"
                    )
                self.write(value.detach())
        elif func == _setter("grad") and value is None:
            for tile in self.tiles:
                tile.grad = None
        else:
            raise _refusal("assignment to an attribute of the whole weight")

    def _track(self, requires_grad: bool = True) -> None:  # noqa: FBT001, FBT002 (torch's signature)
        if not self.tracked:
            raise _refusal("requires_grad_ on a detached tiled weight (take a .clone() first)")
        for tile in self.tiles:
            tile.requires_grad_(requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.requires_grad_(self, requires_grad)

    def _write_through(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            value = self.join_tiles(self.tiles).detach()
            if len(self.tiles) == 1:
                value = value.clone()
        # As a leaf that requires a gradient, so that torch itself refuses what it would refuse on a Parameter.
        value.requires_grad_(self.requires_grad)

        def swap(item: TiledTensor) -> Tensor:
            return value if item is self else item.whole()

        args, kwargs = tree_map_only(TiledTensor, swap, (args, kwargs))
        func(*args, **kwargs)
        self.write(value.detach())
        return self


def _refusal(what: str) -> ParameterError:
    return ParameterError(
        f"{what} has no meaning for a tiled weight, which has no storage of its own: use the parameters of layer.tiles, "
        "a copy (layer.weight.detach().clone()), or layer.load_state_dict to write"
    )
