"""Non-finite gradients, loss scales and clipping."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from support.models import TinyMLP, mlp_loss
from support.training import (
    Session,
    assert_like_plain_torch,
    assert_same_bits,
    engine_for,
    exact_sgd,
    snapshot,
)
from torch import Tensor, nn

from zero_plugin.errors import CheckpointError, ConfigError, NonFiniteGradientError

BAD = [float("nan"), float("inf"), float("-inf")]


def poison(model: TinyMLP, value: float) -> Tensor:
    """A loss whose gradient has one bad element, in `first.weight`, and is finite elsewhere."""
    return mlp_loss(model, 0) + model.first.weight[2, 3] * value


# Non-finite -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", BAD)
def test_a_step_with_a_non_finite_gradient_is_skipped_whole(value: float) -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        before = snapshot(model), optimizer.state_dict()
        engine.backward(poison(model, value))
        assert not math.isfinite(engine.clip_grad_norm_(1.0))
        with pytest.warns(RuntimeWarning, match=r"step skipped: the gradient of first\.weight"):
            optimizer.step()
        optimizer.zero_grad()
        assert_same_bits((snapshot(model), optimizer.state_dict()), before)
        assert engine.step_was_skipped
        assert engine.skipped_steps == 1
        engine.backward(mlp_loss(model, 1))
        optimizer.step()
        assert not engine.step_was_skipped
        assert engine.skipped_steps == 1
        assert not torch.equal(model.first.weight, before[0]["first.weight"])


@pytest.mark.parametrize("value", BAD)
def test_non_finite_raises_where_asked(value: float) -> None:
    model = TinyMLP()
    with engine_for(model, nonfinite="raise") as (engine, optimizer):
        before = snapshot(model)
        engine.backward(poison(model, value))
        with pytest.raises(
            NonFiniteGradientError, match=r"first\.weight.*no weight was changed.*propagate"
        ):
            optimizer.step()
        assert_same_bits(snapshot(model), before)
        optimizer.zero_grad()
        engine.backward(mlp_loss(model, 0))
        optimizer.step()


@pytest.mark.parametrize("value", BAD)
def test_non_finite_propagates_as_in_plain_torch(value: float) -> None:
    def script(session: Session) -> None:
        session.backward(mlp_loss(session.model, 0))
        session.update()
        session.backward(poison(session.model, value))
        session.update()
        session.notes.append(
            session.model.first.weight.isnan() | session.model.first.weight.isinf()
        )

    settings = ({"nonfinite": "propagate", "backend": "threads", "bucket_bytes": 256},)
    assert_like_plain_torch(TinyMLP, script, settings=settings)


def test_patience_ends_in_an_error_that_names_the_parameter() -> None:
    model = TinyMLP()
    with engine_for(model, nonfinite_patience=3) as (engine, optimizer):

        def bad_step() -> None:
            engine.backward(poison(model, float("inf")))
            optimizer.step()

        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="step skipped"):
                bad_step()
            optimizer.zero_grad()
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="step skipped"):
                bad_step()
            optimizer.zero_grad()
        with pytest.raises(NonFiniteGradientError, match=r"first\.weight.*for 3 steps in a row"):
            bad_step()


def test_error_if_nonfinite() -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, _):
        engine.backward(poison(model, float("nan")))
        with pytest.raises(NonFiniteGradientError, match=r"first\.weight"):
            engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert math.isnan(engine.clip_grad_norm_(1.0))


# Loss scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.5, 1024.0, 2.0**16])
def test_a_static_scale_changes_no_bit(scale: float) -> None:
    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, 2 * step))
            session.backward(mlp_loss(session.model, 2 * step + 1))
            session.clip(0.25)
            session.update()

    for accumulated in ({}, {"stage": 1, "optimizer": "device"}):
        settings = ({"loss_scale": scale, "bucket_bytes": 256, **accumulated},)
        assert_like_plain_torch(TinyMLP, script, settings=settings)


def test_full_grads_are_unscaled() -> None:
    model, twin = TinyMLP(), TinyMLP()
    twin.load_state_dict(model.state_dict())
    mlp_loss(twin, 0).backward()
    with engine_for(model, loss_scale=256.0) as (engine, _):
        assert engine.loss_scale == 256.0
        engine.backward(mlp_loss(model, 0))
        with engine.full_grads():
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert_same_bits(ours.grad, theirs.grad)


OVERFLOWS = [True, True, False, False, True, False, False, False, True, True, False]


def fp16_like_loss(model: TinyMLP, step: int, *, overflow: bool) -> Tensor:
    """A loss that overflows in the backward, whatever the scale."""
    return poison(model, float("inf")) if overflow else mlp_loss(model, step)


@pytest.mark.parametrize("plain_backward", [False, True])
def test_dynamic_scale_moves_as_torchs_grad_scaler(plain_backward: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("zero_plugin.grads.scaler._GROWTH_INTERVAL", 2)
    torch.manual_seed(0)
    model, twin = TinyMLP(), TinyMLP()
    twin.load_state_dict(model.state_dict())
    other = exact_sgd(twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2)
    with engine_for(model, exact_sgd(model.parameters()), loss_scale="dynamic") as (
        engine,
        optimizer,
    ):
        for step, overflow in enumerate(OVERFLOWS):
            loss = fp16_like_loss(model, step, overflow=overflow)
            if plain_backward:
                engine.scale_loss(loss).backward()
            else:
                engine.backward(loss)
            assert engine.loss_scale == scaler.get_scale(), step
            scaler.scale(fp16_like_loss(twin, step, overflow=overflow)).backward()
            optimizer.step()
            scaler.step(other)
            scaler.update()
            optimizer.zero_grad()
            other.zero_grad()
            assert engine.step_was_skipped == overflow
            assert_same_bits(snapshot(model), snapshot(twin), f"step {step}: ")


def test_two_optimizers_move_the_scale_once_a_step() -> None:
    model = TinyMLP()
    parts = [exact_sgd(model.first.parameters()), exact_sgd(model.second.parameters())]
    with engine_for(model, parts, loss_scale="dynamic") as (engine, _):
        engine.backward(mlp_loss(model, 0) * float("inf"))
        engine.step()
        engine.zero_grad()
        engine.backward(mlp_loss(model, 0))
        # GradScaler.update(), once an iteration: 65536 / 2, however many optimizers overflowed.
        assert engine.loss_scale == 32768.0


def test_an_exhausted_scale_ends_in_an_error_that_names_the_parameter() -> None:
    model = TinyMLP()
    with engine_for(model, loss_scale="dynamic", nonfinite_patience=3) as (engine, optimizer):

        def train() -> None:
            for _ in range(40):
                engine.backward(poison(model, float("inf")))
                optimizer.step()
                optimizer.zero_grad()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises(NonFiniteGradientError, match=r"first\.weight.*at loss scale 1;"):
                train()
        assert engine.skipped_steps >= 16


def test_the_scale_does_not_change_within_a_step() -> None:
    model = TinyMLP()
    with engine_for(model, loss_scale="dynamic") as (engine, optimizer):
        engine.backward(poison(model, float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(3):
            engine.backward(mlp_loss(model, 0))
            assert engine.loss_scale == 32768.0


def test_scaler_state_round_trip() -> None:
    model = TinyMLP()
    with engine_for(model, loss_scale="dynamic") as (engine, optimizer):
        engine.backward(poison(model, float("inf")))
        optimizer.step()
        state = engine.loss_scale_state()
    model = TinyMLP()
    with engine_for(model, loss_scale="dynamic") as (engine, _):
        engine.load_loss_scale_state(state)
        assert engine.loss_scale == 32768.0
        for bad in ({}, {"scale": -1.0, "good_steps": 0}, {"scale": "x", "good_steps": 0}):
            with pytest.raises(CheckpointError, match="scale"):
                engine.load_loss_scale_state(bad)
        assert engine.loss_scale == 32768.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_steps_equal_fp32_master_adamw(dtype: torch.dtype) -> None:
    # The oracle: fp32 masters stepped by torch's AdamW on the upcast gradient, and cast to the weights.
    torch.manual_seed(0)
    model = TinyMLP().to(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    twin = TinyMLP().to(dtype)
    twin.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"lr": 2.0**-7, "momentum": 0.5, "weight_decay": 0.0}
    other = torch.optim.SGD(masters, **options)
    with engine_for(model, torch.optim.SGD(model.parameters(), **options)) as (engine, optimizer):
        for step in range(6):
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
            engine.backward(model(inputs).float().square().mean())
            twin(inputs).float().square().mean().backward()
            for master, weight in zip(masters, twin.parameters(), strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
                weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            other.step()
            with torch.no_grad():
                for master, weight in zip(masters, twin.parameters(), strict=True):
                    weight.copy_(master)
            assert_same_bits(snapshot(model), snapshot(twin), f"step {step}: ")


def test_accumulation_of_low_precision_gradients_is_in_fp32() -> None:
    # 256 ones of which each is below half an ulp of the sum in bf16: a bf16 sum would stop at 256.
    for settings in ({"stage": 2}, {"stage": 1}, {"stage": 2, "gradients": "device"}):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        with engine_for(model, exact_sgd(model.parameters()), **settings) as (engine, _):
            for _ in range(300):
                with engine.no_sync():
                    engine.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
            assert engine.clip_grad_norm_(float("inf")) == 300.0


# Clipping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_are_real_and_before_clipping(norm_type: float) -> None:
    model, twin = TinyMLP(), TinyMLP()
    twin.load_state_dict(model.state_dict())
    mlp_loss(twin, 0).backward()
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        norm = engine.clip_grad_norm_(1e-3, norm_type)
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 1e-3, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
        assert norm.dtype == torch.float32
        assert norm.shape == ()


def test_clipping_by_value_and_by_norm_of_infinity() -> None:
    def by_value(session: Session) -> None:
        for step in range(3):
            session.backward(mlp_loss(session.model, step))
            if session.engine is None:
                nn.utils.clip_grad_value_(session.model.parameters(), 2.0**-6)
            else:
                session.engine.clip_grad_value_(2.0**-6)
            session.update()

    assert_like_plain_torch(TinyMLP, by_value)


def test_clipping_twice_and_norm_before_value() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            session.backward(mlp_loss(session.model, step))
            session.clip(0.125)
            if session.engine is None:
                nn.utils.clip_grad_value_(session.model.parameters(), 2.0**-6)
            else:
                session.engine.clip_grad_value_(2.0**-5)
                session.engine.clip_grad_value_(2.0**-6)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_a_clip_does_not_outlive_its_step() -> None:
    def script(session: Session) -> None:
        session.backward(mlp_loss(session.model, 0))
        session.clip(1e-3)
        session.update()
        session.backward(mlp_loss(session.model, 1))
        session.update()
        session.backward(mlp_loss(session.model, 2))
        session.clip(1e-3)
        session.optimizer.zero_grad()
        session.backward(mlp_loss(session.model, 3))
        session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_clipping_one_of_several_optimizers() -> None:
    torch.manual_seed(0)
    model, twin = TinyMLP(), TinyMLP()
    twin.load_state_dict(model.state_dict())
    parts = [exact_sgd(model.first.parameters()), exact_sgd(model.second.parameters())]
    others = [exact_sgd(twin.first.parameters()), exact_sgd(twin.second.parameters())]
    with engine_for(model, parts) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        mlp_loss(twin, 0).backward()
        whole = engine.clip_grad_norm_(float("inf"))
        norm = engine.clip_grad_norm_(1.0, optimizer=parts[0])
        expected = nn.utils.clip_grad_norm_(twin.first.parameters(), float("inf"))
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
        assert whole > norm
        engine.clip_grad_value_(2.0**-7, optimizer=parts[0])
        nn.utils.clip_grad_value_(twin.first.parameters(), 2.0**-7)
        engine.step()
        for other in others:
            other.step()
        assert_same_bits(snapshot(model), snapshot(twin))


def test_senseless_clips_are_refused() -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        for bad in (-1.0, float("nan")):
            with pytest.raises(ConfigError, match="max_norm"):
                engine.clip_grad_norm_(bad)
            with pytest.raises(ConfigError, match="clip_value"):
                engine.clip_grad_value_(bad)
        with pytest.raises(ConfigError, match="norm_type=1"):
            engine.clip_grad_norm_(1.0, 1.0)
        engine.clip_grad_value_(1.0)
        with pytest.raises(ConfigError, match="clip by norm first"):
            engine.clip_grad_norm_(1.0)
