"""A model whose parameters are sharded (stage 3): its units, their shards, and who gathers them when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import EngineStateError, ParameterError, ZeroError
from zero_plugin.runtime.backend import Backend
from zero_plugin.sharding.gather import Unit, UnitGatherer
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.hooks import UnitHooks
from zero_plugin.sharding.parameters import FROZEN, ManagedParameter
from zero_plugin.sharding.partition import Block, ShardPlace, form_blocks
from zero_plugin.sharding.precut import check_same_ranks, precut_of
from zero_plugin.sharding.swapped_weights import SwappedWeights
from zero_plugin.sharding.units import ModelPlan, plan_units
from zero_plugin.sharding.weights import WeightShards
from zero_plugin.store.store import NvmeStore

_FIRST_FROZEN = 1 << 20
"""Index of the first block of frozen parameters: they are no blocks of the optimizer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNeeds:
    """Bytes that sharded weights take on this rank.

    Attributes:
        shards: in the tier of the weights.
        staging: on the device.
        gathered: most bytes of full weights on the device at once.
        host_staging: in host memory, for shards on their way from files.
    """

    shards: int
    staging: int
    gathered: int
    host_staging: int


class ShardedModel:
    """The sharded parameters of one model.

    Args:
        model: the module; its parameters hold their full weights now.
        backend: lanes and memory.
        group: the ranks, for gathers only.
        place: over how many ranks weights are cut.
        config: tier and prefetch.
        before_unpack: called before a weight is unpacked inside a backward.
        store: where the shards lie if on NVMe, else None.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts it connects
        self,
        model: nn.Module,
        backend: Backend,
        group: ProcessGroup,
        place: ShardPlace,
        config: ZeroConfig,
        before_unpack: Callable[[], None],
        store: NvmeStore | None = None,
    ) -> None:
        self._place = place
        self._limit = config.bucket_size
        self._depth = config.prefetch_units
        self._keeps_memory = config.debug_poison
        self._plan: ModelPlan = plan_units(
            model, persist_below=config.persist_below, max_bytes=config.unit_limit
        )
        self.shards = (
            WeightShards(backend, config.params)
            if store is None
            else SwappedWeights(backend, store, buffer_bytes=config.nvme_buffer_size)
        )
        """This rank's part of the weights."""
        self.gatherer = UnitGatherer(
            backend,
            group,
            self.shards,
            depth=config.prefetch_units,
            ahead_bytes=config.prefetch_limit,
            poison=config.debug_poison,
        )
        """Gathers and releases units."""
        self._hooks = UnitHooks(self.gatherer, before_unpack)
        self._attached = False
        self._frozen_index = _FIRST_FROZEN
        self._number_of = {
            id(parameter): number
            for number, unit in enumerate(self._plan.units)
            for _, parameter in unit.parameters
        }
        check_same_ranks(
            model.named_parameters(),
            sharded=set(self._number_of),
            shards=place.shards,
            rank=place.rank,
        )
        self._units = [
            Unit(index=number, name=unit.name, members=[], blocks=[])
            for number, unit in enumerate(self._plan.units)
        ]

    @property
    def units(self) -> Sequence[Unit]:
        """All units."""
        return self._units

    @property
    def is_attached(self) -> bool:
        """Whether the weights were cut and the modules hooked; a model of frozen weights alone has to be, too."""
        return self._attached

    def open(self, newcomers: Sequence[ManagedParameter]) -> None:
        """Place parameters in their units, and bring those units here, before blocks are formed.

        Args:
            newcomers: trainable parameters that are managed from now on; known as frozen ones before, or not at all.
        """
        for number in sorted({self._number_of.get(id(m.parameter), -1) for m in newcomers}):
            if number >= 0 and self._attached:
                self.gatherer.bring(self._units[number])
                self.gatherer.hold(self._units[number])
        for member in newcomers:
            member.unit = self._number_of.get(id(member.parameter), -1)

    def admit(self, blocks: Sequence[Block]) -> None:
        """Cut the shards of new trainable blocks, and of what is frozen in their units, from the full weights here."""
        touched: dict[int, list[Block]] = {}
        for block in blocks:
            if block.unit >= 0:
                touched.setdefault(block.unit, []).append(block)
        for unit in self._units:
            if unit.index in touched or not self._attached:
                self._admit_unit(unit, touched.get(unit.index, []))

    def seal(self) -> None:
        """Release what is cut, and hook the modules the first time."""
        self.gatherer.set_units(self._units)
        for unit in self._units:
            unit.holds = 0
        self.gatherer.release_all()
        if not self._attached:
            self._attached = True
            self.gatherer.forget_peak()
            for module, numbers in self._plan.uses:
                self._hooks.attach(module, [self._units[number] for number in numbers])

    @contextmanager
    def full(self, *, writeback: bool) -> Generator[set[int]]:
        """Inside, every parameter holds its full weights; a collective.

        Args:
            writeback: take what is written inside into the shards; the same on every rank.

        Yields:
            A set that holds, after the block, the managed indices of the parameters that were written to.

        Raises:
            ParameterError: a parameter was written to without `writeback`.
        """
        written: set[int] = set()
        names: list[str] = []
        for unit in self._units:
            self.gatherer.bring(unit)
            self.gatherer.hold(unit)
        pushed = self._hooks.saved.push()
        try:
            yield written
        finally:
            if pushed:
                self._hooks.saved.pop()
            for unit in self._units:
                names += self._take_writes(unit, written, writeback=writeback)
                self.gatherer.let_go(unit)
                if unit.holds == 0:
                    self.gatherer.release(unit)
        if names and not writeback:
            raise ParameterError(
                f"parameter {', '.join(map(repr, names))} was written to inside engine.full_params(), and the write is "
                "lost: pass writeback=True, on every rank"
            )

    def gathered_units(self) -> Generator[Unit]:
        """Every unit, here while it is the current one; a collective."""
        for unit in self._units:
            was_released = unit.is_released
            self.gatherer.bring(unit)
            self.gatherer.hold(unit)
            try:
                yield unit
            finally:
                self.gatherer.let_go(unit)
                if was_released and unit.holds == 0:
                    self.gatherer.release(unit)

    def rest(self) -> None:
        """Release everything: the shards are about to change.

        Raises:
            EngineStateError: full weights are in use.
        """
        self.gatherer.release_all()
        held = [unit.name for unit in self._units if unit.holds]
        if held:
            raise EngineStateError(
                f"the weights of {held[0] or 'the model'} are in use, and what was asked for would change them: do it outside a "
                "forward and outside engine.full_params()"
            )

    def is_released(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's full weights take no memory."""
        number = self._number_of.get(id(parameter))
        if precut_of(parameter) is not None and not self._attached:
            return True
        gone = number is not None and self._units[number].is_released
        return gone and not self._keeps_memory

    def needs(self, blocks: Iterable[Block]) -> WeightNeeds:
        """What the weights take once trainable `blocks` are admitted and everything is released."""
        sizes = [
            sum(p.numel() * p.element_size() for _, p in unit.parameters)
            for unit in self._plan.units
        ]
        trainable = [block for block in blocks if block.unit >= 0]
        shards = sum(block.chunk * block.dtype.itemsize for block in trainable)
        inside = sum(m.nbytes for block in trainable for m in block.parameters)
        frozen = -(-max(0, sum(sizes) - inside) // self._place.shards)
        # Two more than what is gathered ahead: the unit in use, and one that holds tied weights or the root's.
        most = None if self._keeps_memory else self._depth + 2
        gathered = sum(sorted(sizes, reverse=True)[:most])
        return WeightNeeds(
            shards=shards + frozen,
            staging=self.gatherer.planned(
                [*(block for unit in self._units for block in unit.blocks), *trainable]
            ),
            gathered=gathered,
            host_staging=self.shards.planned(trainable),
        )

    def close(self, *, restore: bool) -> None:
        """Take the hooks off and free everything.

        Args:
            restore: leave plain parameters with their full weights; a collective.
        """
        self._hooks.remove()
        try:
            self.gatherer.close(restore=restore)
        except ZeroError as error:
            # What broke the run has been raised already; this must not hide it.
            logging.getLogger(__name__).warning(
                "the full weights could not be brought back (%s): the parameters stay sharded, and raise when they are used",
                error,
            )
            self.gatherer.close(restore=False)
        self.shards.close()

    # Inside ------------------------------------------------------------------------------------------------------

    def _admit_unit(self, unit: Unit, trainable: Sequence[Block]) -> None:
        kept = [block for block in unit.blocks if block.optimizer != FROZEN]
        self.shards.drop([block for block in unit.blocks if block.optimizer == FROZEN])
        unit.blocks = [*kept, *trainable]
        managed = {id(m.parameter) for block in unit.blocks for m in block.parameters}
        frozen = [
            ManagedParameter(
                index=-1, name=name, parameter=parameter, optimizer=FROZEN, unit=unit.index
            )
            for name, parameter in self._plan.units[unit.index].parameters
            if id(parameter) not in managed
        ]
        unit.blocks += self._form_frozen(frozen)
        unit.members = [member for block in unit.blocks for member in block.parameters]
        for member in unit.members:
            _own_storage(member)
        for block in unit.blocks:
            if block not in kept:
                self.shards.cut(block)

    def _form_frozen(self, members: Sequence[ManagedParameter]) -> list[Block]:
        blocks = form_blocks(
            members,
            self._place,
            wire_bytes=4,
            limit=self._limit,
            first_index=self._frozen_index,
        )
        self._frozen_index += len(blocks)
        return blocks

    def _take_writes(self, unit: Unit, written: set[int], *, writeback: bool) -> list[str]:
        names: list[str] = []
        for block in unit.blocks:
            changed = [
                member
                for member in block.parameters
                if member.moved or member.parameter._version != self._version(unit, member)
            ]
            if writeback:
                for member in changed:
                    self._adopt(member)
                changed = self._differing(block)
            names += [member.name for member in changed]
            if changed and writeback:
                self.shards.take_write(block)
                written.update(member.index for member in changed if member.optimizer != FROZEN)
        unit.versions = [member.parameter._version for member in unit.members]
        return names

    def _differing(self, block: Block) -> list[ManagedParameter]:
        """Members whose slices here differ from the shard: writes through `Parameter.data` move no version."""
        chunk = self.shards.snapshot(block)
        found: list[ManagedParameter] = []
        for position, member in enumerate(block.parameters):
            part = block.own_slice(position)
            now = member.alias.narrow(0, part.start, part.numel)
            # As bytes, so that a NaN is equal to itself and -0 is not 0.
            before = block.own_view(chunk, position).view(torch.uint8)
            if not torch.equal(now.to(chunk.device).view(torch.uint8), before):
                found.append(member)
        return found

    @staticmethod
    def _version(unit: Unit, member: ManagedParameter) -> int:
        return unit.versions[unit.members.index(member)]

    @staticmethod
    def _adopt(member: ManagedParameter) -> None:
        """A replaced `Parameter.data` is copied into the storage that autograd and the gatherer know."""
        member.check_unchanged()
        if member.moved:
            data: Tensor = member.parameter.data
            member.alias.copy_(data.reshape(-1))
            member.parameter.data = member.alias.view(member.shape)


def _own_storage(member: ManagedParameter) -> None:
    """Give a parameter memory that can be freed and filled again (not a file mapping or a foreign buffer)."""
    if not member.alias.untyped_storage().resizable():
        with torch.no_grad():
            member.parameter.data = member.parameter.data.clone()
        member.refresh_alias()
