"""Units: the parameters that are gathered and released together, found in a model by its structure.

A transformer block is one unit, so that branches and experts inside it are safe: every rank gathers the same units,
whatever happens within. What lies outside the blocks forms one unit for each module that owns parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_plugin.errors import ConfigError, ParameterError
from zero_plugin.sharding.parameters import SUPPORTED_DTYPES
from zero_plugin.sharding.precut import precut_of

UNIT_MARK = "is_gather_unit"
"""A module with this attribute set to True is a unit even inside another one (a tile of a large linear)."""


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward of their own: whoever holds them decides which of their children run."""

_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read the weights of their children without calling them: a unit with all that is inside."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitPlan:
    """One unit, before anything is cut.

    Attributes:
        name: qualified name of its module.
        module: the module whose forward needs it.
        parameters: names and parameters, in registration order; a tied weight is in its first unit only.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelPlan:
    """The units of a model.

    Attributes:
        units: in registration order.
        uses: modules to hook, each with the indices of the units its forward needs; the model itself in any case.
    """

    units: tuple[UnitPlan, ...]
    uses: tuple[tuple[nn.Module, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Modules whose parameters are gathered together.

    Attributes:
        whole: identities of modules that are a unit with all that is inside.
        cut: identities of those that were too large for that.
    """

    whole: frozenset[int]
    cut: frozenset[int] = frozenset()


def plan_units(model: nn.Module, *, persist_below: int, max_bytes: int | None = None) -> ModelPlan:
    """Find the units of a model.

    Args:
        model: the module. `_no_split_modules` of Hugging Face models names its blocks; else they are the children of
            the outermost containers that hold two or more modules of one class.
        persist_below: parameters with fewer elements stay gathered and are in no unit.
        max_bytes: a block with more is split at its children, and these at theirs; not at those in a container, of which
            ranks may run different ones (experts). None: no limit.

    Raises:
        ConfigError: a unit is larger than `max_bytes` and cannot be split.
        ParameterError: a module with parameters is compiled by TorchScript.
    """
    modules = dict(model.named_modules())
    _check_no_scripts(modules)
    blocks = _block_modules(model, modules.values())
    if max_bytes is not None:
        blocks = _split(model, blocks, persist_below, max_bytes)
    owner: dict[int, int] = {}
    members: list[list[tuple[str, nn.Parameter]]] = []
    places: list[tuple[str, nn.Module]] = []
    uses: dict[int, tuple[nn.Module, dict[int, None]]] = {id(model): (model, {})}
    number_of: dict[int, int] = {}
    for unit_name, unit_module, name, parameter in _walk(model, blocks):
        if not can_shard(parameter, persist_below):
            continue
        number = owner.get(id(parameter))
        if number is None:
            number = number_of.setdefault(id(unit_module), len(members))
            if number == len(members):
                members.append([])
                places.append((unit_name, unit_module))
            owner[id(parameter)] = number
            members[number].append((name, parameter))
        uses.setdefault(id(unit_module), (unit_module, {}))[1][number] = None
    if max_bytes is not None:
        _check_sizes(places, members, max_bytes)
    return ModelPlan(
        units=tuple(
            UnitPlan(name=name or type(module).__name__, module=module, parameters=tuple(found))
            for (name, module), found in zip(places, members, strict=True)
        ),
        uses=tuple((module, tuple(numbers)) for module, numbers in uses.values()),
    )


def can_shard(parameter: nn.Parameter, persist_below: int) -> bool:
    """Whether a parameter can be cut and released: a plain one, floating, large enough.

    Quantised weights (tensor subclasses, integer storage) are kept whole.
    """
    known = type(parameter) is nn.Parameter or precut_of(parameter) is not None
    plain = known and parameter.layout == torch.strided
    return (
        plain
        and parameter.dtype in SUPPORTED_DTYPES
        and parameter.numel() > 0
        and parameter.numel() >= persist_below
    )


def _check_no_scripts(modules: Mapping[str, nn.Module]) -> None:
    """Refuse what reads the memory of its weights without asking anybody: it would crash the process."""
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule) and _owns(module):
            raise ParameterError(
                f"module {name or type(module).__name__!r} is compiled by TorchScript, whose code reads weights behind the back of "
                "Python, also those that are sharded away: use the plain module (or torch.compile) at stage 3, or a stage below"
            )


