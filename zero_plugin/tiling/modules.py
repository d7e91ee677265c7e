"""Layers whose weight lies in tiles, each tile a module that owns its part."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_plugin.errors import ConfigError, ParameterError
from zero_plugin.tiling.cut import Cut
from zero_plugin.tiling.whole import TiledTensor

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tile(nn.Module):
    """One part of a tiled weight, and of its bias.

    It is a gather unit of its own, also inside a block. Its parameters are not in the state dict under its own name: the layer reads and writes them as parts of the whole.

    Args:
        weight: this part of the weight.
        bias: this part of the bias, or None.
    """

    is_gather_unit = True

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def extra_repr(self) -> str:
        """Shape of the part."""
        return f"weight={list(self.weight.shape)}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        pass

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        pass


class LinearTile(Tile):
    """`x @ weight.T + bias`."""

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs of the tile] to [..., outputs of the tile]."""
        return F.linear(features, self.weight, self.bias)


class Conv1DTile(Tile):
    """`x @ weight + bias`, computed as transformers' `Conv1D` does."""

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs of the tile] to [..., outputs of the tile]."""
        flat = features.reshape(-1, features.size(-1))
        result = (
            torch.mm(flat, self.weight)
            if self.bias is None
            else torch.addmm(self.bias, flat, self.weight)
        )
        return result.view(*features.shape[:-1], self.weight.shape[1])


class EmbeddingTile(Tile):
    """Some rows of an embedding.

    Args:
        weight: the rows.
        padding_idx: row, counted in this tile, that gets no gradient.
        scale_grad_by_freq: as in `nn.Embedding`.
    """

    def __init__(
        self, weight: nn.Parameter, padding_idx: int | None, *, scale_grad_by_freq: bool
    ) -> None:
        super().__init__(weight)
        self.padding_idx = padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq

    def forward(self, rows: Tensor) -> Tensor:
        """[n] row numbers, counted in this tile, to [n, width]."""
        return F.embedding(
            rows,
            self.weight,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )


class Written:
    """Under which name the whole weight stands in the state dict that is being made.

    Tied layers share one of these, so that both names get one tensor, as in the model before tiling. Copies and pickles
    start empty.
    """

    def __init__(self) -> None:
        self._place: tuple[Any, str, tuple[nn.Parameter, ...]] | None = None

    def __reduce__(self) -> tuple[type[Written], tuple[()]]:
        return Written, ()

    def find(self, destination: Any, key: str, tiles: Sequence[nn.Parameter]) -> Tensor | None:
        """The tensor that a tied layer put into this very state dict."""
        if self._place is None:
            return None
        where, other, same = self._place
        if where() is not destination or other == key or other not in destination:
            return None
        tied = len(same) == len(tiles) and all(a is b for a, b in zip(same, tiles, strict=True))
        return destination[other] if tied else None

    def note(self, destination: Any, key: str, tiles: Sequence[nn.Parameter]) -> None:
        """The whole weight now stands in `destination` under `key`."""
        try:
            self._place = (weakref.ref(destination), key, tuple(tiles))
        except TypeError:  # a plain dict of the caller's
            self._place = None


class Tiled(nn.Module):
    """What tiled layers have in common; made by `tile_linears` only, which re-classes the layer in place."""

    tiles: nn.ModuleList
    _cut: Cut
    _written: Written

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} is not built directly: build the plain layer and call zero_plugin.tile_linears on it or "
            "on its model"
        )

    def install(self, tiles: Sequence[Tile], cut: Cut, written: Written) -> None:
        """Take the tiles over; the plain parameters are gone by now."""
        self._cut = cut
        self._written = written
        self.tiles = nn.ModuleList(tiles)
        self.tiles.train(self.training)

    @property
    def cut(self) -> Cut:
        """Where the weight is cut."""
        return self._cut

    @property
    def weight(self) -> Any:
        """The whole weight as a `TiledTensor`; see there for what may be done with it."""
        tiles = [cast("Tile", tile).weight for tile in self.tiles]
        return TiledTensor(tiles, self._cut.shape, self._cut.join, self._cut.pieces)

    @property
    def bias(self) -> Any:
        """The whole bias as a `TiledTensor`, or None."""
        tiles = [bias for tile in self.tiles if (bias := cast("Tile", tile).bias) is not None]
        if not tiles:
            return None
        cut = self._cut
        return TiledTensor(tiles, (cut.outputs[-1],), cut.join_bias, cut.bias_pieces)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("weight", "bias"):
            super().__setattr__(name, value)
            return
        present = getattr(self, name)
        # A model that ties its weights again (transformers' tie_weights) assigns what is there already.
        if present is value or (isinstance(present, TiledTensor) and present.same_as(value)):
            return
        raise ParameterError(
            f"{type(self).__name__}.{name} lies in tiles and cannot be assigned: tie weights before tile_linears, and write "
            "values with layer.weight.copy_(value) under torch.no_grad(), or with load_state_dict"
        )

    def _whole(self) -> dict[str, TiledTensor]:
        found = {"weight": self.weight, "bias": self.bias}
        return {name: value for name, value in found.items() if value is not None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        for name, value in self._whole().items():
            key = prefix + name
            tensor = None
            if name == "weight":
                tensor = self._written.find(destination, key, value.tiles)
            if tensor is None:
                tensor = (value if keep_vars else value.untracked()).whole()
                if name == "weight":
                    self._written.note(destination, key, value.tiles)
            destination[key] = tensor

    def _load_from_state_dict(  # noqa: PLR0913, PLR0917 (torch's signature)
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for hook in list(self._load_state_dict_pre_hooks.values()):
            cast("Any", hook)(state_dict, prefix, *rest)
        whole = self._whole()
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        for name, target in whole.items():
            key = prefix + name
            if key in state_dict:
                problem = self._load(name, key, target, state_dict[key], assign=assign)
                error_msgs += [problem] if problem else []
            elif strict:
                missing_keys.append(key)
        if strict:
            names = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
            unexpected_keys += [prefix + name for name in names if name not in whole]

    def _load(
        self, name: str, key: str, target: TiledTensor, value: Any, *, assign: bool
    ) -> str | None:
        """Take one entry; returns what is wrong with it, if anything."""
        if not isinstance(value, Tensor):
            return f'While copying the parameter named "{key}", expected a torch.Tensor, received {type(value)}.'
        if tuple(value.shape) != tuple(target.shape):
            return (
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape in "
                f"current model is {target.shape}."
            )
        if assign:
            self._assign(name, target, value.detach())
            return None
        if target.is_meta and not value.is_meta:
            warnings.warn(
                f"for {key}: copying from a non-meta parameter in the checkpoint to a meta parameter in the current "
                "model, which is a no-op. (Did you mean to pass `assign=True`?)",
                stacklevel=2,
            )
        target.write(value.detach())
        return None

    def _assign(self, name: str, target: TiledTensor, value: Tensor) -> None:
        """Replace the tiles, here and in tied layers, by copies of the parts of `value`.

        Copies, since each tile owns its storage; parts of one large tensor could not be released one by one.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            for old, piece in zip(target.tiles, target.cut_whole(value), strict=True):
                new = nn.Parameter(
                    piece.clone(memory_format=torch.contiguous_format), old.requires_grad
                )
                for tile in self._tiles_with(name, old):
                    setattr(tile, name, new)

    def _tiles_with(self, name: str, parameter: nn.Parameter) -> list[nn.Module]:
        return [
            tile
            for layer in self._tied_layers()
            for tile in layer.tiles
            if getattr(tile, name) is parameter
        ]

    def _tied_layers(self) -> list[Tiled]:
        return [self, *self._partners]

    @property
    def _partners(self) -> list[Tiled]:
        # In a list inside a tuple, so that nn.Module does not take the layers for children.
        return [layer for layer in self.__dict__.get("_tied", ()) if layer is not self]


