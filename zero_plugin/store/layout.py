"""Which bytes of an extent lie where: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MAX_CYCLE = 32
_EQUAL_WITHIN = 1.25
"""Speeds measured in an instant are not known better than this."""


class Span(NamedTuple):
    """A run of bytes that is contiguous in its file.

    Attributes:
        path: index of the path.
        position: where it begins within the extent's part on that path.
        start: where it begins within the extent.
        nbytes: its length.
    """

    path: int
    position: int
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stripes:
    """Bytes dealt out over paths: `weights[0]` units to the first, `weights[1]` to the next, and round again.

    Attributes:
        unit: bytes dealt at once.
        weights: units for each path in a round, all at least 1.
    """

    unit: int
    weights: tuple[int, ...]

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The bytes from `start` to before `stop`, in order."""
        if len(self.weights) == 1:
            if start < stop:
                yield Span(0, start, start, stop - start)
            return
        turn = self.unit * sum(self.weights)
        while start < stop:
            rounds, within = divmod(start, turn)
            path, begin = self._path_of(within)
            size = self.weights[path] * self.unit
            nbytes = min(begin + size - within, stop - start)
            yield Span(path, rounds * size + within - begin, start, nbytes)
            start += nbytes

    def sizes(self, nbytes: int) -> tuple[int, ...]:
        """Bytes that the first `nbytes` take on each path."""
        turn = self.unit * sum(self.weights)
        rounds, within = divmod(nbytes, turn)
        sizes = [rounds * weight * self.unit for weight in self.weights]
        for place, weight in enumerate(self.weights):
            part = min(within, weight * self.unit)
            sizes[place] += part
            within -= part
        return tuple(sizes)

    def _path_of(self, within: int) -> tuple[int, int]:
        """The path that has byte `within` of a round, and where its share begins."""
        begin = 0
        for path, weight in enumerate(self.weights):
            if within < begin + weight * self.unit:
                return path, begin
            begin += weight * self.unit
        raise ValueError(f"byte {within} is past the round of {begin} bytes")


def weights_for(speeds: Sequence[float | None]) -> tuple[int, ...]:
    """Small whole numbers in proportion to `speeds` (any unit); equal where one is unknown or all are alike."""
    known = [speed for speed in speeds if speed is not None and speed > 0]
    if len(known) < len(speeds) or max(known) <= _EQUAL_WITHIN * min(known):
        return (1,) * len(speeds)
    best, best_error = (1,) * len(speeds), float("inf")
    for scale in range(1, 5):
        weights = tuple(max(1, round(speed / min(known) * scale)) for speed in known)
        if sum(weights) > _MAX_CYCLE and scale > 1:
            break
        # The path that is the last to end sets the time of a round.
        slowest = max(weight / speed for weight, speed in zip(weights, known, strict=True))
        error = slowest * sum(known) / sum(weights)
        if error < best_error - 1e-9:
            best, best_error = weights, error
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Reserved space for `nbytes` bytes, spread over the store's paths.

    Attributes:
        number: its place among the store's extents.
        label: names it in errors.
        nbytes: bytes asked for.
        padded: `nbytes` rounded up to the store's alignment; all of them can be read and written.
        bases: where its part begins in each path's file.
        first_file: the first path's file, by the engine's numbers.
    """

    number: int
    label: str
    nbytes: int
    padded: int
    bases: tuple[int, ...]
    first_file: int = 0


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit
