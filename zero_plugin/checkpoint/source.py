"""What an engine holds on this rank, as parts of its file; and where a checkpoint's bytes go on a load.

Both walk the states block by block, and states in files tile by tile, so that no more than a tile is in memory beside what is
there anyway. A state that every rank holds whole (stage 0, frozen weights below stage 3) is written in equal slices by all.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_plugin.checkpoint.format import BUFFER, MASTER, STATE, WEIGHT, slice_name
from zero_plugin.checkpoint.shardfile import Part, whole
from zero_plugin.config import MomentDType
from zero_plugin.errors import EngineStateError
from zero_plugin.optim.blocks import BlockStates
from zero_plugin.optim.moments import GROUP, put, take
from zero_plugin.optim.plan import BlockPlan
from zero_plugin.optim.split import join, split
from zero_plugin.optim.states import OptimizerStates
from zero_plugin.optim.swap import Tile
from zero_plugin.runtime.backend import Ticket
from zero_plugin.runtime.memory import allocate_host
from zero_plugin.sharding.layout import Slice, cut
from zero_plugin.sharding.parameters import FROZEN, RESIDENT
from zero_plugin.sharding.partition import Block
from zero_plugin.sharding.roster import Roster
from zero_plugin.sharding.sharded import ShardedModel
from zero_plugin.store.layout import Extent, round_up
from zero_plugin.store.store import NvmeStore

if TYPE_CHECKING:
    from torch.optim import Optimizer


_RANGE = 1 << 22
"""Elements that are put together at once: 16 MiB, and whole groups."""


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
        held = _Held()
        return [p for block in self._frozen_blocks() for p in self._weight_parts(block, held)]

    def weight_parts(self, names: Container[str] | None = None) -> list[Part]:
        """This rank's slices of the compute weights of managed parameters, of all or of some."""
        held = _Held()
        return [p for block in self.roster.blocks for p in self._weight_parts(block, held, names)]

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

    @property
    def are_apart(self) -> bool:
        """Whether all masters and states lie apart from the weights, and can be read in the order of updates."""
        return not any(
            item.foreign is not None or _uses_weights(item)
            for states in self.states
            for item in states.blocks.values()
        )

    def state_parts(self) -> tuple[list[Part], list[BlockParts]]:
        """This rank's slices of masters and optimizer states.

        Returns:
            What must be read before the training goes on, since user code may write it or lanes are needed to read it;
            and the rest, block by block.
        """
        first: list[Part] = []
        rest: list[BlockParts] = []
        held, weights = _Held(), _Held()
        for states in self.states:
            for item in states.blocks.values():
                if item.is_swapped:
                    parts = self._tile_parts(states, item, held, weights)
                else:
                    parts = self._block_parts(states, item, weights)
                if _uses_weights(item):
                    first += parts
                else:
                    rest.append(_block_parts_of(states, item, parts))
        return first, rest

    # Loading -----------------------------------------------------------------------------------------------------

    def state_targets(self) -> Iterator[Target]:
        """Masters and optimizer states of this rank, each to be filled before the next is asked for."""
        for states in self.states:
            for item in states.blocks.values():
                if item.is_swapped:
                    yield from _swapped_targets(states, item)
                elif item.is_plain:
                    yield from _block_targets(states, item)
                else:
                    yield from _ranged_targets(states, item)

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

    def _weight_parts(
        self, block: Block, held: _Held, names: Container[str] | None = None
    ) -> list[Part]:
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

    def _block_parts(
        self, states: OptimizerStates, item: BlockStates, weights: _Held
    ) -> list[Part]:
        """Parts of a block in memory; what is not kept as fp32 is put together range by range."""
        block = item.block
        parts: list[Part] = []
        for position, member in enumerate(block.parameters):
            mine, own = self._mine(block, position), block.own_slice(position)
            if not mine.numel:
                continue
            inside = slice(mine.start - own.start, mine.stop - own.start)
            if item.is_plain:
                for kind, view in _named_views(states, item, position):
                    parts.append(_slice_part(kind, member.name, mine.start, view[inside]))
                continue
            offset = block.layout.offsets[position] + inside.start
            for number, kind in enumerate(state_kinds(states)):
                if number:
                    # Taken now: an update that may be undone exchanges a block's states.
                    kept = item.states[number - 1]
                    decode = partial(states.decoded, moments=item.moments, number=number - 1)
                    read = partial(_decoded, decode, kept, item.moments, offset)
                elif item.form == "split":
                    read = partial(_joined, states, item, weights, offset)
                else:
                    view = item.master_view(position)[inside]
                    parts.append(_slice_part(kind, member.name, mine.start, view))
                    continue
                name = slice_name(f"{kind}/{member.name}", mine.start, mine.stop)
                parts.append(Part(name=name, dtype=torch.float32, shape=(mine.numel,), read=read))
        return parts

    def _tile_parts(
        self, states: OptimizerStates, item: BlockStates, held: _Held, weights: _Held
    ) -> list[Part]:
        swap, block = states.swap, item.block
        if swap is None:
            return []
        parts: list[Part] = []
        load = partial(self._read_tile, held)
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
                            read=_TilePart(
                                states=states,
                                item=item,
                                tile=tile,
                                held=held,
                                load=load,
                                weights=weights,
                                number=number,
                                first=start - tile.start,
                            ).read,
                        )
                    )
        return parts

    def _read_tile(self, held: _Held, tile: Tile) -> list[Tensor]:
        """What is kept of a tile, read beside the lanes: its last write must have ended, and nothing of it be cached."""
        if self.store is None:
            raise EngineStateError(f"the states of {tile.block.name} were asked of a closed engine")
        region = held.room(tile.nbytes)
        self.store.read(self.store.clone_of(tile.extent), tile.offset, region)
        return tile.parts(region)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TilePart:
    """One state of a tile from an element on; what is not kept as fp32 is put together range by range."""

    states: OptimizerStates
    item: BlockStates
    tile: Tile
    held: _Held
    load: Callable[[Tile], Sequence[Tensor]]
    weights: _Held
    number: int
    first: int

    def read(self, start: int, stop: int) -> Tensor:
        """A range of it."""
        form = self.tile.form
        kept = self.held.of(self.tile, self.load)
        if self.number:
            decode = partial(self.states.decoded, moments=form.moments, number=self.number - 1)
            part = kept[form.masters + self.number - 1]
            return _decoded(decode, part, form.moments, self.first, start, stop)
        inside = slice(self.first + start, self.first + stop)
        if form.master == "whole":
            return kept[0][inside]
        begin, end = self.tile.start + inside.start, self.tile.start + inside.stop
        shown = _shown(self.states, self.item, self.weights, begin, end)
        return join(shown.cpu(), kept[0][inside]) if form.master == "split" else shown


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockParts:
    """Parts that only a block's updates change.

    Attributes:
        block: the block.
        parts: its slices of masters and states.
        reads: the tensors that they are read from, where they lie in memory.
        after: what must have ended before they are read, beside the block's last update.
        extent: the file space that they are read from, where they lie in files.
    """

    block: Block
    parts: list[Part]
    reads: tuple[Tensor, ...]
    after: tuple[Ticket[Any], ...]
    extent: Extent | None = None


