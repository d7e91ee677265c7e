"""A step as lanes would run it: every unit's gather, computation, reduction and update on resources that serve one at a time.

Finer than `zero_plugin.planner.cost`, which takes the slowest resource of each phase: here a unit can only be used once it has
come, only so many come ahead, and what is last has nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zero_plugin.machine.hardware import Hardware
from zero_plugin.planner.cost import (
    BEGUN_EARLY,
    COLLECTIVE,
    COMPUTE,
    DEVICE_UPDATE,
    DOWN,
    FIXED,
    HOST_UPDATE,
    NORM,
    ON_DEVICE,
    READ,
    UP,
    WRITE,
    Choice,
    Load,
    Phase,
    begun_early,
    phases,
    server,
)

_COMING = (READ, UP, COLLECTIVE, ON_DEVICE)
"""What a unit of sharded weights passes, in order."""

MOST_UNITS = 96
"""More are simulated as so many of even size: the step's shape does not change."""


class _Lanes:
    """When each resource is free again; the cores' all at once where they are shared."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._free: dict[str, float] = {}

    def run(self, name: str, seconds: float, after: float) -> float:
        """Queue work; returns when it ends."""
        name = server(name, shared=self._shared)
        end = max(self._free.get(name, 0.0), after) + seconds
        self._free[name] = end
        return end

    @property
    def end(self) -> float:
        """When all have ended."""
        return max(self._free.values(), default=0.0)


def simulate(
    choice: Choice, load: Load, hardware: Hardware, *, most_units: int = MOST_UNITS
) -> float:
    """Seconds of a step, the second of two where the update is delayed.

    Args:
        choice: the placement.
        load: what is computed and moved.
        hardware: rates.
        most_units: a step of more units is simulated as one of so many.
    """
    parts = phases(choice, load, hardware)
    forward, backward, update = parts
    units = max(1, min(load.units, most_units))
    blocks = min(load.blocks_at(choice.stage), most_units)
    if not choice.delayed:
        lanes = _Lanes(shared=hardware.device_is_host)
        _, after = begun_early(choice, parts)
        names = [name for name in BEGUN_EARLY if choice.early and name in update.seconds]
        early = {name: update.seconds[name] for name in names}
        updated: list[float] = []
        computed = _compute(forward, backward, choice, lanes, units, (early, updated))
        # The blocks are shown in the order in which their updates began.
        starts = [
            max(computed, updated[number * units // blocks]) if updated else computed
            for number in range(blocks)
        ]
        return _update(after, choice, lanes, starts)
    # The update of one step and the computation of the next share every resource but the ones that compute.
    lanes = _Lanes(shared=hardware.device_is_host)
    _update(update, choice, lanes, [0.0] * blocks)
    _compute(forward, backward, choice, lanes, units, ({}, []))
    return lanes.end


_Early = tuple[Mapping[str, float], list[float]]
"""What of the update begins inside the last backward; takes when each unit's has ended."""


def _compute(
    forward: Phase,
    backward: Phase,
    choice: Choice,
    lanes: _Lanes,
    units: int,
    early: _Early,
) -> float:
    """All micro-batches; when they have ended, updates that began inside aside."""
    at = 0.0
    for number in range(forward.repeats):
        coming = _arrivals(choice, out=True)
        at, _ = _pass(forward.seconds, choice, lanes, units, at, coming)
        coming = _arrivals(choice, out=False)
        at, left = _pass(backward.seconds, choice, lanes, units, at, coming)
        if number == forward.repeats - 1 and early[0]:
            end = lanes.end
            for done in left:
                for name, value in early[0].items():
                    done = lanes.run(name, value / units, done)  # noqa: PLW2901 - one after the other
                early[1].append(done)
            return max(at, end)
    return max(at, lanes.end)


def _arrivals(choice: Choice, *, out: bool) -> tuple[str, ...]:
    """Resources a unit passes before it is computed; the others come after."""
    if choice.stage == 3:
        return tuple(
            name
            for name in _COMING
            if name in (COLLECTIVE, ON_DEVICE) or choice.params != "device" or not out
        )
    return () if out else tuple(name for name in (READ, UP))


def _pass(
    seconds: Mapping[str, float],
    choice: Choice,
    lanes: _Lanes,
    units: int,
    start: float,
    coming: tuple[str, ...],
) -> tuple[float, list[float]]:
    """One forward or backward: units come, at most `prefetch` ahead, are computed, and leave.

    Returns:
        When the last is computed, and when each has left.
    """
    each = {name: value / units for name, value in seconds.items()}
    ahead = max(choice.prefetch, 0) if choice.stage == 3 else units
    ends: list[float] = []
    left: list[float] = []
    for unit in range(units):
        before = unit - ahead - 1
        ready = start if before < 0 else ends[before]
        for name in coming:
            if name in each:
                ready = lanes.run(name, each[name], ready)
        done = lanes.run(COMPUTE, each.get(COMPUTE, 0.0), max(ready, ends[-1] if ends else start))
        done = lanes.run(FIXED, each.get(FIXED, 0.0), done) if FIXED in each else done
        ends.append(done)
        for name in (ON_DEVICE, COLLECTIVE, DOWN, NORM, WRITE):
            if name in each and name not in coming:
                done = lanes.run(name, each[name], done)
        left.append(done)
    return ends[-1], left


def _update(update: Phase, choice: Choice, lanes: _Lanes, starts: Sequence[float]) -> float:
    """Blocks are read, updated, written and published, one behind the other, none before its start."""
    each = {name: value / len(starts) for name, value in update.seconds.items()}
    gradients_up = choice.optimizer == "device" and choice.gradients != "device"
    before = (READ, DOWN, *((UP,) if gradients_up else ()))
    for start in starts:
        at = start
        for name in before:
            if name in each:
                at = lanes.run(name, each[name], at)
        for name in (FIXED, HOST_UPDATE, DEVICE_UPDATE):
            if name in each:
                at = lanes.run(name, each[name], at)
        for name in (WRITE, UP, COLLECTIVE, ON_DEVICE):
            if name in each and name not in before:
                lanes.run(name, each[name], at)
    return lanes.end
