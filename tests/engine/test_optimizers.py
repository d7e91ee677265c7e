"""The user's own optimizer object: classes with and without a compiled rule, closures, hooks, schedulers, state dicts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import BranchMLP, OddMLP, TinyMLP, mlp_loss
from support.training import (
    Session,
    adamw,
    assert_like_plain_torch,
    assert_same_bits,
    engine_for,
    exact_sgd,
    snapshot,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from zero_plugin import Lion
from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import CheckpointError, EngineStateError, OptimizerError, ZeroError

# Without a compiled rule: torch's own code runs on the slices, so bits are torch's ---------------------------------------

FOREIGN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
}


def train_odd(session: Session) -> None:
    for step in range(4):
        session.backward(mlp_loss(session.model, step))
        if step == 2:
            session.optimizer.param_groups[0]["lr"] *= 0.5
        session.update()


@pytest.mark.parametrize("name", list(FOREIGN))
def test_other_element_wise_optimizers_are_torchs_bit_for_bit(name: str) -> None:
    assert_like_plain_torch(OddMLP, train_odd, FOREIGN[name])


@pytest.mark.parametrize("name", list(FOREIGN))
def test_states_of_other_optimizers_survive_a_round_trip(name: str) -> None:
    def run(*, interrupted: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        model = OddMLP()
        saved: dict[str, Any] = {}
        for part in range(2):
            optimizer = FOREIGN[name](model.parameters())
            with engine_for(model, optimizer) as (engine, _):
                if part == 1 and interrupted:
                    optimizer.load_state_dict(saved)
                for step in range(2) if interrupted else range(4):
                    engine.backward(mlp_loss(model, step + 2 * part))
                    optimizer.step()
                    optimizer.zero_grad()
                saved = optimizer.state_dict()
            if not interrupted:
                break
        return snapshot(model), saved

    weights, state = run(interrupted=True)
    expected_weights, expected_state = run(interrupted=False)
    assert_same_bits(weights, expected_weights)
    assert_same_bits(state["state"], expected_state["state"])
    # And it is torch's format: keys, shapes, and a plain optimizer of the class takes it.
    torch.manual_seed(0)
    twin = OddMLP()
    plain = FOREIGN[name](twin.parameters())
    for step in range(4):
        mlp_loss(twin, step).backward()
        plain.step()
        plain.zero_grad()
    assert_same_bits(state["state"], plain.state_dict()["state"])
    plain.load_state_dict(copy.deepcopy(state))


class Clumped(torch.optim.Optimizer):
    """Scales each parameter's step by its own norm, so an element's step depends on the others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


