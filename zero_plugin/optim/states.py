"""Everything one optimizer owns on this rank: rule, states of each block, step counts; and its torch state dict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_plugin.config import MomentDType
from zero_plugin.errors import CheckpointError, OptimizerError
from zero_plugin.optim.blocks import BlockStates, allocate_states
from zero_plugin.optim.fallback import ForeignBlock, check_element_wise, clone_optimizer
from zero_plugin.optim.form import MasterForm, StateForm, StateForms
from zero_plugin.optim.moments import decode, encode
from zero_plugin.optim.plan import BlockPlan, StepPlan, plan_step
from zero_plugin.optim.rule import Rule, rule_for, unsupported_option, why_not
from zero_plugin.optim.split import follow, join, split
from zero_plugin.optim.swap import SwappedStates
from zero_plugin.runtime.backend import Backend
from zero_plugin.sharding.parameters import RESIDENT, ManagedParameter
from zero_plugin.sharding.partition import Block
from zero_plugin.sharding.weights import WeightShards

if TYPE_CHECKING:
    from torch.optim import Optimizer

Gather = Callable[[Block, Tensor], list[Tensor]]
"""Turns a chunk of this rank into full CPU tensors of the block's members; a collective."""

MASTER_KEY = "master"
"""Key of the fp32 master in a parameter's state, beside torch's own keys."""


