"""Sharded weights over an engine's life: copies, writes, states, closing, a second engine; and many seeded schedules."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
from support.models import TinyMLP, features, gpt_batch, make, make_gpt, mlp_loss
from support.training import adamw, assert_same_bits, config, engine_for, exact_sgd, snapshot
from torch import nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import EngineStateError, ParameterError
from zero_plugin.sharding.guard import ReleasedParameter

STAGE_3 = {"stage": 3, "params": "host", "bucket_bytes": 256}


def steps(model: Any, engine: Any, optimizer: Any, numbers: range) -> None:
    for step in numbers:
        loss = mlp_loss(model, step)
        loss.backward() if engine is None else engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_a_deep_copy_is_plain_and_lives_on() -> None:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), **STAGE_3) as (engine, optimizer):
        steps(model, engine, optimizer, range(2))
        with engine.full_params():
            copied = copy.deepcopy(model)
            expected = snapshot(model)
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        steps(model, engine, optimizer, range(2, 4))
        assert_same_bits(snapshot(copied), expected)
        # Its forward and backward have nothing to do with the engine.
        sharded: Any = engine._sharded
        gathered = sharded.gatherer.missed
        steps(copied, None, exact_sgd(copied.parameters()), range(2, 4))
        assert sharded.gatherer.missed == gathered
        with engine.full_params():
            for name, parameter in model.named_parameters():
                assert parameter.shape == copied.get_parameter(name).shape


def test_writes_without_writeback_are_refused_and_undone() -> None:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), **STAGE_3) as (engine, optimizer):
        steps(model, engine, optimizer, range(2))
        with engine.full_params():
            before = snapshot(model)
        for write in (
            lambda: nn.init.zeros_(model.first.weight),
            lambda: setattr(model.first.weight, "data", torch.zeros(13, 7)),
            lambda: model.load_state_dict(make(TinyMLP, seed=3).state_dict()),
        ):
            refusal = pytest.raises(ParameterError, match=r"first\.weight.*writeback=True")
            with refusal, torch.no_grad(), engine.full_params():
                write()
            with engine.full_params():
                assert_same_bits(snapshot(model), before)


def test_full_params_nests_and_survives_an_exception() -> None:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), **STAGE_3) as (engine, optimizer):
        with engine.full_params():
            with engine.full_params():
                model.first.weight.norm()
            assert type(model.first.weight) is nn.Parameter
        with pytest.raises(RuntimeError, match="shapes"), engine.full_params():
            model(features(0)[:, :3])
        assert isinstance(model.first.weight, ReleasedParameter)
        # A forward and a backward inside, and a step after.
        with engine.full_params():
            engine.backward(mlp_loss(model, 0))
        optimizer.step()
        expected = make(TinyMLP)
        steps(expected, None, exact_sgd(expected.parameters()), range(1))
        with engine.full_params():
            assert_same_bits(snapshot(model), snapshot(expected))


def test_states_can_be_loaded_and_training_goes_on_bit_for_bit() -> None:
    first = make(TinyMLP)
    with engine_for(first, adamw(first.parameters()), **STAGE_3) as (engine, optimizer):
        steps(first, engine, optimizer, range(3))
        weights = engine.full_state_dict()
        state = copy.deepcopy(optimizer.state_dict())
        steps(first, engine, optimizer, range(3, 6))
        expected = engine.full_state_dict()
    second = make(TinyMLP, seed=9)
    with engine_for(second, adamw(second.parameters()), **STAGE_3) as (engine, optimizer):
        with engine.full_params(writeback=True):
            second.load_state_dict(weights)
        engine.load_optimizer_state_dict(optimizer, state)
        steps(second, engine, optimizer, range(3, 6))
        assert_same_bits(engine.full_state_dict(), expected)


def test_the_model_is_plain_after_close_and_a_second_engine_goes_on() -> None:
    model, expected = make(TinyMLP), make(TinyMLP)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for turn in range(3):
        numbers = range(2 * turn, 2 * turn + 2)
        with engine_for(model, exact_sgd(model.parameters()), **STAGE_3) as (engine, optimizer):
            steps(model, engine, optimizer, numbers)
        steps(expected, None, exact_sgd(expected.parameters()), numbers)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        assert_same_bits(snapshot(model), snapshot(expected))
    steps(model, None, exact_sgd(model.parameters()), range(6, 8))
    steps(expected, None, exact_sgd(expected.parameters()), range(6, 8))
    assert_same_bits(snapshot(model), snapshot(expected))


def test_a_second_engine_on_a_live_one_is_refused() -> None:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), **STAGE_3) as (engine, optimizer):
        for settings in (STAGE_3, {"stage": 1}):
            with pytest.raises(EngineStateError, match=r"close"):
                ZeroEngine(model, exact_sgd(model.parameters()), config(**settings))
        steps(model, engine, optimizer, range(2))
        expected = make(TinyMLP)
        steps(expected, None, exact_sgd(expected.parameters()), range(2))
        with engine.full_params():
            assert_same_bits(snapshot(model), snapshot(expected))


def test_a_dropped_engine_leaves_a_plain_model() -> None:
    model, expected = make(TinyMLP), make(TinyMLP)
    optimizer, plain = exact_sgd(model.parameters()), exact_sgd(expected.parameters())
    engine = ZeroEngine(model, optimizer, config(**STAGE_3))
    steps(model, engine, optimizer, range(2))
    del engine, optimizer
    gc.collect()
    steps(expected, None, plain, range(2))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same_bits(snapshot(model), snapshot(expected))
    steps(model, None, exact_sgd(model.parameters()), range(2))


def test_data_replaced_inside_a_forward_is_refused_and_undone() -> None:
    model = make(TinyMLP)
    before = snapshot(model)

    def replace(module: Any, *_: Any) -> None:
        module.weight.data = torch.zeros(5, 13)

    with engine_for(model, exact_sgd(model.parameters()), **STAGE_3) as (engine, _):
        handle = model.second.register_forward_pre_hook(replace)
        with pytest.raises(ParameterError, match=r"second\.weight.*writeback=True"):
            model(features(0))
        handle.remove()
        with engine.full_params():
            assert_same_bits(snapshot(model), before)
        engine.backward(mlp_loss(model, 0))


def test_an_alias_kept_past_release_keeps_its_values_and_never_crashes() -> None:
    class Keeping(TinyMLP):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            self.kept = self.first.weight.t() * 1
            outputs = super().forward(features)
            self.flat = self.first.bias[2:]
            return outputs

    model, expected = make(Keeping), make(TinyMLP)
    plain = exact_sgd(expected.parameters())
    with engine_for(model, exact_sgd(model.parameters()), **STAGE_3) as (engine, optimizer):
        for step in range(4):
            before = snapshot(expected)
            steps(model, engine, optimizer, range(step, step + 1))
            steps(expected, None, plain, range(step, step + 1))
            assert torch.equal(model.kept, before["first.weight"].t())
            assert torch.equal(model.flat * 1, before["first.bias"][2:])
        with engine.full_params():
            assert_same_bits(snapshot(model), snapshot(expected))


@pytest.mark.parametrize("tenth", range(10))
def test_seeded_schedules_find_no_stale_read(tenth: int, schedules: int) -> None:
    def train(seed: int | None) -> dict[str, Any]:
        model = make_gpt(width=8, layers=2)
        generator = random.Random(seed)
        settings: dict[str, Any] = {"stage": 0, "backend": "inline"}
        if seed is not None:
            settings = {
                "stage": 3,
                "backend": "chaos",
                "backend_seed": seed,
                "params": generator.choice(["device", "host"]),
                "optimizer": generator.choice(["device", "host"]),
                "gradients": generator.choice(["device", "host"]),
                "bucket_bytes": generator.choice([256, 1024, "32MiB"]),
                "prefetch_units": generator.choice([0, 1, 2, 4]),
                "persist_below": generator.choice([0, 0, 20]),
            }
        losses = []
        with engine_for(model, adamw(model.parameters()), **settings) as (engine, optimizer):
            for step in range(3):
                loss = model(gpt_batch(step, batch=1))
                engine.backward(loss)
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            with engine.full_params():
                return {"losses": losses, "weights": snapshot(model)}

    expected = train(None)
    for seed in range(tenth * schedules // 10, (tenth + 1) * schedules // 10):
        assert_same_bits(train(seed), expected, f"seed {seed}: ")
