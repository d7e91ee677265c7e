"""Managed parameters: which ones an engine takes on, and what must hold of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.errors import OptimizerError, ParameterError

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FROZEN = -1
"""Optimizer of a parameter that has none."""

_OWN_USERS = 3
"""Of a parameter's storage: the parameter, its alias, and the object that asks."""

RESIDENT = -1
"""Unit of a parameter that is in none."""


@dataclass(kw_only=True, slots=True, eq=False)
class ManagedParameter:
    """A trainable parameter that the engine reduces, updates and publishes.

    Attributes:
        index: position among the managed parameters, the same on every rank.
        name: its (first) qualified name in the model.
        parameter: the user's own object; its identity never changes.
        optimizer: index of the optimizer it belongs to; `FROZEN` for a parameter that is only gathered.
        unit: index of the unit it is gathered and released with; `RESIDENT` when its weights are always here.
        alias: flat tensor over the parameter's storage with a version counter of its own, so that publishing does not
            look like a write of the user's.
        shape: shape when it was taken on.
        leaves: other leaves of autograd on the same memory, for the parts of a step (`sharding.leaves`).
    """

    index: int
    name: str
    parameter: nn.Parameter
    optimizer: int
    unit: int = RESIDENT
    alias: Tensor = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    leaves: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        """Take the first alias."""
        self.shape = tuple(self.parameter.shape)
        self.refresh_alias()

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.parameter.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the full weights."""
        return self.alias.numel() * self.alias.element_size()

    @property
    def moved(self) -> bool:
        """Whether `parameter.data` was replaced since the alias was made."""
        with torch._C.DisableTorchFunctionSubclass():
            place = self.alias.data_ptr()
            return any(place != item.data_ptr() for item in (self.parameter, *self.leaves))

    def become(self, kind: Any) -> None:
        """Exchange the class of the parameter and of its leaves."""
        self.parameter.__class__ = kind
        for leaf in self.leaves:
            leaf.__class__ = kind

    def restore_data(self) -> bool:
        """Point the parameter at its own storage again; True if `parameter.data` was replaced."""
        if not self.moved:
            return False
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for item in (self.parameter, *self.leaves):
                item.data = self.alias.view(self.shape)
        return True

    def empty(self) -> bool:
        """Free the weights' memory; False where someone else (a view, `detach()`) uses it too and keeps it.

        The parameter and its alias then get an empty storage of their own: reading the other's would crash the process.
        """
        native: Any = torch._C
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):
            storage = self.alias.untyped_storage()
            if native._storage_Use_Count(storage._cdata) <= _OWN_USERS + len(self.leaves):  # noqa: SLF001
                storage.resize_(0)
                return True
            parameter = self.parameter
            fresh = torch.empty(self.numel, dtype=parameter.dtype, device=parameter.device)
            for item in (parameter, *self.leaves):
                item.data = fresh.view(self.shape)
            self.alias = fresh
            fresh.untyped_storage().resize_(0)
            return False

    def poison(self) -> None:
        """Fill the weights with NaN where `empty` would free them: a handle on them that was kept shows it."""
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):
            storage = self.alias.untyped_storage()
            if storage.nbytes() < self.nbytes:
                storage.resize_(self.nbytes)
            self.alias.fill_(float("nan"))

    def check_unchanged(self) -> None:
        """Refuse a parameter whose dtype, device or shape is not what the states were laid out for.

        Raises:
            ParameterError: it was converted, moved or reshaped.
        """
        parameter, alias = self.parameter, self.alias
        if parameter.dtype != alias.dtype or parameter.device != alias.device:
            raise ParameterError(
                f"parameter {self.name!r} was {alias.dtype} on {alias.device} when the engine was built and is now "
                f"{parameter.dtype} on {parameter.device}: convert or move the model before building the engine, or "
                "close it and build a new one"
            )
        if tuple(parameter.shape) != self.shape:
            raise ParameterError(
                f"parameter {self.name!r} had shape {self.shape} when the engine was built and now has "
                f"{tuple(parameter.shape)}: change the model before building the engine, or close it and build a new one"
            )

    def refresh_alias(self) -> None:
        """Make the parameter contiguous and aligned in a storage of its own, and take an alias of it.

        The linear layers of torch give other bits at unaligned addresses, and safetensors refuses parameters that are
        views of one buffer.
        """
        if _has_no_memory(self.parameter):
            self._take_alias_of_released()
            return
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):
            data = self.parameter.data
            owns_storage = (
                data.is_contiguous()
                and data.storage_offset() == 0
                and data.untyped_storage().nbytes() == data.numel() * data.element_size()
                and data.data_ptr() % 64 == 0
            )
            if not owns_storage or data.is_inference():
                self.parameter.data = data.clone(memory_format=torch.contiguous_format)
                data = self.parameter.data
            alias: Tensor = torch.empty(0, dtype=data.dtype, device=data.device)
            self.alias = alias.set_(data.untyped_storage(), 0, (data.numel(),), (1,))

    def _take_alias_of_released(self) -> None:
        """A sharded parameter has a storage of its own already; an alias can be made only while it has its size."""
        parameter = self.parameter
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):
            storage = parameter.untyped_storage()
            storage.resize_(parameter.numel() * parameter.element_size())
            alias = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            self.alias = alias.set_(storage, 0, (parameter.numel(),), (1,))
            storage.resize_(0)


def collect_parameters(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    known: Iterable[ManagedParameter] = (),
) -> list[ManagedParameter]:
    """Find the trainable parameters of the optimizers, in model order, and check all of them first.

    Args:
        model: the module whose names are used.
        optimizers: torch optimizers built on the model's parameters.
        known: parameters managed already; they are checked against but not returned.

    Returns:
        The parameters not yet managed, numbered after `known`.

    Raises:
        OptimizerError: an optimizer holds a tensor that is not a parameter of the model.
        ParameterError: a parameter is non-leaf, in two optimizers, or of an unsupported layout, device or dtype.
    """
    names = {
        id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=True)
    }
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        seen: set[int] = set()
        for group_number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                place = f"optimizer {number} ({type(optimizer).__name__}), group {group_number}, position {position}"
                _check_member(parameter, names, place)
                if id(parameter) in seen or id(parameter) in owner:
                    raise ParameterError(
                        f"parameter {names[id(parameter)]!r} appears twice ({place}): "
                        "give each parameter to one group of one optimizer"
                    )
                seen.add(id(parameter))
                owner[id(parameter)] = number
    managed = {id(item.parameter) for item in known}
    found = [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=True)
        if parameter.requires_grad and id(parameter) in owner and id(parameter) not in managed
    ]
    for name, parameter in found:
        _check_dtype(name, parameter)
    _check_disjoint([*((item.name, item.parameter) for item in known), *found])
    return [
        ManagedParameter(
            index=len(managed) + i, name=name, parameter=parameter, optimizer=owner[id(parameter)]
        )
        for i, (name, parameter) in enumerate(found)
    ]


def _has_no_memory(parameter: Tensor) -> bool:
    """Whether a parameter's weights are sharded, and not here."""
    with torch._C.DisableTorchFunctionSubclass():
        meta = parameter.device.type == "meta" or parameter.layout != torch.strided
        return (
            not meta
            and parameter.numel() > 0
            and type(parameter.data) is Tensor
            and parameter.untyped_storage().nbytes() == 0
        )


