"""What another system's checkpoint holds, and one of ours written from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_plugin.checkpoint import tree
from zero_plugin.checkpoint.folder import PartialFolder
from zero_plugin.checkpoint.format import (
    BUFFER,
    DTYPES,
    INDEX,
    MASTER,
    STATE,
    VALUE,
    WEIGHT,
    file_name,
    seal_index,
    slice_name,
)
from zero_plugin.checkpoint.index import complete, stamp
from zero_plugin.checkpoint.shardfile import (
    PIECE_BYTES,
    Part,
    header_of,
    pieces_of,
    whole,
    write_file,
)
from zero_plugin.checkpoint.spread import Value, part_of
from zero_plugin.errors import CheckpointError


@dataclass(kw_only=True)
class Found:
    """What another system's checkpoint holds.

    Attributes:
        weights: by name; tied ones may be there twice.
        masters: fp32, by name.
        states: of each parameter, its optimizer states by torch's names.
        steps: of each parameter, the updates it has had.
        groups: param groups: names of the parameters, and options.
        optimizer: name of the optimizer's class.
        buffers: names in `weights` that are buffers.
        written: told that what was read last is not needed any more.
        extra: what else there is; a nest as `ZeroEngine.save_checkpoint` takes it.
    """

    weights: dict[str, Value] = field(default_factory=dict[str, Value])
    masters: dict[str, Value] = field(default_factory=dict[str, Value])
    states: dict[str, dict[str, Value]] = field(default_factory=dict[str, dict[str, Value]])
    steps: dict[str, int] = field(default_factory=dict[str, int])
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    optimizer: str = "AdamW"
    buffers: set[str] = field(default_factory=set[str])
    written: Callable[[], None] = lambda: None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def write_found(found: Found, target: Path) -> Path:
    """Write a checkpoint of one rank."""
    aliases = find_aliases(found.weights)
    parameters: dict[str, Any] = {}
    parts: list[Part] = []
    for name, weight in found.weights.items():
        if name in aliases:
            continue
        if name in found.buffers:
            place = slice_name(f"{BUFFER}/{name}", 0, weight.numel())
            parts.append(replace(part_of(place, weight, weight.dtype), shape=tuple(weight.shape)))
            continue
        parameters[name] = {
            "shape": list(weight.shape),
            "dtype": DTYPES[weight.dtype],
            "trainable": name in found.states,
        }
        parts += _tensor_parts(found, name, weight, parameters[name])
    tensors: dict[str, Tensor] = {}
    extra = tree.encode(found.extra, tensors, "extra")
    parts += [
        whole(slice_name(f"{VALUE}/{name}", 0, item.numel()), item)
        for name, item in tensors.items()
    ]
    content = {
        **stamp(),
        "world_size": 1,
        "placement": {},
        "parameters": parameters,
        "aliases": aliases,
        "buffers": {
            name: {
                "shape": list(found.weights[name].shape),
                "dtype": DTYPES[found.weights[name].dtype],
            }
            for name in found.weights
            if name in found.buffers
        },
        "extra_states": {},
        "hf": None,
        "optimizers": _optimizers(found),
        "pending": [],
        "counters": {},
        "extra": extra,
    }
    partial = PartialFolder(target.absolute())
    try:
        name = file_name(0, 1)
        written = write_file(
            partial.path / name, header_of(parts, {}), _pieces(found, parts), progress=_ignore
        )
        index = complete(content, {name: written}, partial.path, [{"random": None}])
        with (partial.path / INDEX).open("xb") as file:
            file.write(seal_index(index))
            file.flush()
            os.fsync(file.fileno())
        partial.commit()
    except BaseException:
        partial.discard()
        raise
    return target


def _pieces(found: Found, parts: Sequence[Part]) -> Iterator[Tensor]:
    """The bytes of parts; what they were read from is let go of behind them."""
    moved = 0
    for piece in pieces_of(parts):
        yield piece
        moved += piece.numel()
        if moved >= PIECE_BYTES:
            found.written()
            moved = 0


def _ignore(_: int) -> None:
    """Nobody looks at the progress."""


def _tensor_parts(found: Found, name: str, weight: Value, described: dict[str, Any]) -> list[Part]:
    # A master is fp32 in our format; a fp32 weight is its own.
    wanted = {MASTER: torch.float32}
    tensors = {MASTER if name in found.masters else WEIGHT: found.masters.get(name, weight)}
    if any(name in group["parameters"] for group in found.groups):
        described |= {"optimizer": 0, "step": found.steps.get(name, 0)}
        tensors = {MASTER: found.masters.get(name, weight)}
        tensors |= {STATE + key: value for key, value in found.states.get(name, {}).items()}
    for kind, value in tensors.items():
        if value.numel() != weight.numel():
            raise CheckpointError(
                f"{kind} of parameter {name!r} has {value.numel():,} elements, the weight has {weight.numel():,}: the checkpoint "
                "is damaged, or of a version that is not known here"
            )
    return [
        part_of(
            slice_name(f"{kind}/{name}", 0, weight.numel()), value, wanted.get(kind, value.dtype)
        )
        for kind, value in tensors.items()
        if weight.numel()
    ]


def _optimizers(found: Found) -> list[dict[str, Any]]:
    if not found.states:
        return []
    names = sorted({key for item in found.states.values() for key in item})
    return [
        {
            "class": found.optimizer,
            "states": [STATE + name for name in names],
            "groups": found.groups,
        }
    ]


def find_aliases(weights: Mapping[str, Value]) -> dict[str, str]:
    """Names whose tensors are the same memory as an earlier one's."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name, value in weights.items():
        if not value.numel():
            continue
        key = (value.data_ptr(), tuple(value.shape))
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
    return aliases


def _plain(value: Any) -> Any:
    """What of a param group's option JSON keeps."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return {"$tuple": [_plain(item) for item in value]}
    return value if value is None or isinstance(value, (bool, int, float, str)) else None


def describe_group(names: list[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group of the index."""
    options = {
        key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")
    }
    return {"parameters": names, "options": options}
