"""Checkpoints of `torch.distributed.checkpoint` (FSDP, `torch.distributed.checkpoint.save`), read with torch's own reader.

Torch's reader puts the whole state together. Here its tensors are files without names, which the system keeps in memory as far as
there is room; each is filled piece by piece. The `.metadata` is a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from zero_plugin.checkpoint.foreign import Found, describe_group
from zero_plugin.checkpoint.spread import Value
from zero_plugin.errors import CheckpointError
from zero_plugin.runtime.memory import allocate_file, forget_pages

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem


class _IntoFiles(DefaultLoadPlanner):
    """Loads everything that a checkpoint's metadata names, each tensor into a file without a name.

    Args:
        folder: where there is room for all of them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[str, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - as in the base
    ) -> None:
        """Build the nest."""
        if metadata is not None:
            paths: Mapping[str, Any] = metadata.planner_data or {}
            for name, item in metadata.state_dict_metadata.items():
                value = self._room(name, item) if isinstance(item, TensorStorageMetadata) else item
                set_element(state_dict, paths.get(name, (name,)), value)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """A part of a tensor is there: its pages may go."""
        super().commit_tensor(read_item, tensor)
        file = self._files.get(read_item.dest_index.fqn)
        if file is not None:
            forget_pages(file)

    def forget(self) -> None:
        """What was looked at is not needed soon."""
        for file in self._files.values():
            forget_pages(file)

    def _room(self, name: str, item: TensorStorageMetadata) -> Tensor:
        dtype = item.properties.dtype
        nbytes = item.size.numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(item.size, dtype=dtype, device="cpu")
        self._files[name] = allocate_file(self._folder, nbytes)
        return self._files[name].view(dtype).view(item.size)


def read(place: Path, folder: Path) -> Found:
    """The model and the optimizer of a checkpoint, with parameters by name as `get_state_dict` gives them.

    Args:
        place: the checkpoint.
        folder: where its tensors are kept meanwhile, in files without names.

    Raises:
        CheckpointError: there is no state dict in it.
    """
    content: dict[str, Any] = {}
    planner = _IntoFiles(folder)
    _load_state_dict(
        content,
        storage_reader=FileSystemReader(place),
        planner=planner,
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
    weights: dict[str, Value] = {k: v for k, v in model.items() if isinstance(v, Tensor)}
    found = Found(weights=weights, written=planner.forget)
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
