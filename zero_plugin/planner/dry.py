"""What an engine would allocate, asked of the engine's own parts on a backend that allocates nothing.

The model is a twin on torch's meta device, the ranks and the files are stand-ins, and every operation ends where it is
issued. So blocks, padding, slabs and staging come from the code that trains, and the most weights that are gathered at
once from the gatherer itself, led through a forward and a backward in the order of the modules.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from zero_plugin.access import make_plain
from zero_plugin.accounts import KINDS
from zero_plugin.budget import Budget
from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.grads.scaler import LossScaler
from zero_plugin.optim.lion import Lion
from zero_plugin.optim.rule import rule_for
from zero_plugin.parts import DTYPES, assemble
from zero_plugin.planner.layers import LAID_OUT, Layers
from zero_plugin.resources import Resources
from zero_plugin.runtime.backend import Backend, HostCompute, Lane, LaneKind, Memory
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.slabset import slab_sizes
from zero_plugin.runtime.ticket import ProgramOrder
from zero_plugin.sharding.layout import group_by_bytes
from zero_plugin.sharding.parameters import ManagedParameter
from zero_plugin.sharding.partition import Block, form_blocks
from zero_plugin.sharding.peer import PIECE_BYTES
from zero_plugin.sharding.roster import Roster
from zero_plugin.sharding.sharded import ShardedModel
from zero_plugin.sharding.units import plan_units
from zero_plugin.store.layout import Extent, round_up
from zero_plugin.trace import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer

Table = dict[str, dict[str, int]]
"""Bytes of each kind in each tier, as `ZeroEngine.memory()` gives them."""

ALIGNMENT = 4096
"""Of the files of a tier."""

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
    "sgd": torch.optim.SGD,
}
"""By the names that the command line takes; each with its defaults, `sgd` with momentum."""

_PASSED = 8
"""Equal layers that the gatherer is led through, and three more for each that it gathers ahead: nothing new comes after them."""

_ROUNDS = 2
"""Steps the gatherer is led through: in the first it foresees nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What one rank's engine takes.

    Attributes:
        table: bytes by tier and kind; device params hold what is resident.
        gathered: most bytes of full weights that are gathered at once (stage 3), beside the table's.
        unreduced: most bytes of gradients that are not reduced yet, beside the table's.
        blocks: how many blocks of parameters there are.
        largest_unit: bytes of the largest unit, or 0 where weights are whole.
        units: number of units.
    """

    table: Table
    gathered: int
    unreduced: int
    blocks: int
    largest_unit: int
    units: int

    def tier(self, name: str) -> int:
        """All bytes of a tier that the engine causes, transients included."""
        total = sum(self.table[name].values())
        return total + (self.gathered + self.unreduced if name == "device" else 0)

    def plus(self, more: Footprint, less: Footprint, *, times: int) -> Footprint:
        """With `times` what one footprint has beyond another; the largest are the same in all of them."""
        return replace(
            self,
            table={
                tier: {
                    kind: nbytes + times * (more.table[tier][kind] - less.table[tier][kind])
                    for kind, nbytes in kinds.items()
                }
                for tier, kinds in self.table.items()
            },
            unreduced=self.unreduced + times * (more.unreduced - less.unreduced),
            blocks=self.blocks + times * (more.blocks - less.blocks),
            units=self.units + times * (more.units - less.units),
        )


class _DryLane(Lane):
    """Ends every operation where it is issued."""

    @override
    def _enqueue(self, ticket: Any, operation: Any, dependencies: Any) -> None:
        del operation, dependencies
        ticket.start()
        ticket.finish(None)


class _DryBackend(Backend):
    """Memory on the meta device."""

    def __init__(self) -> None:
        order = ProgramOrder("dry")
        services = Services(kernels=cast("Any", None), ledger=Ledger(), trace=None)
        super().__init__(order=order, services=services, compute=HostCompute(order))

    @override
    def allocate(self, nbytes: int, memory: Memory) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    @override
    def _new_lane(self, name: str, kind: LaneKind) -> Lane:
        return _DryLane(name=name, kind=kind, order=self._order, services=self._services)

    @override
    def _shut(self) -> None:
        return


class _DryGroup:
    """Ranks of which only the first is here."""

    rank = 0
    workspace_bytes = 0

    def __init__(self, size: int) -> None:
        self.size = size


class _DryStore:
    """Files without bytes."""

    alignment = ALIGNMENT

    def reserve(self, nbytes: int, label: str) -> Extent:
        padded = round_up(nbytes, ALIGNMENT)
        return Extent(number=0, label=label, nbytes=nbytes, padded=padded, bases=(0,))

    def register(self, memory: Tensor) -> None:
        del memory


def meta_twin(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """The same modules with parameters and buffers on the meta device; no weight is copied or touched.

    What is no module, parameter or buffer is shared with the original, and hooks are left behind.

    Args:
        model: any module.
        dtype: of its floating parameters in the twin; None: their own.
    """
    tensors: dict[int, Tensor] = {}
    for parameter in model.parameters():
        converts = dtype is not None and parameter.is_floating_point()
        kept = dtype if converts else parameter.dtype
        empty = torch.empty(tuple(parameter.shape), dtype=kept, device="meta")
        tensors[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        tensors[id(buffer)] = torch.empty(tuple(buffer.shape), dtype=buffer.dtype, device="meta")
    return _twin_of(model, tensors, {})


def _twin_of(
    module: nn.Module, tensors: dict[int, Tensor], made: dict[int, nn.Module]
) -> nn.Module:
    known = made.get(id(module))
    if known is not None:
        return known
    kind = type(module)
    twin = made[id(module)] = kind.__new__(kind)
    state = dict(vars(module))
    for name, value in state.items():
        if isinstance(value, OrderedDict) and "_hooks" in name:
            state[name] = OrderedDict()
    for kept in ("_parameters", "_buffers"):
        held: dict[str, Any] = state[kept]
        state[kept] = {name: tensors.get(id(item), item) for name, item in held.items()}
    children: dict[str, nn.Module | None] = state["_modules"]
    state["_modules"] = {
        name: None if child is None else _twin_of(child, tensors, made)
        for name, child in children.items()
    }
    vars(twin).update(state)
    return twin


def optimizer_for(model: nn.Module, optimizer: str | Optimizer) -> Optimizer:
    """An optimizer to plan with: the one given, or a new one of that name.

    Raises:
        ConfigError: the name is unknown, or nothing is trainable.
    """
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"rule={optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter, so there is nothing to plan: set requires_grad"
        )
    kind = OPTIMIZERS[optimizer]
    # Building one loads the compiler of torch, which takes longer than a plan; a plan asks for its rule and groups only.
    made: Any = kind.__new__(kind)
    made.defaults = {
        name: option.default
        for name, option in inspect.signature(kind.__init__).parameters.items()
        if option.default is not inspect.Parameter.empty
    }
    made.defaults |= {"momentum": 0.9} if optimizer == "sgd" else {}
    made.state = {}
    made.param_groups = [{**made.defaults, "params": trainable}]
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSizes:
    """Sizes that bound an engine's buffers from below, found without trying one.

    Attributes:
        largest: elements of the largest parameter.
        two_blocks: bytes of the two largest blocks.
        unit: bytes of the largest unit.
        gathers: elements of the slabs that a unit's blocks are gathered through.
        blocks: how many there are where weights are whole.
        unit_blocks: how many there are where units have blocks of their own.
        units: how many of these there are.
    """

    largest: int
    two_blocks: int
    unit: int
    gathers: int
    blocks: int
    unit_blocks: int
    units: int


class DryModel:
    """A model that engines are tried on.

    Args:
        model: on the meta device (`meta_twin`); it is this object's from now on.
        optimizer: its name, or an optimizer of the same kind as will be used.
    """

    def __init__(self, model: nn.Module, optimizer: str | Optimizer = "adamw") -> None:
        self.model = model
        self.optimizer = optimizer_for(model, optimizer)
        self._every = tuple(model.parameters())
        self.parameters = sum(p.numel() for p in self._every)
        """Elements of all parameters, tied ones once."""
        self.tensors = len(self._every)
        """Number of parameters."""
        self.trainable = sum(p.numel() for p in self._every if p.requires_grad)
        """Elements of those that are trained."""
        self.element = round(_bytes_of(self._every) / max(1, self.parameters)) or 4
        """Bytes of an element, on average."""
        self._gathered: dict[tuple[Any, ...], int] = {}
        self.laid_out = 0
        """Engines whose parts were laid out for a footprint."""
        self.laid_out_blocks = 0
        """Blocks that these had together."""

    def sizes(self, bucket_bytes: int, wire: int) -> BufferSizes:
        """What placements can be compared by before one is tried."""
        blocks: list[int] = []
        units: list[int] = []
        pieces: list[list[int]] = []
        every = [p for p in self._every if p.requires_grad]
        for unit in plan_units(self.model, persist_below=0).units:
            members = [p for _, p in unit.parameters]
            keys = [(p.requires_grad, p.dtype) for p in members]
            groups = group_by_bytes([p.numel() * wire for p in members], keys, bucket_bytes)
            trained = [group for group in groups if members[group[0]].requires_grad]
            parts = [sum(members[i].nbytes for i in group) for group in trained]
            blocks += parts
            units.append(sum(parts))
            pieces.append([sum(members[i].numel() for i in group) for group in groups])
        return BufferSizes(
            largest=max((p.numel() for p in self._every), default=0),
            two_blocks=sum(sorted(blocks, reverse=True)[:2]),
            unit=max(units, default=0),
            gathers=sum(slab_sizes(pieces)),
            blocks=len(
                group_by_bytes(
                    [p.numel() * wire for p in every], [p.dtype for p in every], bucket_bytes
                )
            ),
            unit_blocks=len(blocks),
            units=len(units),
        )

    @property
    def states(self) -> int:
        """fp32 states of a parameter beside its master; those of Adam where the optimizer has no compiled rule."""
        rule = rule_for(self.optimizer)
        return 2 if rule is None else len(rule.state_names)

    def footprint(self, config: ZeroConfig, world_size: int, *, accumulate: int = 1) -> Footprint:
        """What the engine of one rank takes under a config.

        Args:
            config: any; limits are not looked at.
            world_size: number of ranks.
            accumulate: micro-batches of a step.

        Raises:
            ConfigError: the combination is refused.
            BudgetError: `nvme_buffer_bytes` is too small.
        """
        layers = self._layers
        if config.undo_bytes is not None and config.speculate:
            # Blocks get memory to be undone with until there is none: no sum over equal layers.
            found = self._lay_out(self.model, config, world_size, accumulate)
        else:
            found = self._lay_out_a_few(layers, config, world_size, accumulate)
        return replace(found, gathered=self.gathered(config)) if found.units else found

    @cached_property
    def _layers(self) -> Layers:
        return Layers(self.model)

    def _lay_out_a_few(
        self, layers: Layers, config: ZeroConfig, world_size: int, accumulate: int
    ) -> Footprint:
        """With few of the equal layers, and what the others add."""
        division = layers.divide(config)
        removed = [number for run in division.runs for number in run.beyond(LAID_OUT)]

        def laid_out(without: Sequence[int]) -> Footprint:
            fraction = division.fraction(without) if config.device_fraction else 0.0
            return self._lay_out(
                layers.without(without),
                replace(config, device_fraction=fraction),
                world_size,
                accumulate,
            )

        few = found = laid_out(removed)
        for run in division.runs:
            one = run.layers[LAID_OUT]
            more = laid_out([number for number in removed if number != one])
            found = found.plus(more, few, times=run.count - LAID_OUT)
        return found

    def _lay_out(
        self, model: nn.Module, config: ZeroConfig, world_size: int, accumulate: int
    ) -> Footprint:
        """What the engine of a model takes, with nothing gathered."""
        self.laid_out += 1
        trial = _Trial(model, self.optimizer, config, world_size)
        try:
            table = trial.fill(accumulate)
            table["device"]["staging"] += trial.workspace(self._sent)
            units = [] if trial.parts.sharded is None else trial.parts.sharded.units
            self.laid_out_blocks += len(trial.roster.blocks)
            return Footprint(
                table=table,
                gathered=0,
                unreduced=trial.unreduced(accumulate),
                blocks=len(trial.roster.blocks),
                largest_unit=max((unit.nbytes for unit in units), default=0),
                units=len(units),
            )
        finally:
            _make_plain(model)

    @cached_property
    def _sent(self) -> tuple[int, int]:
        """Number and bytes of the tensors that the first rank sends to all."""
        tensors = [*self._every, *self.model.buffers()]
        return len(tensors), _bytes_of(tensors)

    def gathered(self, config: ZeroConfig) -> int:
        """Most bytes of full weights at once, the same for every number of ranks and every tier."""
        key = (config.prefetch_units, config.prefetch_limit, config.persist_below)
        if key not in self._gathered:
            model = self._layers.without(
                [
                    number
                    for run in self._layers.alike()
                    for number in run.beyond(_PASSED + 3 * config.prefetch_units)
                ]
            )
            plan = plan_units(model, persist_below=config.persist_below)
            # The gatherer's own limit, given to it so that it need not find the largest unit at every turn.
            largest = max(
                (_bytes_of([p for _, p in unit.parameters]) for unit in plan.units), default=0
            )
            ahead = config.prefetch_limit
            alone = ZeroConfig(
                stage=3,
                optimizer="device",
                gradients="device",
                prefetch_units=config.prefetch_units,
                prefetch_bytes=largest * config.prefetch_units if ahead is None else ahead,
                persist_below=config.persist_below,
            )
            trial = _Trial(model, self.optimizer, alone, 1)
            try:
                trial.open()
                trial.release()
                sharded = trial.parts.sharded
                found = 0 if sharded is None else _most_gathered(model, sharded, plan.uses)
                self._gathered[key] = found
            finally:
                _make_plain(model)
        return self._gathered[key]


class _Trial:
    """The parts of one engine, on stand-ins."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, config: ZeroConfig, world_size: int
    ) -> None:
        self.group = _DryGroup(world_size)
        group: Any = self.group
        stands_in: Any = _DryStore() if config.nvme_paths else None
        self.world_size = world_size
        self.model = model
        self.config = config
        self.resources = Resources(
            group=group,
            weight_group=group if config.shards_parameters else None,
            kernels=cast("Any", None),
            backend=_DryBackend(),
            control=group,
            store=stands_in,
            ledger=Ledger(),
            trace=None,
            trace_path=None,
        )
        self.roster = Roster(model, [optimizer])
        budget = Budget(ZeroConfig(), torch.device("cpu"))
        scaler = LossScaler(config.loss_scale)
        with _without_compiler():
            self.parts = assemble(model, config, self.resources, self.roster, budget, scaler)
        self.states = self.parts.make_states([optimizer], config, self.resources)
        self.accounts = self.parts.make_accounts(config, self.states, self.resources)

    def open(self) -> list[Block]:
        """Take parameters and weights on as an engine does; what reduces and updates them is not told of them."""
        parts, config = self.parts, self.config
        members = _members(self.model)
        with torch.no_grad():
            if parts.sharded is not None:
                parts.sharded.open(members)
            blocks = form_blocks(
                members,
                parts.place,
                wire_bytes=DTYPES[config.reduce_dtype].itemsize,
                limit=config.bucket_size,
                device_fraction=config.device_fraction,
            )
            self.roster.admit(members, blocks)
            if parts.sharded is not None:
                parts.sharded.admit(blocks)
        return blocks

    def release(self) -> None:
        """Keep no full weights of units."""
        sharded = self.parts.sharded
        if sharded is not None:
            sharded.gatherer.set_units(sharded.units)
            sharded.gatherer.release_all()

    def fill(self, accumulate: int) -> Table:
        """Reserve everything as an engine does, let gradients arrive, and count it with nothing gathered."""
        parts, config = self.parts, self.config
        blocks = self.open()
        with torch.no_grad():
            parts.gradients.add_blocks(blocks)
            if parts.swap is not None:
                parts.swap.prepare(self.accounts.formed(blocks))
            for states in self.states:
                states.add_blocks(blocks)
            parts.buckets.add_blocks(blocks)
            parts.pipeline.add_blocks(blocks)
            if config.speculate:
                parts.undo.add_blocks(self.accounts.with_states(blocks))
            self.release()
            self._receive(blocks, accumulate)
        table = self.accounts.held(self.model)
        return {tier: {kind: table[tier][kind] for kind in KINDS} for tier in table}

    def _receive(self, blocks: Sequence[Block], accumulate: int) -> None:
        """Gradients arrive: what is added up takes fp32 buffers, made when the second one comes."""
        whole = not self.config.shards_gradients
        for _ in range(1 if whole else min(accumulate, 2)):
            for block in blocks:
                gradients = self.parts.gradients
                arrival = gradients.arrive(block, exact=whole and accumulate > 1)
                written = self.resources.backend.mark("gradients")
                gradients.commit(block, arrival, written, last=True)

    def unreduced(self, accumulate: int) -> int:
        """Two blocks' gradients, the one that is moved and the one that is filled; all of them where they are kept."""
        if accumulate > 1 and not self.config.shards_gradients:
            return 4 * sum(member.numel for member in self.roster.members)
        sizes = [sum(m.nbytes for m in block.parameters) for block in self.roster.blocks]
        return sum(sorted(sizes, reverse=True)[:2])

    def workspace(self, sent: tuple[int, int]) -> int:
        """What the transport of host tensors keeps: pieces on their way to be summed, and one of the first broadcast.

        Args:
            sent: number and bytes of the tensors of that broadcast.
        """
        others, blocks = self.world_size - 1, self.roster.blocks
        if not others or not blocks:
            return 0
        # An all-reduce sums this rank's part of the whole chunk, a reduce-scatter its chunk.
        parted = self.world_size // self.parts.place.shards
        nbytes = max(block.chunk for block in blocks) // parted * self.parts.buckets.wire.itemsize
        pieces = 2 * others * round_up(min(PIECE_BYTES, nbytes), 64)
        tensors, size = sent
        return pieces + (min(PIECE_BYTES, size) if tensors > 1 else 0)


