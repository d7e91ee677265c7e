"""Optimizer states of each block in their tier, and the table that the compiled update walks.

A block's states are one contiguous region `[master | state 0 | state 1]`, so a tier can read or write a block with one
request. Where the optimizer's tier is the device and the compute weights are fp32 already, the weights themselves are
the master: nothing is stored twice and nothing is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_plugin.config import MomentDType, Tier
from zero_plugin.grads.norm import Clip
from zero_plugin.kernels import SOURCE_COLUMNS, Kernels
from zero_plugin.optim.fallback import ForeignBlock
from zero_plugin.optim.form import MasterForm, StateForm
from zero_plugin.optim.moments import GROUP, STORED, decode, encode, put, stream_of, take
from zero_plugin.optim.moments import update as reference_update
from zero_plugin.optim.rule import Rule
from zero_plugin.runtime.backend import Backend
from zero_plugin.sharding.layout import UNIT
from zero_plugin.sharding.partition import Block
from zero_plugin.store.layout import round_up

Int64 = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class BlockStates:
    """One block's fp32 master and moments on this rank.

    Attributes:
        block: the block.
        tier: where they lie.
        master: fp32 [chunk], or None when the compute weights are the master, or their part of it is.
        states: [chunk] each, in the rule's order, fp32 or as `moments` says (`zero_plugin.optim.moments`); empty for a foreign
            optimizer.
        foreign: the torch optimizer that runs this block, for optimizers without a compiled rule.
        weights: the chunk of the compute weights on this rank, where they are sharded; else None.
        form: how the master is kept.
        remainder: int16 [chunk], what the compute weights lack of the master in split form; None where it lies in a file.
        swapped: bytes in files of each part; none of them is here then.
        moments: how the states are kept.
    """

    block: Block
    tier: Tier
    master: Tensor | None
    states: tuple[Tensor, ...]
    foreign: ForeignBlock | None = None
    weights: Tensor | None = None
    form: MasterForm = "whole"
    remainder: Tensor | None = None
    swapped: tuple[int, ...] = ()
    moments: MomentDType = "fp32"

    @property
    def is_plain(self) -> bool:
        """Whether what is kept is an fp32 master and fp32 states, as whoever looks at them sees them."""
        return self.form != "split" and self.moments == "fp32"

    @property
    def is_swapped(self) -> bool:
        """Whether master and states lie in files (`zero_plugin.optim.swap`), not here."""
        return bool(self.swapped)

    @property
    def reads_weights(self) -> bool:
        """Whether the update takes the compute weights, or their part of the master, from what it writes."""
        return self.form == "split" or (self.form == "weights" and self.is_swapped)

    @property
    def weights_are_master(self) -> bool:
        """Whether the shard of the compute weights is the master: fp32, in the optimizer's tier."""
        return self.master is not None and self.master is self.weights

    def weights_view(self, position: int) -> Tensor:
        """This rank's slice of a member's compute weights."""
        if self.weights is not None:
            return self.block.own_view(self.weights, position)
        part = self.block.own_slice(position)
        return self.block.parameters[position].alias.narrow(0, part.start, part.numel)

    def master_view(self, position: int) -> Tensor:
        """This rank's slice of a member's fp32 master."""
        if self.master is not None:
            return self.block.own_view(self.master, position)
        part = self.block.own_slice(position)
        return self.block.parameters[position].alias.narrow(0, part.start, part.numel)

    @property
    def master_bytes(self) -> int:
        """Bytes of the master, or of its remainder; 0 where the compute weights serve."""
        if self.is_swapped:
            return 0 if self.form == "weights" else self.swapped[0]
        if self.remainder is not None:
            return self.remainder.numel() * 2
        return 0 if self.master is None or self.weights_are_master else self.master.numel() * 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's states."""
        if self.foreign is not None:
            return self.foreign.state_bytes
        if self.is_swapped:
            return sum(self.swapped) - self.master_bytes
        return sum(state.numel() * state.element_size() for state in self.states)

    def import_weights(self, positions: Sequence[int]) -> None:
        """Copy the compute weights of some members into the master (start, or after a write of the user's)."""
        for position in positions:
            member = self.block.parameters[position]
            if member.moved:
                member.refresh_alias()
            if self.master is not None and not self.weights_are_master:
                self.master_view(position).copy_(self.weights_view(position))


