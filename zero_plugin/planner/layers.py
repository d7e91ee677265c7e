"""Equal layers in a row, of which a few tell what all of them take.

An engine's bytes are sums over blocks of parameters and sizes of the largest of them. One layer more that is like those before it,
and is cut into blocks as they are, adds the same to every sum and changes no largest. So a model of 80 layers is laid out with 3
and with 4 of them, and the difference is taken 76 times. Layers that differ in anything are laid out themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_plugin.config import ZeroConfig
from zero_plugin.parts import DTYPES
from zero_plugin.sharding.layout import group_by_bytes
from zero_plugin.sharding.parameters import RESIDENT
from zero_plugin.sharding.units import UNIT_MARK, plan_units

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

LAID_OUT = 3
"""Layers of a run that are laid out: the largest block and the second largest must be among them."""

_OUTSIDE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Layers in a row that add the same.

    Attributes:
        layers: their numbers.
    """

    layers: range

    @property
    def count(self) -> int:
        """How many."""
        return len(self.layers)

    def beyond(self, kept: int) -> range:
        """Those after the first `kept`."""
        return self.layers[kept:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """A model under one config, as runs of layers.

    Attributes:
        runs: those that are longer than what is laid out of them.
        staying: for each layer, and for what lies outside of them (the last entry), the elements of the blocks whose states stay
            on the device, and the elements of all.
    """

    runs: tuple[Run, ...]
    staying: tuple[tuple[int, int], ...]

    def fraction(self, removed: Sequence[int]) -> float:
        """The `device_fraction` under which the same blocks stay without some layers.

        Args:
            removed: numbers of the layers.
        """
        gone = set(removed)
        left = [pair for number, pair in enumerate(self.staying) if number not in gone]
        here, total = sum(pair[0] for pair in left), sum(pair[1] for pair in left)
        # Half an element more, against rounding: no block is as small.
        return min(1.0, (here + 0.5) / total) if here else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A parameter that is trained: its identity, elements and dtype."""

    key: int
    numel: int
    dtype: torch.dtype


class Layers:
    """The layers of a model that stand in containers beside equal ones.

    Args:
        model: any; on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules: list[nn.Module] = []
        """The layers, by number."""
        self._shapes: list[object] = []
        for module, shape in _outermost(model):
            self.modules.append(module)
            self._shapes.append(shape)
        uses = [_uses_in(layer) for layer in self.modules]
        self._layer_of = {key: number for number, inside in enumerate(uses) for key in inside}
        everywhere = _uses_in(model)
        self._tied = {
            number
            for number, inside in enumerate(uses)
            if any(everywhere[key] != count for key, count in inside.items())
        }
        """Layers with a parameter that is also somewhere else."""
        self._trained = tuple(
            _Trained(key=id(p), numel=p.numel(), dtype=p.dtype)
            for p in model.parameters()
            if p.requires_grad
        )
        self._units: dict[tuple[int, int | None], dict[int, int]] = {}
        self._divisions: dict[tuple[object, ...], Division] = {}

    def divide(self, config: ZeroConfig) -> Division:
        """Find the runs under a config: equal layers with equal blocks."""
        key = (
            config.shards_parameters,
            config.persist_below,
            config.unit_limit,
            config.reduce_dtype,
            config.bucket_size,
            config.device_fraction,
        )
        if key not in self._divisions:
            self._divisions[key] = self._divide(config)
        return self._divisions[key]

    def _divide(self, config: ZeroConfig) -> Division:
        trained = self._trained
        units = self._units_of(config)
        wire = DTYPES[config.reduce_dtype].itemsize
        keys = [(units.get(p.key, RESIDENT), p.dtype) for p in trained]
        groups = group_by_bytes([p.numel * wire for p in trained], keys, config.bucket_size)
        left = config.device_fraction * sum(p.numel for p in trained)
        patterns: list[list[object]] = [[] for _ in self.modules]
        staying = [[0, 0] for _ in range(len(self.modules) + 1)]
        alone = {*self._tied, *self._parted(units)}
        running = 0
        for group in groups:
            numels = [trained[i].numel for i in group]
            total = sum(numels)
            running += total
            stays = config.device_fraction > 0 and running <= left
            places = [self._layer_of.get(trained[i].key, _OUTSIDE) for i in group]
            first = places[0]
            staying[first][0] += total * stays
            staying[first][1] += total
            # A block may reach into the next layer; it is the same block if it does so after every one of them.
            for place, numel in zip(places, numels, strict=True):
                if place == _OUTSIDE:
                    continue
                if first == _OUTSIDE:
                    alone.add(place)
                patterns[place].append((place - first, numel, stays, place == first and len(group)))
        signatures: list[object] = [
            number if number in alone else (self._shapes[number], tuple(pattern))
            for number, pattern in enumerate(patterns)
        ]
        # What a block that begins in a layer has of the next one is seen in that one only.
        runs = tuple(
            Run(layers=run.layers[:-1]) for run in _equal(signatures) if run.count > LAID_OUT + 2
        )
        return Division(runs=runs, staying=tuple((here, every) for here, every in staying))

    def alike(self) -> tuple[Run, ...]:
        """Runs of layers that are equal by themselves, whatever their blocks."""
        signatures: list[object] = [
            number if number in self._tied else shape for number, shape in enumerate(self._shapes)
        ]
        return tuple(_equal(signatures))

    def without(self, removed: Sequence[int]) -> nn.Module:
        """The model without some layers; what is left are the same modules and parameters."""
        gone = {id(self.modules[number]) for number in removed}
        return _pruned(self._model, gone) if gone else self._model

    # Inside ------------------------------------------------------------------------------------------------------

    def _units_of(self, config: ZeroConfig) -> dict[int, int]:
        """Number of the unit of each sharded parameter."""
        if not config.shards_parameters:
            return {}
        key = (config.persist_below, config.unit_limit)
        if key not in self._units:
            plan = plan_units(self._model, persist_below=key[0], max_bytes=key[1])
            self._units[key] = {
                id(p): number for number, unit in enumerate(plan.units) for _, p in unit.parameters
            }
        return self._units[key]

    def _parted(self, units: dict[int, int]) -> Iterator[int]:
        """Layers that are in a unit with something else."""
        together: dict[int, set[int]] = {}
        for parameter, unit in units.items():
            together.setdefault(unit, set()).add(self._layer_of.get(parameter, _OUTSIDE))
        for layers in together.values():
            if len(layers) > 1:
                yield from layers


def _equal(signatures: Sequence[object]) -> Iterator[Run]:
    start = 0
    for number in range(1, len(signatures) + 1):
        if number == len(signatures) or signatures[number] != signatures[start]:
            yield Run(layers=range(start, number))
            start = number


def _uses_in(module: nn.Module) -> Counter[int]:
    """How often each parameter is used in a module."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _outermost(module: nn.Module) -> Iterator[tuple[nn.Module, object]]:
    """Children of containers that have an equal neighbour, each with its shape; not those inside another one."""
    children = list(module.children())
    equal: set[int] = set()
    shapes: list[object] = []
    if isinstance(module, _CONTAINERS):
        shapes = [_shape_of(child) for child in children]
        for run in _equal(shapes):
            # A layer less would be another layer's neighbour: containers of two are left as they are.
            if run.count > LAID_OUT + 1:
                equal.update(run.layers)
    for number, child in enumerate(children):
        if number in equal:
            yield child, shapes[number]
        else:
            yield from _outermost(child)


def _shape_of(layer: nn.Module) -> object:
    modules = tuple(
        (name, type(module), getattr(module, UNIT_MARK, False))
        for name, module in layer.named_modules()
    )
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()
    )
    return modules, parameters


def _pruned(module: nn.Module, gone: set[int]) -> nn.Module:
    children: dict[str, nn.Module | None] = vars(module)["_modules"]
    kept = {
        name: None if child is None else _pruned(child, gone)
        for name, child in children.items()
        if id(child) not in gone
    }
    if len(kept) == len(children) and all(kept[name] is children[name] for name in kept):
        return module
    made: Any = type(module).__new__(type(module))
    vars(made).update(vars(module))
    vars(made)["_modules"] = kept
    return made