@contextmanager
def _without_compiler() -> Generator[None]:
    """Make hooks without asking torch to keep Dynamo from tracing them.

    The question loads all of Dynamo, which takes seconds, and the hooks of a trial never run.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    compiler: Any = torch.compiler
    original = compiler.disable
    compiler.disable = _unchanged
    try:
        yield
    finally:
        compiler.disable = original


def _unchanged(function: Any, **_: Any) -> Any:
    return function


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(item.numel() * item.element_size() for item in tensors)


def _members(model: nn.Module) -> list[ManagedParameter]:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        ManagedParameter(index=index, name=name, parameter=parameter, optimizer=0)
        for index, (name, parameter) in enumerate(trainable)
    ]


def _make_plain(model: nn.Module) -> None:
    """Undo what a trial did to the model's parameters."""
    make_plain(
        [(p, torch.empty(tuple(p.shape), dtype=p.dtype, device="meta")) for p in model.parameters()]
    )


def _most_gathered(
    model: nn.Module,
    sharded: ShardedModel,
    uses: Sequence[tuple[nn.Module, tuple[int, ...]]],
) -> int:
    """Lead the gatherer through a few steps in registration order."""
    gatherer = sharded.gatherer
    gatherer.forget_peak()
    numbers = {id(module): found for module, found in uses}
    with torch.no_grad():
        for _ in range(_ROUNDS):
            calls = list(_forward(model, numbers, sharded, set()))
            for call, found in reversed(calls):
                for number in reversed(found):
                    gatherer.reached(call, sharded.units[number])
            gatherer.end_backward()
    return gatherer.peak_bytes


def _forward(
    module: nn.Module,
    uses: dict[int, tuple[int, ...]],
    sharded: ShardedModel,
    seen: set[int],
) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Each call of a module that needs units, children inside their parent's; innermost calls end first."""
    seen.add(id(module))
    numbers = uses.get(id(module))
    call = None
    if numbers is not None:
        units = [sharded.units[number] for number in numbers]
        call = sharded.gatherer.enter(units)
        yield call, numbers
    for child in module.children():
        if id(child) not in seen:
            yield from _forward(child, uses, sharded, seen)
    if numbers is not None and call is not None:
        sharded.gatherer.leave([sharded.units[number] for number in numbers], call)
