"""Replaces large layers by tiled ones: first a plan of everything, then the change."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from zero_plugin.config import parse_bytes
from zero_plugin.errors import ConfigError, EngineStateError, ParameterError
from zero_plugin.sharding.hooks import is_managed
from zero_plugin.sharding.precut import precut_of, set_record
from zero_plugin.tiling.cut import Cut, edges
from zero_plugin.tiling.modules import (
    Conv1DTile,
    EmbeddingTile,
    LinearTile,
    Tile,
    Tiled,
    TiledEmbedding,
    TiledLinear,
    Written,
    tied_together,
    tiled_embedding,
)

Model = TypeVar("Model", bound=nn.Module)


def tile_linears(
    model: Model,
    *,
    max_bytes: int | str,
    split_inputs: bool = False,
    embeddings: bool = False,
) -> Model:
    """Split large linear layers into sequential tiles, in place.

    Every `nn.Linear`, and `Conv1D` of transformers, whose weight and bias together are larger than `max_bytes` becomes a
    sequence of layers over some of its output features each. The module objects stay (they are re-classed, and still
    instances of `nn.Linear`), with their hooks and attributes. An embedding that shares its weight with such a layer is
    tiled with it and stays tied.

    What stays the same: results (each tile computes what the whole layer computes for its outputs; sums over outputs,
    that is gradients of the input, are rounded in another order), names, shapes and values in `state_dict()` and
    `load_state_dict()`, `in_features`, `out_features`, and reads of `weight` and `bias`.

    What changes: `named_parameters()` shows the tiles (`fc.tiles.0.weight`), so build the optimizer *after* tiling: one
    built before holds parameters that are in no layer any more (an engine refuses it; plain torch cannot notice).
    `state_dict()` copies the tiled weights together instead of aliasing them, and `load_state_dict(assign=True)` copies
    the parts. `layer.weight` is a handle without memory of its own: computing with it makes a copy for the occasion,
    in-place writes go to the tiles.

    A model that is built in shards is tiled inside its `init_context`, once it is built.

    Layers that are left as they are and named in a log message: subclasses of `nn.Linear`, parametrised or quantised
    ones, layers whose `forward` was replaced, weights shared with a module of another kind, biases shared at all,
    embeddings with `max_norm` or sparse gradients. An adapter's `base_layer` (LoRA) is tiled before or after wrapping.

    Args:
        model: any module, the layer itself included; also on the meta device.
        max_bytes: most bytes of one tile's weight and bias, in their present dtype; a number or a string like "64MiB".
        split_inputs: where one output's weights are larger than a tile, split along the input too and add the products
            up. Rounds differently.
        embeddings: also tile large `nn.Embedding`s that share their weight with no linear layer.

    Returns:
        The same model.

    Raises:
        ConfigError: `model` is not a module, `max_bytes` is not a size or smaller than one output of a layer, or a layer
            was tiled before with larger tiles.
        EngineStateError: a live engine manages the model, or its weights were cut by an `init_context` that has ended.
        ParameterError: a parameter to be tiled has hooks.
    """
    if not isinstance(cast("object", model), nn.Module):
        raise ConfigError(
            f"tile_linears takes a torch.nn.Module, not {type(model).__name__}: pass the model or the layer"
        )
    planner = _Planner(
        model, parse_bytes(max_bytes, "max_bytes"), split_inputs=split_inputs, embeddings=embeddings
    )
    plans = list(planner.plans())
    with torch.inference_mode(mode=False), torch.no_grad():
        for plan in plans:
            plan.apply()
    if planner.left:
        listed = "; ".join(f"{name}: {reason}" for name, reason in planner.left.items())
        logging.getLogger(__name__).warning(
            "larger than max_bytes=%s but not tiled: %s", max_bytes, listed
        )
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a parameter is registered: `owner.name`, with the owner's qualified name."""

    owner: nn.Module
    path: str
    name: str

    def __str__(self) -> str:
        return ".".join(part for part in (self.path, self.name) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """A class that can be tiled.

    Attributes:
        plain: the class; subclasses do not count.
        tiled: what it becomes.
        transposed: whether its weight is [inputs, outputs].
    """

    plain: type[nn.Module]
    tiled: type[Tiled]
    transposed: bool = False

    def tile(
        self,
        layer: Any,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        span: tuple[int, int],
    ) -> Tile:
        """A tile of `layer` over the outputs (rows) in `span`."""
        if self.plain is not nn.Embedding:
            return (Conv1DTile if self.transposed else LinearTile)(weight, bias)
        padding = layer.padding_idx
        if padding is not None:
            padding = padding - span[0] if span[0] <= padding < span[1] else None
        return EmbeddingTile(weight, padding, scale_grad_by_freq=layer.scale_grad_by_freq)


def _kinds() -> list[_Kind]:
    found = [
        _Kind(plain=nn.Linear, tiled=TiledLinear),
        _Kind(plain=nn.Embedding, tiled=TiledEmbedding),
    ]
    # Only a model made with transformers has its Conv1D, and then this module is loaded.
    utilities = sys.modules.get("transformers.pytorch_utils")
    if utilities is not None and hasattr(utilities, "Conv1D"):
        from zero_plugin.tiling.gpt2 import TiledConv1D

        found.append(_Kind(plain=utilities.Conv1D, tiled=TiledConv1D, transposed=True))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """One weight, the layers that use it, and how it is cut."""

    layers: list[tuple[_Kind, nn.Module]]
    cut: Cut

    def apply(self) -> None:
        """Make the tiles and re-class the layers; the whole parameter is freed at the end."""
        whole = _parameters(self.layers[0][1])["weight"]
        weights = _cut_parameter(whole, self.cut.pieces)
        written = Written()
        tiled = [self._convert(kind, layer, weights, written) for kind, layer in self.layers]
        if len(tiled) > 1:
            tied_together(tiled)

    def _convert(
        self, kind: _Kind, layer: nn.Module, weights: Sequence[nn.Parameter], written: Written
    ) -> Tiled:
        bias = _parameters(layer).get("bias")
        biases = [] if bias is None else _cut_parameter(bias, self.cut.bias_pieces)
        tiles: list[Tile] = []
        for number, weight in enumerate(weights):
            row, column = divmod(number, self.cut.columns)
            own_bias = biases[row] if biases and not column else None
            tiles.append(kind.tile(layer, weight, own_bias, self.cut.output_spans[row]))
        for name in ("weight", "bias"):
            if hasattr(layer, name):
                delattr(layer, name)
        layer.__class__ = kind.tiled
        converted = cast("Tiled", layer)
        converted.install(tiles, self.cut, written)
        return converted


def _cut_parameter(whole: nn.Parameter, split: Any) -> list[nn.Parameter]:
    """Parameters with the parts' values, gradients and attributes, each in a storage of its own."""
    gradients: list[Any] = [None] * len(split(whole.data))
    if whole.grad is not None:
        gradients = split(whole.grad)
    parts: list[nn.Parameter] = []
    for piece, gradient in zip(split(whole.data), gradients, strict=True):
        part = nn.Parameter(_own(piece), requires_grad=whole.requires_grad)
        part.grad = None if gradient is None else _own(gradient)
        vars(part).update(vars(whole))
        set_record(part, None)
        parts.append(part)
    return parts


def _own(piece: Tensor) -> Tensor:
    return piece.clone(memory_format=torch.contiguous_format)


class _Planner:
    """Decides what is tiled and how, and changes nothing.

    Args:
        model: the model.
        limit: most bytes of a tile.
        split_inputs: whether inputs may be split.
        embeddings: whether embeddings that are not tied are tiled too.
    """

    def __init__(
        self, model: nn.Module, limit: int, *, split_inputs: bool, embeddings: bool
    ) -> None:
        self._kinds = _kinds()
        self._limit = limit
        self._split_inputs = split_inputs
        self._embeddings = embeddings
        self._uses: dict[int, list[_Place]] = {}
        self._tiled: list[tuple[str, Tiled]] = []
        self.left: dict[str, str] = {}
        """Names of layers that are too large and cannot be tiled, and why."""
        for path, module in model.named_modules():
            if isinstance(module, Tiled):
                self._tiled.append((path, module))
            for name, parameter in _parameters(module).items():
                place = _Place(owner=module, path=path, name=name)
                _check_not_managed(parameter, place)
                self._uses.setdefault(id(parameter), []).append(place)

    def plans(self) -> Iterator[_Plan]:
        """One plan for each weight that is too large.

        Raises:
            ConfigError: the limit is below one output, or a tiled layer's tiles are larger than it.
            ParameterError: a parameter has hooks.
        """
        for path, layer in self._tiled:
            self._check_tiled(path, layer)
        for places in self._uses.values():
            if self._wanted(places):
                reason = self._why_not(places)
                if reason is None:
                    yield self._plan(places)
                else:
                    self.left[str(places[0]).removesuffix(".weight")] = reason

    def _wanted(self, places: Sequence[_Place]) -> bool:
        """Whether this is the weight of a layer to be tiled, and too large."""
        classes = tuple(
            kind.plain for kind in self._kinds if kind.plain is not nn.Embedding or self._embeddings
        )
        layers = [
            place.owner
            for place in places
            if isinstance(place.owner, classes) and place.name == "weight"
        ]
        return any(_bytes(layer) > self._limit for layer in layers)

    def _why_not(self, places: Sequence[_Place]) -> str | None:
        for place in places:
            kind = self._kind(place.owner)
            if kind is None or place.name != "weight":
                return f"its weight belongs to a {type(place.owner).__name__} ({place}), which is not a class that can be tiled"
            reason = self._why_not_layer(kind, place.owner)
            if reason is not None:
                return f"{place.path or type(place.owner).__name__} {reason}"
        if len({cast("_Kind", self._kind(place.owner)).transposed for place in places}) > 1:
            return "its weight is shared by layers that read it in different orientations"
        return None

    def _why_not_layer(self, kind: _Kind, layer: nn.Module) -> str | None:
        parameters = _parameters(layer)
        kept = vars(layer)["_buffers"].keys() - vars(layer)["_non_persistent_buffers_set"]
        others = [*kept, *layer.children()]
        if kind.plain is not nn.Embedding:
            others += layer.buffers(recurse=False)
        if others or not parameters.keys() <= {"weight", "bias"}:
            return "has parameters, buffers or children of its own beside weight and bias"
        if "forward" in layer.__dict__:
            return "has a replaced forward (tile before what replaced it)"
        options: Any = layer
        if kind.plain is nn.Embedding and (options.max_norm is not None or options.sparse):
            return "has max_norm or sparse gradients"
        for name, parameter in parameters.items():
            plain = precut_of(parameter) is not None or (
                type(parameter) is nn.Parameter and type(parameter.data) is Tensor
            )
            if not plain or not parameter.is_floating_point() or parameter.layout != torch.strided:
                return f"has a {name} that is not a plain dense floating-point parameter"
        bias = _parameters(layer).get("bias")
        if bias is not None and len(self._uses[id(bias)]) > 1:
            return "shares its bias with another module"
        return None

    def _plan(self, places: Sequence[_Place]) -> _Plan:
        layers = [(cast("_Kind", self._kind(place.owner)), place.owner) for place in places]
        for place, (_, layer) in zip(places, layers, strict=True):
            for parameter in _parameters(layer).values():
                _check_no_hooks(parameter, place)
                _check_not_cut_before(parameter, place)
        kind, _ = layers[0]
        weight = _parameters(places[0].owner)["weight"]
        outputs, inputs = weight.shape[::-1] if kind.transposed else weight.shape
        bias_item = max(
            0 if bias is None else bias.element_size()
            for _, layer in layers
            for bias in [_parameters(layer).get("bias")]
        )
        item = weight.element_size()
        if (most := self._limit // (inputs * item + bias_item)) >= 1:
            cut = Cut(outputs=edges(outputs, most), inputs=(0, inputs), transposed=kind.transposed)
        else:
            lookup = any(kind.plain is nn.Embedding for kind, _ in layers)
            cut = self._cut_inputs(places[0], (outputs, inputs), item, bias_item, lookup=lookup)
        return _Plan(layers=layers, cut=cut)

    def _cut_inputs(
        self, place: _Place, shape: tuple[int, int], item: int, bias_item: int, *, lookup: bool
    ) -> Cut:
        outputs, inputs = shape
        row = inputs * item + bias_item
        if not self._split_inputs or lookup:
            cure = "" if lookup else ", or pass split_inputs=True"
            raise ConfigError(
                f"max_bytes={self._limit} is less than one output of {str(place)!r}, which takes {row} bytes "
                f"({inputs} inputs): give at least that{cure}"
            )
        if (most := (self._limit - bias_item) // item) < 1:
            raise ConfigError(
                f"max_bytes={self._limit} is less than one element of {str(place)!r}: give at least {item + bias_item}"
            )
        transposed = cast("_Kind", self._kind(place.owner)).transposed
        return Cut(outputs=edges(outputs, 1), inputs=edges(inputs, most), transposed=transposed)

    def _check_tiled(self, path: str, layer: Tiled) -> None:
        largest = max(_bytes(tile) for tile in layer.tiles)
        if largest > self._limit:
            raise ConfigError(
                f"{path or type(layer).__name__!r} is in tiles of up to {largest} bytes already, more than "
                f"max_bytes={self._limit}: tile the plain model once, with the smallest size that is needed"
            )

    def _kind(self, layer: nn.Module) -> _Kind | None:
        found = next((kind for kind in self._kinds if type(layer) is kind.plain), None)
        if found is None and isinstance(layer, nn.Embedding) and not isinstance(layer, Tiled):
            # Some models scale what an embedding finds: their forward asks that of nn.Embedding.
            return _Kind(plain=nn.Embedding, tiled=tiled_embedding(type(layer)))
        return found


def _bytes(layer: nn.Module) -> int:
    parameters = _parameters(layer)
    found = [parameters[name] for name in ("weight", "bias") if name in parameters]
    return sum(item.numel() * item.element_size() for item in found)


def _parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """What a module owns directly, by name; absent biases left out."""
    return dict(layer.named_parameters(recurse=False, remove_duplicate=False))


def _check_not_managed(parameter: nn.Parameter, place: _Place) -> None:
    if is_managed(parameter):
        raise EngineStateError(
            f"parameter {str(place)!r} belongs to a live engine: tile the model before building its optimizer and engine, or "
            "close the engine first (engine.close())"
        )


def _check_not_cut_before(parameter: nn.Parameter, place: _Place) -> None:
    record = precut_of(parameter)
    if record is not None and not record.builder.is_open:
        raise EngineStateError(
            f"the weights of {place.path or type(place.owner).__name__!r} were cut by a zero_plugin.init_context that has ended, "
            "and no rank has them whole: call tile_linears inside the context, after the model is built, on every rank"
        )


def _check_no_hooks(parameter: Any, place: _Place) -> None:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if any(getattr(parameter, name, None) for name in names):
        raise ParameterError(
            f"a parameter of {place.path or type(place.owner).__name__!r} has hooks, which a tile could not run on the "
            "whole gradient: tile the model first, then register hooks on the tiles"
        )