def _walk(model: nn.Module, blocks: Blocks) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every use of a parameter: name and module of its unit, its own name, itself; duplicates included."""
    root = ("", model)
    stack: list[tuple[str, nn.Module, tuple[str, nn.Module], tuple[str, nn.Module] | None]] = [
        ("", model, root, None)
    ]
    seen: set[int] = set()
    while stack:
        name, module, owner, unit = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        marked = getattr(module, UNIT_MARK, False) is True
        is_block = id(module) in blocks.whole or isinstance(module, _READERS)
        if marked or (unit is None and is_block):
            unit = (name, module)
        own_unit = unit or (name, module)
        if unit is None and isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            own_unit = owner  # It has no forward of its own.
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield own_unit[0], own_unit[1], f"{name}.{key}" if name else key, parameter
        children = [
            (
                f"{name}.{key}" if name else key,
                child,
                own_unit,
                # What a container in a split block holds goes with the block.
                own_unit if id(module) in blocks.cut and isinstance(child, _CONTAINERS) else unit,
            )
            for key, child in module.named_children()
        ]
        stack.extend(reversed(children))


def _split(model: nn.Module, blocks: Blocks, persist_below: int, max_bytes: int) -> Blocks:
    """Blocks without those above `max_bytes`, and with the children of these instead."""
    whole, cut = set(blocks.whole), set(blocks.cut)
    waiting = [module for module in model.modules() if id(module) in whole]
    while waiting:
        module = waiting.pop()
        if isinstance(module, _READERS) or _bytes_of(module, persist_below) <= max_bytes:
            continue
        whole.discard(id(module))
        cut.add(id(module))
        children = [c for c in module.children() if not isinstance(c, _CONTAINERS) and _owns(c)]
        whole.update(map(id, children))
        waiting += children
    return Blocks(whole=frozenset(whole), cut=frozenset(cut))


def _bytes_of(module: nn.Module, persist_below: int) -> int:
    """Bytes of the weights that a unit of the whole module would hold; tiles in it are units of their own."""
    own = sum(
        parameter.numel() * parameter.element_size()
        for parameter in module.parameters(recurse=False)
        if can_shard(parameter, persist_below)
    )
    return own + sum(
        _bytes_of(child, persist_below)
        for child in module.children()
        if getattr(child, UNIT_MARK, False) is not True
    )


def _check_sizes(
    places: Sequence[tuple[str, nn.Module]],
    members: Sequence[Sequence[tuple[str, nn.Parameter]]],
    max_bytes: int,
) -> None:
    for (name, module), found in zip(places, members, strict=True):
        nbytes = sum(parameter.numel() * parameter.element_size() for _, parameter in found)
        if nbytes > max_bytes:
            largest = max(found, key=lambda item: item[1].numel())[0]
            raise ConfigError(
                f"unit {name!r} ({type(module).__name__}) takes {nbytes:,} bytes, most of them for {largest!r}, and "
                f"max_unit_bytes allows {max_bytes:,}: what is in it is gathered together, since ranks may run different "
                "parts of it or use its parameters directly. Raise max_unit_bytes, or cut large linears with "
                "zero_plugin.tile_linears(model, max_bytes=...)"
            )


def _block_modules(model: nn.Module, modules: Collection[nn.Module]) -> Blocks:
    named: set[str] = set()
    for module in modules:
        listed: Any = getattr(module, "_no_split_modules", None)
        if listed:
            named.update(listed)
    found = {id(m) for m in modules if named and type(m).__name__ in named and _owns(m)}
    return Blocks(whole=frozenset(found or {id(module) for module in _repeated([model])}))


def _repeated(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Children of the outermost containers that hold two or more modules of one class with parameters."""
    found: list[nn.Module] = []
    for module in modules:
        inner = [child for child in module.children() if _owns(child)]
        blocks: list[nn.Module] = []
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            classes = [type(child) for child in inner]
            blocks = [child for child in inner if classes.count(type(child)) > 1]
        found += blocks
        found += _repeated(child for child in inner if child not in blocks)
    return found


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
