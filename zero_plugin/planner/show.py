"""A plan as a table, as bars, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.planner.advice import size
from zero_plugin.planner.plan import Plan
from zero_plugin.planner.search import TIERS, Candidate, activation_bytes

_BAR = 40
_DEFAULTS = {field.name: field.default for field in fields(ZeroConfig)}


def as_dict(plan: Plan) -> dict[str, Any]:
    """What `plan --json` prints: bytes are those of one rank, seconds those of a step."""
    best = plan.best
    return {
        "fits": plan.fits,
        "config": None if plan.config is None else _config_fields(plan.config),
        "peak_bytes": None if best is None else dict(best.peak),
        "step_seconds": None if best is None else best.seconds,
        "bound_by": None if best is None else best.price.bound_by,
        "lower_bound_seconds": None if best is None else best.price.lower_bound,
        "alternatives": [_alternative(item) for item in plan.others],
        "activation_checkpointing": plan.checkpointing,
        "lacking_bytes": {tier: int(nbytes) for tier, nbytes in plan.lacking.items()},
        "advice": list(plan.advice),
    }


def _config_fields(config: ZeroConfig) -> dict[str, Any]:
    """The fields that a plan decides, and those that are not the default."""
    values = asdict(config)
    decided = ("stage", "params", "optimizer", "gradients", "activations")
    return {
        key: [str(item) for item in value] if isinstance(value, tuple) else value
        for key, value in values.items()
        if key in decided or value != _DEFAULTS[key]
    }


def _alternative(item: Candidate) -> dict[str, Any]:
    return {
        **item.choice.settings(),
        "activation_checkpointing": item.choice.checkpointing,
        "peak_bytes": dict(item.peak),
        "step_seconds": item.seconds,
        "bound_by": item.price.bound_by,
        "lower_bound_seconds": item.price.lower_bound,
    }


def table(plan: Plan) -> Iterator[str]:
    """Lines for people."""
    hardware, batch = plan.hardware, plan.batch
    tokens = "" if batch.sequence is None else f" x {batch.sequence} tokens"
    steps = "" if batch.accumulate == 1 else f", {batch.accumulate} micro-batches a step"
    yield f"{plan.name}: {plan.parameters / 1e9:,.3g} billion parameters"
    yield f"on {hardware.world_size} ranks ({hardware.name}), batch {batch.batch}{tokens} a rank{steps}"
    yield ""
    best = plan.best
    if best is None:
        yield "Nothing fits."
        yield from (f"  - {line}" for line in plan.advice)
        return
    yield from _rows([best, *plan.others])
    yield ""
    yield from bars(plan)
    yield ""
    yield from _timing(best)
    yield from (f"  - {line}" for line in plan.advice)


def _rows(found: list[Candidate]) -> Iterator[str]:
    yield (
        f"{'':4}{'stage':>5} {'params':>7} {'optim.':>7} {'grads':>7} {'checkpoints':>12} {'step':>9} {'floor':>9} "
        f"{'device':>9} {'host':>9} {'nvme':>9}  bound by"
    )
    for number, item in enumerate(found):
        choice = item.choice
        kept = choice.activations if choice.checkpointing else "-"
        peaks = " ".join(f"{size(item.peak[tier]):>9}" for tier in TIERS)
        mark = "best" if number == 0 else f"{number + 1}."
        yield (
            f"{mark:4}{choice.stage:>5} {choice.params:>7} {choice.optimizer:>7} {choice.gradients:>7} {kept:>12} "
            f"{seconds(item.seconds):>9} {seconds(item.price.lower_bound):>9} {peaks}  {item.price.bound_by}{_also(item)}"
        )


def _also(item: Candidate) -> str:
    choice = item.choice
    said = [
        *(["delayed update"] if choice.delayed else []),
        *(["split master"] if choice.split else []),
        *([f"prefetch {choice.prefetch}"] if choice.stage == 3 and choice.prefetch != 1 else []),
        *([f"loss in {choice.loss_tiles} pieces"] if choice.loss_tiles > 1 else []),
        *([f"{choice.cached:.0%} of the states cached"] if choice.cached else []),
        *([f"{choice.fraction:.0%} of them on the device"] if choice.fraction else []),
    ]
    return f" ({', '.join(said)})" if said else ""


def seconds(value: float) -> str:
    """A duration for people."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def parts(plan: Plan) -> dict[str, dict[str, int]]:
    """Bytes of one rank by tier and what they are for, empty ones left out."""
    best = plan.best
    if best is None:
        return {}
    footprint = best.footprint
    found: dict[str, dict[str, int]] = {}
    for tier in TIERS:
        kinds = {kind: nbytes for kind, nbytes in footprint.table[tier].items() if nbytes}
        if tier == "device":
            kinds["gathered weights"] = footprint.gathered
            kinds["gradients on their way"] = footprint.unreduced
        kinds["activations"] = kinds.get("activations", 0)
        found[tier] = kinds
    for tier, nbytes in activation_bytes(best.choice, plan.load).items():
        found[tier]["activations"] += int(nbytes)
    return {tier: {kind: n for kind, n in kinds.items() if n} for tier, kinds in found.items()}


