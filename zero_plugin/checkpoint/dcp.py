"""Checkpoints of `torch.distributed.checkpoint` (FSDP, `torch.distributed.checkpoint.save`), read with torch's own reader.

Torch puts the whole state together in memory, and its `.metadata` is a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from zero_plugin.checkpoint.foreign import Found, describe_group
from zero_plugin.errors import CheckpointError


def read(place: Path) -> Found:
    """The model and the optimizer of a checkpoint, with parameters by name as `get_state_dict` gives them.

    Raises:
        CheckpointError: there is no state dict in it.
    """
    content: dict[str, Any] = {}
    _load_state_dict(
        content,
        storage_reader=FileSystemReader(place),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    nests = list(_nests(content))
    optimizer = next((nest for nest in nests if {"state", "param_groups"} <= nest.keys()), None)
    inside = {id(nest) for nest in _nests(optimizer)} if optimizer is not None else set[int]()
    model = next(
        (
            nest
            for nest in nests
            if id(nest) not in inside and any(isinstance(value, Tensor) for value in nest.values())
        ),
        None,
    )
    if model is None:
        raise CheckpointError(
            f"{place} holds {', '.join(map(repr, list(content)[:6]))}, and no state dict of a model among them"
        )
    found = Found(weights={k: v for k, v in model.items() if isinstance(v, Tensor)})
    if optimizer is not None:
        _take_optimizer(found, optimizer, place)
    return found


def _nests(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        return []
    return [value, *(nest for item in value.values() for nest in _nests(item))]


def _take_optimizer(found: Found, optimizer: Mapping[str, Any], place: Path) -> None:
    groups: Any = optimizer["param_groups"]
    for group in groups:
        names = [str(name) for name in group["params"]]
        if not all(name in found.weights for name in names):
            raise CheckpointError(
                f"{place} has an optimizer whose parameters have no names ({group['params'][:3]}): save it with "
                "torch.distributed.checkpoint.state_dict.get_state_dict"
            )
        found.groups.append(describe_group(names, group))
        for name in names:
            entry = optimizer["state"].get(name, {})
            found.steps[name] = int(entry.get("step", 0))
            found.states[name] = {
                key: value
                for key, value in entry.items()
                if isinstance(value, Tensor) and key != "step" and value.dim()
            }
    trained = {name for group in found.groups for name in group["parameters"]}
    found.buffers = {
        name
        for name, value in found.weights.items()
        if name not in trained and not value.is_floating_point()
    }
