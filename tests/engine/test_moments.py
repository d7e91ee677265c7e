"""Moments kept in bf16 or 8 bits: the same bits in every tier, at any number of ranks and across a resume, in the bytes they cost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import OddMLP, gpt_batch, make_gpt
from support.training import (
    Outcome,
    Recipe,
    adamw,
    assert_same_bits,
    assert_same_outcome,
    config,
    engine_for,
    ranks,
    snapshot,
    train,
)
from torch import Tensor, nn

from zero_plugin import Lion
from zero_plugin.config import MomentDType
from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import BudgetError, OptimizerError
from zero_plugin.optim import moments
from zero_plugin.optim.moments import GROUP, STORED, kept_numel, stream_of
from zero_plugin.optim.rule import rule_for

KINDS: tuple[MomentDType, ...] = ("bf16", "int8")
PLACES: dict[str, dict[str, Any]] = {
    "host": {"stage": 2},
    "device": {"stage": 0, "optimizer": "device", "gradients": "device"},
    "device, gathered": {"stage": 3, "optimizer": "device", "gradients": "device"},
    "part on device": {"stage": 1, "device_fraction": 0.4},
    "speculating": {"stage": 2, "speculate": True, "backend": "chaos"},
    "weights on host": {"stage": 3, "params": "host", "backend": "chaos"},
    "inside backward": {"stage": 2, "nonfinite": "propagate", "update_in_backward": True},
    "nvme": {"stage": 2, "optimizer": "nvme", "nvme_cache_bytes": 60_000},
    "all on nvme": {"stage": 3, "params": "nvme", "optimizer": "nvme", "gradients": "nvme"},
}


def placed(name: str, kind: MomentDType, path: Path, **settings: Any) -> dict[str, Any]:
    """Settings of one place."""
    chosen = {**PLACES[name], "moment_dtype": kind}
    if "nvme" in chosen.values():
        chosen["nvme_path"] = str(path)
        chosen["nvme_buffer_bytes"] = 4 * (14 + 3 * 2) * 4096
    return chosen | settings


def oracle(recipe: Recipe, kind: MomentDType, warmup: int | None = None) -> Outcome:
    """Plain torch, and the reference of the update with kept moments; delayed by a step after `warmup` steps."""
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    rule = rule_for(optimizer)
    assert rule is not None
    named = dict(model.named_parameters())
    masters = {name: p.detach().float().flatten().clone() for name, p in named.items()}
    kept = {
        name: [
            torch.zeros(kept_numel(kind, -(-p.numel() // GROUP) * GROUP), dtype=STORED[kind])
            for _ in rule.state_names
        ]
        for name, p in named.items()
    }
    outcome = Outcome()
    for step in range(recipe.steps):
        loss = model(gpt_batch(step, batch=recipe.batch))
        loss.backward()
        outcome.losses.append(loss.detach().clone())
        late = warmup is not None and step + 1 >= warmup
        for name, parameter in named.items():
            assert parameter.grad is not None
            if late and step + 1 != warmup:
                parameter.data.copy_(masters[name].view_as(parameter))
            moments.update(
                rule,
                kind,
                master=masters[name],
                kept=kept[name],
                stream=stream_of(name),
                first=0,
                gradient=parameter.grad.flatten(),
                output=None,
                hyper=rule.hyper(optimizer.param_groups[0], step + 1),
                scale=1.0,
                clip_value=None,
            )
            if not late:
                parameter.data.copy_(masters[name].view_as(parameter))
            parameter.grad = None
    outcome.weights = snapshot(model)
    state: Any = {
        number: {
            key: moments.decode(item, kind, signed=signed)[: p.numel()].view_as(p)
            for key, item, signed in zip(rule.state_names, kept[name], rule.signed, strict=True)
        }
        for number, (name, p) in enumerate(named.items())
    }
    outcome.state = state
    return outcome


def lion(parameters: Any) -> torch.optim.Optimizer:
    return Lion(parameters, lr=1e-3, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_has_the_bits_of_the_reference(kind: MomentDType, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        recipe = Recipe(steps=6, width=12, dtype=dtype)
        expected = oracle(recipe, kind)
        first: Outcome | None = None
        for name in PLACES:
            found = train(recipe, **placed(name, kind, tmp_path))
            first = first or found
            assert_same_outcome(found, first, name)
        assert first is not None
        assert_same_bits(first.losses, expected.losses)
        assert_same_bits(first.weights, expected.weights)
        for number, entry in expected.state.items():
            own = first.state["state"][number]
            assert_same_bits({key: own[key] for key in entry}, entry, f"{number} ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_master_keeps_them_too(kind: MomentDType, tmp_path: Path) -> None:
    recipe = Recipe(steps=5, width=12, dtype=torch.bfloat16, clip=0.5, accumulate=2)
    names = ("weights on host", "all on nvme", "device, gathered")
    made = [
        train(recipe, **placed(n, kind, tmp_path, optimizer=o, split_master=True))
        for n, o in zip(names, ("host", "nvme", "host"), strict=True)
    ]
    for other in made[1:]:
        assert_same_outcome(other, made[0])


@pytest.mark.parametrize("optimizer", [lion, momentum, adagrad])
def test_other_optimizers(optimizer: Any, tmp_path: Path) -> None:
    recipe = Recipe(steps=4, accumulate=2, clip=0.5, width=12, optimizer=optimizer)
    for kind in KINDS:
        expected = train(recipe, stage=2, moment_dtype=kind, overlap=False)
        for name in ("device", "nvme"):
            assert_same_outcome(train(recipe, **placed(name, kind, tmp_path)), expected, name)


def rank_outcome(rank: int, size: int, path: Path) -> list[Outcome]:
    """Every rank has the same data: the mean of equal gradients is exact, so that 2 ranks do what 1 does."""
    recipe = Recipe(steps=4, width=12, clip=0.5, dtype=torch.bfloat16)
    return [
        train(recipe, **placed(name, kind, path))
        for name, kind in itertools.product(("host", "all on nvme"), KINDS)
    ]


@pytest.mark.dist
def test_the_number_of_ranks_changes_no_bit(tmp_path: Path) -> None:
    alone = rank_outcome(0, 1, tmp_path)
    for found in ranks(2, rank_outcome, tmp_path):
        for one, other in zip(found, alone, strict=True):
            assert_same_outcome(one, other)


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("kind", KINDS)
def test_absent_gradients_skipped_steps_and_delays(kind: MomentDType, tmp_path: Path) -> None:
    def run(**settings: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({str(i): OddMLP() for i in range(3)})
        left: list[Any] = []
        with engine_for(model, **settings) as (engine, optimizer):
            for step, layer in enumerate((0, 1, 2, 0, 1, 2, 0)):
                loss = model[str(layer)](torch.ones(2, 7) * (step + 1)).square().mean()
                engine.backward(loss * (float("inf") if step == 4 else 1.0))
                optimizer.step()
                optimizer.zero_grad()
                left.append(loss.detach().clone())
            engine.drain()
            assert engine.skipped_steps == 1
            with engine.full_params():
                left.append(snapshot(model))
            left.append(optimizer.state_dict()["state"])
        return left

    expected = run(stage=2, moment_dtype=kind, overlap=False)
    for name in ("nvme", "all on nvme", "weights on host", "speculating"):
        assert_same_bits(run(**placed(name, kind, tmp_path)), expected, name)
    delayed = {"delayed_update": True, "delayed_update_warmup": 2}
    late = [run(**placed(name, kind, tmp_path, **delayed)) for name in ("host", "nvme")]
    # No layer is used in two steps in a row: an update that is one step late comes in time.
    for found in late:
        assert_same_bits(found, expected, "delayed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_delayed_update_follows_its_recurrence(kind: MomentDType, tmp_path: Path) -> None:
    recipe = Recipe(steps=8, width=12)
    expected, plain = oracle(recipe, kind, warmup=3), oracle(recipe, kind)
    delay = {"delayed_update": True, "delayed_update_warmup": 3}
    for name in ("host", "weights on host", "nvme", "all on nvme"):
        found = train(recipe, **placed(name, kind, tmp_path, **delay))
        assert_same_bits(found.losses, expected.losses, name)
        for number, entry in expected.state.items():
            own = found.state["state"][number]
            assert_same_bits({key: own[key] for key in entry}, entry, f"{name}, {number} ")
    # A delay shows from the step after the warm-up's last.
    same = [torch.equal(a, b) for a, b in zip(expected.losses, plain.losses, strict=True)]
    assert same == [True] * 3 + [False] * 5


# Bytes -------------------------------------------------------------------------------------------------------------


def groups_of(numel: int) -> int:
    return -(-numel // GROUP) * GROUP


@pytest.mark.parametrize(("kind", "sixteen"), [("fp32", 64), ("bf16", 32), ("int8", 17)])
def test_bytes_in_memory_and_on_the_way(kind: MomentDType, sixteen: int, tmp_path: Path) -> None:
    """Two moments of Adam: 8 bytes an element, 4, and 2 and an eighth."""
    for name in ("host", "device", "nvme"):
        torch.manual_seed(0)
        model = nn.Linear(256, 256, bias=False).bfloat16()
        numel = 256 * 256
        settings = placed(name, kind, tmp_path, bucket_bytes="1MiB")
        if name == "nvme":
            settings |= {"nvme_buffer_bytes": "8MiB", "nvme_cache_bytes": 0}
        with engine_for(model, **settings) as (engine, optimizer):
            tier = PLACES[name].get("optimizer", "host")
            held = engine.memory()[tier]
            assert (held["master"], held["moments"]) == (4 * numel, 2 * numel * sixteen // 16)
            before: dict[str, int] = {}
            after: dict[str, int] = {}
            for _ in range(3):
                before = engine.ledger()
                engine.backward(model(torch.ones(2, 256).bfloat16()).float().sum())
                optimizer.step()
                optimizer.zero_grad()
                engine.drain()
                after = engine.ledger()
            if name == "nvme":
                moved = 4 * numel + 2 * numel * sixteen // 16
                for way in ("nvme_read", "nvme_write"):
                    assert after[way] - before[way] == moved, way


def test_a_buffer_too_small_says_how_much_it_takes(tmp_path: Path) -> None:
    model = make_gpt(width=12)
    for kind, needed in (("bf16", 2 * 4 * 8 * 4096 // 2), ("int8", 4 * (6 * 4096 + 4 * 4096))):
        settings: dict[str, Any] = {
            "stage": 2,
            "optimizer": "nvme",
            "nvme_path": str(tmp_path),
            "moment_dtype": kind,
        }
        with pytest.raises(BudgetError, match="cannot hold 4 tiles of 3 states") as caught:
            ZeroEngine(model, adamw(model.parameters()), config(**settings, nvme_buffer_bytes=1000))
        least = int(str(caught.value).split("give at least ")[1].split(" ")[0].replace(",", ""))
        assert least <= needed
        with engine_for(model, **settings, nvme_buffer_bytes=least) as (engine, _):
            assert engine.memory()["host"]["staging"] >= 0
        with pytest.raises(BudgetError, match="cannot hold"):
            ZeroEngine(
                model, adamw(model.parameters()), config(**settings, nvme_buffer_bytes=least - 4)
            )
    assert list(tmp_path.iterdir()) == []


# States that leave and come back -----------------------------------------------------------------------------------


def steps(model: Any, engine: ZeroEngine, optimizer: Any, numbers: range) -> list[Tensor]:
    losses: list[Tensor] = []
    for step in numbers:
        loss = model(gpt_batch(step))
        engine.backward(loss)
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit(kind: MomentDType, tmp_path: Path) -> None:
    for name, other, dtype in (
        ("host", "all on nvme", torch.bfloat16),
        ("nvme", "device", torch.float32),
        ("device", "weights on host", torch.float32),
    ):
        model = make_gpt(dtype, width=12)
        with engine_for(model, **placed(name, kind, tmp_path)) as (engine, optimizer):
            steps(model, engine, optimizer, range(4))
            engine.save_checkpoint(tmp_path / "ck", asynchronous=name == "nvme")
            state = optimizer.state_dict()
            weights = engine.full_state_dict()
            expected = steps(model, engine, optimizer, range(4, 7))
            final = optimizer.state_dict()
        model = make_gpt(dtype, width=12)
        with engine_for(model, **placed(other, kind, tmp_path)) as (engine, optimizer):
            engine.load_checkpoint(tmp_path / "ck")
            assert_same_bits(optimizer.state_dict(), state, name)
            assert_same_bits(steps(model, engine, optimizer, range(4, 7)), expected, name)
            assert_same_bits(optimizer.state_dict(), final, name)
        model = make_gpt(dtype, width=12)
        model.load_state_dict(weights)
        with engine_for(model, **placed(other, kind, tmp_path)) as (engine, optimizer):
            optimizer.load_state_dict(state)
            assert_same_bits(steps(model, engine, optimizer, range(4, 7)), expected, "torch's")


def test_moments_move_between_dtypes(tmp_path: Path) -> None:
    model = make_gpt(width=12)
    with engine_for(model, stage=2) as (engine, optimizer):
        steps(model, engine, optimizer, range(4))
        engine.save_checkpoint(tmp_path / "whole")
        whole = optimizer.state_dict()["state"]
    bounds = {"bf16": (1 / 256, 0.0), "int8": (1 / 32, 1 / 2048)}
    for kind in KINDS:
        model = make_gpt(width=12)
        with engine_for(model, stage=3, moment_dtype=kind) as (engine, optimizer):
            engine.load_checkpoint(tmp_path / "whole")
            rounded = optimizer.state_dict()["state"]
            engine.save_checkpoint(tmp_path / kind)
        relative, of_largest = bounds[kind]
        for number, entry in whole.items():
            for key in ("exp_avg", "exp_avg_sq"):
                exact, found = entry[key], rounded[number][key]
                error = (found - exact).abs()
                if key == "exp_avg_sq":
                    # What is below the smallest number of its group became that.
                    assert torch.equal(found == 0, exact == 0)
                    error = torch.where(found > exact.max() * 2.0**-15, error, 0.0)
                assert (error <= exact.abs() * relative + exact.abs().max() * of_largest).all()
        model = make_gpt(width=12)
        with engine_for(model, stage=2) as (engine, optimizer):
            engine.load_checkpoint(tmp_path / kind)
            assert_same_bits(optimizer.state_dict()["state"], rounded, kind)


def test_an_optimizer_without_a_compiled_rule_is_refused() -> None:
    model = make_gpt(width=12)
    with pytest.raises(OptimizerError, match=r"RMSprop runs as plain torch .* moment_dtype='fp32'"):
        ZeroEngine(model, torch.optim.RMSprop(model.parameters()), config(moment_dtype="bf16"))