def bars(plan: Plan) -> Iterator[str]:
    """Memory of each tier as bars of text, with what fills them."""
    hardware, best = plan.hardware, plan.best
    if best is None:
        return
    limits = {"device": plan.limits.device, "host": plan.limits.host, "nvme": plan.limits.nvme}
    for tier, kinds in parts(plan).items():
        ranks = 1 if tier == "device" else hardware.devices
        taken, limit = best.peak[tier] * ranks, limits[tier]
        if not taken:
            continue
        share = min(1.0, taken / limit) if limit else 1.0
        filled = max(1, round(share * _BAR))
        whose = "of each device" if tier == "device" else "of each machine"
        yield f"{tier:7}|{'#' * filled:{_BAR}}| {size(taken)} of {size(limit)} {whose}"
        largest = sorted(kinds.items(), key=lambda pair: -pair[1])
        yield f"{'':8} " + ", ".join(f"{kind} {size(n * ranks)}" for kind, n in largest)


def _timing(best: Candidate) -> Iterator[str]:
    for phase in best.price.phases:
        busy = sorted(phase.seconds.items(), key=lambda pair: -pair[1])[:4]
        said = ", ".join(f"{name} {seconds(value)}" for name, value in busy)
        times = f" x {phase.repeats}" if phase.repeats > 1 else ""
        yield f"{phase.name:9}{times}: {said}"


def summary(plan: Plan) -> list[str]:
    """At most ten lines for a log."""
    best = plan.best
    if best is None or plan.config is None:
        return ["nothing fits: " + "; ".join(plan.advice)]
    settings = ", ".join(f"{key}={value!r}" for key, value in _config_fields(plan.config).items())
    lines = [
        f"plan for {plan.name}, {plan.parameters:,} parameters, on {plan.hardware.world_size} ranks ({plan.hardware.name})",
        f"settings: {settings}",
        f"step: {seconds(best.seconds)}, not below {seconds(best.price.lower_bound)}, bound by {best.price.bound_by}",
        *(f"{tier}: {size(best.peak[tier])} a rank" for tier in TIERS if best.peak[tier]),
        *plan.advice,
    ]
    return lines[:10]


def draw(plan: Plan, file: Path) -> None:
    """A picture of the memory of each tier.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"drawing {file} needs matplotlib: pip install matplotlib") from error
    figure: Any = Figure(figsize=(8, 2.6), layout="constrained")
    axes: Any = figure.add_subplot()
    drawn = parts(plan)
    kinds = sorted({kind for found in drawn.values() for kind in found})
    left = dict.fromkeys(drawn, 0.0)
    for kind in kinds:
        widths = [found.get(kind, 0) / 2**30 for found in drawn.values()]
        axes.barh(list(drawn), widths, left=list(left.values()), label=kind)
        left = {tier: left[tier] + width for tier, width in zip(drawn, widths, strict=True)}
    axes.set_xlabel("GiB of one rank")
    axes.set_title(plan.name)
    axes.legend(fontsize="small", ncols=2)
    axes.invert_yaxis()
    figure.savefig(file, dpi=150)
