"""Reports about how a model is used: unused and shared parameters, clipping, schedulers, adapters, several models.

Each scenario runs at one process and again in two ranks. The number in a name is the case's number in
docs/differences.md.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import BranchMLP, TinyMLP, features, make, mlp_loss
from support.training import (
    adamw,
    assert_like_plain_torch,
    assert_same_bits,
    engine_for,
    exact_sgd,
    ranks,
    snapshot,
)
from torch import Tensor, nn

from zero_plugin import ZeroConfig, ZeroEngine

STAGES = (0, 1, 2, 3)


def tail(model: nn.Module, engine: ZeroEngine) -> dict[str, Tensor]:
    """Weights that may cross a process boundary."""
    with engine.full_params():
        return {name: value.clone() for name, value in snapshot(model).items()}


# 27: a trainable parameter that is never used -----------------------------------------------------------------------


def unused_branch(rank: int, size: int, stage: int) -> dict[str, Tensor]:
    model = make(BranchMLP)
    with engine_for(model, exact_sgd(model.parameters()), stage=stage) as (engine, optimizer):
        for step in range(3):
            engine.backward(mlp_loss(model, step, 0, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
        return tail(model, engine)


def averaged_plain(size: int, loss: Callable[[nn.Module, int, int], Tensor], model: Any) -> Any:
    """Three steps of plain torch on the mean of what `size` ranks would compute."""
    optimizer = exact_sgd(model.parameters())
    for step in range(3):
        for rank in range(size):
            (loss(model, step, rank) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_27_a_branch_that_is_never_used(size: int) -> None:
    """27: two ranks hung at ZeRO-2 when a trainable parameter was not used. Three steps, every stage."""
    start = make(BranchMLP)
    plain = averaged_plain(
        size, lambda m, step, rank: mlp_loss(m, step, 0, rank=rank), make(BranchMLP)
    )
    for stage in STAGES:
        found = [unused_branch(0, 1, stage)] if size == 1 else ranks(size, unused_branch, stage)
        for weights in found:
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6)
            for name, value in start.experts[1].state_dict().items():
                assert torch.equal(weights[f"experts.1.{name}"], value)


# 52: a parameter used outside its module ----------------------------------------------------------------------------


class Borrower(nn.Module):
    """Uses another module's weight, and that weight transposed, without calling the module."""

    def __init__(self) -> None:
        super().__init__()
        self.lender = nn.Linear(7, 5)
        self.never_called = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.linear(inputs, self.lender.weight)
        hidden = hidden + self.never_called.weight.sum() * self.never_called.bias
        return hidden + (hidden @ self.lender.weight @ self.lender.weight.t()) * 0.125


def test_52_a_weight_used_outside_its_module() -> None:
    """52: it had shape (0,), or was once broadcast wrongly without a word."""

    def script(session: Any) -> None:
        for step in range(3):
            session.backward(mlp_loss(session.model, step))
            session.update()

    settings = tuple({"stage": stage, "bucket_bytes": 128} for stage in STAGES)
    assert_like_plain_torch(Borrower, script, settings=settings)


def borrowed(rank: int, size: int, stage: int) -> dict[str, Tensor]:
    model = make(Borrower)
    with engine_for(model, exact_sgd(model.parameters()), stage=stage) as (engine, optimizer):
        for step in range(3):
            engine.backward(mlp_loss(model, step, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
        return tail(model, engine)


@pytest.mark.dist
def test_52_a_weight_used_outside_its_module_on_two_ranks() -> None:
    plain = averaged_plain(2, lambda m, step, rank: mlp_loss(m, step, rank=rank), make(Borrower))
    for stage in (2, 3):
        for weights in ranks(2, borrowed, stage):
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6)


# 57, 58: clipping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_57_the_norm_is_real_and_from_before_clipping(stage: int) -> None:
    """57: the reported norm was None, zero, or looked as if clipping did nothing."""
    ours, plain = make(TinyMLP), make(TinyMLP)
    with engine_for(ours, exact_sgd(ours.parameters(), momentum=0), stage=stage) as (
        engine,
        optimizer,
    ):
        engine.backward(100 * mlp_loss(ours, 0))
        (100 * mlp_loss(plain, 0)).backward()
        true = torch.nn.utils.get_total_norm(
            [p.grad for p in plain.parameters() if p.grad is not None]
        )
        reported = engine.clip_grad_norm_(0.5)
        torch.testing.assert_close(reported, true, rtol=1e-6, atol=0)
        assert reported > 5
        before = tail(ours, engine)
        optimizer.step()
    moved = [
        (value - before[name]) / 0.125 + before[name] * 2.0**-6
        for name, value in snapshot(ours).items()
    ]
    assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(0.5, rel=1e-4)


def test_58_nothing_is_clipped_by_default() -> None:
    """58: "no clipping" became clipping at 1.0. Here a gradient of norm above 100 goes through whole."""

    def script(session: Any) -> None:
        session.backward(1000 * mlp_loss(session.model, 0))
        session.update()

    assert_like_plain_torch(TinyMLP, script)
    assert not [name for name in ZeroConfig.__dataclass_fields__ if "clip" in name]


# 60: schedulers -----------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "warm_up": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda step: min(1.0, (step + 1) / 4)
    ),
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
}


