"""One function runs at a time, all come to the same stations, and none is left behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from zero_plugin.sharding.relay import Relay, Stopped


class Log:
    """Writes down what a relay says, and checks that only one function runs."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.running: int | None = None

    def leave(self, runner: int) -> None:
        assert self.running == runner
        self.running = None

    def resume(self, runner: int) -> None:
        assert self.running is None
        self.running = runner

    def arrive(self, runner: int, station: Any) -> None:
        self.events.append((runner, station))

    def lap(self, station: Any) -> None:
        self.events.append(station)


def relay_of(*functions: Callable[[Relay], Any]) -> tuple[Relay, Log]:
    log, found = Log(), list[Relay]()
    relay = Relay([lambda f=f: f(found[0]) for f in functions], log, name="runner")
    found.append(relay)
    return relay, log


def walk(*stations: str) -> Callable[[Relay], str]:
    def run(relay: Relay) -> str:
        assert relay.is_running
        for station in stations:
            relay.station(station)
        return stations[-1]

    return run


def left_over() -> list[str]:
    return [item.name for item in threading.enumerate() if item.name.startswith("runner")]


def test_a_lap_begins_when_all_have_come() -> None:
    relay, log = relay_of(walk("a", "b"), walk("a", "b"), walk("a", "b"))
    assert relay.run() == ["b"] * 3
    arrivals = [[(0, station), (1, station), (2, station), station] for station in "ab"]
    assert log.events == [*arrivals[0], *arrivals[1], (0, None), (1, None), (2, None)]
    assert not relay.is_running
    assert left_over() == []


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_that_fails_ends_the_others_where_they_stand(position: int) -> None:
    ended: list[str] = []

    def fail(relay: Relay) -> None:
        relay.station("a")
        raise FloatingPointError("here")

    def go_on(relay: Relay) -> None:
        relay.station("a")
        try:
            relay.station("b")
        except Stopped:
            ended.append("first")  # Swallowed: it comes again.
        try:
            relay.station("c")
        finally:
            ended.append("again")

    functions: list[Any] = [go_on, go_on, go_on]
    functions[position] = fail
    relay, _ = relay_of(*functions)
    with pytest.raises(FloatingPointError, match="here"):
        relay.run()
    assert left_over() == []
    # Those behind it had not gone on from the station, and end there.
    assert ended == ["first", "again"] * position


def test_an_interrupt_ends_all() -> None:
    main = threading.main_thread().ident or 0

    def long(relay: Relay) -> None:
        signal.pthread_kill(
            main, signal.SIGINT
        )  # As from a terminal: only the main thread is told.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            relay.station("a")
            time.sleep(0.01)
        raise AssertionError("was not interrupted")

    relay, _ = relay_of(long, walk(*"a" * 9999))
    with pytest.raises(KeyboardInterrupt):
        relay.run()
    assert left_over() == []
