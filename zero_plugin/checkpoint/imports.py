"""Checkpoints of other systems, turned into one of ours: weights, and where they are there masters, moments and step counts.

Tensors are mapped from their files where torch can, so that memory does not grow with the model. Files are read as tensors and
plain values only; what else a pickle names is not run. Torch's reader of DCP checkpoints does run it, and needs `trust=True`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from zero_plugin.checkpoint.foreign import Found, describe_group, find_aliases, write_found
from zero_plugin.checkpoint.format import MASTER
from zero_plugin.checkpoint.spread import Value
from zero_plugin.errors import CheckpointError
from zero_plugin.runtime.memory import forget_mappings, mappings_of

Source = Literal["auto", "torch", "hf", "lightning", "deepspeed", "dcp"]


def import_checkpoint(
    source: str | Path, target: str | Path, *, kind: Source = "auto", trust: bool = False
) -> Path:
    """Write a checkpoint of ours from another system's.

    Args:
        source: a file, or a folder.
        target: the new checkpoint.
        kind: what wrote it; `auto` looks.
        trust: whether a DCP checkpoint's pickled `.metadata` may be run: only from a source you trust.

    Raises:
        CheckpointError: it is not what it should be, or holds what cannot be taken.
    """
    place = Path(source)
    if not place.exists():
        raise CheckpointError(f"{place} does not exist: name a file or folder of a checkpoint")
    if kind not in get_args(Source):
        raise CheckpointError(f"kind {kind!r} is not one of {', '.join(get_args(Source))}")
    chosen = _look(place) if kind == "auto" else kind
    if chosen == "dcp" and not trust:
        raise CheckpointError(
            f"{place / '.metadata'} is a pickle, which torch's reader runs: pass trust=True (--trust) if you know where it comes from"
        )
    parent = Path(target).absolute().parent
    readers: dict[str, Callable[[Path], Found]] = {
        "torch": _read_torch,
        "lightning": _read_torch,
        "hf": _read_hf,
        "deepspeed": _read_deepspeed,
        "dcp": partial(_read_dcp, folder=parent),
    }
    found = readers[chosen](place)
    if chosen != "dcp":
        # Pages of mapped files count as this process's memory until the system wants them back.
        found.written = partial(forget_mappings, mappings_of(place))
    return write_found(found, Path(target))


def _look(place: Path) -> Source:
    if place.is_file():
        return "hf" if place.suffix == ".safetensors" else "torch"
    if (place / ".metadata").exists():
        return "dcp"
    if any(place.glob("*.safetensors")):
        return "hf"
    if (place / "latest").exists() or any(place.glob("*_optim_states.pt")):
        return "deepspeed"
    raise CheckpointError(
        f"{place} holds neither safetensors, nor DeepSpeed's 'latest' or *_optim_states.pt, nor DCP's .metadata: name the "
        "checkpoint's own folder, or say what wrote it"
    )


# torch, Lightning, Hugging Face --------------------------------------------------------------------------------------


def _read_torch(place: Path) -> Found:
    """A state dict; or a dict with one beside an optimizer's, as scripts and Lightning write it."""
    content = _load(place)
    if not isinstance(content, dict):
        raise CheckpointError(f"{place} holds a {type(content).__name__}, wanted a state dict")
    model: Any = next(
        (
            content[key]
            for key in ("state_dict", "model", "module", "model_state_dict")
            if key in content
        ),
        content,
    )
    if not isinstance(model, dict) or not any(isinstance(v, Tensor) for v in model.values()):
        raise CheckpointError(
            f"{place} holds {', '.join(map(repr, list(content)[:6]))}, and no state dict among them: save {{'model': "
            "model.state_dict(), 'optimizer': optimizer.state_dict()}"
        )
    found = Found(weights={k: v for k, v in model.items() if isinstance(v, Tensor)})
    optimizer: Any = content.get("optimizer", content.get("optimizer_state_dict"))
    if "optimizer_states" in content and len(content["optimizer_states"]) == 1:
        optimizer = content["optimizer_states"][0]
    if optimizer:
        take_optimizer(found, optimizer, place)
    kept = (
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "hyper_parameters",
        "loops",
        "lr_schedulers",
    )
    found.extra = {key: content[key] for key in kept if key in content and _is_json(content[key])}
    return found


def take_optimizer(found: Found, state: Mapping[str, Any], place: Path) -> None:
    """Put into `found` a torch optimizer's state. Its parameters are numbers in the order of `model.parameters()`, unless it has names."""
    aliases = find_aliases(found.weights)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    named = all("param_names" in group for group in state["param_groups"])
    if named:
        order = [name for group in state["param_groups"] for name in group["param_names"]]
    else:
        floating = [
            k for k, v in found.weights.items() if v.is_floating_point() and k not in aliases
        ]
        order = _matching(floating, found, state, numbers, place)
    name_of = dict(zip(numbers, order, strict=True))
    for group in state["param_groups"]:
        found.groups.append(describe_group([name_of[number] for number in group["params"]], group))
    for number, entry in state["state"].items():
        name = name_of[number]
        tensors = {k: v for k, v in entry.items() if isinstance(v, Tensor) and k != "step"}
        if MASTER in tensors:  # Our own optimizer state dicts have it.
            found.masters[name] = tensors.pop(MASTER)
        found.states[name] = {
            key: value
            for key, value in tensors.items()
            if value.numel() == found.weights[name].numel()
        }
        found.steps[name] = int(entry.get("step", 0))
    found.buffers = (
        {name for name in found.weights if name not in order and name not in aliases}
        if len(state["param_groups"])
        else set()
    )


def _matching(
    names: list[str],
    found: Found,
    state: Mapping[str, Any],
    numbers: list[Any],
    place: Path,
) -> list[str]:
    """The names of numbered parameters: in order, and with the shapes of their states; buffers between them are passed."""
    order: list[str] = []
    left = iter(names)
    for number in numbers:
        entry = state["state"].get(number, {})
        shapes = {tuple(v.shape) for v in entry.values() if isinstance(v, Tensor) and v.dim()}
        for name in left:
            if not shapes or tuple(found.weights[name].shape) in shapes:
                order.append(name)
                break
    if len(order) != len(numbers):
        raise CheckpointError(
            f"{place} has an optimizer of {len(numbers)} parameters, and only {len(order)} weights have the shapes of its states "
            "in order: it was not built on model.parameters(); save it with named parameters, or take the weights alone"
        )
    return order


def _read_hf(place: Path) -> Found:
    from safetensors import safe_open

    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    weights: dict[str, Value] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                weights[name] = opened.get_tensor(name)
    return Found(weights=weights)


def _load(place: Path) -> Any:
    try:
        return torch.load(place, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{place} cannot be read as tensors and plain values ({str(error).splitlines()[0][:200]}): save model.state_dict() "
            "without other objects"
        ) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _read_deepspeed(place: Path) -> Found:
    from zero_plugin.checkpoint.deepspeed import read

    return read(place)


def _read_dcp(place: Path, folder: Path) -> Found:
    from zero_plugin.checkpoint.dcp import read

    folder.mkdir(parents=True, exist_ok=True)
    return read(place, folder)
