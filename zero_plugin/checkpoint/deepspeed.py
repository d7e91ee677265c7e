"""Checkpoints of DeepSpeed's ZeRO stages 1, 2 and 3: the ranks' flat partitions, put together parameter by parameter.

DeepSpeed need not be installed, and nothing of its pickles is run: objects of its own are read as empty stand-ins.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from zero_plugin.checkpoint.foreign import Found, describe_group
from zero_plugin.checkpoint.spread import Spread, cut_ranges, spread
from zero_plugin.errors import CheckpointError

_SAFE = {
    "builtins": ("set", "frozenset", "dict", "list", "tuple", "int", "float", "bool", "slice"),
    "collections": ("OrderedDict", "defaultdict"),
    "torch._utils": (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_parameter",
    ),
}
"""What of a pickle is taken as it is, beside storages, dtypes and shapes of torch."""

_ALIGNMENT = 2
"""DeepSpeed pads the flat groups of stages 1 and 2 to this many elements a rank."""


class _StandIn:
    """Stands for an object of DeepSpeed's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget what a subclass of a dict is filled with."""

    def append(self, value: Any) -> None:
        """Forget what a subclass of a list is filled with."""


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = global_name in _SAFE.get(module_name, ())
        is_torch = module_name in ("torch", "torch.storage") and (
            global_name.endswith("Storage") or global_name in ("Size", "device", "_load_from_bytes")
        )
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _rebuild
        if known or (is_torch and global_name != "_load_from_bytes"):
            return super().find_class(module_name, global_name)
        return _StandIn


def _rebuild(build: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    """A tensor without the attributes that were set on it."""
    return build(*arguments)


_PICKLE: Any = SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="zero_plugin_pickle")


def read(place: Path) -> Found:
    """Weights, masters, moments and step counts.

    Args:
        place: the folder with `latest`, or the one it names.

    Raises:
        CheckpointError: files are missing, or of a kind that is not known.
    """
    folder = _tag_folder(place)
    models = _ordered(folder.glob("*model_states.pt"))
    optimizers = _ordered(folder.glob("*_optim_states.pt"))
    if not models or not optimizers:
        raise CheckpointError(
            f"{folder} holds {len(models)} *model_states.pt and {len(optimizers)} *_optim_states.pt, wanted at least one of each: "
            "it was not saved by a ZeRO optimizer, or not on a file system that all ranks share"
        )
    model = _load(models[0])
    states = [_load(path)["optimizer_state_dict"] for path in optimizers]
    world = _count(states[0]["partition_count"])
    if len(states) != world:
        raise CheckpointError(
            f"{folder} holds {len(states)} *_optim_states.pt, wanted {world}: it is incomplete"
        )
    if "fp32_flat_groups" in states[0]:
        return _read_stage_3(model, [_load(path) for path in models], states)
    if "single_partition_of_fp32_groups" in states[0]:
        return _read_stage_2(model, states, folder)
    raise CheckpointError(
        f"{optimizers[0]} holds {', '.join(sorted(map(str, states[0])))}, and no fp32 partitions: this layout of DeepSpeed is not known "
        "(0.19.8 is)"
    )


def _tag_folder(place: Path) -> Path:
    latest = place / "latest"
    if not latest.exists():
        return place
    folder = place / latest.read_text().strip()
    if not folder.is_dir():
        raise CheckpointError(
            f"{latest} names {folder.name!r}, which is not there: the checkpoint is incomplete"
        )
    return folder


def _ordered(paths: Iterator[Path]) -> list[Path]:
    """Files in the order of their ranks."""

    def rank(path: Path) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"rank_(\d+)", path.name))

    return sorted(paths, key=rank)


def _load(path: Path) -> Any:
    try:
        return torch.load(
            path, map_location="cpu", weights_only=False, mmap=True, pickle_module=_PICKLE
        )
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({str(error).splitlines()[0][:200]}): it is damaged, or of a version that is not known here"
        ) from error


def _count(value: Any) -> int:
    return int(max(value)) if isinstance(value, (list, tuple)) else int(value)


def _begin(model: Mapping[str, Any]) -> Found:
    """The compute weights and buffers of stages 1 and 2; of stage 3 buffers only."""
    found = Found()
    shared: Mapping[str, str] = dict(model.get("shared_params") or {})
    buffers: set[str] = set(model.get("buffer_names") or ())
    module: Mapping[str, Any] = model["module"] or {}
    for name, value in module.items():
        if isinstance(value, Tensor) and name not in shared:
            found.weights[name] = value
    found.buffers = buffers & found.weights.keys()
    found.extra = {
        key: model[key]
        for key in ("global_steps", "global_samples")
        if isinstance(model.get(key), int)
    }
    return found