def _check_member(parameter: object, names: dict[int, str], place: str) -> None:
    if not isinstance(parameter, Tensor):
        raise ParameterError(
            f"{place} holds a {type(parameter).__name__}: an optimizer takes tensors"
        )
    if not parameter.is_leaf:
        raise ParameterError(
            f"{place} holds a non-leaf tensor of shape {tuple(parameter.shape)}: it is computed from other tensors, so "
            "it has no gradient of its own; give the optimizer model.parameters()"
        )
    if isinstance(parameter, nn.UninitializedParameter):
        raise ParameterError(
            f"{place} holds an uninitialised parameter of a lazy module: run one batch through the model before building "
            "the optimizer and the engine"
        )
    if id(parameter) not in names:
        raise OptimizerError(
            f"{place} holds a tensor of shape {tuple(parameter.shape)} that is not a parameter of the model: build the "
            "optimizer on this model's parameters(), after any step that replaces them"
        )


def _check_disjoint(found: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory: each would have a master of its own, and the last write would win."""
    extents: list[tuple[int, int, str]] = []
    for name, parameter in found:
        if parameter.numel() and not _has_no_memory(parameter):
            last = sum(
                (n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)
            )
            with torch._C.DisableTorchFunctionSubclass():
                start = parameter.data_ptr()
            extents.append((start, start + (last + 1) * parameter.element_size(), name))
    extents.sort()
    for (_, stop, first), (start, _, second) in itertools.pairwise(extents):
        if start < stop:
            raise ParameterError(
                f"parameters {first!r} and {second!r} share memory: to tie weights, assign the same Parameter object to "
                "both places; else give each a tensor of its own (clone)"
            )


def _check_dtype(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype not in SUPPORTED_DTYPES:
        raise ParameterError(
            f"parameter {name!r} has dtype {parameter.dtype}: trainable parameters must be float32, bfloat16 or "
            "float16; convert it or set requires_grad=False"
        )
    if parameter.layout != torch.strided:
        raise ParameterError(
            f"parameter {name!r} has layout {parameter.layout}: only dense parameters can be sharded"
        )
    if parameter.device.type == "meta":
        raise ParameterError(
            f"parameter {name!r} is on the meta device: materialise the model before the engine"
        )
    if parameter.is_inference():
        raise ParameterError(
            f"parameter {name!r} was made under torch.inference_mode, so autograd cannot track it: build the model "
            "outside of it"
        )
    if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
        raise ParameterError(
            f"parameter {name!r} has grad_dtype {parameter.grad_dtype} and dtype {parameter.dtype}: the engine sums "
            "gradients in fp32 itself; leave grad_dtype alone"
        )
    with torch._C.DisableTorchFunctionSubclass():
        plain = type(parameter) is nn.Parameter or type(parameter.data) is Tensor
    if not plain:
        raise ParameterError(
            f"parameter {name!r} is a {type(parameter).__name__}, a tensor subclass with a storage of its own kind: "
            "train it frozen (requires_grad=False) or convert it to a plain tensor"
        )
