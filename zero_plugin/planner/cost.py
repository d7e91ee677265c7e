"""What a step costs in seconds under one placement: traffic and work of each phase over the rates of a machine.

The terms are those of the three papers, with the traffic of this engine: fp32 on the wire of a reduction, one gather of sharded
weights in the forward and one in the backward, gradients reduced and moved with every micro-batch at stages 2 and 3.

On a machine without an accelerator computation, copies, norms and updates are the same processor cores' work: there they come one
after another (`CORES`), and only files are beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zero_plugin.config import Tier
from zero_plugin.machine.hardware import Hardware
from zero_plugin.planner.workload import Activity

COMPUTE, UP, DOWN = "compute", "host to device", "device to host"
COLLECTIVE, READ, WRITE = "collectives", "disk reads", "disk writes"
HOST_UPDATE, DEVICE_UPDATE = "update on the host", "update on the device"
ON_DEVICE, NORM, FIXED = "copies on the device", "norm of gradients", "fixed costs"
RESOURCES = (
    COMPUTE,
    UP,
    DOWN,
    COLLECTIVE,
    READ,
    WRITE,
    HOST_UPDATE,
    DEVICE_UPDATE,
    ON_DEVICE,
    NORM,
    FIXED,
)
"""What can be the bound of a step; each does one thing at a time."""

CORES = "processor cores"
"""What serves everything but files on a machine without an accelerator."""


def server(name: str, *, shared: bool) -> str:
    """What serves a resource: itself, or the cores where they do everything but files."""
    return CORES if shared and name not in (READ, WRITE) else name


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
        fraction: part of the host's states that stays on the device and is updated there.
        early: setting that begins updates inside backward, `speculate` or `update_in_backward`; empty for none.
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
    fraction: float = 0.0
    early: str = ""

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
        if self.fraction:
            found["device_fraction"] = self.fraction
        if self.early:
            found[self.early] = True
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
        blocks: number of blocks that are reduced and updated where weights are whole; 0: as many as units.
        unit_blocks: likewise where they are sharded.
        moment: bytes of an element of a state beside the master.
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
    blocks: int = 0
    unit_blocks: int = 0
    moment: float = 4.0

    @property
    def moments(self) -> float:
        """Bytes of a parameter's states beside the master."""
        return self.moment * (self.states - 1)

    def blocks_at(self, stage: int) -> int:
        """Blocks that a step goes through."""
        return max(1, (self.unit_blocks if stage == 3 else self.blocks) or self.units)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a step that the next one waits for.

    Attributes:
        name: "forward", "backward" or "update".
        repeats: how often it occurs in a step.
        seconds: busy time of each resource in one of them.
        shared: whether the cores serve all of them but files.
    """

    name: str
    repeats: int
    seconds: Mapping[str, float]
    shared: bool = False

    @property
    def served(self) -> dict[str, float]:
        """Busy time of what serves the resources."""
        found: dict[str, float] = {}
        for name, seconds in self.seconds.items():
            _add(found, server(name, shared=self.shared), seconds)
        return found

    @property
    def longest(self) -> float:
        """The time of its slowest server."""
        return max(self.served.values(), default=0.0)

    @property
    def slowest(self) -> str:
        """The resource that most of it waits for."""
        served = self.served
        last = max(served, key=lambda name: served[name], default=COMPUTE)
        own = {n: s for n, s in self.seconds.items() if server(n, shared=self.shared) == last}
        return max(own, key=lambda name: own[name], default=COMPUTE)


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
    repeats, shared = load.accumulate, hardware.device_is_host
    # Below stage 2 gradients are reduced once a step: their part of a backward is spread over the micro-batches.
    share = 1.0 if choice.stage >= 2 else 1 / repeats
    return (
        Phase(name="forward", repeats=repeats, seconds=terms.forward(), shared=shared),
        Phase(name="backward", repeats=repeats, seconds=terms.backward(share), shared=shared),
        Phase(name="update", repeats=1, seconds=terms.update(), shared=shared),
    )


BEGUN_EARLY = (READ, DOWN, HOST_UPDATE)
"""What of an update on the host runs beside a backward that it begins in: all but what shows the new weights."""


def begun_early(choice: Choice, parts: tuple[Phase, ...]) -> tuple[Phase, Phase]:
    """The last backward of a step, and the update after it, where updates may begin in that backward."""
    _, backward, update = parts
    if not choice.early:
        return backward, update
    inside = dict(backward.seconds)
    for name in BEGUN_EARLY:
        _add(inside, name, update.seconds.get(name, 0.0))
    after = {name: value for name, value in update.seconds.items() if name not in BEGUN_EARLY}
    return replace(backward, seconds=inside), replace(update, seconds=after)


def price(choice: Choice, load: Load, hardware: Hardware) -> Price:
    """Seconds of a step: within a phase the resources work at once, the phases one after another.

    A delayed update is beside forward and backward; what its gradient and the new weights need stays between them. Updates that
    begin inside backward are beside the last one.
    """
    parts = phases(choice, load, hardware)
    forward, backward, _ = parts
    last, after = begun_early(choice, parts)
    start = _first(parts, load)
    computing = forward.repeats * forward.longest + (backward.repeats - 1) * backward.longest
    # New weights are shown once the backward has ended, while later blocks are still updated.
    update = max(after.longest, last.longest - backward.longest)
    update += _tail(after, load.blocks_at(choice.stage))
    computing += backward.longest + start
    busy: dict[str, float] = {}
    for phase in parts:
        for name, taken in phase.served.items():
            _add(busy, name, phase.repeats * taken)
    seconds = max(computing, update, busy.get(CORES, 0.0)) if choice.delayed else computing + update
    waited: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
    counted = [(forward, forward.repeats), (backward, backward.repeats - 1), (last, 1), (after, 1)]
    if choice.delayed:
        counted = counted[:3] if computing >= update else counted[3:]
    for phase, repeats in counted:
        waited[phase.slowest] += repeats * phase.longest
    return Price(
        seconds=seconds,
        lower_bound=min(seconds, max(busy.values())),
        bound_by=max(waited, key=lambda name: waited[name]),
        phases=parts,
        hidden_update=choice.delayed and computing >= update,
    )


def _first(parts: tuple[Phase, ...], load: Load) -> float:
    """The first unit of a step is waited for: nothing is there to compute meanwhile."""
    forward = parts[0]
    coming = (READ,) if forward.shared else (UP, COLLECTIVE, READ)
    return sum(forward.seconds.get(name, 0.0) for name in coming) / max(1, load.units)


def _tail(update: Phase, blocks: int) -> float:
    """The last block passes through every resource in turn."""
    return (sum(update.seconds.values()) - update.longest) / blocks


class _Terms:
    """Bytes over rates, for one rank."""

    def __init__(self, choice: Choice, load: Load, hardware: Hardware) -> None:
        self._choice = choice
        self._load = load
        self._hardware = hardware
        self._ranks = hardware.world_size
        self._own = load.trainable / (self._ranks if choice.stage >= 1 else 1)
        self._weights = load.element * load.parameters / self._ranks
        self._blocks = load.blocks_at(choice.stage)
        # Whose weights are fp32 and held by the update itself writes nothing beside its master.
        self._is_master = (
            load.element == 4 and choice.optimizer != "nvme"
        )  # Held updates too: it is what is shown.

    def forward(self) -> dict[str, float]:
        """One micro-batch."""
        seconds = {COMPUTE: self._load.activity.forward_flops / self._hardware.flops}
        moved = {READ: 0.0, WRITE: 0.0}
        self._gather(seconds, moved)
        self._checkpoints(seconds, moved, out=True)
        return self._end(seconds, moved, self._units())

    def backward(self, share: float) -> dict[str, float]:
        """One micro-batch, with `share` of a reduction of all gradients."""
        choice, load, hardware = self._choice, self._load, self._hardware
        times = 3 if choice.checkpointing else 2
        seconds = {COMPUTE: times * load.activity.forward_flops / hardware.flops}
        moved = {READ: 0.0, WRITE: 0.0}
        self._gather(seconds, moved)
        self._checkpoints(seconds, moved, out=False)
        self._reduce(seconds, share)
        width = load.gradient if choice.stage >= 2 or load.accumulate == 1 else 4
        landed = share * width * self._own * (1 - choice.fraction)
        if choice.gradients != "device":
            _add(seconds, DOWN, landed / hardware.link_down)
        elif self._ranks == 1:
            # Out of autograd's own memory into the chunk: read and written.
            _add(seconds, ON_DEVICE, 2 * landed / hardware.device_bandwidth)
        if hardware.norm and (choice.gradients != "device" or hardware.device_is_host):
            _add(seconds, NORM, landed / hardware.norm)
        if choice.gradients == "nvme":
            moved[WRITE] += landed
            if load.accumulate > 1 and choice.stage >= 2:
                # What was added up is read, and written wider.
                moved[READ] += 4 * self._own
                moved[WRITE] += (4 - load.gradient) * self._own
        fixed = self._units() + share * self._blocks * hardware.launch_seconds / 2
        return self._end(seconds, moved, fixed)

    def update(self) -> dict[str, float]:
        """The end of a step."""
        choice, load, hardware = self._choice, self._load, self._hardware
        own, seconds, moved = self._own, dict[str, float](), {READ: 0.0, WRITE: 0.0}
        # 28 bytes a parameter for Adam and bf16: the gradient, each state read and written, and the new weight.
        output = 0 if self._is_master else load.element
        traffic = (load.gradient + 8 + 2 * load.moments + output) * own
        if choice.optimizer == "device" and not hardware.device_is_host:
            _add(seconds, DEVICE_UPDATE, traffic / hardware.device_bandwidth)
        else:
            name = DEVICE_UPDATE if choice.optimizer == "device" else HOST_UPDATE
            there = 0.0 if hardware.device_is_host else choice.fraction
            _add(seconds, name, (1 - there) * traffic * hardware.devices / hardware.update)
            _add(seconds, DEVICE_UPDATE, there * traffic / hardware.device_bandwidth)
        self._move_gradients(seconds, moved, own)
        fixed = hardware.step_seconds + self._blocks * hardware.launch_seconds / 2
        if choice.optimizer == "nvme":
            # fp32 weights in files are the master; they are read for the update and written after it.
            serve = load.element == 4 and choice.params == "nvme"
            master = 0 if serve else 4 - 2 * choice.split
            stored = (master + load.moments) * own * (1 - choice.cached)
            moved[READ] += stored + serve * load.element * own
            moved[WRITE] += stored
            fixed += self._blocks * hardware.tile_seconds
        self._publish(seconds, moved, own)
        return self._end(seconds, moved, fixed)

    def _units(self) -> float:
        if self._choice.stage != 3:
            return 0.0
        return self._load.units * (self._hardware.unit_seconds or self._hardware.launch_seconds)

    def _reduce(self, seconds: dict[str, float], share: float) -> None:
        load, hardware, ranks = self._load, self._hardware, self._ranks
        if ranks == 1:
            return
        sent = share * load.wire * load.trainable * (ranks - 1) / ranks
        _add(seconds, COLLECTIVE, sent / hardware.reduced_between_ranks)
        if self._choice.stage == 0:
            _add(seconds, COLLECTIVE, sent / hardware.between_ranks)
        packed = share * (load.element + load.wire) * load.trainable
        _add(seconds, ON_DEVICE, packed / hardware.device_bandwidth)

    def _move_gradients(
        self, seconds: dict[str, float], moved: dict[str, float], own: float
    ) -> None:
        choice, load, hardware = self._choice, self._load, self._hardware
        width = load.gradient if load.accumulate == 1 else 4
        if choice.gradients == "nvme":
            moved[READ] += width * own
        if choice.optimizer == "device" and choice.gradients != "device":
            _add(seconds, UP, width * own / hardware.link_up)
        if choice.optimizer != "device" and choice.gradients == "device":
            _add(seconds, DOWN, (1 - choice.fraction) * width * own / hardware.link_down)

    def _publish(self, seconds: dict[str, float], moved: dict[str, float], own: float) -> None:
        choice, load, hardware = self._choice, self._load, self._hardware
        new = load.element * own
        if choice.params == "nvme":
            moved[WRITE] += new
        if choice.optimizer != "device" and choice.params == "device":
            _add(seconds, UP, (1 - choice.fraction) * new / hardware.link_up)
        if choice.optimizer == "device" and choice.params != "device":
            _add(seconds, DOWN, new / hardware.link_down)
        elif choice.params == "host":
            _add(seconds, DOWN, choice.fraction * new / hardware.link_down)
        if choice.stage in (1, 2) and self._ranks > 1:
            whole = load.element * load.trainable
            sent = whole * (self._ranks - 1) / self._ranks
            _add(seconds, COLLECTIVE, sent / hardware.between_ranks)
            _add(seconds, ON_DEVICE, 2 * whole / hardware.device_bandwidth)

    def _gather(self, seconds: dict[str, float], moved: dict[str, float]) -> None:
        if self._choice.stage != 3:
            return
        hardware, whole = self._hardware, self._load.element * self._load.parameters
        if self._ranks > 1:
            sent = self._weights * (self._ranks - 1)
            _add(seconds, COLLECTIVE, sent / hardware.between_ranks)
            unpack = hardware.gather or hardware.device_bandwidth / 2
            _add(seconds, ON_DEVICE, whole / unpack)
            if self._choice.params != "device":
                _add(seconds, UP, self._weights / hardware.link_up)
        elif self._choice.params == "device":
            _add(seconds, ON_DEVICE, whole / (hardware.gather or hardware.device_bandwidth / 2))
        else:
            _add(seconds, UP, whole / (hardware.gather or hardware.link_up))
        if self._choice.params == "nvme":
            moved[READ] += self._weights

    def _checkpoints(
        self, seconds: dict[str, float], moved: dict[str, float], *, out: bool
    ) -> None:
        choice, nbytes = self._choice, self._load.activity.checkpoints
        if not choice.checkpointing or choice.activations == "device":
            return
        hardware = self._hardware
        if out:
            _add(seconds, DOWN, nbytes / hardware.link_down)
        else:
            _add(seconds, UP, nbytes / hardware.link_up)
        if choice.activations == "nvme":
            moved[WRITE if out else READ] += nbytes

    def _end(
        self, seconds: dict[str, float], moved: dict[str, float], fixed: float
    ) -> dict[str, float]:
        """With the files' part, and the fixed costs: the cores' own where they do everything, else one on each resource."""
        hardware = self._hardware
        both = min(moved[READ], moved[WRITE])
        rates = (
            (READ, hardware.nvme_read, hardware.nvme_read_alone),
            (WRITE, hardware.nvme_write, hardware.nvme_write_alone),
        )
        for name, mixed, alone in rates:
            if moved[name]:
                # Of the ranks on one machine together.
                beside = _over(both, mixed / hardware.devices)
                _add(
                    seconds,
                    name,
                    beside + _over(moved[name] - both, (alone or mixed) / hardware.devices),
                )
        if hardware.device_is_host:
            _add(seconds, FIXED, fixed)
            return seconds
        return {name: value + fixed for name, value in seconds.items()}


def _over(nbytes: float, rate: float) -> float:
    if nbytes <= 0:
        return 0.0
    return nbytes / rate if rate else float("inf")


def _add(seconds: dict[str, float], name: str, more: float) -> None:
    if more > 0:
        seconds[name] = seconds.get(name, 0.0) + more
