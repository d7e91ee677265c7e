"""A load: check that everything fits and is whole, on every rank, then read what this rank's slices need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_plugin.checkpoint import random_states
from zero_plugin.checkpoint.agreement import agree
from zero_plugin.checkpoint.fit import Fit, compare, listed, refusal
from zero_plugin.checkpoint.format import BUFFER, MASTER, STATE, WEIGHT
from zero_plugin.checkpoint.index import Catalog
from zero_plugin.checkpoint.progress import shown
from zero_plugin.checkpoint.shardfile import RangeReader, checksum_of
from zero_plugin.checkpoint.source import Holdings, Target, state_kinds
from zero_plugin.errors import CheckpointError
from zero_plugin.optim.plan import BlockPlan
from zero_plugin.runtime.backend import Lane, Ticket
from zero_plugin.runtime.operations import Snapshot
from zero_plugin.sharding.control import Control
from zero_plugin.sharding.partition import Block


class DelayedUpdate(Protocol):
    """Where the delayed updates of an engine's optimizers stand."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Of each optimizer: plain values; "held" names the parameters whose masters are ahead of their weights."""
        ...

    def held_chunks(self) -> list[tuple[BlockPlan, Tensor]]:
        """Which members' new weights are not shown yet, and this rank's chunk with them."""
        ...

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on there; weights and states are loaded."""
        ...

    def take_writes(self, number: int) -> None:
        """Wait for updates, and take in weights that user code wrote; a collective."""
        ...

    def take_writes_beside(self, number: int) -> None:
        """As `take_writes`, but updates go on where user code wrote nothing."""
        ...

    def read_states(
        self, block: Block, lane: Lane, operation: Snapshot, after: Sequence[Ticket[Any]]
    ) -> Ticket[None]:
        """Have a lane read a block's states after the last step's update, and before its next one."""
        ...

    def forget_held(self, number: int) -> None:
        """Drop updates whose weights are not shown: the states are about to be replaced."""
        ...


class Load:
    """One load on one rank; every method is a collective.

    Args:
        holdings: what is filled.
        control: the ranks.
        directory: the checkpoint.
        strict: whether everything must fit.
        weights_only: optimizer states begin anew.
    """

    def __init__(
        self,
        holdings: Holdings,
        control: Control,
        directory: Path,
        *,
        strict: bool,
        weights_only: bool = False,
    ) -> None:
        self._holdings = holdings
        self._control = control
        self._directory = directory
        self._strict = strict
        self._weights_only = weights_only
        self._reader = RangeReader()
        self._found: Catalog | None = None
        self._fit = Fit()
        self._initial = {
            member.name: dict(zip(state_kinds(states)[1:], fills, strict=False))
            for states in holdings.states
            for fills in (states.initial_fills(),)
            for item in states.blocks.values()
            for member in item.block.parameters
        }

    @property
    def catalog(self) -> Catalog:
        """The checkpoint.

        Raises:
            CheckpointError: `check` was not called.
        """
        if self._found is None:
            raise CheckpointError(f"{self._directory} was not checked before it was read")
        return self._found

    def check(self) -> None:
        """Find the checkpoint, compare it with the engine, and check each file's sum on one rank.

        Raises:
            CheckpointError: on every rank, if one finds fault; nothing was changed.
        """

        def look() -> None:
            self._found = Catalog.open(self._directory)
            self._fit = compare(self._found, self._holdings, weights_only=self._weights_only)
            if self._strict and self._fit.left_out:
                raise refusal(self._fit, self._found)

        self._together(look)
        rank, size = self._control.rank, self._control.size

        def check_sums() -> None:
            total = sum(item["bytes"] for _, item in _every(self.catalog, rank, size))
            with shown(f"checking {self._directory}", total, quiet=rank > 0) as progress:
                verify(self.catalog, rank, size, progress)

        self._together(check_sums)
        if self._fit.left_out and self._control.rank == 0:
            logging.getLogger(__name__).warning(
                "loading %s with strict=False: %s", self._directory, listed(self._fit.left_out)
            )

    def fill(self, delayed: DelayedUpdate) -> None:
        """Read everything.

        Args:
            delayed: takes where the delayed update stood.

        Raises:
            CheckpointError: reading failed on some rank; the states are those of neither checkpoint then.
        """
        if self._holdings.sharded is not None:
            self._holdings.sharded.rest()
            self._holdings.sharded.shards.forget_ahead()

        def read() -> None:
            total = sum(item["bytes"] for item in self.catalog.index["files"].values())
            rank, size = self._control.rank, self._control.size
            with shown(f"loading {self._directory}", total // size, quiet=rank > 0) as progress:
                for target in self._holdings.state_targets():
                    self._fill_state(target)
                    progress(target.view.numel() * target.view.element_size())
            for target in self._holdings.weight_targets():
                if target.name in self._fit.weights and target.view.numel():
                    entry = self.catalog.weight(target.name)
                    self.catalog.fill(self._reader, entry, target.start, target.view)
            self._fill_members()
            self._fill_buffers()
            self._fill_groups()

        after = "; the states are mixed now: load another checkpoint, or start the run again"
        self._together(read, after)
        pending = self.catalog.nest(self.catalog.index["pending"], self._reader)
        if self._fit.states and len(pending) == len(self._holdings.states):
            known = {member.name for member in self._holdings.roster.members}
            delayed.load_state_dict(
                [
                    {**line, "held": [name for name in line["held"] if name in known]}
                    for line in pending
                ]
            )

    def counters(self) -> Any:
        """The loss scaler's state and the like."""
        return self.catalog.nest(self.catalog.index["counters"], self._reader)

    def extra(self) -> Any:
        """What was given to the save."""
        return self.catalog.nest(self.catalog.index["extra"], self._reader)

    def restore_random_states(self, device: torch.device) -> None:
        """Give this rank the random states of the rank of its number; further ranks keep theirs."""
        rank, ranks = self._control.rank, self.catalog.index["ranks"]
        if rank < len(ranks):
            saved = self.catalog.nest(ranks[rank]["random"], self._reader)
            if saved is not None:
                random_states.restore(saved, device)
        if len(ranks) != self._control.size and rank == 0:
            logging.getLogger(__name__).warning(
                "the checkpoint was saved by %d ranks and is loaded by %d: each rank has the random state of the saved rank of "
                "its number, and those beyond keep their own",
                len(ranks),
                self._control.size,
            )

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    # Inside ------------------------------------------------------------------------------------------------------

    def _together(self, act: Callable[[], None], after: str = "") -> None:
        error: BaseException | None = None
        try:
            act()
        except BaseException as failure:  # noqa: BLE001 - raised on every rank
            error = CheckpointError(f"{failure}{after}") if after else failure
            error.__cause__ = failure if after else failure.__cause__
        try:
            agree(self._control, error, f"loading {self._directory}")
        except BaseException:
            self.close()
            raise

    def _fill_state(self, target: Target) -> None:
        catalog = self.catalog
        if target.view.numel() == 0:
            return
        if target.kind == MASTER:
            if target.name in self._fit.weights:
                catalog.fill(self._reader, catalog.master(target.name), target.start, target.view)
        elif target.name in self._fit.states and catalog.has(target.kind, target.name):
            entry = catalog.entry(target.kind, target.name)
            catalog.fill(self._reader, entry, target.start, target.view)
        elif target.name in self._fit.states or (
            self._weights_only and target.name in self._fit.weights
        ):
            # A parameter that was never updated has no states where the checkpoint comes from.
            target.view.fill_(self._initial[target.name].get(target.kind, 0.0))

    def _fill_members(self) -> None:
        """Step counts, and all states of optimizers without a compiled rule."""
        for states in self._holdings.states:
            for item in states.blocks.values():
                for position, member in enumerate(item.block.parameters):
                    if self._weights_only and member.name in self._fit.weights:
                        states.set_step_count(member.index, 0)
                        if item.foreign is not None:
                            item.foreign.load(position, {})
                    if member.name not in self._fit.states:
                        continue
                    described = self.catalog.parameters[member.name]
                    states.set_step_count(member.index, int(described["step"]))
                    if item.foreign is None:
                        continue
                    held = dict(self.catalog.nest(described.get("scalars", {}), self._reader))
                    own = item.block.own_slice(position)
                    for name in states.foreign_names:
                        if self.catalog.has(STATE + name, member.name):
                            entry = self.catalog.entry(STATE + name, member.name)
                            held[name] = torch.empty(
                                own.numel,
                                dtype=entry.dtype,
                                device=item.master_view(position).device,
                            )
                            self.catalog.fill(self._reader, entry, own.start, held[name])
                    item.foreign.load(position, held)

    def _fill_buffers(self) -> None:
        for name, value in self._holdings.rest().items():
            if name in self._fit.buffers and isinstance(value, Tensor):
                kind = BUFFER if self.catalog.has(BUFFER, name) else WEIGHT
                value.copy_(self.catalog.tensor(kind, name, self._reader))
        states = self.catalog.index["extra_states"]
        for prefix, module in self._holdings.model.named_modules():
            name = f"{prefix}.{'_extra_state'}".lstrip(".")
            if name in states:
                module.set_extra_state(self.catalog.nest(states[name], self._reader))

    def _fill_groups(self) -> None:
        for number, taken in enumerate(self._fit.groups):
            if not taken:
                continue
            saved = self.catalog.index["optimizers"][number]["groups"]
            for ours, theirs in zip(
                self._holdings.optimizers[number].param_groups, saved, strict=True
            ):
                ours.update(self.catalog.nest(theirs["options"], self._reader))


def verify(
    catalog: Catalog,
    rank: int = 0,
    size: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Check the sums of every `size`-th file, beginning with number `rank`.

    Raises:
        CheckpointError: a file is missing, of another length, or holds other bytes.
    """
    for name, item in _every(catalog, rank, size):
        path = catalog.path / name
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing, wanted {item['bytes']:,} bytes: the checkpoint is incomplete; load another one"
            )
        found = path.stat().st_size
        if found != item["bytes"]:
            raise CheckpointError(
                f"{path} has {found:,} bytes, wanted {item['bytes']:,}: it was cut short or replaced; load another checkpoint"
            )
        checksum = f"{checksum_of(path, progress).checksum:08x}"
        if checksum != item["crc32"]:
            raise CheckpointError(
                f"{path} has checksum {checksum}, wanted {item['crc32']}: its bytes are not those that were written; load "
                "another checkpoint"
            )


def _every(catalog: Catalog, rank: int, size: int) -> Iterator[tuple[str, Any]]:
    for number, pair in enumerate(catalog.index["files"].items()):
        if number % size == rank:
            yield pair
