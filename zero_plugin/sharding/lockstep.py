"""Several forwards of one model that go from unit to unit together, so that each unit is gathered once for all of them.

Each forward has a thread and hands on before it enters a unit (`relay`). What the gatherer keeps of a line of forwards is exchanged
with the thread, and their clocks run alike: to a backward the calls of one unit in all of them began and ended at one time.
The same holds for the numbers of autograd's nodes, which are counted in each thread: at every unit the threads go on with the
same number, so that one backward through all graphs runs the nodes of a unit in all of them before those of the unit before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_plugin.errors import EngineStateError
from zero_plugin.sharding.gather import Track, Unit, UnitGatherer
from zero_plugin.sharding.leaves import PartLeaves
from zero_plugin.sharding.relay import Relay
from zero_plugin.sharding.surroundings import Surroundings, grow_sequence, sequence_number


class RandomStreams:
    """A stream of random numbers for each of several forwards that take turns.

    The first goes on with the default generators. Each other one begins at a seed of its own, drawn from the CPU's.

    Args:
        device: the model's.
        count: how many streams.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._devices = [torch.device("cpu"), *([] if device.type == "cpu" else [device])]
        seeds = torch.randint(2**63 - 1, (count - 1,), dtype=torch.int64, device="cpu").tolist()
        self._states = [[_get_state(item) for item in self._devices]]
        for seed in seeds:
            made = [torch.Generator(item).manual_seed(seed) for item in self._devices]
            self._states.append([generator.get_state() for generator in made])

    def keep(self, number: int) -> None:
        """Note where a stream stands."""
        self._states[number] = [_get_state(item) for item in self._devices]

    def use(self, number: int) -> None:
        """Draw from a stream from now on."""
        for device, state in zip(self._devices, self._states[number], strict=True):
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)


def _get_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


class Lockstep:
    """Runs forwards together; the course of a relay.

    Args:
        gatherer: of the model's units.
        leaves: the parameters as each forward sees them.
        device: the model's.
        count: how many forwards.
    """

    def __init__(
        self,
        gatherer: UnitGatherer,
        leaves: PartLeaves,
        device: torch.device,
        count: int,
    ) -> None:
        self._gatherer = gatherer
        self._leaves = leaves
        self._count = count
        self._surroundings = Surroundings(device)
        self._streams = RandomStreams(device, count)
        self._relay: Relay | None = None
        self._main = Track()
        self._tracks: list[Track] = []
        self._numbers = [0] * count
        self._target = 0
        self._station: Any = None
        self._units: Sequence[Unit] = ()

    def run(self, forwards: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run them to their end.

        Returns:
            What they returned.

        Raises:
            EngineStateError: they came to different units.
            ParameterError: a weight was written to.
        """
        gatherer = self._gatherer
        held = {unit.index: unit.holds for unit in gatherer.units}
        self._main = gatherer.track
        self._tracks = [
            Track(clock=self._main.clock, part=part, follows=part > 0, arrive=self._enter)
            for part in range(self._count)
        ]
        relay = self._relay = Relay(
            [self._inside(forward) for forward in forwards], self, name="micro-batch"
        )
        try:
            results = relay.run()
            units, self._units = self._units, ()
            gatherer.end_lap(units)
        finally:
            self._relay = None
            self._leaves.show(None)
            self._streams.use(0)
            self._main.clock = max(track.clock for track in self._tracks)
            gatherer.track = self._main
            self._let_go(held)
        return results

    # The relay's side --------------------------------------------------------------------------------------------

    def leave(self, runner: int) -> None:
        """A forward stands still."""
        self._streams.keep(runner)

    def resume(self, runner: int) -> None:
        """A forward goes on."""
        self._gatherer.track = self._tracks[runner]
        self._leaves.show(runner)
        self._streams.use(runner)
        grow_sequence(self._target)

    def arrive(self, runner: int, station: Any) -> None:
        """A forward came to units, or to its end.

        Raises:
            EngineStateError: the first one is elsewhere.
        """
        if runner == 0:
            self._station = station
        elif station != self._station:
            raise EngineStateError(
                f"layer_first: micro-batch {runner} came to {_name(station)} while micro-batch 0 came to {_name(self._station)}, "
                "and micro-batches must use the same units in the same order: run those that do not one after another, with "
                "engine.backward"
            )
        self._numbers[runner] = sequence_number()
        if runner == self._count - 1:
            self._target = max(self._numbers)
            clock = max(track.clock for track in self._tracks)
            for track in self._tracks:
                track.clock = clock

    def lap(self, station: Any) -> None:
        """All have come to units: the last ones may go, and these are brought here."""
        before, self._units = self._units, ()
        self._gatherer.end_lap(before)
        self._gatherer.begin_lap(station)
        self._units = station

    # Inside ------------------------------------------------------------------------------------------------------

    def _enter(self, units: Sequence[Unit]) -> bool:
        if not units or self._relay is None or not self._relay.is_running:
            return False
        self._relay.station(tuple(units))
        return True

    def _inside(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self._gatherer.saving():
                return forward()

        return lambda: self._surroundings.run(run)

    def _let_go(self, before: Mapping[int, int]) -> None:
        """After an exception: what the forwards and the lap still hold."""
        for unit in self._gatherer.units:
            unit.is_kept = False
            while unit.holds > before[unit.index]:
                self._gatherer.let_go(unit)
        self._units = ()


def _name(station: Any) -> str:
    if station is None:
        return "its end"
    return "unit " + ", ".join(repr(unit.name) for unit in station)
