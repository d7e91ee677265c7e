"""The same Accelerate loop on stock Accelerate and on us."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support.accelerate_runs import STAGES, accelerator_for, assert_same, data, ranks, train

from zero_plugin.errors import ConfigError

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "evaluation first": {"evaluate_first": True},
    "clipped by value": {"clip_value": 2.0**-6},
    "norm measured": {"max_norm": float("inf")},
}
CLIPPED: dict[str, Any] = {"max_norm": 0.25, "gradient_accumulation_steps": 2}


def compare(_rank: int, size: int) -> None:
    for name, options in CASES.items():
        stock = train(None, **options)
        for settings in STAGES if size == 1 or name == "plain" else STAGES[1::2]:
            ours = train(settings, **options)
            # The norm is formed more exactly than torch does it, and accumulated sums of several ranks are rounded
            # at other places than DDP's.
            exact = "max_norm" not in options and (size == 1 or name != "accumulation")
            assert_same(stock, ours, tolerance=0.0 if exact else 1e-6)
    join_uneven(size)


def join_uneven(size: int) -> None:
    with accelerator_for({"stage": 2}) as accelerator:
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        # 5 batches: with two ranks one of them has one more.
        model, optimizer, loader = accelerator.prepare(model, optimizer, data(count=20))
        counts = [0, 0]
        for turn, even in enumerate((None, True)):
            with accelerator.join_uneven_inputs([model], even_batches=even):
                for features, labels in loader:
                    accelerator.backward(torch.nn.functional.cross_entropy(model(features), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                    counts[turn] += 1
        assert counts == [5 if size == 1 else 3] * 2
        refused = (
            pytest.raises(
                ConfigError, match="join_uneven_inputs on 2 ranks with even_batches=False"
            )
            if size > 1
            else contextlib.nullcontext()
        )
        with refused, accelerator.join_uneven_inputs([model], even_batches=False):
            pass
        if size > 1:
            assert loader.batch_sampler.even_batches


def clipped(_rank: int, _size: int) -> None:
    stock = train(None, **CLIPPED)
    assert max(stock.norms) > CLIPPED["max_norm"] > 0
    for settings in STAGES[::2]:
        assert_same(stock, train(settings, **CLIPPED), tolerance=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_equals_stock_accelerate(size: int) -> None:
    ranks(size, compare)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_clipping_by_norm_equals_stock_accelerate(size: int) -> None:
    ranks(size, clipped)