class TiledProduct(Tiled):
    """The computation of linear layers in tiles."""

    def product(self, features: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], one tile after the other."""
        features = _cast_once(features)
        columns = self._cut.columns
        spans = self._cut.input_spans
        parts = [features]
        if columns > 1:
            parts = list(features.split([high - low for low, high in spans], dim=-1))
        outputs: list[Tensor] = []
        for number, tile in enumerate(self.tiles):
            column = number % columns
            product: Tensor = tile(parts[column])
            if column:
                outputs[-1] = outputs[-1] + product
            else:
                outputs.append(product)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class TiledLinear(TiledProduct, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An `nn.Linear` in tiles."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """[..., in_features] to [..., out_features], one tile after the other."""
        return self.product(input)


class TiledEmbedding(Tiled, nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An `nn.Embedding` in tiles of rows."""

    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Row numbers [...] to [..., width]; every tile is called, whatever the numbers are."""
        flat = input.reshape(-1)
        order = torch.argsort(flat, stable=True)
        rows = flat[order]
        ends = self._ends(rows)
        found: list[Tensor] = []
        for tile, (start, stop), (low, _) in zip(
            self.tiles, itertools.pairwise(ends), self._cut.output_spans, strict=True
        ):
            found.append(tile(rows[start:stop] - low))
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
        return torch.cat(found).index_select(0, place).view(*input.shape, self._cut.inputs[-1])

    def _ends(self, rows: Tensor) -> list[int]:
        """Where each tile's part of the sorted row numbers ends; numbers out of range stay with the outer tiles."""
        inner = self._cut.outputs[1:-1]
        if rows.is_meta:
            return [0, *(0 for _ in inner), rows.numel()]
        edges = torch.tensor(inner, dtype=rows.dtype, device=rows.device)
        return [0, *torch.searchsorted(rows, edges).tolist(), rows.numel()]

    def _fill_padding_idx_with_zero(self) -> None:
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx] = 0


@functools.cache
def tiled_embedding(kind: type[nn.Embedding]) -> type[TiledEmbedding]:
    """The tiled form of a subclass of `nn.Embedding`, whose own methods come first."""

    def reduce(layer: nn.Module, _: Any) -> Any:
        return _empty_embedding, (kind,), layer.__dict__

    body = {"__reduce_ex__": reduce, "__module__": __name__}
    bases: tuple[Any, ...] = (kind, TiledEmbedding)
    return type(f"Tiled{kind.__name__}", bases, body)


def _empty_embedding(kind: type[nn.Embedding]) -> TiledEmbedding:
    found = tiled_embedding(kind)
    return found.__new__(found)


def _cast_once(features: Tensor) -> Tensor:
    """What autocast would do to the input of each tile, done once: each tile would keep a copy for its backward."""
    kind = features.device.type
    if not features.is_floating_point() or not torch.amp.is_autocast_available(kind):
        return features
    if not torch.is_autocast_enabled(kind):
        return features
    dtype = torch.get_autocast_dtype(kind)
    return features if features.dtype in (dtype, torch.float64) else features.to(dtype)


def tied_together(layers: Sequence[Tiled]) -> None:
    """Let layers that share tiles know one another."""
    for layer in layers:
        layer.__dict__["_tied"] = tuple(layers)
