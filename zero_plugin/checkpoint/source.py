"""What an engine holds on this rank, as parts of its file; and where a checkpoint's bytes go on a load.

Both walk the states block by block, and states in files tile by tile, so that no more than a tile is in memory beside what is
there anyway. A state that every rank holds whole (stage 0, frozen weights below stage 3) is written in equal slices by all.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_plugin.checkpoint.format import BUFFER, MASTER, STATE, WEIGHT, slice_name
from zero_plugin.checkpoint.shardfile import Part, whole
from zero_plugin.errors import EngineStateError
from zero_plugin.optim.blocks import BlockStates
from zero_plugin.optim.plan import BlockPlan
from zero_plugin.optim.states import OptimizerStates
from zero_plugin.optim.swap import Tile
from zero_plugin.runtime.memory import allocate_host
from zero_plugin.sharding.layout import Slice, cut
from zero_plugin.sharding.parameters import FROZEN, RESIDENT
from zero_plugin.sharding.partition import Block
from zero_plugin.sharding.roster import Roster
from zero_plugin.sharding.sharded import ShardedModel
from zero_plugin.store.store import NvmeStore

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A range of a parameter's state on this rank, to be filled.

    Attributes:
        kind: `MASTER`, `WEIGHT` or a state's.
        name: the parameter.
        start: its first element that is wanted.
        view: flat, of the elements wanted; any device, and any floating dtype.
    """

    kind: str
    name: str
    start: int
    view: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """An engine's model and optimizer states on this rank.

    Attributes:
        model: the module.
        optimizers: its optimizers.
        roster: the managed parameters.
        states: of each optimizer.
        sharded: sharded weights, or None.
        store: where states in files lie, or None.
        rank: this rank.
        size: number of ranks.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    roster: Roster
    states: Sequence[OptimizerStates]
    sharded: ShardedModel | None
    store: NvmeStore | None
    rank: int
    size: int

    # Names -------------------------------------------------------------------------------------------------------

    def names(self) -> dict[str, nn.Parameter]:
        """Every parameter by its first name."""
        return dict(self.model.named_parameters())

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters, each with the first."""
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            name: first[id(parameter)]
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if name != first[id(parameter)]
        }

    def rest(self) -> dict[str, Any]:
        """What the model's state dict holds beside parameters: buffers, and the extra states of modules."""
        with torch.no_grad():
            found: dict[str, Any] = {}
            for prefix, module in self.model.named_modules():
                start = f"{prefix}." if prefix else ""
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:  # noqa: SLF001
                        found[start + name] = buffer
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    found[f"{start}_extra_state"] = module.get_extra_state()
        return found

    def is_managed(self, parameter: nn.Parameter) -> bool:
        """Whether the engine updates a parameter."""
        return id(parameter) in self._managed()

    @property
    def managed_names(self) -> set[str]:
        """Names of the parameters that the engine updates."""
        return {member.name for member in self.roster.members}

    # Saving ------------------------------------------------------------------------------------------------------

    def volatile_parts(self) -> list[Part]:
        """What user code may write at any time, without the engine: frozen weights below stage 3."""
        sharded = self._sharded_ids()
        managed = self._managed()
        return [
            part
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in managed and id(parameter) not in sharded
            for part in self._cut(WEIGHT, name, parameter.detach().reshape(-1))
        ]

    def frozen_parts(self) -> list[Part]:
        """This rank's slices of frozen sharded weights."""
        return [part for block in self._frozen_blocks() for part in self._weight_parts(block)]

    def weight_parts(self, names: Container[str] | None = None) -> list[Part]:
        """This rank's slices of the compute weights of managed parameters, of all or of some."""
        return [part for block in self.roster.blocks for part in self._weight_parts(block, names)]

    def ahead_parts(self, ahead: Sequence[tuple[BlockPlan, Tensor]]) -> list[Part]:
        """This rank's slices of new weights that are not shown yet, in place of the compute weights."""
        parts: list[Part] = []
        for plan, chunk in ahead:
            block = plan.block
            for position in plan.positions:
                name, view = block.parameters[position].name, block.own_view(chunk, position)
                if block.layout.shards == 1:
                    parts += self._cut(WEIGHT, name, view)
                elif view.numel():
                    own = block.own_slice(position)
                    parts.append(whole(slice_name(f"{WEIGHT}/{name}", own.start, own.stop), view))
        return parts

    def state_parts(self) -> tuple[list[Part], list[Part]]:
        """This rank's slices of masters and optimizer states.

        Returns:
            What must be read before the training goes on, since user code may write it or lanes are needed to read it;
            and the rest.
        """
        first: list[Part] = []
        rest: list[Part] = []
        held = _Held()
        for states in self.states:
            for item in states.blocks.values():
                if item.is_swapped and item.is_plain and item.form == "whole":
                    rest += self._tile_parts(states, item, held)
                elif item.is_swapped or not item.is_plain:
                    first += self._opened_parts(states, item)
                elif item.master is None:
                    first += self._block_parts(states, item)
                else:
                    rest += self._block_parts(states, item)
        return first, rest

    # Loading -----------------------------------------------------------------------------------------------------

    def state_targets(self) -> Iterator[Target]:
        """Masters and optimizer states of this rank, each to be filled before the next is asked for."""
        for states in self.states:
            for item in states.blocks.values():
                if item.is_swapped and item.is_plain and item.form == "whole":
                    yield from _swapped_targets(states, item)
                elif item.is_swapped or not item.is_plain:
                    with states.opened(item, write=True) as here:
                        yield from _block_targets(states, here)
                else:
                    yield from _block_targets(states, item)

    def weight_targets(self) -> Iterator[Target]:
        """Compute weights of this rank that are not part of a master, each to be filled before the next is asked for."""
        if self.sharded is not None:
            filled = {
                number
                for states in self.states
                for number, item in states.blocks.items()
                if item.reads_weights or item.weights_are_master
            }
            for unit in self.sharded.units:
                for block in unit.blocks:
                    if block.optimizer == FROZEN or block.index not in filled:
                        yield from _shard_targets(self.sharded, block)
        sharded = self._sharded_ids()
        managed = self._managed()
        for name, parameter in self.model.named_parameters():
            if id(parameter) in sharded:
                continue
            member = managed.get(id(parameter))
            if member is not None:
                yield Target(kind=WEIGHT, name=name, start=0, view=member.alias)
                continue
            data = parameter.detach()
            flat = data.reshape(-1)
            yield Target(kind=WEIGHT, name=name, start=0, view=flat)
            if flat.data_ptr() != data.data_ptr() and flat.numel():
                data.copy_(flat.view(data.shape))

    # Inside ------------------------------------------------------------------------------------------------------

    def _sharded_ids(self) -> set[int]:
        units = () if self.sharded is None else self.sharded.units
        return {id(member.parameter) for unit in units for member in unit.members}

    def _managed(self) -> dict[int, Any]:
        return {id(member.parameter): member for member in self.roster.members}

    def _frozen_blocks(self) -> list[Block]:
        units = () if self.sharded is None else self.sharded.units
        return [block for unit in units for block in unit.blocks if block.optimizer == FROZEN]

    def _mine(self, block: Block, position: int) -> Slice:
        """The part of a member that this rank writes: its slice, or a cut of what every rank holds."""
        if block.layout.shards == self.size:
            return block.own_slice(position)
        return cut(block.layout.numels[position], self.size)[self.rank]

    def _cut(self, kind: str, name: str, flat: Tensor) -> list[Part]:
        part = cut(flat.numel(), self.size)[self.rank]
        if not part.numel:
            return []
        return [_slice_part(kind, name, part.start, flat[part.start : part.stop])]

    def _weight_parts(self, block: Block, names: Container[str] | None = None) -> list[Part]:
        shards = (
            self.sharded.shards if self.sharded is not None and block.unit != RESIDENT else None
        )
        if shards is None:
            return [
                part
                for member in block.parameters
                if names is None or member.name in names
                for part in self._cut(WEIGHT, member.name, member.alias)
            ]
        held = _Held()
        parts: list[Part] = []
        for position, member in enumerate(block.parameters):
            own = block.own_slice(position)
            if own.numel and (names is None or member.name in names):
                offset = block.layout.offsets[position]
                parts.append(
                    Part(
                        name=slice_name(f"{WEIGHT}/{member.name}", own.start, own.stop),
                        dtype=block.dtype,
                        shape=(own.numel,),
                        read=partial(
                            held.read,
                            block,
                            lambda b: (shards.snapshot(b),),
                            number=0,
                            first=offset,
                        ),
                    )
                )
        return parts

    def _opened_parts(self, states: OptimizerStates, item: BlockStates) -> list[Part]:
        """Parts of a block whose master is put together, or whose moments are decoded, when it is looked at."""
        block, held = item.block, _Held()

        def load(_: object) -> list[Tensor]:
            with states.opened(item, write=False) as here:
                if here.master is not None:
                    return [here.master, *here.states]
                if block.unit != RESIDENT:
                    raise EngineStateError(
                        f"the master of {block.name} was asked of a closed engine"
                    )
                master = torch.zeros(block.chunk, dtype=torch.float32, device=block.device)
                for position in range(len(block.parameters)):
                    block.own_view(master, position).copy_(here.master_view(position))
                return [master, *here.states]

        return [
            Part(
                name=slice_name(f"{kind}/{member.name}", mine.start, mine.stop),
                dtype=torch.float32,
                shape=(mine.numel,),
                read=partial(
                    held.read,
                    block,
                    load,
                    number=number,
                    first=block.layout.offsets[position]
                    + mine.start
                    - block.own_slice(position).start,
                ),
            )
            for position, member in enumerate(block.parameters)
            for mine in (self._mine(block, position),)
            if mine.numel
            for number, kind in enumerate(state_kinds(states))
        ]

    def _block_parts(self, states: OptimizerStates, item: BlockStates) -> list[Part]:
        block = item.block
        parts: list[Part] = []
        for position, member in enumerate(block.parameters):
            mine, own = self._mine(block, position), block.own_slice(position)
            if not mine.numel:
                continue
            inside = slice(mine.start - own.start, mine.stop - own.start)
            for kind, view in _named_views(states, item, position):
                parts.append(_slice_part(kind, member.name, mine.start, view[inside]))
        return parts

    def _tile_parts(self, states: OptimizerStates, item: BlockStates, held: _Held) -> list[Part]:
        swap, block = states.swap, item.block
        if swap is None:
            return []
        parts: list[Part] = []
        for tile in swap.tiles(block):
            for position, member in enumerate(block.parameters):
                mine, own = self._mine(block, position), block.own_slice(position)
                # Where the part of the slice that this rank writes lies in the chunk.
                offset = block.layout.offsets[position] - own.start
                start = max(offset + mine.start, tile.start)
                stop = min(offset + mine.stop, tile.stop)
                if start >= stop:
                    continue
                for number, kind in enumerate(state_kinds(states)):
                    parts.append(
                        Part(
                            name=slice_name(f"{kind}/{member.name}", start - offset, stop - offset),
                            dtype=torch.float32,
                            shape=(stop - start,),
                            transient=True,
                            read=partial(
                                held.read,
                                tile,
                                partial(self._read_tile, held),
                                number=number,
                                first=start - tile.start,
                            ),
                        )
                    )
        return parts

    def _read_tile(self, held: _Held, tile: Tile) -> list[Tensor]:
        """A tile's states, read beside the lanes: they must be at rest, and nothing of it cached."""
        if self.store is None:
            raise EngineStateError(f"the states of {tile.block.name} were asked of a closed engine")
        region = held.room(tile.nbytes)
        self.store.read(tile.extent, tile.offset, region)
        return tile.parts(region)