def _block_parts_of(states: OptimizerStates, item: BlockStates, parts: list[Part]) -> BlockParts:
    own = () if item.master is None else (item.master,)
    # All tiles of a block are in one extent; a rank may have none.
    tiles = () if states.swap is None else states.swap.tiles(item.block)
    return BlockParts(
        block=item.block,
        parts=parts,
        reads=(*own, *item.states),
        after=() if states.swap is None else states.swap.written(item.block),
        extent=tiles[0].extent if tiles else None,
    )


def _uses_weights(item: BlockStates) -> bool:
    """Whether a master lies in the compute weights, or half of it, where user code may write to it."""
    return item.reads_weights or (item.master is None and not item.is_swapped)


def _shown(
    states: OptimizerStates, item: BlockStates, held: _Held, start: int, stop: int
) -> Tensor:
    """A range of a block's chunk of the compute weights."""

    def load(block: Block) -> tuple[Tensor]:
        weights = states.present_weights(item)
        if weights is None:
            raise EngineStateError(f"the master of {block.name} was asked of a closed engine")
        return (weights,)

    return held.read(item.block, load, start, stop, number=0, first=0)


def _joined(
    states: OptimizerStates, item: BlockStates, weights: _Held, first: int, start: int, stop: int
) -> Tensor:
    """A range of the master that a remainder in memory and the compute weights give."""
    remainder = item.remainder
    if remainder is None:
        raise EngineStateError(f"the master of {item.block.name} was asked of a closed engine")
    inside = slice(first + start, first + stop)
    shown = _shown(states, item, weights, inside.start, inside.stop)
    return join(shown.to(remainder.device), remainder[inside])


