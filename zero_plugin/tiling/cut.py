"""Where a weight is cut into tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUND = (256, 128, 64, 32, 16, 8)
"""Tiles get a multiple of these outputs where that costs little balance: matrix products like it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The edges of a grid of tiles over a weight.

    Attributes:
        outputs: edges along the output features (rows of an embedding), from 0 to their number.
        inputs: edges along the input features, from 0 to their number.
        transposed: whether the weight is [inputs, outputs], as in the `Conv1D` of transformers.
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole weight."""
        outputs, inputs = self.outputs[-1], self.inputs[-1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    @property
    def columns(self) -> int:
        """Tiles side by side along the input; 1 where only the output is cut."""
        return len(self.inputs) - 1

    @property
    def output_spans(self) -> list[tuple[int, int]]:
        """First and last+1 output of each row of tiles."""
        return list(itertools.pairwise(self.outputs))

    @property
    def input_spans(self) -> list[tuple[int, int]]:
        """First and last+1 input of each column of tiles."""
        return list(itertools.pairwise(self.inputs))

    def pieces(self, weight: Tensor) -> list[Tensor]:
        """Views of a whole weight, one a tile, along the inputs first."""
        return [
            weight[low:high, start:stop] if self.transposed else weight[start:stop, low:high]
            for start, stop in self.output_spans
            for low, high in self.input_spans
        ]

    def bias_pieces(self, bias: Tensor) -> list[Tensor]:
        """Views of a whole bias, one for the first tile of each row."""
        return [bias[start:stop] for start, stop in self.output_spans]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole weight, copied together from its tiles."""
        output_dim, input_dim = (1, 0) if self.transposed else (0, 1)
        rows = [
            _joined(pieces[first : first + self.columns], input_dim)
            for first in range(0, len(pieces), self.columns)
        ]
        return _joined(rows, output_dim)

    def join_bias(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole bias, copied together from its parts."""
        return _joined(pieces, 0)


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)


def edges(total: int, most: int) -> tuple[int, ...]:
    """Edges of the fewest near-equal spans of at most `most` that cover `total`."""
    count = -(-total // most)
    size = -(-total // count)
    for multiple in _ROUND:
        rounded = -(-size // multiple) * multiple
        if rounded <= min(most, size + size // 8):
            size = rounded
            break
    return (*range(0, total, size), total)
