"""Brings the weights of units here when they are needed, and lets them go after.

A unit is *released* (its parameters have no memory), *coming* (memory is there, lanes are filling it) or *here*. Who needs
it says so: a forward that enters (`enter`, `leave`), a backward that unpacks a saved weight (`reached`), a computation outside
any module (`borrow`).

When a backward reaches a call of a unit, every unit whose own call began after that one ended has been passed: autograd runs
the nodes of one thread in the reverse order of their creation, a consumer always being younger than what it consumes. So
a unit is released in backward as soon as the call before it is reached, without a hook on gradients that may never come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from zero_plugin.errors import ParameterError
from zero_plugin.runtime.backend import Backend, Ticket
from zero_plugin.runtime.operations import Collective, Copy
from zero_plugin.runtime.slabset import SlabSet, planned_bytes, slab_sizes
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.guard import guard_of, storage_key
from zero_plugin.sharding.hooks import undisturbed
from zero_plugin.sharding.parameters import ManagedParameter
from zero_plugin.sharding.partition import Block, unpack_pairs
from zero_plugin.sharding.prefetch import OrderPredictor
from zero_plugin.sharding.weights import WeightShards

Phase = Literal["forward", "evaluation", "backward"]
_END = "end of backward"
_READ_AHEAD = 2
"""Units beyond those gathered ahead whose shards are read from files: read i+3, upload i+2, gather i+1."""
_UNPLACED = -1.0
"""Anchor of a unit that recomputation brought here: which call of the backward it serves is not known yet."""


class Saver(Protocol):
    """Keeps autograd from saving the memory of weights."""

    def saving(self) -> AbstractContextManager[None]:
        """Inside, weights are saved as handles."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One forward of a unit's module.

    Attributes:
        start: when it began, in events.
        end: when it ended; infinity while it runs.
        part: which of the step's parts it is of (`sharding.lockstep`).
    """

    start: float
    end: float = math.inf
    part: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class Track:
    """Where one line of forwards stands.

    Attributes:
        clock: events so far.
        calls: forwards that run.
        inside: the same, as the hooks see it.
        part: which part of a step this is, or which one a backward has reached.
        follows: whether an earlier part has done the same since the last unit: then there is nothing to learn.
        arrive: called before a forward enters units; whether they were brought here for several.
    """

    clock: float = 0.0
    calls: list[Call] = field(default_factory=list[Call])
    inside: list[Any] = field(default_factory=list[Any])
    part: int = 0
    follows: bool = False
    arrive: Callable[[Sequence[Unit]], bool] | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Unit:
    """Parameters that are gathered and released together.

    Attributes:
        index: position among the units, the same on every rank.
        name: of its module.
        members: its parameters, trainable and frozen.
        blocks: how their shards are laid out.
        is_here: whether the weights are complete.
        tickets: of a gather under way, else empty.
        holds: forwards inside it, and other holders.
        anchor: start of the call it was last needed for.
        task: autograd's number of the backward it was last needed in.
        foreseen: gathered on a guess, and not needed yet.
        versions: of the members' version counters when they were last shown.
        is_shared: parts of a step go through it together.
        is_kept: some of them have not been there yet.
        outlasts: they need it again before any other.
    """

    index: int
    name: str
    members: list[ManagedParameter]
    blocks: list[Block]
    is_here: bool = True
    tickets: tuple[Ticket[Any], ...] = ()
    holds: int = 0
    anchor: float = 0.0
    task: int = -1
    foreseen: bool = False
    versions: list[int] = field(default_factory=list[int])
    is_shared: bool = False
    is_kept: bool = False
    outlasts: bool = False

    @property
    def stays(self) -> bool:
        """Whether others hold it, and a view of its weights may outlive the forward that holds it too."""
        return self.holds != 1 and not self.is_shared

    @property
    def is_released(self) -> bool:
        """Whether it has no memory."""
        return not self.is_here and not self.tickets

    @property
    def nbytes(self) -> int:
        """Bytes of the full weights."""
        return sum(member.nbytes for member in self.members)


class UnitsHere:
    """The units that are here or coming: a few, of the hundreds that a model may have."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
        self.nbytes = 0
        """Bytes of their full weights."""
        self.peak_bytes = 0
        """The most there were since `start`."""
        self.largest_bytes = 0
        """Bytes of the model's largest unit."""

    def start(self, units: Sequence[Unit]) -> None:
        """Begin anew with all units of the model."""
        self._units = {unit.index: unit for unit in units if not unit.is_released}
        self.nbytes = self.peak_bytes = sum(unit.nbytes for unit in self._units.values())
        self.largest_bytes = max((unit.nbytes for unit in units), default=0)

    def units(self) -> list[Unit]:
        """The units; they may go while the list is gone through."""
        return list(self._units.values())

    def add(self, unit: Unit) -> None:
        """A unit is coming."""
        self._units[unit.index] = unit
        self.nbytes += unit.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def drop(self, unit: Unit) -> None:
        """A unit was released."""
        del self._units[unit.index]
        self.nbytes -= unit.nbytes

    def forget_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak_bytes = self.nbytes