def _groups(
    found: Found, shapes: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]
) -> None:
    for number, group in enumerate(shapes):
        found.groups.append(describe_group(list(group), options[min(number, len(options) - 1)]))


# Stages 1 and 2 ------------------------------------------------------------------------------------------------------


def _read_stage_2(model: Mapping[str, Any], states: Sequence[Any], folder: Path) -> Found:
    """Each group's parameters lie one after another, padded at the end, and are cut evenly over the ranks."""
    found = _begin(model)
    shapes: Sequence[Mapping[str, Any]] = model["param_shapes"]
    base = [item["base_optimizer_state"] for item in states]
    entries = [
        item["state"] if isinstance(item, Mapping) and "state" in item else dict(enumerate(item))
        for item in base
    ]
    options = base[0]["param_groups"] if isinstance(base[0], Mapping) else [{}]
    _groups(found, shapes, options)
    for number, group in enumerate(shapes):
        flats = [item["single_partition_of_fp32_groups"][number].flatten() for item in states]
        moments = {
            key: [entry[number][key].flatten() for entry in entries]
            for key, value in entries[0][number].items()
            if isinstance(value, Tensor) and value.numel() > 1
        }
        step = int(entries[0][number].get("step", 0))
        wanted = sum(shape.numel() for shape in group.values())
        total = sum(flat.numel() for flat in flats)
        if not wanted <= total <= wanted + _ALIGNMENT * len(states) * len(states) + 64:
            raise CheckpointError(
                f"group {number} of {folder} has {total:,} elements, its parameters {wanted:,}: this layout is not known"
            )
        offset = 0
        for name, shape in group.items():
            found.masters[name] = spread(flats, offset, shape)
            found.states[name] = {
                key: spread(parts, offset, shape) for key, parts in moments.items()
            }
            found.steps[name] = step
            found.weights.setdefault(name, found.masters[name])
            offset += shape.numel()
    _share(found, model)
    return found


# Stage 3 -------------------------------------------------------------------------------------------------------------


def _read_stage_3(
    model: Mapping[str, Any], models: Sequence[Mapping[str, Any]], states: Sequence[Any]
) -> Found:
    """Each parameter is cut evenly over the ranks, and each rank's pieces of a sub-group lie one after another."""
    found = _begin(model)
    found.weights = {name: v for name, v in found.weights.items() if name in found.buffers}
    shapes: Sequence[Mapping[str, Any]] = model["param_shapes"]
    inner = [item["optimizer_state_dict"] for item in states]
    _groups(found, shapes, inner[0].get("param_groups", [{}]))
    flats = [[part.flatten() for part in item["fp32_flat_groups"]] for item in states]
    numbered = [item["state"] for item in inner]
    keys = sorted(numbered[0])
    moments = {
        name: [[item[key][name].flatten() for key in keys] for item in numbered]
        for name, value in numbered[0][keys[0]].items()
        if isinstance(value, Tensor) and value.numel() > 1
    }
    step = int(numbered[0][keys[0]].get("step", 0))
    world, offset = len(states), 0
    dtype = _compute_dtype(model)
    for group in shapes:
        for name, shape in group.items():
            piece = math.ceil(shape.numel() / world)

            def gathered(
                ranks: Sequence[Sequence[Tensor]],
                shape: Any = shape,
                at: int = offset,
                piece: int = piece,
            ) -> Spread:
                cut = [part for parts in ranks for part in cut_ranges(parts, at, at + piece)]
                return spread(cut, 0, shape)

            found.masters[name] = gathered(flats)
            found.states[name] = {key: gathered(ranks) for key, ranks in moments.items()}
            found.steps[name] = step
            found.weights[name] = replace(gathered(flats), dtype=dtype)
            offset += piece
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        parts = [item["frozen_param_fragments"][name] for item in models]
        found.weights[name] = spread([part.flatten() for part in parts], 0, shape)
    _share(found, model)
    return found


def _compute_dtype(model: Mapping[str, Any]) -> torch.dtype:
    settings = model.get("ds_config") or {}
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if isinstance(settings, Mapping) and (settings.get(key) or {}).get("enabled"):
            return dtype
    return torch.float32


def _share(found: Found, model: Mapping[str, Any]) -> None:
    for name, first in dict(model.get("shared_params") or {}).items():
        if first in found.weights:
            found.weights[name] = found.weights[first]