def _decoded(
    decode: Callable[[Tensor], Tensor],
    kept: Tensor,
    moments: MomentDType,
    first: int,
    start: int,
    stop: int,
) -> Tensor:
    """A range of a moment in memory, as fp32; groups that share an exponent are decoded whole."""
    begin = (first + start) // GROUP * GROUP
    numel = round_up(first + stop - begin, GROUP)
    return decode(take(kept, moments, begin, numel))[first + start - begin : first + stop - begin]


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
        return self.of(key, load)[number][first + start : first + stop]

    def of(self, key: Any, load: Any) -> tuple[Tensor, ...]:
        """What was loaded for a tile or chunk; loads it in place of the last one."""
        if self.key is not key:
            self.tensors = ()
            self.tensors = tuple(load(key))
            self.key = key
        return self.tensors


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


def _ranged_targets(states: OptimizerStates, item: BlockStates) -> Iterator[Target]:
    """Of a block in memory that is not kept as fp32: range by range, each put back into its form."""
    block, kinds = item.block, state_kinds(states)
    weights = states.present_weights(item) if item.form == "split" else None
    for position, member in enumerate(block.parameters):
        own, offset = block.own_slice(position), block.layout.offsets[position]
        if weights is None and own.numel:
            view = item.master_view(position)
            yield Target(kind=MASTER, name=member.name, start=own.start, view=view)
        for start in range(0, own.numel, _RANGE):
            stop = min(start + _RANGE, own.numel)
            inside = slice(offset + start, offset + stop)
            if weights is not None and item.remainder is not None:
                kept = item.remainder[inside]
                master = join(weights[inside].to(kept.device), kept)
                yield Target(kind=MASTER, name=member.name, start=own.start + start, view=master)
                _take_split(master, weights[inside], kept)
            for number, kind in enumerate(kinds[1:]):
                whole_groups = round_up(stop - start, GROUP)
                part = take(item.states[number], item.moments, inside.start, whole_groups)
                values = states.decoded(part, item.moments, number)
                view = values[: stop - start]
                yield Target(kind=kind, name=member.name, start=own.start + start, view=view)
                states.encode(values, item.moments, number, part)
                put(item.states[number], item.moments, inside.start, part)
    if weights is not None:
        states.write_weights(item, weights)


def _take_split(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    new, rest = split(master)
    weights.copy_(new)
    remainder.copy_(rest)


def _swapped_targets(states: OptimizerStates, item: BlockStates) -> Iterator[Target]:
    """Of a block in files: tile by tile, and range by range where they are not kept as fp32."""
    swap, block = states.swap, item.block
    weights = states.present_weights(item) if item.reads_weights else None
    for tile in () if swap is None else swap.tiles(block):
        if swap is None:
            return
        with swap.opened(tile, write=True) as parts:
            step = tile.stop - tile.start if item.is_plain else _RANGE
            for start in range(tile.start, tile.stop, step):
                yield from _tile_targets(
                    states, tile, parts, weights, start, min(start + step, tile.stop)
                )
    if weights is not None:
        states.write_weights(item, weights)


def _tile_targets(
    states: OptimizerStates,
    tile: Tile,
    parts: Sequence[Tensor],
    weights: Tensor | None,
    start: int,
    stop: int,
) -> Iterator[Target]:
    """Of the elements of a chunk from one place to another, which are put back into their form."""
    form, begin = tile.form, start - tile.start
    groups = round_up(stop - start, GROUP)
    kept = [take(part, form.moments, begin, groups) for part in parts[form.masters :]]
    moments = [states.decoded(part, form.moments, number) for number, part in enumerate(kept)]
    first = parts[0][begin : begin + stop - start]
    shown = None if weights is None else weights[start:stop]
    master = first if shown is None else shown
    if shown is not None and form.master == "split":
        master = join(shown.cpu(), first)
    yield from _range_targets(state_kinds(states), tile.block, start, [master, *moments])
    if shown is not None and form.master == "split":
        _take_split(master, shown, first)
    for number, (part, values) in enumerate(zip(kept, moments, strict=True)):
        states.encode(values, form.moments, number, part)
        put(parts[form.masters + number], form.moments, begin, part)


def _range_targets(
    kinds: Sequence[str], block: Block, first: int, parts: Sequence[Tensor]
) -> Iterator[Target]:
    """Of what lies in a block's chunk from an element on."""
    last = first + parts[0].numel()
    for position, member in enumerate(block.parameters):
        own = block.own_slice(position)
        offset = block.layout.offsets[position]
        start, stop = max(offset, first), min(offset + own.numel, last)
        if start >= stop:
            continue
        for kind, part in zip(kinds, parts, strict=True):
            yield Target(
                kind=kind,
                name=member.name,
                start=own.start + start - offset,
                view=part[start - first : stop - first],
            )
