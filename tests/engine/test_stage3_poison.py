"""`debug_poison`: whoever kept a handle on weights past their release reads NaN, and everything else is as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import TinyMLP, features, make, make_gpt, mlp_loss
from support.training import (
    Recipe,
    adamw,
    assert_same_outcome,
    engine_for,
    exact_sgd,
    ranks,
    train,
)

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ParameterError

POISON: dict[str, Any] = {"stage": 3, "params": "host", "debug_poison": True}


@pytest.mark.parametrize("backend", ["inline", "threads", "chaos"])
def test_training_has_the_same_bits(backend: str) -> None:
    recipe = Recipe(steps=4, width=12, accumulate=2, clip=0.5)
    found = train(recipe, **POISON, backend=backend)
    assert_same_outcome(found, train(recipe, stage=0, backend="inline"))


def keep_handles(rank: int, size: int) -> None:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), **POISON) as (engine, optimizer):
        weight = model.first.weight
        kept: list[torch.Tensor] = []

        def keep(*_: Any) -> None:
            kept.extend([weight.data, weight.detach(), weight.view(-1)[3:].detach()])
            assert not any(item.isnan().any() for item in kept)

        handle = model.first.register_forward_pre_hook(keep)
        loss = mlp_loss(model, 0, rank=rank)
        handle.remove()
        engine.backward(loss)
        assert len(kept) == 3
        assert all(item.isnan().all() for item in kept)
        optimizer.step()
        assert all(item.isnan().all() for item in kept)
        with engine.full_params():
            # Memory stays where it is, so that a handle shows the present weights while these are here.
            assert torch.equal(kept[0], weight)
            assert not kept[0].isnan().any()
        assert all(item.isnan().all() for item in kept)
        with pytest.raises(ParameterError, match=r"first\.weight"):
            weight.data_ptr()
        assert not model(features(0, rank=rank)).isnan().any()


@pytest.mark.parametrize("size", [1, 2])
def test_a_handle_kept_past_release_reads_nan(size: int) -> None:
    ranks(size, keep_handles)


def test_a_closed_engine_leaves_the_weights() -> None:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), **POISON):
        pass
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_memory_counts_what_is_kept() -> None:
    model = make_gpt(width=12)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    for poison in (False, True):
        settings = {**POISON, "debug_poison": poison}
        with engine_for(model, adamw(model.parameters()), **settings) as (engine, _):
            assert engine.memory()["device"]["params"] == (nbytes if poison else 0)


def test_a_model_built_in_shards() -> None:
    import zero_plugin

    config = ZeroConfig(threads=1, **POISON)
    with zero_plugin.init_context(config):
        model = TinyMLP()
    with engine_for(model, exact_sgd(model.parameters()), **POISON) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        with engine.full_params():
            assert all(parameter.isfinite().all() for parameter in model.parameters())
