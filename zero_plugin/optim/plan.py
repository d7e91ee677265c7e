"""What a step does, decided before any byte moves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_plugin.optim.rule import Rule
from zero_plugin.sharding.partition import Block


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlan:
    """One block's part of a step.

    Attributes:
        block: which block.
        positions: members with a gradient on some rank.
        rows: row of `StepPlan.hyper` for each position.
        groups: param-group options for each position.
    """

    block: Block
    positions: tuple[int, ...]
    rows: npt.NDArray[np.int64]
    groups: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Blocks in the order in which the next forward needs them, with their hyper-parameters.

    Attributes:
        blocks: blocks with at least one present member.
        hyper: float64 [rows, 16]; one row for each pair of param group and step count.
    """

    blocks: tuple[BlockPlan, ...]
    hyper: Tensor


def is_same_update(one: BlockPlan, hyper: Tensor, other: BlockPlan, other_hyper: Tensor) -> bool:
    """Whether two plans of a block update the same members with the same hyper-parameters, each table with its own rows."""
    return one.positions == other.positions and torch.equal(
        hyper[one.rows.tolist()], other_hyper[other.rows.tolist()]
    )


def plan_step(
    blocks: Iterable[Block],
    *,
    is_present: Callable[[int], bool],
    step_of: Callable[[int], int],
    group_of: Mapping[int, int],
    groups: Sequence[Mapping[str, Any]],
    rule: Rule | None,
) -> StepPlan:
    """Plan one optimizer's step.

    Args:
        blocks: its blocks, forward order.
        is_present: whether a parameter (by managed index) has a gradient on some rank.
        step_of: the count a parameter's step will have, 1 for its first.
        group_of: index of each parameter's group; a parameter taken out of its groups is left alone, as in torch.
        groups: the optimizer's param groups.
        rule: the compiled rule, None for a foreign optimizer.
    """
    rows: dict[tuple[int, int], int] = {}
    # As they are now: a scheduler may change a group before the update has run.
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    table: list[tuple[float, ...]] = []
    planned: list[BlockPlan] = []
    for block in blocks:
        positions = tuple(
            i
            for i, member in enumerate(block.parameters)
            if member.index in group_of and is_present(member.index)
        )
        if not positions:
            continue
        members = [block.parameters[position].index for position in positions]
        numbers: list[int] = []
        for index in members:
            key = (group_of[index], step_of(index))
            if key not in rows:
                rows[key] = len(table)
                table.append(rule.hyper(groups[key[0]], key[1]) if rule else (0.0,) * 16)
            numbers.append(rows[key])
        planned.append(
            BlockPlan(
                block=block,
                positions=positions,
                rows=np.asarray(numbers, dtype=np.int64),
                groups=tuple(options[group_of[index]] for index in members),
            )
        )
    hyper = (
        torch.tensor(table, dtype=torch.float64, device="cpu")
        if table
        else torch.zeros(0, 16, dtype=torch.float64, device="cpu")
    )
    return StepPlan(blocks=tuple(planned), hyper=hyper)
