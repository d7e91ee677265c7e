"""Checkpoints as DeepSpeed lays them out, written without it: seeded numbers in two ranks' flat partitions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RANKS = 2
KEYS = ("master", "exp_avg", "exp_avg_sq")


def write_deepspeed(
    folder: Path, stage: int, *, parameters: int, side: int
) -> dict[str, dict[str, Tensor]]:
    """Write a ZeRO-2 or ZeRO-3 checkpoint of bf16 weights; the masters and moments in it, by parameter.

    Args:
        folder: the place.
        stage: 2 or 3.
        parameters: how many, of which every second one is a vector of odd size.
        side: of the matrices.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(stage)
    shapes = {
        f"layer.{number}": torch.Size((side, side) if number % 2 == 0 else (2 * side - 1,))
        for number in range(parameters)
    }
    values = {
        name: {key: torch.randn(shape, generator=generator) for key in KEYS}
        for name, shape in shapes.items()
    }
    model: dict[str, Any] = {
        "module": {name: value["master"].bfloat16() for name, value in values.items()},
        "param_shapes": [shapes],
        "ds_config": {"bf16": {"enabled": True}},
        "global_steps": 4,
    }
    options = [{"lr": 0.1, "params": [0]}]
    for rank in range(RANKS):
        own = (_cut_group if stage == 2 else _cut_each)(values, rank)
        # Two sub-groups: a parameter may begin in one and end in the other.
        middle = own["master"].numel() // 2
        halves = {key: [flat[:middle].clone(), flat[middle:].clone()] for key, flat in own.items()}
        if stage == 2:
            state: dict[str, Any] = {
                "single_partition_of_fp32_groups": [own["master"]],
                "base_optimizer_state": {
                    "state": {0: {"step": 4, **{key: own[key] for key in KEYS[1:]}}},
                    "param_groups": options,
                },
            }
        else:
            moments = {
                number: {"step": 4, **{key: halves[key][number] for key in KEYS[1:]}}
                for number in range(2)
            }
            state = {
                "fp32_flat_groups": halves["master"],
                "optimizer_state_dict": {"state": moments, "param_groups": options},
            }
            model["module"] = {}
        state["partition_count"] = RANKS
        torch.save(
            {"optimizer_state_dict": state},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if rank == 0 or stage == 3:
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return values


def _cut_group(values: dict[str, dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """A rank's even cut of all parameters one after another."""
    found: dict[str, Tensor] = {}
    for key in KEYS:
        flat = torch.cat([value[key].flatten() for value in values.values()])
        size = math.ceil(flat.numel() / (2 * RANKS)) * 2
        flat = torch.cat([flat, flat.new_zeros(size * RANKS - flat.numel())])
        found[key] = flat[rank * size : (rank + 1) * size].clone()
    return found


def _cut_each(values: dict[str, dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """A rank's even cut of each parameter, one after another."""
    found: dict[str, Tensor] = {}
    for key in KEYS:
        pieces: list[Tensor] = []
        for value in values.values():
            flat = value[key].flatten()
            size = math.ceil(flat.numel() / RANKS)
            flat = torch.cat([flat, flat.new_zeros(size * RANKS - flat.numel())])
            pieces.append(flat[rank * size : (rank + 1) * size])
        found[key] = torch.cat(pieces)
    return found
