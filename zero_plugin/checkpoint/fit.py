"""Whether a checkpoint fits an engine: everything that differs is found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zero_plugin.checkpoint.format import MASTER, STATE
from zero_plugin.checkpoint.index import Catalog
from zero_plugin.checkpoint.source import Holdings, state_kinds
from zero_plugin.errors import CheckpointError

_SHOWN = 6


@dataclass(kw_only=True, slots=True)
class Fit:
    """What of a checkpoint an engine takes.

    Attributes:
        weights: parameters whose weights are there.
        states: parameters whose masters and optimizer states are there.
        buffers: buffers that are there.
        groups: for each optimizer whether its groups' options are taken.
        left_out: what is not taken, or not there; a line each.
    """

    weights: set[str] = field(default_factory=set[str])
    states: set[str] = field(default_factory=set[str])
    buffers: set[str] = field(default_factory=set[str])
    groups: list[bool] = field(default_factory=list[bool])
    left_out: list[str] = field(default_factory=list[str])


def compare(catalog: Catalog, holdings: Holdings, *, weights_only: bool = False) -> Fit:
    """Compare names, shapes, optimizers and groups."""
    fit = Fit()
    _compare_weights(fit, catalog, holdings)
    _compare_buffers(fit, catalog, holdings)
    if not weights_only:
        _compare_optimizers(fit, catalog, holdings)
    return fit


def refusal(fit: Fit, catalog: Catalog) -> CheckpointError:
    """The error that lists what does not fit."""
    return CheckpointError(
        f"{catalog.path} does not fit the model or its optimizers: {listed(fit.left_out)}. Build what was saved, or pass "
        "strict=False to load the rest"
    )


def listed(lines: Sequence[str]) -> str:
    """Some lines as one text."""
    more = len(lines) - _SHOWN
    return "; ".join(lines[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _compare_weights(fit: Fit, catalog: Catalog, holdings: Holdings) -> None:
    saved, aliases = catalog.parameters, catalog.index["aliases"]
    own = holdings.names()
    for name, parameter in own.items():
        source = name if name in saved else aliases.get(name)
        if source is None:
            fit.left_out.append(f"parameter {name!r} is not in the checkpoint")
        elif source != name:
            fit.left_out.append(
                f"parameter {name!r} was tied to {source!r} in the saved model and is not here"
            )
        elif tuple(saved[name]["shape"]) != tuple(parameter.shape):
            fit.left_out.append(
                f"parameter {name!r} has shape {tuple(saved[name]['shape'])} in the checkpoint and {tuple(parameter.shape)} here"
            )
        else:
            fit.weights.add(name)
    # Another system's checkpoint does not say which of its tensors are buffers.
    tied = {*holdings.aliases(), *holdings.rest()}
    fit.left_out += [
        f"the checkpoint's parameter {name!r} is not in the model"
        for name in saved
        if name not in own and name not in tied
    ]


def _compare_buffers(fit: Fit, catalog: Catalog, holdings: Holdings) -> None:
    buffers: Mapping[str, Any] = catalog.index["buffers"]
    saved = {**catalog.parameters, **buffers}
    own = {name: value for name, value in holdings.rest().items() if isinstance(value, Tensor)}
    for name, value in own.items():
        if name not in saved:
            fit.left_out.append(f"buffer {name!r} is not in the checkpoint")
        elif tuple(saved[name]["shape"]) != tuple(value.shape):
            fit.left_out.append(
                f"buffer {name!r} has shape {tuple(saved[name]['shape'])} in the checkpoint and {tuple(value.shape)} here"
            )
        else:
            fit.buffers.add(name)
    fit.left_out += [
        f"the checkpoint's buffer {name!r} is not in the model"
        for name in buffers
        if name not in own
    ]


def _compare_optimizers(fit: Fit, catalog: Catalog, holdings: Holdings) -> None:
    saved: Sequence[Mapping[str, Any]] = catalog.index["optimizers"]
    if not saved:
        fit.left_out.append("the checkpoint was saved without optimizer states")
    elif len(saved) != len(holdings.states):
        fit.left_out.append(
            f"the checkpoint has {len(saved)} optimizers, here are {len(holdings.states)}"
        )
    if len(saved) != len(holdings.states):
        fit.groups = [False] * len(holdings.states)
        return
    for number, item in enumerate(saved):
        problems = list(_optimizer_problems(number, item, holdings))
        fit.groups.append(not problems)
        fit.left_out += problems
        wanted = set(state_kinds(holdings.states[number])[1:])
        if wanted != set(item["states"]):
            continue
        for states in holdings.states[number].blocks.values():
            for member in states.block.parameters:
                if member.name not in fit.weights:
                    continue
                if catalog.parameters[member.name].get("optimizer") == number:
                    fit.states.add(member.name)
                else:
                    fit.left_out.append(
                        f"parameter {member.name!r} had no optimizer states in the saved optimizer {number}"
                    )


def _optimizer_problems(number: int, saved: Mapping[str, Any], holdings: Holdings) -> Iterable[str]:
    states, optimizer = holdings.states[number], holdings.optimizers[number]
    who = f"optimizer {number} ({states.name})"
    wanted = state_kinds(states)[1:]
    if set(saved["states"]) != set(wanted):
        yield (
            f"{who} keeps {_kinds(wanted)}, the saved {saved['class']} kept {_kinds(saved['states'])}"
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        yield (
            f"{who} has {len(optimizer.param_groups)} param groups, the saved one had {len(saved['groups'])}"
        )
        return
    names = {id(parameter): name for name, parameter in holdings.names().items()}
    for place, (theirs, ours) in enumerate(
        zip(saved["groups"], optimizer.param_groups, strict=True)
    ):
        here = [names.get(id(p), "(not in the model)") for p in ours["params"]]
        if theirs["parameters"] == here:
            continue
        found, gone = set(here) - set(theirs["parameters"]), set(theirs["parameters"]) - set(here)
        differing = (
            f"{_some(found)} only here, {_some(gone)} only there"
            if found or gone
            else "the same parameters in another order"
        )
        yield (
            f"param group {place} of {who} has {len(here)} parameters, the saved one had {len(theirs['parameters'])}: {differing}"
        )


def _kinds(kinds: Iterable[str]) -> str:
    return ", ".join(kind.removeprefix(STATE) for kind in kinds if kind != MASTER) or "nothing"


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "none"
    return shown + (", ..." if len(names) > 3 else "")
