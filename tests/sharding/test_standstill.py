"""Ranks that wait for one another in different sequences get an error in time; a slow rank gets none."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from zero_plugin.errors import LaneError
from zero_plugin.kernels import Kernels
from zero_plugin.runtime.backend import Services
from zero_plugin.runtime.operations import Collective, Copy
from zero_plugin.runtime.threads import Latency, ThreadsBackend
from zero_plugin.sharding import watchdog
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.sharding.standstill import Standing, standing_still
from zero_plugin.trace import Ledger

SLOW_SECONDS = 2.5
"""Many times what a circle is found in."""


def standing(beat: int = 0, rest: tuple[int, ...] = (), /, **come: int) -> Standing:
    """A rank that waits in the sequences in capitals."""
    return Standing(
        text="",
        come={name.lower(): number for name, number in come.items()},
        waits=tuple(name.lower() for name in come if name.isupper()),
        rest=rest,
        beat=beat,
    )


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        pytest.param({0: standing(A=3, b=1), 1: standing(a=2, B=2)}, {0, 1}, id="crossed"),
        pytest.param({0: standing(A=3, b=1)}, set(), id="the other says nothing"),
        pytest.param({0: standing(A=3, b=1), 1: standing(a=3, B=2)}, set(), id="has come"),
        pytest.param({0: standing(A=3, b=1), 1: standing(a=2, b=1)}, set(), id="waits in nothing"),
        pytest.param({0: standing(A=3, B=2), 1: standing(a=2, B=2)}, set(), id="one goes on"),
        pytest.param(
            {0: standing(A=3, b=1), 1: standing(A=3, b=1), 2: standing(a=2, B=2)},
            {0, 1, 2},
            id="two wait for one",
        ),
        pytest.param(
            {0: standing(A=3, b=1, c=1), 1: standing(a=2, B=2, c=1), 2: standing(a=3, b=1, C=2)},
            {0, 1, 2},
            id="three in a circle",
        ),
        pytest.param(
            {0: standing(A=3, b=1), 1: standing(a=2, B=2), 3: standing(A=3, b=2)},
            {0, 1, 3},
            id="one of four says nothing",
        ),
    ],
)
def test_who_stands_still(standings: dict[int, Standing], expected: set[int]) -> None:
    assert standing_still(standings) == expected


def test_what_confirms_that_nothing_happened() -> None:
    before = standing(4, (7,), A=3)
    assert standing(6, (7,), A=3).confirms(before)
    assert not standing(5, (7,), A=3).confirms(before)
    assert not standing(9, (8,), A=3).confirms(before)
    assert not standing(9, (7,), A=4).confirms(before)
    assert not standing(9, (7,), a=3).confirms(before)
    assert Standing.load(before.dump()) == before


class Ranks:
    """Two groups and the lanes of a rank, as an engine at stage 3 has them."""

    def __init__(self, timeout: float) -> None:
        watchdog.PATIENCE_SECONDS = 0.2
        ledger = Ledger()

        def join(**options: Any) -> ProcessGroup:
            device = torch.device("cpu")
            return ProcessGroup.create(
                device=device, ledger=ledger, timeout_seconds=timeout, **options
            )

        self.gradients = join()
        self.weights = join(beside=self.gradients, name="weights")
        self.kernels = Kernels(threads=1)
        services = Services(kernels=self.kernels, ledger=ledger, trace=None)
        latency = {"slow": Latency(seconds=SLOW_SECONDS)}
        self.backend = ThreadsBackend(services=services, latency=latency)
        self.gradients.watch(self.backend.at_rest)

    def gather(self, name: str) -> Any:
        group = self.weights if name == "weights" else self.gradients
        operation = Collective(
            kind="all_gather",
            group=group,
            output=torch.zeros(group.size, 3),
            input=torch.full((3,), group.rank + 1.0),
            tag=1,
            label=f"unit of {name}",
        )
        return self.backend.lane(name, "device").submit(operation), operation.output

    def work(self) -> Any:
        copy = Copy(destinations=(torch.zeros(3),), sources=(torch.ones(3),), label="slow")
        return self.backend.lane("slow", "device").submit(copy)

    def close(self) -> None:
        self.gradients.close()
        self.weights.close()
        self.backend.close()
        self.kernels.close()


def crossed(rank: int, size: int, last: str) -> Any:
    """All ranks but the last wait in the weights, and then come to the gradients; the last the other way round."""
    ranks = Ranks(timeout=30.0)
    start = time.monotonic()
    try:
        if rank < size - 1:
            ticket, weights = ranks.gather("weights")
            ticket.wait()
            ticket, gradients = ranks.gather("gradients")
            ticket.wait()
        else:
            first, gradients = ranks.gather("gradients")
            if last == "computes":
                time.sleep(SLOW_SECONDS)
            elif last == "waits for a lane that works":
                ranks.work().wait()
            else:
                first.wait()
            ticket, weights = ranks.gather("weights")
            ticket.wait()
            first.wait()
    except LaneError as error:
        time.sleep(1.0)  # What the others hear is the news, not that a connection closed.
        return time.monotonic() - start, str(error)
    finally:
        ranks.close()
    return [row.tolist() for row in (weights[:, 0], gradients[:, 0])]


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_a_circle_is_an_error_that_names_every_rank(size: int) -> None:
    for seconds, text in run_ranks(size, crossed, "waits", deadline=40):
        assert seconds < 10
        assert "wait for one another" in text
        for rank in range(size):
            name = "gradients" if rank == size - 1 else "weights"
            line = next(x for x in text.splitlines() if x.startswith(f"  rank {rank}: waiting"))
            assert f"'unit of {name}'" in line


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("last", ["computes", "waits for a lane that works"])
def test_a_slow_rank_is_waited_for(size: int, last: str) -> None:
    numbers = [rank + 1.0 for rank in range(size)]
    assert run_ranks(size, crossed, last, deadline=40) == [[numbers, numbers]] * size
