"""What is given to an engine: checked before anything is changed, and described so that ranks can compare it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError, ParameterError
from zero_plugin.sharding.parameters import ManagedParameter
from zero_plugin.sharding.precut import check_built_for_sharding


def check_arguments(model: object, optimizer: object, config: object) -> tuple[Optimizer, ...]:
    """The optimizers as a tuple.

    Raises:
        ConfigError: an argument is of another type, or the model is wrapped by another data-parallel engine.
        ParameterError: a buffer cannot be sent to other ranks.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give the torch.nn.Module to train")
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise ConfigError(
            f"model is wrapped in {type(model).__name__}: give the module inside (model.module); the engine reduces "
            "gradients itself"
        )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided or any(
            size > 1 and stride == 0
            for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
        ):
            raise ParameterError(
                f"buffer {name!r} is sparse or expanded (layout {buffer.layout}, strides {buffer.stride()}), so it cannot be "
                "sent to other ranks: register a dense copy (contiguous())"
            )
    if config is not None and not isinstance(config, ZeroConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}: give a ZeroConfig; ZeroConfig.from_dict reads a mapping"
        )
    wanted = config or ZeroConfig()
    check_built_for_sharding(model, shards_parameters=wanted.shards_parameters)
    given: Sequence[object] = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    optimizers: list[Optimizer] = []
    for item in given:
        if not isinstance(item, Optimizer):
            raise ConfigError(
                f"optimizer is a {type(item).__name__}: give a torch.optim.Optimizer built on the model's parameters, or "
                "a list of them"
            )
        optimizers.append(item)
    if not optimizers:
        raise ConfigError(
            "the engine was given no optimizer: give one torch optimizer, or a list of them"
        )
    return tuple(optimizers)


def describe(
    config: ZeroConfig, optimizers: Sequence[Optimizer], model: nn.Module
) -> dict[str, list[str]]:
    """What must be the same on all ranks, section by section, line by line."""
    private = ("trace", "threads", "instruction_set", "backend", "backend_seed", "nvme_path")
    settings = [f"{key}={value!r}" for key, value in vars(config).items() if key not in private]
    groups = [
        f"{type(item).__name__} group {number}: {len(group['params'])} parameters, "
        + ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        for item in optimizers
        for number, group in enumerate(item.param_groups)
    ]
    shapes = [
        f"{name} {tuple(item.shape)} {item.dtype} requires_grad={item.requires_grad}"
        for name, item in (*model.named_parameters(), *model.named_buffers())
    ]
    return {"settings": settings, "optimizers": groups, "model": shapes}


def find_device(model: nn.Module, members: Sequence[ManagedParameter]) -> torch.device:
    """The one device that the trainable parameters lie on.

    Raises:
        ParameterError: they lie on several.
    """
    devices = {member.parameter.device for member in members} or {
        p.device for p in model.parameters()
    }
    if len(devices) > 1:
        raise ParameterError(
            f"trainable parameters lie on several devices ({', '.join(sorted(map(str, devices)))}): move the model to "
            "one device; the engine shards over processes, not over devices of one process"
        )
    return devices.pop() if devices else torch.device("cpu")