@pytest.mark.parametrize("which", SCHEDULERS)
@pytest.mark.parametrize("before_engine", [True, False])
def test_60_the_learning_rates_are_those_of_plain_torch(which: str, before_engine: bool) -> None:
    """60: schedulers were stepped twice, or the first learning rate was wrong. (The Trainer: tests/lightning.)"""

    def rates(engine_wanted: bool) -> tuple[list[float], dict[str, Tensor]]:
        model = make(TinyMLP)
        optimizer = exact_sgd(model.parameters())
        scheduler = SCHEDULERS[which](optimizer) if before_engine else None
        engine = ZeroEngine(model, optimizer, ZeroConfig(threads=1)) if engine_wanted else None
        scheduler = scheduler or SCHEDULERS[which](optimizer)
        seen: list[float] = []
        for step in range(8):
            loss = mlp_loss(model, step)
            engine.backward(loss) if engine else loss.backward()
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if engine:
            engine.close()
        return seen, snapshot(model)

    (found, weights), (expected, plain_weights) = rates(True), rates(False)
    assert found == expected
    assert len(set(found)) > 2
    for name, value in weights.items():
        torch.testing.assert_close(value, plain_weights[name], rtol=1e-5, atol=1e-6)


# 62: adapters -------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """A frozen linear layer plus a low-rank change that starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + inputs @ self.lora_A.t() @ self.lora_B.t()


