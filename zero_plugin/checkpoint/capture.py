"""A save's contents: the parts of this rank's file, and what rank 0 writes into the index."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_plugin.checkpoint import random_states, tree
from zero_plugin.checkpoint.format import DTYPES, VALUE, slice_name
from zero_plugin.checkpoint.index import stamp
from zero_plugin.checkpoint.shardfile import Part, whole
from zero_plugin.checkpoint.source import BlockParts, Holdings, buffer_parts, state_kinds
from zero_plugin.config import ZeroConfig
from zero_plugin.errors import CheckpointError
from zero_plugin.optim.plan import BlockPlan

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """What one rank saves.

    Attributes:
        volatile: parts that must be read before user code goes on.
        blocks: parts that only the engine changes, block by block.
        values: this rank's own values, as JSON.
        content: rank 0's part of the index, else empty.
    """

    volatile: list[Part]
    blocks: list[BlockParts]
    values: Mapping[str, Any]
    content: Mapping[str, Any]

    @property
    def parts(self) -> list[Part]:
        """All of them, in the order of the file."""
        return [*self.volatile, *(part for item in self.blocks for part in item.parts)]


def capture(  # noqa: PLR0913 - what is saved, and what it depends on
    holdings: Holdings,
    *,
    config: ZeroConfig,
    device: torch.device,
    counters: Mapping[str, Any],
    pending: Sequence[Mapping[str, Any]],
    extra: Any,
    optimizer: bool,
    ahead: Sequence[tuple[BlockPlan, Tensor]] = (),
) -> Capture:
    """Look at everything, copy what is small, and say where the rest is read.

    Args:
        holdings: model and states.
        config: the settings, noted for people.
        device: whose random state is saved.
        counters: the loss scaler's state and the like.
        pending: of each optimizer, where its delayed update stands: "held" names the parameters whose masters are one update
            ahead of their compute weights.
        extra: the user's own nest, rank 0's.
        optimizer: whether masters and optimizer states are saved; else compute weights only.
        ahead: without them, the new weights that are not shown yet, which are saved instead of the present ones.

    Raises:
        CheckpointError: something cannot be kept in a checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    own = f"rank-{holdings.rank}"
    values = {"random": tree.encode(random_states.capture(device), tensors, f"{own}.random")}
    content: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    if holdings.rank == 0:
        rest = holdings.rest()
        content = {
            **stamp(),
            "world_size": holdings.size,
            "placement": _placement(config),
            **_describe(holdings, rest, tensors, optimizer=optimizer),
            "pending": tree.encode(pending, tensors, "pending"),
            "counters": tree.encode(counters, tensors, "counters"),
            "extra": tree.encode(extra, tensors, "extra"),
        }
    volatile = buffer_parts({k: v for k, v in rest.items() if isinstance(v, Tensor)})
    volatile += [
        whole(slice_name(f"{VALUE}/{name}", 0, item.numel()), item.detach().clone())
        for name, item in tensors.items()
    ]
    volatile += holdings.volatile_parts()
    blocks: list[BlockParts] = []
    # Read through lanes, which are the training's own afterwards.
    volatile += holdings.frozen_parts()
    if optimizer:
        held = {name for line in pending for name in line["held"]}
        first, blocks = holdings.state_parts()
        volatile += [*first, *(holdings.weight_parts(held) if held else [])]
    else:
        newer = {plan.block.parameters[i].name for plan, _ in ahead for i in plan.positions}
        volatile += holdings.weight_parts(holdings.managed_names - newer)
        volatile += holdings.ahead_parts(ahead)
    found = Capture(volatile=volatile, blocks=blocks, values=values, content=content)
    _check_dtypes(found.parts)
    return found


def _check_dtypes(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.dtype not in DTYPES:
            raise CheckpointError(
                f"{part.name} has dtype {part.dtype}, which safetensors does not have: convert it, or leave it out"
            )


def _placement(config: ZeroConfig) -> dict[str, Any]:
    return {
        "stage": config.stage,
        "params": config.params,
        "optimizer": config.optimizer,
        "gradients": config.gradients,
    }


def _describe(
    holdings: Holdings, rest: Mapping[str, Any], tensors: dict[str, Tensor], *, optimizer: bool
) -> dict[str, Any]:
    """Parameters, buffers and optimizers of the index."""
    parameters: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, parameter in holdings.model.named_parameters():
        names[id(parameter)] = name
        dtype = DTYPES.get(parameter.dtype)
        if dtype is None:
            raise CheckpointError(
                f"parameter {name!r} has dtype {parameter.dtype}, which safetensors does not have: convert it"
            )
        parameters[name] = {
            "shape": list(parameter.shape),
            "dtype": dtype,
            "trainable": parameter.requires_grad,
        }
    for number, states in enumerate(holdings.states if optimizer else ()):
        for item in states.blocks.values():
            for position, member in enumerate(item.block.parameters):
                parameters[member.name] |= {
                    "optimizer": number,
                    "step": states.step_count(member.index),
                }
                if item.foreign is not None:
                    scalars = {
                        key: value
                        for key, value in item.foreign.state(position).items()
                        if key not in states.foreign_names
                    }
                    place = f"scalars.{member.name}"
                    parameters[member.name]["scalars"] = tree.encode(scalars, tensors, place)
    return {
        "parameters": parameters,
        "aliases": holdings.aliases(),
        "buffers": {
            name: {"shape": list(value.shape), "dtype": DTYPES.get(value.dtype, str(value.dtype))}
            for name, value in rest.items()
            if isinstance(value, Tensor)
        },
        "extra_states": {
            name: tree.encode(value, tensors, name)
            for name, value in rest.items()
            if not isinstance(value, Tensor)
        },
        "hf": _hf_config(holdings),
        "optimizers": [
            {
                "class": states.name,
                "states": state_kinds(states)[1:],
                "groups": _groups(item, names, tensors, f"optimizers.{number}"),
            }
            for number, (item, states) in enumerate(
                zip(holdings.optimizers, holdings.states, strict=True)
            )
        ]
        if optimizer
        else [],
    }


def _groups(
    optimizer: Optimizer, names: Mapping[int, str], tensors: dict[str, Tensor], place: str
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        options: dict[str, Any] = {}
        for key, value in group.items():
            if key == "params":
                continue
            try:
                options[key] = tree.encode(value, tensors, f"{place}.{number}.{key}")
            except CheckpointError as error:
                logging.getLogger(__name__).warning(
                    "option %r of param group %d is not saved: %s", key, number, error
                )
        groups.append(
            {
                "parameters": [names.get(id(p), "(not in the model)") for p in group["params"]],
                "options": options,
            }
        )
    return groups


def _hf_config(holdings: Holdings) -> dict[str, Any] | None:
    """The configuration of a Hugging Face model in the model, so that its export can be loaded by `from_pretrained`."""
    for prefix, module in holdings.model.named_modules():
        config: Any = getattr(module, "config", None)
        if not callable(getattr(module, "save_pretrained", None)) or not hasattr(
            config, "to_json_string"
        ):
            continue
        found: dict[str, Any] = {
            "prefix": f"{prefix}." if prefix else "",
            "config": config.to_json_string(use_diff=False),
        }
        generation: Any = getattr(module, "generation_config", None)
        if hasattr(generation, "to_json_string"):
            found["generation_config"] = generation.to_json_string(use_diff=False)
        return found
    return None
