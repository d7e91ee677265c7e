"""The inputs of activation checkpoints go to the host in forward and come back before backward uses them: same bits, known bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import assert_same_bits, engine_for, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 64, 300
"""A checkpoint's input is [300, 64]: 75 KiB in fp32, above the smallest that moves."""
KINDS = ("reentrant", "non-reentrant")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, *more: Tensor) -> Tensor:
        for item in more:
            hidden = hidden + item
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))


class Stack(nn.Module):
    """Blocks under checkpoints; `between` is called with each block's number and input."""

    def __init__(
        self, kind: str, layers: int = 4, *, dropout: float = 0.0, shared: bool = False
    ) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 1)
        self.shared = shared
        self.between: Callable[[int, Tensor], Any] = lambda *_: None

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        more = (hidden.sin(),) if self.shared else ()
        for number, block in enumerate(self.blocks):
            if self.kind == "none":
                output = block(hidden, *more)
            else:
                output = checkpoint(block, hidden, *more, use_reentrant=self.kind == "reentrant")
            self.between(number, hidden)
            hidden = output
        return self.last(hidden).square().mean()


def stack(kind: str, seed: int = 0, **options: Any) -> Stack:
    torch.manual_seed(seed)
    return Stack(kind, **options)


def features(step: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(step))


def train(model: Any, steps: int = 4, *, rank: int = 0, **settings: Any) -> dict[str, Any]:
    """Two micro-batches a step."""
    losses: list[Tensor] = []
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(steps):
            for micro in range(2):
                torch.manual_seed(2 * step + micro)
                loss = model(features(100 * rank + 2 * step + micro))
                engine.backward(loss)
                losses.append(loss.detach().clone())
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            return {"losses": losses, "weights": snapshot(model)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_without(kind: str, stage: int) -> None:
    options = {"dropout": 0.2, "shared": stage % 2 == 0}
    expected = train(stack(kind, **options), stage=0, backend="inline")
    for number, backend in enumerate(("inline", "threads", "chaos")):
        params = {"params": ("host", "device")[number % 2]} if stage == 3 else {}
        found = train(
            stack(kind, **options), stage=stage, backend=backend, activations="host", **params
        )
        assert_same_bits(found, expected, f"{backend}")