@dataclass(kw_only=True, slots=True)
class _Held:
    """The one tile or chunk that is in memory, for the parts that are read out of it one after another."""

    key: Any = None
    tensors: tuple[Tensor, ...] = field(default=())
    memory: Tensor | None = None

    def room(self, nbytes: int) -> Tensor:
        """Memory for a tile; that of the last one."""
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = None
            self.memory = allocate_host(nbytes)
        return self.memory[:nbytes]

    def read(
        self, key: Any, load: Any, start: int, stop: int, *, number: int, first: int
    ) -> Tensor:
        if self.key is not key:
            self.tensors = ()
            self.tensors = tuple(load(key))
            self.key = key
        return self.tensors[number][first + start : first + stop]


def state_kinds(states: OptimizerStates) -> list[str]:
    """Kinds of what an optimizer keeps of each element, the master first."""
    names = states.foreign_names if states.rule is None else states.rule.state_names
    return [MASTER, *(STATE + name for name in names)]


def buffer_parts(rest: dict[str, Any]) -> list[Part]:
    """Copies of buffers as parts; rank 0's."""
    parts: list[Part] = []
    for name, value in rest.items():
        if isinstance(value, Tensor):
            part = whole(slice_name(f"{BUFFER}/{name}", 0, value.numel()), value.detach().clone())
            parts.append(part)
    return parts


