"""What a step costs in seconds under one placement: traffic and work of each phase over the rates of a machine.

The terms are those of the three papers, with the traffic of this engine: fp32 on the wire of a reduction, one gather of sharded
weights in the forward and one in the backward, gradients reduced and moved with every micro-batch at stages 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_plugin.config import Tier
from zero_plugin.machine.hardware import Hardware
from zero_plugin.planner.workload import Activity

COMPUTE, UP, DOWN = "compute", "host to device", "device to host"
COLLECTIVE, READ, WRITE = "collectives", "disk reads", "disk writes"
HOST_UPDATE, DEVICE_UPDATE = "update on the host", "update on the device"
RESOURCES = (COMPUTE, UP, DOWN, COLLECTIVE, READ, WRITE, HOST_UPDATE, DEVICE_UPDATE)
"""What can be the bound of a step; each does one thing at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One placement.

    Attributes:
        stage: ZeRO stage.
        params: tier of the compute weights.
        optimizer: tier of master and moments.
        gradients: tier of reduced gradients.
        activations: tier of the inputs of checkpoints.
        checkpointing: whether activations are computed again in the backward.
        loss_tiles: pieces that the output and its loss are computed in.
        prefetch: units gathered ahead.
        delayed: whether an update runs beside the next step's computation.
        split: whether the master is kept as a remainder beside bf16 weights.
        cached: part of the states on files that stays in host memory.
    """

    stage: int
    params: Tier = "device"
    optimizer: Tier = "device"
    gradients: Tier = "device"
    activations: Tier = "device"
    checkpointing: bool = False
    loss_tiles: int = 1
    prefetch: int = 1
    delayed: bool = False
    split: bool = False
    cached: float = 0.0

    def settings(self) -> dict[str, Any]:
        """As `ZeroConfig` fields; paths and limits are the planner's to add."""
        found: dict[str, Any] = {
            "stage": self.stage,
            "params": self.params,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
        }
        if self.stage == 3:
            found["prefetch_units"] = self.prefetch
        if self.delayed:
            found["delayed_update"] = True
        if self.split:
            found["split_master"] = True
        return found

    @property
    def uses_files(self) -> bool:
        """Whether any state lies in files."""
        return "nvme" in (self.params, self.optimizer, self.gradients, self.activations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is trained, as far as time is concerned.

    Attributes:
        trainable: parameters that are updated.
        parameters: all of them.
        element: bytes of a compute weight.
        gradient: bytes of a reduced gradient.
        wire: bytes of an element on the wire of a reduction.
        states: fp32 states of a parameter, the master included.
        units: number of gathered units.
        accumulate: micro-batches of a step.
        activity: one micro-batch.
    """

    trainable: int
    parameters: int
    element: int
    gradient: int
    wire: int
    states: int
    units: int
    accumulate: int
    activity: Activity


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a step that the next one waits for.

    Attributes:
        name: "forward", "backward" or "update".
        repeats: how often it occurs in a step.
        seconds: busy time of each resource in one of them.
    """

    name: str
    repeats: int
    seconds: Mapping[str, float]

    @property
    def longest(self) -> float:
        """The time of its slowest resource."""
        return max(self.seconds.values(), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a step takes.

    Attributes:
        seconds: of a step.
        lower_bound: of any schedule of the same work: the busiest resource.
        bound_by: the resource that most of the step waits for.
        phases: the parts.
        hidden_update: whether the update is beside the computation.
    """

    seconds: float
    lower_bound: float
    bound_by: str
    phases: tuple[Phase, ...] = field(default=(), repr=False)
    hidden_update: bool = False


def phases(choice: Choice, load: Load, hardware: Hardware) -> tuple[Phase, ...]:
    """Busy time of each resource in forward, backward and update."""
    terms = _Terms(choice, load, hardware)
    repeats = load.accumulate
    # Below stage 2 gradients are reduced once a step: their part of a backward is spread over the micro-batches.
    share = 1.0 if choice.stage >= 2 else 1 / repeats
    return (
        Phase(name="forward", repeats=repeats, seconds=terms.forward()),
        Phase(name="backward", repeats=repeats, seconds=terms.backward(share)),
        Phase(name="update", repeats=1, seconds=terms.update()),
    )


def price(choice: Choice, load: Load, hardware: Hardware) -> Price:
    """Seconds of a step: within a phase the resources work at once, the phases one after another.

    A delayed update is beside forward and backward; what its gradient and the new weights need stays between them.
    """
    parts = phases(choice, load, hardware)
    start = _first(parts, load)
    computing = sum(phase.repeats * phase.longest for phase in parts[:2]) + start
    update = parts[2].longest + _tail(parts[2], load)
    seconds = max(computing, update) if choice.delayed else computing + update
    busy = {
        name: sum(phase.repeats * phase.seconds.get(name, 0.0) for phase in parts)
        for name in RESOURCES
    }
    waited: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
    counted = parts
    if choice.delayed:
        counted = parts[:2] if computing >= update else parts[2:]
    for phase in counted:
        slowest, longest = max(phase.seconds.items(), key=lambda pair: pair[1])
        waited[slowest] += phase.repeats * longest
    return Price(
        seconds=seconds,
        lower_bound=min(seconds, max(busy.values())),
        bound_by=max(waited, key=lambda name: waited[name]),
        phases=parts,
        hidden_update=choice.delayed and computing >= update,
    )


def _first(parts: tuple[Phase, ...], load: Load) -> float:
    """The first unit of a step is waited for: nothing is there to compute meanwhile."""
    seconds = parts[0].seconds
    moved = sum(seconds.get(name, 0.0) for name in (UP, COLLECTIVE, READ))
    return moved / max(1, load.units)


def _tail(update: Phase, load: Load) -> float:
    """The last block passes through every resource in turn."""
    return (sum(update.seconds.values()) - update.longest) / max(1, load.units)


class _Terms:
    """Bytes over rates, for one rank."""

    def __init__(self, choice: Choice, load: Load, hardware: Hardware) -> None:
        self._choice = choice
        self._load = load
        self._hardware = hardware
        self._ranks = hardware.world_size
        self._own = load.trainable / (self._ranks if choice.stage >= 1 else 1)
        self._weights = load.element * load.parameters / self._ranks
        # Of the ranks on one machine together.
        self._read = hardware.nvme_read / hardware.devices
        self._write = hardware.nvme_write / hardware.devices
        self._launches = hardware.launch_seconds * load.units

    def forward(self) -> dict[str, float]:
        """One micro-batch."""
        seconds = {COMPUTE: self._load.activity.forward_flops / self._hardware.flops}
        self._gather(seconds)
        self._checkpoints(seconds, out=True)
        return _with(seconds, self._launches)

    def backward(self, share: float) -> dict[str, float]:
        """One micro-batch, with `share` of a reduction of all gradients."""
        choice, load, hardware = self._choice, self._load, self._hardware
        times = 3 if choice.checkpointing else 2
        seconds = {COMPUTE: times * load.activity.forward_flops / hardware.flops}
        self._gather(seconds)
        self._checkpoints(seconds, out=False)
        rounds = 2 if choice.stage == 0 else 1
        sent = rounds * load.wire * load.trainable * (self._ranks - 1) / self._ranks
        _add(seconds, COLLECTIVE, share * sent / hardware.between_ranks)
        width = load.gradient if choice.stage >= 2 or load.accumulate == 1 else 4
        landed = share * width * self._own
        if choice.gradients != "device":
            _add(seconds, DOWN, landed / hardware.link_down)
        if choice.gradients == "nvme":
            self._file(seconds, WRITE, landed)
            if load.accumulate > 1 and choice.stage >= 2:
                # What was added up is read, and written wider.
                self._file(seconds, READ, 4 * self._own)
                self._file(seconds, WRITE, (4 - load.gradient) * self._own)
        return _with(seconds, self._launches)

    def update(self) -> dict[str, float]:
        """The end of a step."""
        choice, load, hardware = self._choice, self._load, self._hardware
        own, seconds = self._own, dict[str, float]()
        # 28 bytes a parameter for Adam and bf16: the gradient, each state read and written, and the new weight.
        traffic = (load.gradient + 8 * load.states + load.element) * own
        if choice.optimizer == "device":
            _add(seconds, DEVICE_UPDATE, traffic / hardware.device_bandwidth)
        else:
            _add(seconds, HOST_UPDATE, traffic * hardware.devices / hardware.update)
        self._move_gradients(seconds, own)
        if choice.optimizer == "nvme":
            stored = (4 * load.states - 2 * choice.split) * own * (1 - choice.cached)
            self._file(seconds, READ, stored)
            self._file(seconds, WRITE, stored)
        self._publish(seconds, own)
        return _with(seconds, self._launches)

    def _move_gradients(self, seconds: dict[str, float], own: float) -> None:
        choice, load, hardware = self._choice, self._load, self._hardware
        width = load.gradient if load.accumulate == 1 else 4
        if choice.gradients == "nvme":
            self._file(seconds, READ, width * own)
        if choice.optimizer == "device" and choice.gradients != "device":
            _add(seconds, UP, width * own / hardware.link_up)
        if choice.optimizer != "device" and choice.gradients == "device":
            _add(seconds, DOWN, width * own / hardware.link_down)

    def _publish(self, seconds: dict[str, float], own: float) -> None:
        choice, load, hardware = self._choice, self._load, self._hardware
        new = load.element * own
        if choice.params == "nvme":
            self._file(seconds, WRITE, new)
        if choice.optimizer != "device" and choice.params == "device":
            _add(seconds, UP, new / hardware.link_up)
        if choice.optimizer == "device" and choice.params != "device":
            _add(seconds, DOWN, new / hardware.link_down)
        if choice.stage in (1, 2):
            sent = load.element * load.trainable * (self._ranks - 1) / self._ranks
            _add(seconds, COLLECTIVE, sent / hardware.between_ranks)

    def _gather(self, seconds: dict[str, float]) -> None:
        if self._choice.stage != 3:
            return
        sent = self._weights * (self._ranks - 1)
        _add(seconds, COLLECTIVE, sent / self._hardware.between_ranks)
        if self._choice.params != "device":
            _add(seconds, UP, self._weights / self._hardware.link_up)
        if self._choice.params == "nvme":
            self._file(seconds, READ, self._weights)

    def _checkpoints(self, seconds: dict[str, float], *, out: bool) -> None:
        choice, nbytes = self._choice, self._load.activity.checkpoints
        if not choice.checkpointing or choice.activations == "device":
            return
        hardware = self._hardware
        if out:
            _add(seconds, DOWN, nbytes / hardware.link_down)
        else:
            _add(seconds, UP, nbytes / hardware.link_up)
        if choice.activations == "nvme":
            self._file(seconds, WRITE if out else READ, nbytes)

    def _file(self, seconds: dict[str, float], name: str, nbytes: float) -> None:
        rate = self._read if name == READ else self._write
        _add(seconds, name, nbytes / rate if rate else float("inf") * (nbytes > 0))


def _add(seconds: dict[str, float], name: str, more: float) -> None:
    if more > 0:
        seconds[name] = seconds.get(name, 0.0) + more


def _with(seconds: dict[str, float], launches: float) -> dict[str, float]:
    """Each unit costs a fixed time on every resource it passes."""
    return {name: value + launches for name, value in seconds.items()}
