"""`zero_plugin.plan`: a model, a machine and a batch in, a placement with its bytes and seconds out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_plugin.config import ZeroConfig, parse_bytes
from zero_plugin.errors import ConfigError
from zero_plugin.machine.hardware import Hardware
from zero_plugin.optim.moments import GROUP, kept_bytes
from zero_plugin.planner.advice import advice_for
from zero_plugin.planner.cost import Choice, Load
from zero_plugin.planner.dry import DryModel, meta_twin
from zero_plugin.planner.models import DTYPES, Source, load
from zero_plugin.planner.search import (
    Candidate,
    Limits,
    Search,
    Task,
    dislike,
    with_cache,
    with_fraction,
)
from zero_plugin.planner.workload import (
    Activity,
    Batch,
    Shape,
    transformer_activity,
    unknown_activity,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

_CHOICES = {item.name for item in fields(Choice)}

_PINS = {
    "prefetch_units": "prefetch",
    "delayed_update": "delayed",
    "split_master": "split",
    "device_fraction": "fraction",
}
"""`ZeroConfig` fields that `Choice` has under a shorter name."""

_BUCKET = str(ZeroConfig.bucket_bytes)

_NOWHERE = "nvme"
"""Path in a config that was planned for no folder in particular."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where everything lies, and what a step then costs.

    Attributes:
        name: of the model.
        parameters: of the model.
        hardware: planned for.
        batch: planned for.
        best: the cheapest placement that fits, or the one that lacks least.
        config: its settings, or None where nothing fits and nothing could be built.
        others: the next-best placements.
        lacking: bytes that are lacking in each tier; empty if it fits.
        advice: what else to do, or what would help.
        limits: bytes that could be had.
        load: what a step computes and moves.
        considered: placements that were looked at.
    """

    name: str
    parameters: int
    hardware: Hardware
    batch: Batch
    best: Candidate | None
    config: ZeroConfig | None
    others: tuple[Candidate, ...] = ()
    lacking: Mapping[str, float] = field(default_factory=dict[str, float])
    advice: tuple[str, ...] = ()
    limits: Limits
    load: Load
    considered: int = 0

    @property
    def fits(self) -> bool:
        """Whether a placement was found."""
        return self.best is not None and not self.lacking

    @property
    def checkpointing(self) -> bool:
        """Whether the model must checkpoint its activations (`torch.utils.checkpoint`)."""
        return self.best is not None and self.best.choice.checkpointing


def plan(  # noqa: PLR0913 - what a plan depends on, by name
    model: nn.Module | str | Path | Mapping[str, Any],
    *,
    batch: int = 1,
    seq: int | None = None,
    accumulate: int = 1,
    inputs: Any = None,
    rule: str | Optimizer = "adamw",
    dtype: str | torch.dtype | None = None,
    hardware: Hardware | str | Path | None = None,
    world: int | None = None,
    gpu: int | str | None = None,
    host: int | str | None = None,
    nvme: str | Path | Sequence[str | Path] | None = None,
    nvme_size: int | str | None = None,
    cache: str | Path | None = None,
    delayed_update: bool = False,
    speculate: bool = False,
    alternatives: int = 3,
    **pinned: Any,
) -> Plan:
    """Find the cheapest placement of a model's states that fits.

    Nothing is allocated and no weight is read or changed.

    Args:
        model: a module; or a Hugging Face config, a folder with one, or a name that transformers knows.
        batch: samples of a micro-batch on one rank.
        seq: tokens of a sample.
        accumulate: micro-batches of a step.
        inputs: arguments of the module's forward (a tuple, a mapping, or one tensor), from which operations and activations of
            any module are found; without, those of a transformer are computed and other modules' are not known.
        rule: of the update: "adam", "adamw", "adagrad", "lion", "sgd", or the torch optimizer itself.
        dtype: of the compute weights; None: a module's own, and bf16 for a config.
        hardware: a `Hardware`, a file, or the name of a machine that comes with the package; None: this machine, measured by
            `zero-plugin bench` or looked at.
        world: ranks; None: those of the hardware.
        gpu: memory of a device, in place of the hardware's.
        host: memory of a machine, likewise.
        nvme: folder or folders of the `nvme` tier; none are used without, unless the hardware has disks.
        nvme_size: bytes there, in place of the free space.
        cache: folder with what `zero-plugin bench` measured of this machine; None: the user's.
        delayed_update: whether an update may be one step late.
        speculate: whether updates may begin inside backward, with memory to undo them.
        alternatives: how many next-best placements to name.
        **pinned: `ZeroConfig` fields that are fixed (`stage=2`, `optimizer="host"`), and `checkpointing=True` or `False`.

    Raises:
        ConfigError: something given is unknown, negative, or contradicts something else.
    """
    source = _source(model, dtype)
    sizes = {
        name: parse_bytes(value, name)
        for value, name in ((gpu, "gpu"), (host, "host"), (nvme_size, "nvme_size"))
        if value is not None
    }
    machine = _machine(hardware, world, nvme, cache, sizes)
    rank_batch = Batch(batch=batch, sequence=seq, accumulate=accumulate)
    dry = DryModel(source.model, rule)
    task = _task(dry, source, machine, rank_batch, inputs, nvme, pinned)
    task = replace(task, delayed=task.delayed or delayed_update, speculates=speculate)
    return _choose(task, source, rank_batch, alternatives)


def _choose(task: Task, source: Source, batch: Batch, alternatives: int) -> Plan:
    search = Search(task)
    kept = search.run(alternatives + 1)
    shared: dict[str, Any] = {
        "name": source.name,
        "parameters": task.model.parameters,
        "hardware": task.hardware,
        "batch": batch,
        "limits": task.limits,
        "load": task.load,
        "considered": search.considered,
    }
    if not kept:
        lacking = search.closest[1] if search.closest is not None else {}
        choice = search.closest[0] if search.closest is not None else None
        return Plan(
            **shared,
            best=None,
            config=None if choice is None else task.config(choice),
            lacking=lacking,
            advice=advice_for(task, choice, lacking),
        )
    best, *others = sorted((with_fraction(item, task) for item in kept), key=_cost)
    best, cache = with_cache(best, task)
    return Plan(
        **shared,
        best=best,
        config=task.config(best.choice, cache=cache),
        others=tuple(others),
        advice=advice_for(task, best.choice, {}),
    )


def _cost(candidate: Candidate) -> float:
    return candidate.seconds * (1 + dislike(candidate.choice))


def _source(model: nn.Module | str | Path | Mapping[str, Any], dtype: Any) -> Source:
    wanted = None if dtype is None else _dtype(dtype)
    if not isinstance(model, nn.Module):
        return load(model, wanted or torch.bfloat16)
    config: Any = getattr(model, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else None
    shape = Shape.from_config(described) if isinstance(described, Mapping) else None
    return Source(name=type(model).__name__, model=meta_twin(model, wanted), shape=shape)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r} is not one of fp32, bf16, fp16")
    return found


def _machine(
    hardware: Hardware | str | Path | None,
    world: int | None,
    nvme: str | Path | Sequence[str | Path] | None,
    cache: str | Path | None,
    sizes: Mapping[str, int],
) -> Hardware:
    from zero_plugin.planner.here import here

    if hardware is None:
        found = here(_paths(nvme), world=world, pretends_gpu="gpu" in sizes, cache=cache)
    elif isinstance(hardware, Hardware):
        found = hardware
    else:
        found = Hardware.load(hardware)
    if world is not None:
        found = found.with_world(world)
    changed: dict[str, Any] = {}
    if "gpu" in sizes:
        changed |= {"device_bytes": sizes["gpu"], "device_is_host": False}
    if "host" in sizes:
        changed["host_bytes"] = sizes["host"]
    if "nvme_size" in sizes:
        changed["nvme_bytes"] = sizes["nvme_size"]
    return replace(found, **changed)


def _paths(nvme: str | Path | Sequence[str | Path] | None) -> tuple[Path, ...]:
    if nvme is None:
        return ()
    named = (nvme,) if isinstance(nvme, (str, Path)) else tuple(nvme)
    if "" in named:
        raise ConfigError("nvme path '' is not a folder: name one on a fast local disk")
    return tuple(map(Path, named))


def _task(  # noqa: PLR0913, PLR0917 - the parts of a task
    dry: DryModel,
    source: Source,
    machine: Hardware,
    batch: Batch,
    inputs: Any,
    nvme: Any,
    pinned: Mapping[str, Any],
) -> Task:
    settings, choices = _pins(pinned)
    paths = _paths(nvme)
    settings.setdefault(
        "nvme_path", tuple(map(str, paths)) if len(paths) > 1 else str(*paths or (_NOWHERE,))
    )
    wire = _bytes_of(settings.get("reduce_dtype")) or 4
    bucket = parse_bytes(settings.get("bucket_bytes", _BUCKET), "bucket_bytes")
    sizes = dry.sizes(bucket, wire)
    return Task(
        model=dry,
        load=Load(
            trainable=dry.trainable,
            parameters=dry.parameters,
            element=dry.element,
            gradient=_bytes_of(settings.get("gradient_dtype")) or dry.element,
            wire=wire,
            states=dry.states + 1,
            units=max(1, sizes.units),
            accumulate=batch.accumulate,
            activity=_activity(source, dry, batch, inputs),
            blocks=sizes.blocks,
            unit_blocks=sizes.unit_blocks,
            moment=kept_bytes(settings.get("moment_dtype", "fp32"), GROUP) / GROUP,
        ),
        buffers=sizes,
        hardware=machine,
        limits=Limits.of(machine),
        settings=settings,
        pinned=choices,
        delayed=bool(choices.get("delayed")),
        bf16=next(source.model.parameters()).dtype == torch.bfloat16,
    )


def _pins(pinned: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fixed settings, and fixed choices; both are checked by building a config of them."""
    choices: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in pinned.items():
        name = _PINS.get(key, key)
        if key == "update_in_backward":
            choices["early"] = key if value else ""
        elif name in _CHOICES:
            choices[name] = value
        else:
            settings[key] = value
    if "checkpointing" in choices and not isinstance(choices["checkpointing"], bool):
        raise ConfigError(f"checkpointing={choices['checkpointing']!r} must be True or False")
    plain = {
        key: value for key, value in pinned.items() if key not in ("checkpointing", "loss_tiles")
    }
    needs_stage = {"params", "prefetch_units", "split_master"} & plain.keys()
    if needs_stage and "stage" not in plain and plain.get("params") != "device":
        plain["stage"] = 3
    if "nvme" in plain.values() or any(key.startswith("nvme_") for key in plain):
        plain.setdefault("nvme_path", _NOWHERE)
        plain.setdefault("optimizer", "nvme")
    ZeroConfig(**plain)
    return settings, choices


def _bytes_of(name: str | None) -> int | None:
    return None if name is None else DTYPES[name].itemsize


def _activity(source: Source, dry: DryModel, batch: Batch, inputs: Any) -> Activity:
    if inputs is not None:
        # It counts operations with torch's own counter, whose import costs more than a plan.
        from zero_plugin.planner.profile import profile

        return profile(source.model, inputs, batch)
    if source.shape is not None:
        return transformer_activity(source.shape, dry.parameters, batch, element=dry.element)
    return unknown_activity(dry.parameters, batch)
