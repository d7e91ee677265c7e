"""The cheapest placement that fits.

Every combination is priced, the promising ones are simulated, and what is said to fit has been asked of the engine's own parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zero_plugin.config import Tier, ZeroConfig
from zero_plugin.errors import BudgetError, ConfigError
from zero_plugin.machine.hardware import Hardware
from zero_plugin.planner.cost import Choice, Load, Price, price
from zero_plugin.planner.dry import BufferSizes, DryModel, Footprint
from zero_plugin.planner.simulate import simulate

TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
_PREFETCH = (1, 2, 0, 4)
_LOSS_TILES = (1, 8)
_FRACTIONS = tuple(step / 16 for step in range(1, 16))
"""Of the host's states that a device may keep."""

_TRIALS = 3

_COARSE = 12
"""Units that placements are compared with; what is chosen is simulated with its own number."""

_ASKED = 12_000
"""Tensors that the engine's parts lay out before a search that finds nothing gives up; small models are tried in full."""

_CONTEXT_BYTES = 600_000_000
"""What a device's own runtime takes."""

_USABLE = 0.95
"""Of a device's memory: the rest is lost to fragments."""

_USABLE_HOST = 0.9
"""Of a machine's memory: the rest is the system's and the program's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bytes that may be taken.

    Attributes:
        device: of one device.
        host: of one machine, all its ranks together.
        nvme: of one machine's files.
        shared: whether device memory is part of the host's.
    """

    device: float
    host: float
    nvme: float
    shared: bool = False

    @classmethod
    def of(cls, hardware: Hardware) -> Limits:
        """What a machine can give."""
        host = _USABLE_HOST * hardware.host_bytes
        device = max(0.0, _USABLE * hardware.device_bytes - _CONTEXT_BYTES)
        return cls(
            device=host / hardware.devices if hardware.device_is_host else device,
            host=host,
            nvme=_USABLE * hardware.nvme_bytes,
            shared=hardware.device_is_host,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A placement with what it costs.

    Attributes:
        choice: the placement.
        seconds: of a step, simulated.
        price: how it comes about.
        peak: bytes of each tier on one rank.
        footprint: what the engine's parts take of it.
    """

    choice: Choice
    seconds: float
    price: Price
    peak: Mapping[str, int]
    footprint: Footprint


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a placement is sought for.

    Attributes:
        model: to ask for bytes.
        load: to ask for seconds.
        buffers: sizes of the model's parts.
        hardware: sizes and rates.
        limits: bytes that may be taken.
        settings: `ZeroConfig` fields that every placement shares (paths, dtypes, pinned choices).
        pinned: fields of `Choice` that are fixed.
        delayed: whether a delayed update is allowed.
        speculates: whether updates may begin inside backward, with memory to undo them.
        accumulate: micro-batches of a step.
        bf16: whether compute weights are bf16, so that masters can be split.
    """

    model: DryModel
    load: Load
    buffers: BufferSizes
    hardware: Hardware
    limits: Limits
    settings: Mapping[str, Any]
    pinned: Mapping[str, Any] = field(default_factory=dict[str, Any])
    delayed: bool = False
    speculates: bool = False
    bf16: bool = False

    def config(self, choice: Choice, *, cache: int = 0) -> ZeroConfig:
        """The config of a placement.

        Raises:
            ConfigError: the combination is refused.
        """
        values = {**choice.settings(), **self.settings}
        if not choice.uses_files:
            values = {key: value for key, value in values.items() if not key.startswith("nvme_")}
        if cache:
            values["nvme_cache_bytes"] = cache
        return ZeroConfig(**values)


def candidates(task: Task) -> Iterator[Choice]:
    """Every placement that the hardware and the pinned choices allow."""
    tiers = TIERS if task.hardware.nvme_bytes and task.hardware.nvme_read else TIERS[:2]
    if task.hardware.world_size == 1:
        stages: Sequence[int] = (2, 3)
    else:
        stages = (0, 1, 2, 3)
    known = task.load.activity.checkpoints > 0
    memory = [(False, "device"), *(((True, tier) for tier in tiers) if known else ())]
    options: dict[str, Sequence[Any]] = {
        "stage": stages,
        "params": tiers,
        "optimizer": tiers,
        "gradients": tiers,
        "checkpointing": (False, True),
        "activations": tiers,
        "loss_tiles": _LOSS_TILES if task.load.activity.output else (1,),
        "prefetch": _PREFETCH,
        "delayed": (False, True) if task.delayed else (False,),
        "split": (False, True) if task.bf16 else (False,),
        "early": ("", "speculate") if task.speculates else ("",),
    }
    options |= {name: (value,) for name, value in task.pinned.items()}
    for values in itertools.product(*options.values()):
        choice = Choice(**dict(zip(options, values, strict=True)))
        pair = (choice.checkpointing, choice.activations)
        if pair in memory and _is_sensible(choice, task):
            yield choice


def _is_sensible(choice: Choice, task: Task) -> bool:
    """Whether a combination exists and is not another one under a second name."""
    free = task.pinned
    if choice.stage < 3:
        allowed = choice.params == "device" and not choice.split
        if not allowed or (choice.prefetch != _PREFETCH[0] and "prefetch" not in free):
            return False
    if choice.optimizer == "device" and (choice.delayed or choice.split):
        return False
    if choice.fraction and (choice.optimizer != "host" or choice.gradients == "nvme"):
        return False
    if choice.early and choice.optimizer != "host":
        return False
    return sum((choice.split, choice.delayed, bool(choice.early))) <= 1


def estimate(choice: Choice, task: Task) -> dict[str, float]:
    """Bytes of the states and of the largest buffers on one rank: what a placement takes at least, or nearly."""
    load, ranks = task.load, task.hardware.world_size
    own = load.trainable / (ranks if choice.stage >= 1 else 1)
    found: dict[str, float] = dict.fromkeys(TIERS, 0.0)
    weights = load.element * load.parameters
    found[choice.params] += weights / (ranks if choice.stage == 3 else 1)
    aliased = load.element == 4 and choice.optimizer == choice.params != "nvme"
    # Masters that may be ahead of the weights are no longer the same memory.
    aliased = aliased and not (choice.delayed or choice.early)
    kept = (4 * (1 - aliased) - 2 * choice.split + load.moments) * own
    found[choice.optimizer] += (1 - choice.fraction) * kept
    if choice.early == "speculate" and "undo_bytes" not in task.settings:
        found["host"] += (1 - choice.fraction) * kept
    found[choice.gradients] += (1 - choice.fraction) * load.gradient * own
    found["device"] += choice.fraction * (kept + load.gradient * own)
    found["device"] += _buffers(choice, task)
    for tier, nbytes in activation_bytes(choice, load).items():
        found[tier] += nbytes
    return found


def _buffers(choice: Choice, task: Task) -> float:
    """Device buffers: two of the largest block to reduce and publish in, and at stage 3 those that a unit is gathered through."""
    sizes, load, ranks = task.buffers, task.load, task.hardware.world_size
    found = float(sizes.two_blocks)
    shards = ranks if choice.stage >= 1 else 1
    if choice.stage == 3:
        found += sizes.unit * (1 + min(1, choice.prefetch))
    if ranks == 1:
        return found
    found += 2 * sizes.largest * (max(load.wire, load.element) + 4 / shards)
    if choice.stage == 3:
        own = 0 if choice.params == "device" else 1 / shards
        found += sizes.gathers * load.element * (1 + own)
    return found


def activation_bytes(choice: Choice, load: Load) -> dict[Tier, float]:
    """Bytes of activations in each tier."""
    activity = load.activity
    found: dict[Tier, float] = {"device": activity.output / choice.loss_tiles}
    if not choice.checkpointing:
        found["device"] += activity.kept
        return found
    found["device"] += activity.working
    found[choice.activations] = found.get(choice.activations, 0.0) + activity.checkpoints
    if choice.activations != "device":
        # Two segments' inputs are on the device, and three slabs lie between it and a file.
        one = activity.checkpoints / max(1, load.units)
        found["device"] += 2 * one
        if choice.activations == "nvme":
            found["host"] = 3 * one
    return found


def fits(peak: Mapping[str, float], limits: Limits, hardware: Hardware) -> bool:
    """Whether a rank's bytes, and those of all ranks of a machine, can be had."""
    return not shortage(peak, limits, hardware)


def shortage(peak: Mapping[str, float], limits: Limits, hardware: Hardware) -> dict[str, float]:
    """Bytes that are lacking in each tier; tiers with enough are left out."""
    host = peak["host"] * hardware.devices
    if limits.shared:
        host += peak["device"] * hardware.devices
    lacking = {
        "device": 0.0 if limits.shared else peak["device"] - limits.device,
        "host": host - limits.host,
        "nvme": peak["nvme"] * hardware.devices - limits.nvme,
    }
    return {tier: nbytes for tier, nbytes in lacking.items() if nbytes > 0}


def peak_of(choice: Choice, footprint: Footprint, load: Load) -> dict[str, int]:
    """Bytes of each tier on one rank, activations included."""
    peak = {tier: footprint.tier(tier) for tier in TIERS}
    for tier, nbytes in activation_bytes(choice, load).items():
        peak[tier] += int(nbytes)
    return peak


class Search:
    """Looks for the cheapest placements.

    Args:
        task: what for.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._tried: dict[tuple[Any, ...], Footprint | None] = {}
        self.considered = 0
        """Placements that exist."""
        self.closest: tuple[Choice, dict[str, float]] | None = None
        """Of what does not fit: the placement that lacks least, and how much."""

    def run(self, count: int) -> list[Candidate]:
        """The `count` cheapest different placements that fit, cheapest first; fewer where there are no more."""
        found: list[Candidate] = []
        seen: set[Choice] = set()
        most = max(16, _ASKED // max(1, self._task.model.tensors))
        for choice in self._ordered():
            # Alternatives differ in more than how far ahead they gather.
            plain = replace(choice, prefetch=1)
            if plain in seen:
                continue
            candidate = self._examine(choice)
            if candidate is not None:
                seen.add(plain)
                found.append(candidate)
            if len(found) == count or (not found and len(self._tried) >= most):
                break
        return found

    def _ordered(self) -> list[Choice]:
        """What may fit, in the order of simulated time."""
        task = self._task
        timed: list[tuple[float, Choice]] = []
        for choice in candidates(task):
            self.considered += 1
            lacking = shortage(estimate(choice, task), task.limits, task.hardware)
            if lacking:
                self._note(choice, lacking)
                continue
            seconds = simulate(choice, task.load, task.hardware, most_units=_COARSE)
            if seconds < float("inf"):
                timed.append((seconds * (1 + dislike(choice)), choice))
        timed.sort(key=lambda item: item[0])
        return [choice for _, choice in timed]

    def _examine(self, choice: Choice) -> Candidate | None:
        task = self._task
        footprint = self._footprint(choice)
        if footprint is None:
            return None
        peak = peak_of(choice, footprint, task.load)
        lacking = shortage(peak, task.limits, task.hardware)
        if lacking:
            self._note(choice, lacking)
            return None
        return Candidate(
            choice=choice,
            seconds=simulate(choice, task.load, task.hardware),
            price=price(choice, task.load, task.hardware),
            peak=peak,
            footprint=footprint,
        )

    def _footprint(self, choice: Choice) -> Footprint | None:
        # What activations and tiles of the loss take is not the engine's.
        task = self._task
        key = tuple(replace(choice, prefetch=1, activations="device").settings().items())
        try:
            config = task.config(choice)
        except ConfigError:
            return None
        try:
            if key not in self._tried:
                self._tried[key] = task.model.footprint(
                    config, task.hardware.world_size, accumulate=task.load.accumulate
                )
        except (ConfigError, BudgetError):
            self._tried[key] = None
        found = self._tried[key]
        if found is None or choice.stage < 3:
            return found
        return replace(found, gathered=task.model.gathered(config))

    def _note(self, choice: Choice, lacking: dict[str, float]) -> None:
        if self.closest is None or sum(lacking.values()) < sum(self.closest[1].values()):
            self.closest = (choice, lacking)


def with_cache(candidate: Candidate, task: Task) -> tuple[Candidate, int]:
    """Use host memory that is left for states that would go to files; also the bytes of the cache."""
    choice = candidate.choice
    if choice.optimizer != "nvme" or "nvme_cache_bytes" in task.settings:
        return candidate, 0
    taken = candidate.peak["host"] * task.hardware.devices
    if task.limits.shared:
        taken += candidate.peak["device"] * task.hardware.devices
    left = int((task.limits.host - taken) / task.hardware.devices)
    stored = sum(candidate.footprint.table["nvme"][kind] for kind in ("master", "moments"))
    cache = min(left, stored)
    if cache < stored // 50:
        return candidate, 0
    cached = replace(choice, cached=cache / stored)
    try:
        footprint = task.model.footprint(
            task.config(cached, cache=cache),
            task.hardware.world_size,
            accumulate=task.load.accumulate,
        )
    except (ConfigError, BudgetError):
        return candidate, 0
    peak = peak_of(cached, footprint, task.load)
    if shortage(peak, task.limits, task.hardware):
        return candidate, 0
    return (
        Candidate(
            choice=cached,
            seconds=simulate(cached, task.load, task.hardware),
            price=price(cached, task.load, task.hardware),
            peak=peak,
            footprint=footprint,
        ),
        cache,
    )


def with_fraction(candidate: Candidate, task: Task) -> Candidate:
    """Use device memory that is left for part of the host's states, where that part's update there makes the step shorter."""
    choice = candidate.choice
    if (
        choice.optimizer != "host"
        or choice.gradients == "nvme"
        or choice.split
        or task.hardware.device_is_host
        or {"fraction", "device_fraction"} & {*task.pinned, *task.settings}
    ):
        return candidate
    timed = [
        (simulate(more, task.load, task.hardware), more)
        for more in (replace(choice, fraction=fraction) for fraction in _FRACTIONS)
        if not shortage(estimate(more, task), task.limits, task.hardware)
    ]
    better = [item for item in timed if item[0] < 0.995 * candidate.seconds]
    for seconds, more in sorted(better, key=lambda item: item[0])[:_TRIALS]:
        try:
            footprint = task.model.footprint(
                task.config(more), task.hardware.world_size, accumulate=task.load.accumulate
            )
        except (ConfigError, BudgetError):
            continue
        peak = peak_of(more, footprint, task.load)
        if not shortage(peak, task.limits, task.hardware):
            return Candidate(
                choice=more,
                seconds=seconds,
                price=price(more, task.load, task.hardware),
                peak=peak,
                footprint=footprint,
            )
    return candidate


def _state_tiers(choice: Choice) -> tuple[Tier, ...]:
    return (choice.params, choice.optimizer, choice.gradients)


def dislike(choice: Choice) -> float:
    """A little for everything a user has to do or to know, so that it is asked for only where it pays."""
    tiers = (*_state_tiers(choice), choice.activations)
    return (
        0.004 * choice.checkpointing
        + 0.004 * (choice.loss_tiles > 1)
        + 0.01 * choice.delayed
        + 0.002 * choice.split
        + 0.002 * bool(choice.early)
        + 0.001 * (choice.fraction > 0)
        + 0.001 * choice.stage
        + 0.001 * sum(TIERS.index(tier) for tier in tiers)
        + 0.0005 * abs(choice.prefetch - _PREFETCH[0])
    )