class OptimizerStates:
    """One optimizer's states.

    Args:
        optimizer: the user's torch optimizer.
        backend: allocates memory.
        forms: where the states lie, and what is kept of them.
        weights: this rank's shards of the compute weights, where they are sharded.
        swap: where the states lie, if on NVMe.

    Raises:
        OptimizerError: the optimizer has no compiled rule and is not element-wise.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        backend: Backend,
        forms: StateForms,
        weights: WeightShards | None = None,
        swap: SwappedStates | None = None,
    ) -> None:
        self._weights = weights
        self.swap = swap
        """Where the states lie, if on NVMe."""
        self.optimizer = optimizer
        self._backend = backend
        self._forms = forms
        self.rule: Rule | None = rule_for(optimizer)
        if self.rule is None:
            check_element_wise(optimizer)
            if swap is not None:
                raise OptimizerError(
                    f"{type(optimizer).__name__} runs as plain torch ({why_not(optimizer)}), and states on NVMe need a "
                    "compiled optimizer: use Adam, AdamW, Adagrad, Lion or SGD, or optimizer='host'"
                )
            if forms.splits:
                raise OptimizerError(
                    f"{type(optimizer).__name__} runs as plain torch ({why_not(optimizer)}), and a split master needs a compiled "
                    "optimizer: use Adam, AdamW, Adagrad, Lion or SGD, or split_master=False"
                )
            if forms.moments != "fp32":
                raise OptimizerError(
                    f"{type(optimizer).__name__} runs as plain torch ({why_not(optimizer)}), and moments below fp32 need a compiled "
                    "optimizer: use Adam, AdamW, Adagrad, Lion or SGD, or moment_dtype='fp32'"
                )
            logging.getLogger(__name__).warning(
                "%s runs as plain torch on this rank's shards, slower than a compiled optimizer: %s",
                type(optimizer).__name__,
                why_not(optimizer),
            )
        self._foreign_names = [] if self.rule is not None else foreign_state_names(optimizer)
        self._signed = () if self.rule is None else self.rule.signed
        self.blocks: dict[int, BlockStates] = {}
        self._steps: dict[int, int] = {}
        self._numbers: dict[int, int] | None = None

    @property
    def name(self) -> str:
        """The optimizer's own class name."""
        return getattr(type(self.optimizer), "zero_plain_class", type(self.optimizer)).__name__

    @property
    def num_states(self) -> int:
        """fp32 states an element has beside its master."""
        return len(self._foreign_names if self.rule is None else self.rule.state_names)

    @property
    def foreign_names(self) -> Sequence[str]:
        """Names of the element-wise states of an optimizer without a compiled rule."""
        return self._foreign_names

    def initial_fills(self) -> tuple[float, ...]:
        """The value that each state of a compiled rule begins with."""
        if self.rule is None:
            return ()
        return tuple(self.rule.initial_state(self.optimizer.param_groups[0]))

    def step_count(self, index: int) -> int:
        """Updates that a member has had."""
        return self._steps[index]

    def set_step_count(self, index: int, count: int) -> None:
        """Replace it, with the states it goes with."""
        self._steps[index] = count

    @property
    def shares_weights(self) -> bool:
        """Whether masters are in shards of the compute weights, or half in them: a new master changes those."""
        return any(item.reads_weights for item in self.blocks.values())

    def form_of(self, block: Block) -> StateForm:
        """What is kept of a block's states."""
        return self._forms.of(block, self.num_states)

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Reserve states for new blocks and take over what the optimizer already holds for them."""
        group = self.optimizer.param_groups[0]
        fills = () if self.rule is None else tuple(self.rule.initial_state(group))
        self._numbers = None
        for block in blocks:
            states = self._allocate(block, fills)
            if self.rule is None:
                masters = {i: states.master_view(i) for i in range(len(block.parameters))}
                states.foreign = ForeignBlock(self.optimizer, masters)
            self.blocks[block.index] = states
            if states.form == "split" and self._weights is not None:
                self._weights.followers[block.index] = partial(self._follow, states)
            for position, member in enumerate(block.parameters):
                self._steps[member.index] = 0
                held = self.optimizer.state.pop(member.parameter, None)
                if held:
                    with self._here(states, write=True) as here:
                        self._load_member(here, position, held)

    def _allocate(self, block: Block, fills: Sequence[float]) -> BlockStates:
        form = self._forms.of(block, len(fills))
        weights = None
        if self._weights is not None and block.unit != RESIDENT:
            weights = self._weights.snapshot(block)
        stays = self._weights is None or self._weights.tier != "nvme"
        if self.swap is None:
            states = allocate_states(
                self._backend,
                block,
                self._forms.tier_of(block),
                form=form,
                fills=fills,
                weights=weights,
            )
        else:
            states = self._fill_tiles(self.swap, block, form, fills, weights)
        if not stays:
            states.weights = None
        return states

    @staticmethod
    def _fill_tiles(
        swap: SwappedStates,
        block: Block,
        form: StateForm,
        fills: Sequence[float],
        weights: Tensor | None,
    ) -> BlockStates:
        swap.add_block(block, form)
        strides = zip(*(tile.strides for tile in swap.tiles(block)), strict=True)
        states = BlockStates(
            block=block,
            tier="nvme",
            form=form.master,
            master=None,
            states=(),
            weights=weights,
            swapped=tuple(map(sum, strides)) or (0,) * len(form.dtypes),
            moments=form.moments,
        )
        for tile in swap.tiles(block):
            with swap.opened(tile, write=True, fresh=True) as parts:
                # Only what is never below zero begins elsewhere than at zero.
                kept = parts[form.masters :]
                values = [decode(part, form.moments, signed=False) for part in kept]
                for position in range(len(block.parameters)):
                    offset, view = block.layout.offsets[position], states.weights_view(position)
                    start = max(offset, tile.start)
                    stop = min(offset + view.numel(), tile.stop)
                    if start >= stop:
                        continue
                    inside = slice(start - tile.start, stop - tile.start)
                    for value, begin in zip(values, fills, strict=True):
                        value[inside].fill_(begin)
                    # What is left of a master that is its weights is nothing, in split form.
                    if form.master == "whole":
                        parts[0][inside].copy_(view[start - offset : stop - offset])
                for part, value in zip(kept, values, strict=True):
                    encode(value, form.moments, part, signed=False)
        return states

    @contextmanager
    def _here(self, states: BlockStates, *, write: bool) -> Generator[BlockStates]:
        """A block's states in memory, with a fp32 master and fp32 moments, to look at or to change outside a step.

        Where the compute weights hold the master, or half of it, they change with it: no full weights of theirs may be here
        then.
        """
        weights = self.present_weights(states)
        if not states.is_swapped and states.form != "split":
            here = replace(states, weights=weights, states=self.moments_of(states), moments="fp32")
            yield here
            if write:
                self._keep_moments(states, here.states)
            return
        parts = self._read_parts(states)
        here = BlockStates(
            block=states.block,
            tier="host",
            master=_master_of(states.form, weights, parts),
            states=tuple(parts[states.form != "weights" :]),
            weights=weights,
        )
        yield here
        if write and here.master is not None:
            if states.form == "split":
                new, parts[0] = split(here.master)
                self._replace_weights(states, weights, new)
            elif states.form == "weights":
                self._replace_weights(states, weights, here.master)
            self._write_parts(states, parts)

    def present_weights(self, states: BlockStates) -> Tensor | None:
        """This rank's shard of the compute weights; None where a member's own memory has them."""
        block = states.block
        if states.weights is not None or self._weights is None or block.unit == RESIDENT:
            return states.weights
        if self._weights.closed and not states.reads_weights:
            return None
        return self._weights.snapshot(block)

    def _read_parts(self, states: BlockStates) -> list[Tensor]:
        """Whole chunks of what is kept of a block: the first one may be replaced, the others written to."""
        block = states.block
        if self.swap is None or not states.is_swapped:
            first = () if states.remainder is None else (states.remainder,)
            return [*first, *self.moments_of(states)]
        form = self._forms.of(block, self.num_states)
        dtypes = (*form.dtypes[: form.masters], *(torch.float32 for _ in range(form.states)))
        whole = [torch.zeros(block.chunk, dtype=dtype, device="cpu") for dtype in dtypes]
        for tile in self.swap.tiles(block):
            with self.swap.opened(tile, write=False) as parts:
                for number, (full, part) in enumerate(zip(whole, parts, strict=True)):
                    values = part
                    if number >= form.masters:
                        values = self.decoded(part, form.moments, number - form.masters)
                    full[tile.start : tile.stop].copy_(values)
        return whole

    def moments_of(self, states: BlockStates) -> tuple[Tensor, ...]:
        """A block's moments, which are in memory, as fp32: themselves if they are kept so."""
        return tuple(
            self.decoded(state, states.moments, number)
            for number, state in enumerate(states.states)
        )

    def _keep_moments(self, states: BlockStates, values: Sequence[Tensor]) -> None:
        for number, (state, value) in enumerate(zip(states.states, values, strict=True)):
            self.encode(value, states.moments, number, state)

    def decoded(self, kept: Tensor, moments: MomentDType, number: int) -> Tensor:
        """A moment as fp32, from what is kept of it; itself if it is kept so."""
        return decode(kept, moments, signed=self._signed[number])

    def encode(self, values: Tensor, moments: MomentDType, number: int, kept: Tensor) -> None:
        """Round fp32 values of a moment into what is kept of it; the inverse of `decoded`."""
        encode(values, moments, kept, signed=self._signed[number])

    def write_weights(self, states: BlockStates, weights: Tensor) -> None:
        """Replace a block's chunk of the compute weights, which a new master changes; none of it may be gathered."""
        if self._weights is not None:
            self._weights.replace(states.block, weights)

    def _write_parts(self, states: BlockStates, whole: Sequence[Tensor]) -> None:
        if self.swap is None or not states.is_swapped:
            if states.remainder is not None:
                states.remainder.copy_(whole[0])
            self._keep_moments(states, whole[states.remainder is not None :])
            return
        form = self._forms.of(states.block, self.num_states)
        for tile in self.swap.tiles(states.block):
            with self.swap.opened(tile, write=True) as parts:
                for number, (full, part) in enumerate(zip(whole, parts, strict=True)):
                    values, moment = full[tile.start : tile.stop], number - form.masters
                    if moment < 0:
                        part.copy_(values)
                    else:
                        self.encode(values, form.moments, moment, part)

    def _replace_weights(self, states: BlockStates, old: Tensor | None, new: Tensor) -> None:
        """Write compute weights that a new master changes."""
        if self._weights is None or old is None:
            return
        if not torch.equal(old.cpu().view(torch.uint8), new.view(torch.uint8)):
            self._weights.replace(states.block, new)

    def _follow(self, states: BlockStates, before: Tensor, after: Tensor) -> None:
        """Take a write of user code to the weights of a block in split form into its remainder."""
        parts = self._read_parts(states)
        new = after.cpu()
        follow(before.cpu(), new, parts[0])
        self._write_parts(states, parts)
        after.copy_(new)

    def keep(self) -> None:
        """Have the states be readable once the engine is closed."""
        if self.swap is not None:
            self.swap.keep_files()
        if self._weights is not None and self.shares_weights:
            self._weights.keep()

    def read_master(self, states: BlockStates, destination: Tensor) -> None:
        """Copy this rank's chunk of a block's fp32 master to `destination` [chunk], rounded to its dtype."""
        with self._here(states, write=False) as here:
            if here.master is not None:
                destination.copy_(here.master)

    def peek(self, block: Block, is_present: Callable[[int], bool]) -> StepPlan | None:
        """What `plan` would say of one block now; None where its step would be refused or leave it alone."""
        if self.rule is None or any(map(unsupported_option, self.optimizer.param_groups)):
            return None
        # Once a block in backward: groups are looked through once a step, and a step compares what it wants.
        if self._numbers is None:
            self._numbers = group_numbers(self.optimizer, self.blocks.values())
        plan = self._plan([block], is_present, self._numbers)
        return plan if plan.blocks else None

    def plan(self, is_present: Callable[[int], bool]) -> StepPlan:
        """Plan a step over the present parameters; `count` counts it.

        Raises:
            OptimizerError: a group asks for an option the compiled rule lacks, set after the engine was built.
        """
        self.check_options()
        self._numbers = None
        blocks = [states.block for states in self.blocks.values()]
        return self._plan(blocks, is_present, group_numbers(self.optimizer, self.blocks.values()))

    def count(self, blocks: Iterable[BlockPlan]) -> None:
        """Count a step of some blocks' members."""
        for item in blocks:
            for position in item.positions:
                self._steps[item.block.parameters[position].index] += 1

    def _plan(
        self,
        blocks: Sequence[Block],
        is_present: Callable[[int], bool],
        group_of: Mapping[int, int],
    ) -> StepPlan:
        return plan_step(
            blocks,
            is_present=is_present,
            step_of=lambda index: self._steps[index] + 1,
            group_of=group_of,
            groups=self.optimizer.param_groups,
            rule=self.rule,
        )

    def check_options(self) -> None:
        """Refuse options that were set after the rule was chosen and that it does not have.

        Raises:
            OptimizerError: such an option is on.
        """
        if self.rule is None:
            return
        for number, group in enumerate(self.optimizer.param_groups):
            reason = unsupported_option(group)
            if reason is not None:
                raise OptimizerError(
                    f"param group {number} of {self.name} has {reason}; the compiled {self.rule.name} chosen at the "
                    "start does not do: set it before building the engine, which then runs torch's own step"
                )

    def import_weights(self, changed: set[int]) -> None:
        """Take compute weights that user code wrote into the masters, where they differ.

        A master that is in the weights, or half in them, has followed already.
        """
        for states in self.blocks.values():
            if states.reads_weights:
                continue
            positions = [
                position
                for position, member in enumerate(states.block.parameters)
                if member.index in changed and self._has_weights(states, member)
            ]
            if positions:
                with self._here(states, write=True) as here:
                    self._import_members(here, positions)

    def _has_weights(self, states: BlockStates, member: ManagedParameter) -> bool:
        """Whether a member's weights can be read: after the end they may have been left sharded, or gone."""
        if states.weights is not None or (self._weights is not None and not self._weights.closed):
            return True
        return member.alias.untyped_storage().nbytes() >= member.nbytes

    @staticmethod
    def _import_members(states: BlockStates, positions: Sequence[int]) -> None:
        for position in positions:
            member = states.block.parameters[position]
            if member.moved:
                member.refresh_alias()
            if states.master is None or states.weights_are_master:
                continue
            weights = states.weights_view(position)
            master = states.master_view(position)
            # A master that rounds to the weight is the better copy of it: keep its low bits.
            written = master.to(weights.dtype) != weights.to(master.device)
            master.copy_(torch.where(written, weights.to(master.device, torch.float32), master))

    def state_dict(self, gather: Gather, *, keep: bool, ahead: bool = False) -> dict[str, Any]:
        """The state in torch's format.

        Args:
            gather: a collective; every rank calls it for the same blocks in the same order.
            keep: False on ranks that only take part in the gathers.
            ahead: the masters are newer than the compute weights: give those of fp32 weights too.
        """
        full: dict[int, dict[str, Any]] = {}
        for states in self.blocks.values():
            with self._here(states, write=False) as here:
                gathered = self._gather_block(here, gather, ahead=ahead)
            if keep:
                full.update({i: entry for i, entry in gathered.items() if self._steps[i]})
        if not keep:
            return {}
        return {"state": self._by_torch_number(full), "param_groups": packed_groups(self.optimizer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's slices of a full state; nothing is changed if it does not fit.

        Raises:
            CheckpointError: groups or shapes do not fit the optimizer's.
        """
        numbered = self._check_groups(state)
        entries = {index: state["state"].get(number) for index, number in numbered.items()}
        for states in self.blocks.values():
            for position, member in enumerate(states.block.parameters):
                self._check_entry(states, position, entries.get(member.index))
        for states in self.blocks.values():
            with self._here(states, write=True) as here:
                for position, member in enumerate(states.block.parameters):
                    entry = entries.get(member.index)
                    if entry:
                        self._load_member(here, position, entry)
                    else:
                        self._reset_member(here, position)

    # Torch's format ----------------------------------------------------------------------------------------------

    def _gather_block(
        self, states: BlockStates, gather: Gather, *, ahead: bool
    ) -> dict[int, dict[str, Any]]:
        block = states.block
        entries: dict[int, dict[str, Any]] = {
            member.index: {"step": torch.tensor(float(self._steps[member.index]), device="cpu")}
            for member in block.parameters
        }
        for name, chunk in self._named_chunks(states, ahead=ahead):
            for member, full in zip(block.parameters, gather(block, chunk), strict=True):
                entries[member.index][name] = full
        for member, scalars in zip(block.parameters, self._foreign_scalars(states), strict=True):
            entries[member.index].update(scalars)
        return entries

    def _named_chunks(self, states: BlockStates, *, ahead: bool) -> list[tuple[str, Tensor]]:
        named: list[tuple[str, Tensor]] = []
        if self.rule is not None:
            named += list(zip(self.rule.state_names, states.states, strict=True))
        else:
            named += self._foreign_chunks(states)
        if states.master is not None and (ahead or states.block.dtype != torch.float32):
            named.append((MASTER_KEY, states.master))
        return named

    def _foreign_chunks(self, states: BlockStates) -> list[tuple[str, Tensor]]:
        """Element-wise states of a torch optimizer, copied into chunks so that they gather like ours."""
        foreign = states.foreign
        if foreign is None:
            return []
        block = states.block
        named: list[tuple[str, Tensor]] = []
        for name in self._foreign_names:
            chunk = torch.zeros(
                block.chunk, dtype=torch.float32, device=states.master_view(0).device
            )
            for position in range(len(block.parameters)):
                value = foreign.state(position).get(name)
                if isinstance(value, Tensor) and block.own_slice(position).numel:
                    block.own_view(chunk, position).copy_(value)
            named.append((name, chunk))
        return named

    def _foreign_scalars(self, states: BlockStates) -> list[dict[str, Any]]:
        block, foreign = states.block, states.foreign
        if foreign is None:
            return [{} for _ in block.parameters]
        return [
            {
                key: value
                for key, value in foreign.state(position).items()
                if key not in self._foreign_names
            }
            for position in range(len(block.parameters))
        ]

    def _load_member(self, states: BlockStates, position: int, entry: Mapping[str, Any]) -> None:
        block = states.block
        member = block.parameters[position]
        part = block.own_slice(position)

        def sliced(full: Tensor) -> Tensor:
            return full.detach().reshape(-1)[part.start : part.stop]

        step = entry.get("step", 1)
        self._steps[member.index] = int(step.item() if isinstance(step, Tensor) else step)
        master = entry.get(MASTER_KEY)
        if isinstance(master, Tensor) and states.master is not None:
            states.master_view(position).copy_(sliced(master))
        if self.rule is not None:
            for name, chunk in zip(self.rule.state_names, states.states, strict=True):
                value = entry.get(name)
                if isinstance(value, Tensor):
                    block.own_view(chunk, position).copy_(sliced(value))
        elif states.foreign is not None:
            values = {
                key: sliced(value)
                if key in self._foreign_names and isinstance(value, Tensor)
                else value
                for key, value in entry.items()
                if key != MASTER_KEY
            }
            states.foreign.load(position, values)

    def _reset_member(self, states: BlockStates, position: int) -> None:
        block = states.block
        self._steps[block.parameters[position].index] = 0
        if self.rule is not None:
            fills = self.rule.initial_state(self.optimizer.param_groups[0])
            for fill, chunk in zip(fills, states.states, strict=True):
                block.own_view(chunk, position).fill_(fill)
        elif states.foreign is not None:
            states.foreign.load(position, {})

    def _check_entry(
        self, states: BlockStates, position: int, entry: Mapping[str, Any] | None
    ) -> None:
        member = states.block.parameters[position]
        if not entry or self.rule is None:
            return
        names = (*self.rule.state_names, MASTER_KEY)
        for name in names:
            value = entry.get(name)
            if isinstance(value, Tensor) and value.numel() != member.numel:
                raise CheckpointError(
                    f"state {name!r} of parameter {member.name!r} has shape {tuple(value.shape)}, the model's has "
                    f"{tuple(member.parameter.shape)}: load the checkpoint of this model"
                )
        missing = [
            name for name in self.rule.state_names if not isinstance(entry.get(name), Tensor)
        ]
        if missing:
            raise CheckpointError(
                f"the state of parameter {member.name!r} lacks {', '.join(missing)} (it has {', '.join(entry)}): it was "
                f"saved by another optimizer than {self.name}"
            )

    def _check_groups(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Check a state's groups and return the torch number of each managed index."""
        saved, own = state["param_groups"], self.optimizer.param_groups
        if len(saved) != len(own):
            raise CheckpointError(
                f"the saved {self.name} has {len(saved)} param groups, this one has {len(own)}: build it with the same "
                "groups"
            )
        numbers: dict[int, int] = {}
        for place, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                raise CheckpointError(
                    f"param group {place} of the saved {self.name} has {len(theirs['params'])} parameters, this one "
                    f"has {len(ours['params'])}: build it with the same groups"
                )
            for number, parameter in zip(theirs["params"], ours["params"], strict=True):
                numbers[id(parameter)] = number
        return {
            member.index: numbers[id(member.parameter)]
            for states in self.blocks.values()
            for member in states.block.parameters
            if id(member.parameter) in numbers
        }

    def _by_torch_number(self, full: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        index_of = {
            id(member.parameter): member.index
            for states in self.blocks.values()
            for member in states.block.parameters
        }
        numbered: dict[int, dict[str, Any]] = {}
        number = 0
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                index = index_of.get(id(parameter))
                if index is not None and index in full:
                    numbered[number] = full[index]
                number += 1
        return numbered


def _master_of(form: MasterForm, weights: Tensor | None, parts: Sequence[Tensor]) -> Tensor | None:
    """The fp32 master of a block in host memory, from its shard of the weights and what is kept beside them."""
    if form == "whole" or weights is None:
        return parts[0]
    return join(weights.cpu(), parts[0]) if form == "split" else weights.clone()


def group_numbers(optimizer: Optimizer, blocks: Iterable[BlockStates]) -> dict[int, int]:
    """The number of each managed parameter's group, by managed index."""
    number_of = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return {
        member.index: number_of[id(member.parameter)]
        for states in blocks
        for member in states.block.parameters
        if id(member.parameter) in number_of
    }


def packed_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """An optimizer's param groups as its state dict has them: numbers in place of parameters."""
    packed: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        packed.append({**group, "params": list(range(number, number + count))})
        number += count
    return packed


def foreign_state_names(optimizer: Optimizer) -> list[str]:
    """Names of the element-wise states a torch optimizer makes, found by stepping a small copy of it.

    The same on every rank, also on one that holds no element of a parameter.
    """
    probe = torch.nn.Parameter(torch.ones(3, device="cpu"))
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    clone = clone_optimizer(optimizer, [probe], options)
    probe.grad = torch.ones(3, device="cpu")
    clone.step()
    return [
        name
        for name, value in clone.state[probe].items()
        if isinstance(value, Tensor) and value.shape == probe.shape
    ]
