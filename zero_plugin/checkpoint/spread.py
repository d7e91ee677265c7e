"""A tensor of another system's checkpoint that lies in several places, put together piece by piece as it is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_plugin.checkpoint.shardfile import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A tensor as consecutive ranges of other tensors; nothing of it is copied until a range is read.

    Attributes:
        shape: of the whole.
        dtype: of the whole; the ranges may be of another.
        ranges: flat views, in order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[Tensor, ...]

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.ranges[0].data_ptr() if self.ranges else 0

    def is_floating_point(self) -> bool:
        """Whether its elements are."""
        return self.dtype.is_floating_point

    def read(self, start: int, stop: int) -> Tensor:
        """A range of its elements, in the dtype that they lie in; a view, or a copy."""
        found = cut_ranges(self.ranges, start, stop)
        return found[0] if len(found) == 1 else torch.cat(found)


Value = Tensor | Spread
"""A tensor that is there, or one to put together."""


def spread(
    parts: Sequence[Tensor], start: int, shape: Sequence[int], dtype: torch.dtype | None = None
) -> Spread:
    """The tensor that begins at an element of flat tensors one after another."""
    numel = math.prod(shape)
    return Spread(
        shape=tuple(shape),
        dtype=parts[0].dtype if dtype is None else dtype,
        ranges=tuple(cut_ranges(parts, start, start + numel)),
    )


def cut_ranges(parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Views of the elements from one place to another of flat tensors one after another; at least one."""
    starts = itertools.accumulate((part.numel() for part in parts), initial=0)
    found = [
        part[max(0, start - first) : stop - first]
        for first, part in zip(starts, parts, strict=False)
        if first < stop and start < first + part.numel()
    ]
    return found or [parts[0][:0]]


def part_of(name: str, value: Value, dtype: torch.dtype) -> Part:
    """A flat part with a tensor's elements, in a dtype: converted as they are read."""
    if isinstance(value, Spread):
        return Part(name=name, dtype=dtype, shape=(value.numel(),), read=value.read)
    flat = value.detach().reshape(-1)
    return Part(
        name=name,
        dtype=dtype,
        shape=(flat.numel(),),
        read=lambda start, stop: flat[start:stop],
    )
