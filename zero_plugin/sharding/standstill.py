"""Whether ranks wait for one another in a circle, found from what each says of itself.

A rank says where it is only while nothing can run in it before a collective it waits in goes on: its host thread is
blocked, and so is every lane that has work. Such a rank goes on when all others have come to one of the collectives it waits in. A rank
that says nothing may still come anywhere. So ranks of which each waits for another of them stand still for good.

What ranks say was true at different times. Each repeats itself with a growing `beat`, so that a circle counts once
every rank in it has said the same twice more: then all of it was true at the moment it was first read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import Self

_BEATS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a rank waits.

    Attributes:
        text: in words.
        come: for each sequence of collectives, the number of the last one this rank has come to.
        waits: the sequences in whose last collective it waits.
        rest: numbers that differ once anything has run there.
        beat: how often the rank has looked.
    """

    text: str
    come: dict[str, int]
    waits: tuple[str, ...]
    rest: tuple[int, ...]
    beat: int

    def is_as(self, earlier: Standing) -> bool:
        """Whether nothing has happened on the rank in between."""
        return (self.come, self.waits, self.rest) == (earlier.come, earlier.waits, earlier.rest)

    def confirms(self, earlier: Standing) -> bool:
        """Whether nothing has happened on the rank since `earlier` was read, or a while longer."""
        # The rank looked for the next beat after it had said this one, but maybe before this one was read.
        return self.is_as(earlier) and self.beat >= earlier.beat + _BEATS

    def dump(self) -> str:
        """As text for the store."""
        return json.dumps([self.text, self.come, self.waits, self.rest, self.beat])

    @classmethod
    def load(cls, value: str | bytes) -> Self:
        """Read what `dump` gave."""
        text, come, waits, rest, beat = json.loads(value)
        return cls(text=text, come=come, waits=tuple(waits), rest=tuple(rest), beat=beat)


def standing_still(standings: Mapping[int, Standing]) -> frozenset[int]:
    """The ranks that wait for one another.

    Args:
        standings: of the ranks that have one; any other may go on.
    """
    still = {rank for rank, standing in standings.items() if standing.waits}
    while True:
        free = {
            rank
            for rank in still
            if any(_goes_on(standings, still, rank, name) for name in standings[rank].waits)
        }
        if not free:
            return frozenset(still)
        still -= free


def _goes_on(standings: Mapping[int, Standing], still: set[int], rank: int, name: str) -> bool:
    """Whether every rank has come, or may come, to the collective that `rank` waits in."""
    number = standings[rank].come[name]
    return all(standings[other].come.get(name, 0) >= number for other in still - {rank})


def standstill_text(standings: Mapping[int, Standing]) -> str:
    """Where each rank waits, and what to look for."""
    lines = ["ranks wait for one another, and none can go on:"]
    lines += [f"  rank {rank}: {standing.text}" for rank, standing in sorted(standings.items())]
    lines.append(
        "Every rank has to run the same units in the same order, backward through them included, and the same number of "
        "steps: look for a branch, a loss that leaves out part of the model, or a data loader of uneven length on one "
        "rank only."
    )
    return "\n".join(lines)
