"""Gradients of the parts of one backward: micro-batches that run it together, each with gradients of its own.

They are handed on part after part, whatever order they come in, so that the sum is that of backwards run one after another. A
single rank adds them up here, in that order and in fp32, and hands on the sum; several ranks reduce each part, block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zero_plugin.grads.local import LocalGradients
from zero_plugin.sharding.partition import Block

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Parts:
    """The parts of the backward that runs, one in ordinary ones.

    Args:
        local: where a part's gradients go when it is their turn.
    """

    def __init__(self, local: LocalGradients) -> None:
        self._local = local
        self.count = 0
        """How many, on the rank that has most; 0 in an ordinary backward."""
        self._own = 0
        self.adds = False
        """Whether they are added up here."""
        self.current: Callable[[], int] = int
        """Which part a backward has reached; for gradients that come to the parameter itself."""
        self._waiting: dict[tuple[int, int], Tensor] = {}
        self._arrived: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._seen: set[tuple[int, int]] = set()

    def start(self, count: int, *, adds: bool) -> None:
        """A backward of several parts begins."""
        self.end()
        self.count = self._own = count
        self.adds = adds

    def end(self) -> None:
        """It has ended."""
        for grad in self._waiting.values():
            self._local.track(-grad.numel() * grad.element_size())
        self._waiting.clear()
        self._arrived.clear()
        self._next.clear()
        self._seen.clear()
        self.count = self._own = 0
        self.adds = False

    def put(self, block: Block, index: int, part: int, grad: Tensor, dtype: torch.dtype) -> bool:
        """Take a gradient; False if the part had one of the parameter already.

        Args:
            block: which the parameter is of.
            index: of the parameter.
            part: whose gradient it is.
            grad: any shape.
            dtype: of a contribution to the block.
        """
        if (index, part) in self._seen:
            return False
        self._seen.add((index, part))
        self._waiting[index, part] = grad
        self._arrived[block.index] = self._arrived.get(block.index, 0) + 1
        if self.adds:
            self._add(index, dtype, skip=False)
        return True

    def is_complete(self, block: Block, expected: int) -> bool:
        """Whether all gradients of a block, `expected` for each part, are here."""
        return self._arrived.get(block.index, 0) == expected * self._own

    def load(self, block: Block, dtype: torch.dtype) -> set[int]:
        """Make the next part's gradients of a block (all, where they are added up) the local ones; returns whose."""
        found: set[int] = set()
        for member in block.parameters:
            index = member.index
            if self.adds:
                self._add(index, dtype, skip=True)
            else:
                grad = self._waiting.pop((index, self._next.get(block.index, 0)), None)
                if grad is not None:
                    self._local.hold(index, grad)
            if self._local.held(index) is not None:
                found.add(index)
        return found

    def is_last(self, block: Block) -> bool:
        """Whether what was loaded last is a block's last part."""
        return self.adds or self._next.get(block.index, 0) + 1 >= self.count

    def advance(self, block: Block) -> bool:
        """A part of a block was handed on; whether more follow."""
        if self.is_last(block):
            return False
        self._next[block.index] = self._next.get(block.index, 0) + 1
        return True

    def _add(self, index: int, dtype: torch.dtype, *, skip: bool) -> None:
        """Add up what has come of a parameter, part after part; with `skip`, whatever did not come."""
        part = self._next.get(~index, 0)
        while part < self.count:
            grad = self._waiting.pop((index, part), None)
            if grad is None and not skip:
                break
            if grad is not None:
                # As each would be rounded by itself on its way down.
                rounded = grad.to(dtype)
                self._local.track(rounded.numel() * (rounded.element_size() - grad.element_size()))
                self._local.hold(index, rounded)
            part += 1
        self._next[~index] = part