class UnitGatherer:
    """Gathers and releases units.

    Args:
        backend: lanes and memory.
        group: the ranks, for gathers only.
        shards: where the weights come from.
        depth: how many units are gathered ahead.
        ahead_bytes: most bytes gathered ahead, or None for `depth` times the largest unit.
        poison: keep the memory of released weights, filled with NaN.
    """

    def __init__(
        self,
        backend: Backend,
        group: ProcessGroup,
        shards: WeightShards,
        *,
        depth: int,
        ahead_bytes: int | None,
        poison: bool = False,
    ) -> None:
        self._backend = backend
        self._group = group
        self._shards = shards
        self._depth = depth
        self._ahead_limit = ahead_bytes
        self._poison = poison
        self._fetch = backend.lane("fetch weights", "device")
        self._collectives = backend.lane("gather weights", "device")
        self._unpack = backend.lane("unpack weights", "device")
        self._chunks: SlabSet | None = None
        self._gathered: SlabSet | None = None
        self._predictor = OrderPredictor()
        self._last_event: tuple[int, Phase] | None = None
        self.track = Track()
        """Where the forwards stand that run now."""
        self._guard = guard_of(self)
        self._here = UnitsHere()
        self._unit_of: dict[int, Unit] = {}
        self._name_of: dict[int, str] = {}
        self._closed = False
        self.saver: Saver | None = None
        """Set by the hooks."""
        self.units: list[Unit] = []
        """All units."""
        self.members: dict[int, tuple[Unit, ManagedParameter]] = {}
        """By the identity of a parameter's storage."""
        self.missed = 0
        """Gathers that were not foreseen."""

    # Units -------------------------------------------------------------------------------------------------------

    def set_units(self, units: Sequence[Unit]) -> None:
        """Take on units whose weights are here; their blocks may differ from the last call's."""
        self.units = list(units)
        self._unit_of = {id(m.parameter): unit for unit in units for m in unit.members}
        self._name_of = {id(m.parameter): m.name for unit in units for m in unit.members}
        self.members = {storage_key(m.alias): (unit, m) for unit in units for m in unit.members}
        self._here.start(units)
        self._reserve([block for unit in units for block in unit.blocks])

    def forget_peak(self) -> None:
        """Measure `peak_bytes` from now on."""
        self._here.forget_peak()

    def planned(self, blocks: Sequence[Block]) -> int:
        """Device bytes of staging with these blocks."""
        return sum(map(planned_bytes, self._slab_sizes(blocks)))

    @property
    def staging_bytes(self) -> int:
        """Device bytes of staging."""
        return sum(slabs.nbytes for slabs in (self._chunks, self._gathered) if slabs is not None)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of full weights that are here or coming."""
        return self._here.nbytes

    @property
    def peak_bytes(self) -> int:
        """The most there were since the units were last set."""
        return self._here.peak_bytes

    @property
    def largest_unit_bytes(self) -> int:
        """Bytes of the largest unit."""
        return self._here.largest_bytes

    @property
    def is_computing(self) -> bool:
        """Whether a module that was hooked is in its forward, or a backward runs."""
        return bool(self.track.calls) or _backward_task() != -1

    # Forward -----------------------------------------------------------------------------------------------------

    def enter(self, units: Sequence[Unit]) -> Call:
        """A module's forward begins; its units are here when this returns."""
        task = _backward_task()
        # With others: the units are here then.
        together = task == -1 and self.track.arrive is not None and self.track.arrive(units)
        phase: Phase = (
            "backward" if task != -1 else "forward" if torch.is_grad_enabled() else "evaluation"
        )
        if task != -1:
            self._release_nested(task)
        elif not self.track.follows:
            self._release_kept(units)
        call = Call(start=self._tick(), part=self.track.part)
        for unit in units:
            if not together:
                self._need(unit, phase)
            unit.anchor = call.start if task == -1 else _UNPLACED
            self.hold(unit)
        self.track.calls.append(call)
        return call

    def leave(self, units: Sequence[Unit], call: Call) -> None:
        """A module's forward ended; units nobody needs now are released.

        Raises:
            ParameterError: a weight was written to inside.
        """
        call.end = self._tick()
        calls = self.track.calls
        while calls and calls.pop() is not call:
            pass  # A call whose end was not seen: an exception went through it.
        written: list[str] = []
        for unit in units:
            written += self.let_go(unit)
        if _backward_task() == -1:
            for unit in units:
                if unit.is_kept:
                    unit.outlasts = unit.outlasts if self.track.follows else self._is_next(unit)
                elif not (unit.holds or self._is_next(unit)):
                    self.release(unit)
        if written:
            raise ParameterError(
                f"parameter {', '.join(map(repr, written))} was written to while it was gathered, and the write is lost: "
                "write inside `with engine.full_params(writeback=True):`, on every rank"
            )

    @property
    def current_call(self) -> Call:
        """The innermost forward; a call of its own where there is none."""
        if self.track.calls:
            return self.track.calls[-1]
        now = self._tick()
        return Call(start=now, end=now, part=self.track.part)

    def begin_lap(self, units: Sequence[Unit]) -> None:
        """Several parts are about to enter these units: they stay until `end_lap`."""
        self._release_kept(units)
        for unit in units:
            self._need(unit, "forward")
            unit.is_shared, unit.is_kept, unit.outlasts = True, True, False

    def end_lap(self, units: Sequence[Unit]) -> None:
        """All parts have left the units, or are still inside."""
        for unit in units:
            unit.is_kept = False
            if not (unit.holds or unit.outlasts):
                self.release(unit)

    def know_leaves(self, members: Iterable[ManagedParameter]) -> None:
        """Take on the leaves of members; until `forget_leaves`."""
        for member in members:
            unit = self._unit_of.get(id(member.parameter))
            if unit is not None:
                self._unit_of.update((id(leaf), unit) for leaf in member.leaves)
                self._name_of.update((id(leaf), member.name) for leaf in member.leaves)

    def forget_leaves(self, members: Iterable[ManagedParameter]) -> None:
        """The leaves of members go."""
        for member in members:
            for leaf in member.leaves:
                self._unit_of.pop(id(leaf), None)
                self._name_of.pop(id(leaf), None)
        for unit in self.units:
            unit.is_shared = False

    def hold(self, unit: Unit) -> None:
        """Show the weights of a unit that is here, until `let_go`."""
        unit.holds += 1
        if unit.holds == 1:
            for member in unit.members:
                member.become(nn.Parameter)
            unit.versions = [member.parameter._version for member in unit.members]

    def let_go(self, unit: Unit) -> list[str]:
        """Undo one `hold`; returns the members that were written to meanwhile."""
        unit.holds -= 1
        if unit.holds:
            return []
        written = [
            member.name
            for member, version in zip(unit.members, unit.versions, strict=True)
            if member.parameter._version != version or member.restore_data()
        ]
        self._hide(unit)
        return written

    # Backward ----------------------------------------------------------------------------------------------------

    def passed(self, call: Call, needed: Unit | None = None) -> None:
        """A backward runs a node that was made in `call`: release the units of younger calls, but not `needed`."""
        self.track.part = call.part
        for other in self._here.units():
            passed = other.anchor > call.end and not other.foreseen
            if passed and other is not needed and not (other.holds or other.is_kept):
                self.release(other)

    def reached(self, call: Call, unit: Unit) -> None:
        """A backward needs the unit for a node that was made in `call`; the unit is here when this returns."""
        self.passed(call, needed=unit)
        self._need(unit, "backward")
        unit.anchor = call.start
        unit.task = _backward_task()

    def end_backward(self) -> None:
        """The outermost backward has ended."""
        self.release_all()
        self._observe_end()

    # Outside modules -----------------------------------------------------------------------------------------------

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name in the model."""
        return self._name_of.get(id(parameter), "(unknown)")

    def borrow(self, parameters: Sequence[Tensor], action: str) -> None:
        """Bring weights here for one computation; they stay until the next release.

        Raises:
            ParameterError: other ranks may not take part, or the engine was closed.
        """
        names = ", ".join(repr(self.name_of(item)) for item in parameters)
        if self._closed:
            raise ParameterError(
                f"parameter {names} was used ({action}) after engine.close() with its weights sharded: take "
                "engine.full_state_dict() before, and load it into a new model"
            )
        if self._group.size > 1 and not (self.is_computing or torch.is_grad_enabled()):
            raise ParameterError(
                f"parameter {names} is sharded and was used ({action}) outside its module, where other ranks may not "
                "take part in a gather: do it inside `with engine.full_params():`, on every rank"
            )
        for unit in {id(u): u for u in (self._unit_of[id(item)] for item in parameters)}.values():
            phase: Phase = "backward" if _backward_task() != -1 else "forward"
            with undisturbed():
                self._need(unit, phase)
            unit.anchor = self.track.clock

    def discard(self, parameters: Sequence[Tensor]) -> None:
        """Drop weights that were written to outside `full_params`."""
        for item in parameters:
            unit = self._unit_of[id(item)]
            if unit.holds == 0:
                self.release(unit)

    @contextmanager
    def saving(self) -> Generator[None]:
        """Inside, autograd saves handles instead of weights."""
        if self.saver is None:
            yield
            return
        with self.saver.saving():
            yield

    # Gather and release ----------------------------------------------------------------------------------------------

    def bring(self, unit: Unit) -> None:
        """Gather a unit and wait for it, without noting it as an event."""
        if unit.is_released:
            self._gather(unit)
        self._await(unit)
        unit.foreseen = False

    def release(self, unit: Unit) -> None:
        """Free the full weights of a unit; nothing to do if they are not here."""
        if unit.is_released:
            return
        for ticket in unit.tickets:
            # Lanes may still write: on a device their work comes before whatever gets this memory next.
            ticket.on(self._backend.compute)
        for member in unit.members:
            key = storage_key(member.alias)
            if self._poison:
                member.poison()
            elif not member.empty():
                del self.members[key]
                self.members[storage_key(member.alias)] = (unit, member)
        self._hide(unit)
        self._here.drop(unit)
        unit.tickets = ()
        unit.is_here = False
        unit.foreseen = False

    def release_all(self) -> None:
        """Release every unit nobody holds."""
        for unit in self._here.units():
            if unit.holds == 0:
                self.release(unit)
        self._shards.forget_ahead()

    def reset(self) -> None:
        """After an exception: forget calls and holds, release everything, whatever state it is in."""
        self.track = Track(clock=self.track.clock)
        for unit in self.units:
            unit.holds = 0
            unit.is_kept = False
            for ticket in unit.tickets:
                ticket.settle()
            if unit.tickets:
                unit.tickets = ()
                unit.is_here = True
            self.release(unit)
        self._observe_end()

    def close(self, *, restore: bool) -> None:
        """Free the staging; idempotent.

        Args:
            restore: bring every unit here and leave plain parameters; a collective.
        """
        if restore and not self._closed:
            for unit in self.units:
                self.bring(unit)
                for member in unit.members:
                    member.parameter.__class__ = nn.Parameter
        self._closed = True
        for slabs in (self._chunks, self._gathered):
            if slabs is not None:
                slabs.close()
        self._chunks = self._gathered = None

    # Inside ------------------------------------------------------------------------------------------------------

    def _need(self, unit: Unit, phase: Phase) -> None:
        event = (unit.index, phase)
        is_new = event != self._last_event and not self.track.follows
        if is_new:
            self._predictor.observe(event)
            self._last_event = event
        if unit.is_released:
            self.missed += 1
            self._gather(unit)
        unit.foreseen = False
        if is_new:
            self._look_ahead(unit)
        self._await(unit)

    def _look_ahead(self, current: Unit) -> None:
        wanted = self._wanted_after(current)
        soon, later = wanted[: self._depth], wanted[self._depth : self._depth + _READ_AHEAD]
        limit = self._ahead_limit
        if limit is None:
            limit = self._depth * self.largest_unit_bytes
        for unit in self._here.units():
            if unit.foreseen and unit not in soon:
                self.release(unit)
        ahead = sum(unit.nbytes for unit in self._here.units() if unit.foreseen)
        for unit in soon:
            if unit.is_released and ahead + unit.nbytes <= limit:
                self._gather(unit)
                unit.foreseen = True
                ahead += unit.nbytes
        for unit in later:
            if unit.is_released:
                self._shards.read_ahead(unit.blocks)

    def _wanted_after(self, current: Unit) -> list[Unit]:
        """The units that will be needed next, in order, up to the end of the backward."""
        wanted: list[Unit] = []
        for event in self._predictor.predict(2 * self._depth + 1 + _READ_AHEAD):
            if not isinstance(event, tuple):
                break
            unit = self.units[event[0]]
            if unit is not current and unit not in wanted:
                wanted.append(unit)
        return wanted

    def _is_next(self, unit: Unit) -> bool:
        """Whether the unit will be needed again before any other: then it stays."""
        event = next(iter(self._predictor.predict(1)), None)
        return isinstance(event, tuple) and event[0] == unit.index

    def _release_nested(self, task: int) -> None:
        """Units that an inner backward (of a reentrant checkpoint) needed: it has ended, since `task` runs again."""
        for unit in self._here.units():
            if unit.task > task and not unit.holds and not unit.foreseen:
                self.release(unit)

    def _release_kept(self, wanted: Sequence[Unit]) -> None:
        """Units that stayed on a wrong guess, or were borrowed: another one is needed now."""
        for unit in self._here.units():
            if not (unit.holds or unit.is_kept or unit.foreseen or unit in wanted):
                self.release(unit)

    def _await(self, unit: Unit) -> None:
        for ticket in unit.tickets:
            ticket.on(self._backend.compute)
        unit.tickets = ()
        unit.is_here = True

    def _hide(self, unit: Unit) -> None:
        for member in unit.members:
            member.become(self._guard)

    def _gather(self, unit: Unit) -> None:
        if torch.jit.is_tracing():
            raise ParameterError(
                f"torch.jit.trace reached unit {unit.name!r}, whose weights are sharded: trace a copy that was made inside "
                "`with engine.full_params():` (copy.deepcopy(model))"
            )
        self._here.add(unit)
        for member in unit.members:
            member.alias.untyped_storage().resize_(member.nbytes)
        start = self._backend.mark(f"gather {unit.name}")
        gather = self._gather_block if self._group.size > 1 else self._copy_block
        unit.tickets = tuple(gather(block, start) for block in unit.blocks)

    def _copy_block(self, block: Block, start: Ticket[Any]) -> Ticket[Any]:
        """One rank: its shard is everything."""
        shard = self._shards.fetch(block)
        positions = range(len(block.parameters))
        fetched = self._fetch.submit(
            Copy(
                destinations=tuple(member.alias for member in block.parameters),
                sources=tuple(block.own_view(shard.chunk, i) for i in positions),
                direction=self._direction,
                label=f"fetch weights of {block.name}",
            ),
            after=(start, *shard.after),
        )
        shard.release(after=fetched)
        return fetched

    def _gather_block(self, block: Block, start: Ticket[Any]) -> Ticket[Any]:
        fetched_from = self._shards.fetch(block)
        shard, ready = fetched_from.chunk, (start, *fetched_from.after)
        own = None
        if self._chunks is not None:
            own = self._chunks.acquire(f"own weights of {block.name}", _chunk_bytes(block))
            here = own.tensor(block.dtype, block.chunk)
            fetched = self._fetch.submit(
                Copy(
                    destinations=(here,),
                    sources=(shard,),
                    direction=self._direction,
                    label=f"fetch weights of {block.name}",
                ),
                after=ready,
            )
            fetched_from.release(after=fetched)
            shard, ready = here, (fetched,)
        shards = block.layout.shards
        lease = self._slabs().acquire(f"weights of {block.name}", shards * _chunk_bytes(block))
        gathered = lease.tensor(block.dtype, shards * block.chunk).view(shards, -1)
        arrived = self._collectives.submit(
            Collective(
                kind="all_gather",
                group=self._group,
                output=gathered,
                input=shard,
                tag=block.index,
                label=f"gather weights of {block.name}",
            ),
            after=ready,
        )
        if own is not None:
            own.release(after=arrived)
        pairs = [
            pair
            for position, member in enumerate(block.parameters)
            for pair in unpack_pairs(block, gathered, position, member.alias)
        ]
        unpacked = self._unpack.submit(
            Copy(
                destinations=tuple(pair[0] for pair in pairs),
                sources=tuple(pair[1] for pair in pairs),
                label=f"unpack weights of {block.name}",
            ),
            after=(arrived,),
        )
        lease.release(after=unpacked)
        return unpacked

    @property
    def _direction(self) -> Literal["host_to_device"] | None:
        return None if self._shards.tier == "device" else "host_to_device"

    def _slabs(self) -> SlabSet:
        if self._gathered is None:
            raise ParameterError("weights were gathered after engine.close(): build a new engine")
        return self._gathered

    def _slab_sizes(self, blocks: Sequence[Block]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of each slab for an own chunk, and of each for a gathered block."""
        if self._group.size == 1 or not blocks:
            return (), ()
        # As many as the unit of most blocks has, so that a gather ahead is issued without waiting for its own parts.
        units: dict[int, list[Block]] = {}
        for block in blocks:
            units.setdefault(block.unit, []).append(block)
        chunks = slab_sizes([_chunk_bytes(b) for b in unit] for unit in units.values())
        gathered = slab_sizes(
            [b.layout.shards * _chunk_bytes(b) for b in unit] for unit in units.values()
        )
        return () if self._shards.tier == "device" else chunks, gathered

    def _reserve(self, blocks: Sequence[Block]) -> None:
        chunks, gathered = self._slab_sizes(blocks)
        self._chunks = self._resize(self._chunks, "own weights", chunks)
        self._gathered = self._resize(self._gathered, "gathered weights", gathered)

    def _resize(self, slabs: SlabSet | None, name: str, sizes: Sequence[int]) -> SlabSet | None:
        if slabs is not None:
            if slabs.suffices(sizes):
                return slabs
            slabs.close()
        if not sizes:
            return None
        return SlabSet(
            name=name,
            backend=self._backend,
            sizes=sizes,
            memory="device",
            setting="bucket_bytes",
        )

    def _observe_end(self) -> None:
        if self._last_event is not None:
            self._predictor.observe(_END)
            self._last_event = None

    def _tick(self) -> float:
        self.track.clock += 1.0
        return self.track.clock


def _chunk_bytes(block: Block) -> int:
    """Bytes of one rank's chunk of a block's weights."""
    return max(1, block.chunk * block.dtype.itemsize)


def _backward_task() -> int:
    """Autograd's number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()