def _slice_part(kind: str, name: str, start: int, view: Tensor) -> Part:
    return whole(slice_name(f"{kind}/{name}", start, start + view.numel()), view)


def _named_views(
    states: OptimizerStates, item: BlockStates, position: int
) -> Iterator[tuple[str, Tensor]]:
    """Each state of a member's own slice that exists, flat."""
    yield MASTER, item.master_view(position)
    if states.rule is not None:
        for name, chunk in zip(states.rule.state_names, item.states, strict=True):
            yield STATE + name, item.block.own_view(chunk, position)
    elif item.foreign is not None:
        held = item.foreign.state(position)
        for name in states.foreign_names:
            if isinstance(held.get(name), Tensor):
                yield STATE + name, held[name]


def _block_targets(states: OptimizerStates, item: BlockStates) -> Iterator[Target]:
    block = item.block
    for position, member in enumerate(block.parameters):
        own = block.own_slice(position)
        if not own.numel:
            continue
        for kind, view in _named_views(states, item, position):
            yield Target(kind=kind, name=member.name, start=own.start, view=view)


def _shard_targets(sharded: ShardedModel, block: Block) -> Iterator[Target]:
    chunk = sharded.shards.snapshot(block)
    for position, member in enumerate(block.parameters):
        own = block.own_slice(position)
        if own.numel:
            view = block.own_view(chunk, position)
            yield Target(kind=WEIGHT, name=member.name, start=own.start, view=view)
    if sharded.shards.tier == "nvme":
        sharded.shards.replace(block, chunk)


def _swapped_targets(states: OptimizerStates, item: BlockStates) -> Iterator[Target]:
    swap, block = states.swap, item.block
    for tile in () if swap is None else swap.tiles(block):
        if swap is None:
            return
        with swap.opened(tile, write=True) as parts:
            yield from _tile_targets(state_kinds(states), block, tile, parts)


def _tile_targets(
    kinds: Sequence[str], block: Block, tile: Tile, parts: Sequence[Tensor]
) -> Iterator[Target]:
    for position, member in enumerate(block.parameters):
        own = block.own_slice(position)
        offset = block.layout.offsets[position]
        start, stop = max(offset, tile.start), min(offset + own.numel, tile.stop)
        if start >= stop:
            continue
        for kind, part in zip(kinds, parts, strict=True):
            yield Target(
                kind=kind,
                name=member.name,
                start=own.start + start - offset,
                view=part[start - tile.start : stop - tile.start],
            )