class Adapted(nn.Module):
    """`TinyMLP` with adapters on both layers."""

    def __init__(self) -> None:
        super().__init__()
        base = TinyMLP()
        self.first, self.second = LoraLinear(base.first), LoraLinear(base.second)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def adapted(rank: int, size: int, stage: int) -> dict[str, Any]:
    """Trains the adapters; the optimizer is given every parameter, as most scripts do."""
    model = make(Adapted)
    with engine_for(model, adamw(model.parameters(), lr=0.02), stage=stage) as (engine, optimizer):
        held = engine.memory()["host"]
        for step in range(4):
            engine.backward(mlp_loss(model, step, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
        saved = {
            name: value
            for name, value in engine.full_state_dict().items()
            if name.split(".")[-1].startswith("lora_")
        }
        return {
            "saved": saved,
            "weights": tail(model, engine),
            "master": held["master"],
            "states": len(optimizer.state_dict()["state"]),
        }


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_62_saved_adapters_are_whole_and_trained(size: int) -> None:
    """62: lora_B was zero or empty in what was saved."""
    start = make(Adapted)
    trainable = sum(p.numel() for p in start.parameters() if p.requires_grad)
    results = {
        stage: [adapted(0, 1, stage)] if size == 1 else ranks(size, adapted, stage)
        for stage in STAGES
    }
    for stage, outcomes in results.items():
        saved = outcomes[0]["saved"]
        assert set(saved) == {
            f"{layer}.lora_{part}" for layer, part in itertools.product(("first", "second"), "AB")
        }
        for name, value in saved.items():
            assert value.shape == start.get_parameter(name).shape
            assert value.abs().min() > 0, f"stage {stage}: {name}"
        assert all(outcome["saved"] == {} for outcome in outcomes[1:])
        for outcome in outcomes:
            assert_same_bits(outcome["weights"], outcomes[0]["weights"])
            for layer in ("first", "second"):
                key = f"{layer}.base.weight"
                assert torch.equal(outcome["weights"][key], start.get_parameter(key))
            assert outcome["states"] == 4
            # The frozen base has no master: 4 bytes a trainable element, and padding of less than 64 bytes each.
            assert outcome["master"] <= 4 * trainable + 4 * 4 * 64
    assert_same_bits(results[1][0]["weights"], results[2][0]["weights"])


# 66, 41: what is saved ----------------------------------------------------------------------------------------------


def saved(rank: int, size: int, stage: int) -> dict[str, Any]:
    model = make(TinyMLP)
    with engine_for(model, stage=stage, loss_scale="dynamic") as (engine, optimizer):
        engine.backward(mlp_loss(model, 0, rank=rank))
        optimizer.step()
        file = io.BytesIO()
        torch.save(
            {
                "model": tail(model, engine),
                "full": engine.full_state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": engine.loss_scale_state(),
            },
            file,
        )
        return {"file": file.getvalue(), "own": tail(model, engine)}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_66_and_41_what_is_saved_is_whole_and_plain(size: int) -> None:
    """66: weights of size 0 were written. 41: torch's safe loader refused the system's own objects."""
    shapes = {name: value.shape for name, value in make(TinyMLP).state_dict().items()}
    for stage in STAGES:
        outcomes = [saved(0, 1, stage)] if size == 1 else ranks(size, saved, stage)
        for rank, outcome in enumerate(outcomes):
            loaded = torch.load(io.BytesIO(outcome["file"]), weights_only=True)
            assert {name: value.shape for name, value in loaded["model"].items()} == shapes
            assert_same_bits(loaded["model"], outcome["own"])
            if rank == 0:
                assert_same_bits(loaded["full"], outcome["own"])
            else:
                assert loaded["full"] == {}
            moments = loaded["optimizer"]["state"]
            assert [tuple(entry["exp_avg"].shape) for entry in moments.values()] == [
                tuple(shape) for shape in shapes.values()
            ]
            # Two parameters in one storage would be written twice, or refused by safetensors.
            storages = {value.untyped_storage().data_ptr() for value in loaded["model"].values()}
            assert len(storages) == len(shapes)
            assert all(
                value.untyped_storage().nbytes() == value.numel() * 4
                for value in loaded["model"].values()
            )


# 67: two models in one process --------------------------------------------------------------------------------------


def distilled(rank: int, size: int, stage: int) -> dict[str, Any]:
    """A student learns from a teacher that learns too, each with its own engine."""
    teacher, student = make(TinyMLP, seed=1), make(TinyMLP, seed=2)
    with (
        engine_for(teacher, exact_sgd(teacher.parameters()), stage=stage) as (
            first,
            teacher_optimizer,
        ),
        engine_for(student, exact_sgd(student.parameters()), stage=stage) as (
            second,
            student_optimizer,
        ),
    ):
        for step in range(3):
            inputs = features(step, rank=rank)
            first.backward(mlp_loss(teacher, step, rank=rank))
            with torch.no_grad():
                target = teacher(inputs)
            second.backward(F.mse_loss(student(inputs), target))
            for optimizer in (teacher_optimizer, student_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        return {"teacher": tail(teacher, first), "student": tail(student, second)}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_67_teacher_and_student_in_one_process(size: int) -> None:
    """67: a second model under the same system failed or was sharded as part of the first."""
    teacher, student = make(TinyMLP, seed=1), make(TinyMLP, seed=2)
    optimizers = [exact_sgd(model.parameters()) for model in (teacher, student)]
    for step in range(3):
        for rank in range(size):
            inputs = features(step, rank=rank)
            (mlp_loss(teacher, step, rank=rank) / size).backward()
            with torch.no_grad():
                target = teacher(inputs)
            (F.mse_loss(student(inputs), target) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    outcomes = [
        outcome
        for stage in (2, 3)
        for outcome in ([distilled(0, 1, stage)] if size == 1 else ranks(size, distilled, stage))
    ]
    for outcome in outcomes:
        for key, model in (("teacher", teacher), ("student", student)):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(outcome[key][name], value, rtol=1e-6, atol=1e-6)


# 69: offload without sharding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("gradients", ["device", "host"])
def test_69_offload_without_sharded_gradients(stage: int, gradients: str) -> None:
    """69: offload was only to be had with sharding, "stage 1 offload" did not exist."""

    def script(session: Any) -> None:
        for step in range(3):
            session.backward(mlp_loss(session.model, step))
            session.update()

    settings = {"stage": stage, "optimizer": "host", "gradients": gradients}
    assert_like_plain_torch(TinyMLP, script, settings=(settings,))
    model = make(TinyMLP)
    with engine_for(model, **settings) as (engine, _):
        held = engine.memory()
        assert held["host"]["master"] > 0
        assert held["host"]["moments"] > 0
        assert held["device"]["master"] == held["device"]["moments"] == 0
        assert (held["host"]["gradients"] > 0) == (gradients == "host")
        assert (held["device"]["gradients"] > 0) == (gradients == "device")


def unsharded(rank: int, size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in STAGES:
        model = make(TinyMLP)
        with engine_for(model, exact_sgd(model.parameters()), stage=stage) as (engine, optimizer):
            results[f"master {stage}"] = engine.memory()["host"]["master"]
            for step in range(3):
                engine.backward(mlp_loss(model, step, rank=rank))
                optimizer.step()
                optimizer.zero_grad()
            results[f"weights {stage}"] = tail(model, engine)
    return results


@pytest.mark.dist
def test_69_offload_without_sharding_on_two_ranks() -> None:
    """69: every rank keeps all states at stage 0 and half of them at stage 1; the weights are the same."""
    first, second = ranks(2, unsharded)
    for stage in STAGES:
        assert_same_bits(first[f"weights {stage}"], second[f"weights {stage}"])
        assert_same_bits(first[f"weights {stage}"], first["weights 2"])
    assert first["master 0"] > 1.5 * first["master 1"]
    assert first["master 1"] == first["master 2"]