class WeightAverage(torch.optim.Optimizer):
    """Element-wise, but of the user's own making."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    mean = state.setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.5).add_(parameter.grad, alpha=0.5)
                    parameter.add_(mean.sign() * parameter.grad.abs(), alpha=-group["lr"])


def test_an_element_wise_optimizer_of_the_users_own() -> None:
    assert_like_plain_torch(OddMLP, train_odd, WeightAverage)


REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": torch.optim.LBFGS,
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p)),
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda p: torch.optim.Muon([item for item in p if item.dim() == 2]),
    "Clumped": Clumped,
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_optimizers_that_cannot_run_on_shards_are_refused(name: str) -> None:
    model = TinyMLP()
    optimizer = REFUSED[name](model.parameters())
    kind, before = type(optimizer), snapshot(model)
    with pytest.raises(OptimizerError, match=rf"{name}.*element-wise"):
        ZeroEngine(model, optimizer)
    # Nothing was changed: the optimizer and the model are plain.
    assert type(optimizer) is kind
    assert_same_bits(snapshot(model), before)
    assert not model.first.weight._backward_hooks
    mlp_loss(model, 0).backward()
    assert isinstance(model.first.weight.grad, torch.Tensor)
    assert type(model.first.weight.grad) is torch.Tensor


# The object -----------------------------------------------------------------------------------------------------------


def test_the_optimizer_stays_the_users_object() -> None:
    model = TinyMLP()
    optimizer = adamw(model.parameters())
    group, parameters = optimizer.param_groups[0], list(model.parameters())
    with engine_for(model, optimizer) as (engine, _):
        assert isinstance(optimizer, torch.optim.AdamW)
        assert optimizer.param_groups[0] is group
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(a is b for a, b in zip(group["params"], parameters, strict=True))
        assert "AdamW" in repr(optimizer)
        assert engine.optimizers == (optimizer,)
        with pytest.raises(ZeroError, match="already belongs to a"):
            ZeroEngine(model, optimizer)
        with pytest.raises(EngineStateError, match="not one of this engine's optimizers"):
            engine.clip_grad_norm_(1.0, optimizer=adamw(model.parameters()))
        mlp_loss(model, 0).backward()
        optimizer.step()


def test_closures() -> None:
    def script(session: Session) -> None:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                session.optimizer.zero_grad()
                loss = mlp_loss(session.model, step)
                session.backward(loss)
                return loss

            with torch.no_grad():
                loss = session.optimizer.step(closure)
            session.notes.append(loss.detach())

    assert_like_plain_torch(TinyMLP, script)


def test_closures_given_to_the_engine() -> None:
    model, calls = TinyMLP(), []
    with engine_for(model, exact_sgd(model.parameters())) as (engine, _):

        def closure() -> str:
            calls.append(torch.is_grad_enabled())
            engine.zero_grad()
            engine.backward(mlp_loss(model, 0))
            return "loss"

        before = snapshot(model)
        assert engine.step(closure=closure) == "loss"
        assert calls == [True]
        assert not torch.equal(model.first.weight, before["first.weight"])


def test_step_hooks_run_once_a_step() -> None:
    model = TinyMLP()
    optimizer = exact_sgd(model.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre before"))
    with engine_for(model, optimizer) as (engine, _):
        optimizer.register_step_post_hook(lambda o, *_: calls.append(f"post {o is optimizer}"))
        every = register_optimizer_step_post_hook(lambda *_: calls.append("every"))
        try:
            engine.backward(mlp_loss(model, 0))
            optimizer.step()
        finally:
            every.remove()
    assert sorted(calls) == ["every", "post True", "pre before"]


def test_state_dict_hooks_run() -> None:
    model = TinyMLP()
    optimizer = adamw(model.parameters())
    seen: list[str] = []
    with engine_for(model, optimizer):
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("loading"))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        state = optimizer.state_dict()
        assert state.pop("extra") == 1
        optimizer.load_state_dict(state)
    assert seen == ["saving", "loading", "loaded"]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, T_max=5)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize("early", [True, False])
def test_schedulers_made_before_and_after_the_engine(name: str, early: bool) -> None:
    def run(*, plain: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = TinyMLP()
        optimizer = exact_sgd(model.parameters())
        scheduler = SCHEDULERS[name](optimizer) if early else None
        engine = None if plain else ZeroEngine(model, optimizer)
        scheduler = SCHEDULERS[name](optimizer) if scheduler is None else scheduler
        rates: list[Any] = []
        for step in range(6):
            mlp_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        if engine is not None:
            engine.close()
        return rates, snapshot(model)

    # pytest turns the warning "lr_scheduler.step() before optimizer.step()" into an error.
    (rates, weights), (expected, plain) = run(plain=False), run(plain=True)
    assert rates == expected
    assert len(set(rates)) > 1
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-7)


# State dicts ----------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "SGD": exact_sgd,
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.125),
    "Lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}
CHOICES = ((0,), (0, 1), (1,), (0,), (1,), (0, 1))


def branch_steps(model: nn.Module, optimizer: Any, backward: Any, steps: range) -> None:
    """Experts are used at times and the third never, so step counts differ and one has no state."""
    for step in steps:
        backward(mlp_loss(model, step, *CHOICES[step]))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(MAKERS))
def test_resuming_from_state_dicts_is_bit_exact(
    name: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = BranchMLP().to(dtype)
        return model, MAKERS[name](model.parameters())

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        return model(inputs, *CHOICES[step]).square().mean()

    def advance(model: nn.Module, engine: ZeroEngine, optimizer: Any, steps: range) -> None:
        for step in steps:
            engine.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = start(0)
    with engine_for(model, optimizer) as (engine, _):
        advance(model, engine, optimizer, range(3))
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c"
        )
        advance(model, engine, optimizer, range(3, 6))
        expected = snapshot(model), optimizer.state_dict()
    saved = torch.load(tmp_path / "c", weights_only=True)
    if dtype == torch.bfloat16:
        masters = [entry["master"] for entry in saved["optimizer"]["state"].values()]
        assert any((master != master.bfloat16()).any() for master in masters)
    for weights_first in (True, False):
        # Another placement, stage and bucket size: the format knows none of them.
        model, optimizer = start(1)
        with engine_for(
            model, optimizer, stage=0, optimizer="device", bucket_bytes=128, backend="inline"
        ) as (engine, _):
            if weights_first:
                model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            if not weights_first:
                model.load_state_dict(saved["model"])
            advance(model, engine, optimizer, range(3, 6))
            assert_same_bits((snapshot(model), optimizer.state_dict()), expected)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "Lion"])
def test_torch_and_the_engine_read_each_others_state(name: str) -> None:
    def start() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = BranchMLP()
        return model, MAKERS[name](model.parameters())

    plain, other = start()
    branch_steps(plain, other, torch.Tensor.backward, range(4))
    expected = other.state_dict()
    model, optimizer = start()
    with engine_for(model, optimizer) as (engine, _):
        branch_steps(model, optimizer, engine.backward, range(2))
        mine = optimizer.state_dict()
        assert mine["param_groups"][0].keys() == expected["param_groups"][0].keys()
    # Ours into torch, where training goes on.
    twin, taker = start()
    twin.load_state_dict(model.state_dict())
    taker.load_state_dict(mine)
    branch_steps(twin, taker, torch.Tensor.backward, range(2, 4))
    torch.testing.assert_close(snapshot(twin), snapshot(plain), rtol=1e-5, atol=1e-6)
    # Torch's into ours; the third expert has no state in either.
    model, optimizer = start()
    model.load_state_dict(plain.state_dict())
    with engine_for(model, optimizer) as (engine, _):
        optimizer.load_state_dict(expected)
        found = optimizer.state_dict()
        used = [number for number, entry in expected["state"].items() if entry.get("step", 1)]
        for number in used:
            for key, value in expected["state"][number].items():
                if isinstance(value, torch.Tensor):
                    assert_same_bits(found["state"][number][key], value, key)
        branch_steps(model, optimizer, engine.backward, range(4, 6))
        branch_steps(plain, other, torch.Tensor.backward, range(4, 6))
        torch.testing.assert_close(snapshot(model), snapshot(plain), rtol=1e-5, atol=1e-6)


def test_state_of_an_optimizer_that_has_stepped_is_taken_over() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            session.backward(mlp_loss(session.model, 10 + step))
            session.update()

    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = exact_sgd(model.parameters())
    for step in range(3):
        mlp_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(model)
    other = exact_sgd(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    script(Session(model=twin, optimizer=other))
    with engine_for(model, optimizer) as (engine, _):
        script(Session(model=model, optimizer=optimizer, engine=engine))
    assert_same_bits(snapshot(model), snapshot(twin))


def test_loading_replaces_hyper_parameters_and_leaves_nothing_behind() -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, optimizer):
        empty = optimizer.state_dict()
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        empty["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(empty)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.state_dict()["state"] == {}


def test_a_state_dict_that_does_not_fit_is_refused_whole() -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        good = optimizer.state_dict()

        def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
            state = copy.deepcopy(good)
            change(state)
            return state

        cases: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
            (lambda s: s["param_groups"].append({"params": []}), "group"),
            (lambda s: s["param_groups"][0]["params"].pop(), "parameters"),
            (lambda s: s["state"][3].update(exp_avg=torch.zeros(4)), "second.bias"),
        ]
        for change, culprit in cases:
            with pytest.raises(CheckpointError, match=culprit):
                optimizer.load_state_dict(broken(change))
            assert_same_bits(optimizer.state_dict(), good)


def test_state_dict_is_plain_and_detached() -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, optimizer), warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        held = copy.deepcopy(state)
        engine.backward(mlp_loss(model, 1))
        optimizer.step()
        assert_same_bits(state, held, "a state dict must not change while training goes on")
        assert {type(v) for e in state["state"].values() for v in e.values()} == {torch.Tensor}