def allocate_states(
    backend: Backend,
    block: Block,
    tier: Tier,
    *,
    form: StateForm,
    fills: Sequence[float],
    weights: Tensor | None = None,
) -> BlockStates:
    """Reserve a block's region and import the master from the weights.

    Args:
        backend: allocates the memory.
        block: whose states.
        tier: where they lie.
        form: what is kept.
        fills: initial value of each state beside the master.
        weights: the chunk of the compute weights, where they are sharded.
    """
    memory = "device" if tier == "device" else "host"
    sizes = form.sizes(block.chunk)
    strides = [round_up(size, UNIT * 4) for size in sizes]
    region = backend.allocate(max(sum(strides), 64), memory)
    region.zero_()
    parts = [
        region[start : start + size].view(dtype)
        for start, size, dtype in zip(
            itertools.accumulate(strides, initial=0), sizes, form.dtypes, strict=False
        )
    ]
    # The master of bf16 weights that have just been made is those weights: nothing remains.
    remainder = parts.pop(0) if form.master == "split" else None
    master = None if remainder is not None else weights
    if form.master == "whole":
        master = parts.pop(0)
    states = BlockStates(
        block=block,
        tier=tier,
        form=form.master,
        master=master,
        remainder=remainder,
        states=tuple(parts),
        weights=weights,
        moments=form.moments,
    )
    for part, fill in zip(parts, fills, strict=True):
        if fill:
            # Only what is never below zero begins elsewhere than at zero.
            values = decode(part, form.moments, signed=False)
            for position in range(len(block.parameters)):
                block.own_view(values, position).fill_(fill)
            encode(values, form.moments, part, signed=False)
    states.import_weights(range(len(block.parameters)))
    return states


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockUpdate:
    """One block's update as data, run on a lane.

    Attributes:
        states: what is updated.
        positions: members that have a gradient.
        gradient: the summed gradient chunk.
        output: low-precision chunk to write, or None when the master is what is published.
        direct: write the compute weights themselves (one shard, same tier), no chunk between.
        rule: the compiled rule, None for a foreign optimizer.
        hyper: [rows, 16] hyper-parameters, float64.
        rows: hyper row of each position in `positions`.
        clip: factor (clip and unscale together) and value bound.
        groups: param-group options of each position, for a foreign optimizer.
        source: master and states to read, which stay as they are; None: they are updated in place. Needs every member.
    """

    states: BlockStates
    positions: tuple[int, ...]
    gradient: Tensor
    output: Tensor | None
    direct: bool
    rule: Rule | None
    hyper: Tensor
    rows: Int64
    clip: Clip
    groups: tuple[Mapping[str, Any], ...]
    source: tuple[Tensor, ...] | None = None

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """What the update reads only."""
        return (self.gradient, *(self.source or ()))

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """What the update changes."""
        own = (self.states.master, self.states.remainder, self.output)
        return (*(tensor for tensor in own if tensor is not None), *self.states.states)

    def apply(self, kernels: Kernels) -> None:
        """Update the block."""
        if self.rule is None:
            self._apply_foreign()
        elif self.gradient.is_cpu:
            segments, places = self._segments()
            sources = self._sources()
            kernels.update(
                self.rule.native_id,
                torch.from_numpy(segments),
                self.hyper,
                gradient_dtype=self.gradient.dtype,
                output_dtype=self._output_dtype,
                scale=self.clip.factor,
                clip_value=self.clip.value,
                split=self.states.remainder is not None,
                moment_dtype=STORED[self.states.moments],
                places=None if places is None else torch.from_numpy(places),
                sources=None if sources is None else torch.from_numpy(sources),
            )
        else:
            self._apply_reference(self.rule)

    @property
    def _output_dtype(self) -> torch.dtype | None:
        return self.states.block.dtype if self.direct or self.output is not None else None

    def _target(self, position: int) -> Tensor | None:
        block = self.states.block
        if self.direct:
            part = block.own_slice(position)
            return block.parameters[position].alias.narrow(0, part.start, part.numel)
        return None if self.output is None else block.own_view(self.output, position)

    def _segments(self) -> tuple[Int64, Int64 | None]:
        """The table of segments, and the one of places where moments are not fp32."""
        block, states = self.states.block, self.states
        positions = np.asarray(self.positions, dtype=np.int64)
        offsets = np.asarray(block.layout.offsets, dtype=np.int64)[positions]
        numels = np.asarray([block.own_slice(p).numel for p in self.positions], dtype=np.int64)
        table = np.zeros((len(positions), 7), dtype=np.int64)
        if states.remainder is not None:
            table[:, 0] = states.remainder.data_ptr() + 2 * offsets
        elif states.master is not None:
            table[:, 0] = states.master.data_ptr() + 4 * offsets
        else:
            table[:, 0] = [states.master_view(p).data_ptr() for p in self.positions]
        for column, state in enumerate(states.states, start=1):
            table[:, column] = state.data_ptr() + state.element_size() * offsets
        table[:, 3] = self.gradient.data_ptr() + self.gradient.element_size() * offsets
        if self.output is not None:
            table[:, 4] = self.output.data_ptr() + self.output.element_size() * offsets
        elif self.direct:
            starts = np.asarray([block.own_slice(p).start for p in self.positions], dtype=np.int64)
            bases = np.asarray(
                [block.parameters[p].alias.data_ptr() for p in self.positions], dtype=np.int64
            )
            table[:, 4] = bases + block.dtype.itemsize * starts
        table[:, 5] = numels
        table[:, 6] = self.rows
        present = numels > 0
        if states.moments == "fp32":
            return table[present], None
        places = np.zeros((len(positions), 4), dtype=np.int64)
        places[:, 0] = [stream_of(block.parameters[p].name) for p in self.positions]
        places[:, 1] = [block.own_slice(p).start for p in self.positions]
        for column, state in enumerate(states.states, start=2):
            places[:, column] = state.data_ptr() + block.chunk + offsets // GROUP
        return table[present], places[present]

    def _sources(self) -> Int64 | None:
        """The table of what is read, where that is not what is written."""
        if self.source is None:
            return None
        block = self.states.block
        positions = np.asarray(self.positions, dtype=np.int64)
        offsets = np.asarray(block.layout.offsets, dtype=np.int64)[positions]
        table = np.zeros((len(positions), SOURCE_COLUMNS), dtype=np.int64)
        for column, part in enumerate(self.source):
            table[:, column] = part.data_ptr() + part.element_size() * offsets
        return table[[block.own_slice(p).numel > 0 for p in self.positions]]

    def _apply_reference(self, rule: Rule) -> None:
        block, moments = self.states.block, self.states.moments
        for position, row in zip(self.positions, self.rows, strict=True):
            own, offset = block.own_slice(position), block.layout.offsets[position]
            if own.numel == 0:
                continue
            whole = round_up(own.numel, GROUP)
            kept = [take(state, moments, offset, whole) for state in self.states.states]
            reference_update(
                rule,
                moments,
                master=self.states.master_view(position),
                kept=kept,
                stream=stream_of(block.parameters[position].name),
                first=own.start,
                gradient=block.own_view(self.gradient, position),
                output=self._target(position),
                hyper=tuple(self.hyper[int(row)].tolist()),
                scale=self.clip.factor,
                clip_value=self.clip.value,
            )
            for state, part in zip(self.states.states, kept, strict=True):
                put(state, moments, offset, part)

    def _apply_foreign(self) -> None:
        block, foreign = self.states.block, self.states.foreign
        if foreign is None:
            return
        gradients: dict[int, Tensor] = {}
        for position in self.positions:
            gradient = block.own_view(self.gradient, position).float() * self.clip.factor
            if self.clip.value is not None:
                gradient = gradient.clamp_(-self.clip.value, self.clip.value)
            gradients[position] = gradient
        foreign.step(gradients, dict(zip(self.positions, self.groups, strict=True)))
        for position in self.positions:
            target = self._target(position)
            if target is not None:
                target.copy_(self.states.master_view(position))
