"""What a user has to do beside setting a config, and what would help where nothing fits."""

from __future__ import annotations

from collections.abc import Mapping

from zero_plugin.planner.cost import Choice
from zero_plugin.planner.formulas import tokens_to_hide_files, tokens_to_hide_update
from zero_plugin.planner.search import Task, estimate

UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(nbytes: float) -> str:
    """A byte count for people."""
    for name, unit in UNITS:
        if abs(nbytes) >= unit:
            return (
                f"{nbytes / unit:.3g} {name}"
                if nbytes / unit < 1000
                else f"{nbytes / unit:,.0f} {name}"
            )
    return f"{nbytes:.0f} B"


def advice_for(task: Task, choice: Choice | None, lacking: Mapping[str, float]) -> tuple[str, ...]:
    """Sentences, most important first."""
    if lacking:
        return tuple(_help(task, choice, lacking))
    return () if choice is None else tuple(_duties(task, choice))


def _duties(task: Task, choice: Choice) -> list[str]:
    found: list[str] = []
    if choice.checkpointing:
        found.append(
            "turn activation checkpointing on in the model (Hugging Face: model.gradient_checkpointing_enable())"
        )
    if choice.loss_tiles > 1:
        found.append("compute the loss in pieces: zero_plugin.tiled_cross_entropy")
    if not task.load.activity.known:
        found.append(
            "activations are not counted: give the forward's inputs to zero_plugin.plan(model, inputs=...)"
        )
    tokens = task.load.activity.tokens * task.load.accumulate
    needed = _tokens_needed(task, choice)
    if tokens < needed and not choice.delayed:
        found.append(
            f"a step of {tokens:,.0f} tokens a rank is too small to hide the update, which takes as long as computing "
            f"{needed:,.0f}: raise the batch or accumulate, or allow delayed_update or speculate"
        )
    return found


def _tokens_needed(task: Task, choice: Choice) -> float:
    """Tokens of a step and rank whose computation is as long as the update of the states where they lie."""
    hardware = task.hardware
    if choice.optimizer == "device":
        return 0.0
    # A rank updates its part of the states: 1/N of the model for the computation of a whole one.
    part = hardware.world_size if choice.stage >= 1 else 1
    rate = hardware.update / hardware.devices * part
    needed = tokens_to_hide_update(hardware.flops, rate, recompute=choice.checkpointing)
    if choice.optimizer == "nvme":
        disk = 2 / (1 / hardware.nvme_read + 1 / hardware.nvme_write) / hardware.devices * part
        needed = max(
            needed, tokens_to_hide_files(hardware.flops, disk, recompute=choice.checkpointing)
        )
    return needed


def _help(task: Task, choice: Choice | None, lacking: Mapping[str, float]) -> list[str]:
    hardware = task.hardware
    where = {
        "device": "device memory",
        "host": "host memory of each machine",
        "nvme": "files of each machine",
    }
    found = [
        "lacking: "
        + ", ".join(f"{size(nbytes)} of {where[tier]}" for tier, nbytes in lacking.items())
    ]
    if not hardware.nvme_bytes:
        found.append("name a folder on a fast disk for the nvme tier (--nvme PATH)")
    if "host" in lacking:
        found.append(
            f"{_more_ranks(task, choice)} machines of this kind, or as much more host memory"
        )
    if "device" in lacking:
        found.append(
            "a smaller micro-batch with more accumulation, activation checkpointing, tiled linears "
            "(zero_plugin.tile_linears) and bucket_bytes below the default make the device's part smaller"
        )
    if "nvme" in lacking and hardware.nvme_bytes:
        found.append("free space on the disks, or more of them")
    if task.pinned:
        fixed = ", ".join(f"{key}={value!r}" for key, value in task.pinned.items())
        found.append(f"let go of what is pinned ({fixed})")
    return found


def _more_ranks(task: Task, choice: Choice | None) -> int:
    """Machines among which the states would fit, as far as they are sharded."""
    if choice is None:
        return task.hardware.machines + 1
    need = estimate(choice, task)["host"] * task.hardware.devices
    have = max(1.0, task.limits.host)
    return max(task.hardware.machines + 1, -(-int(need * task.hardware.machines) // int(have)))
