"""Split masters: exact fp32 masters of 2 bytes beside bf16 weights, in every tier that takes them."""

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
from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import BudgetError, EngineStateError, OptimizerError
from zero_plugin.optim import reference
from zero_plugin.optim.rule import rule_for
from zero_plugin.optim.split import join, split

PAGE = 4096
SMALLEST = 4 * 10 * PAGE // 2
"""The smallest `nvme_buffer_bytes` for a remainder and two states."""

PLACES = [
    {"params": params, "optimizer": optimizer}
    for params, optimizer in itertools.product(("device", "host", "nvme"), ("host", "nvme"))
]


def placed(number: int, path: Path, **settings: Any) -> dict[str, Any]:
    """Settings of one placement, unlike the others' in lanes, buckets and slabs."""
    chosen: dict[str, Any] = {
        "stage": 3,
        "split_master": True,
        **PLACES[number],
        "gradients": ("host", "nvme", "device")[number % 3],
        "backend": ("chaos", "threads", "inline")[(number + number // 3) % 3],
        "backend_seed": number,
        "bucket_bytes": (4096, "1MiB", 1024)[number % 3],
        "prefetch_units": (1, 2, 0)[number % 3],
    }
    if "nvme" in chosen.values():
        chosen |= {"nvme_path": str(path)}
    if chosen["optimizer"] == "nvme":
        chosen |= {"nvme_buffer_bytes": SMALLEST, "nvme_cache_bytes": (0, 60_000)[number % 2]}
    return chosen | settings


def oracle(steps: int) -> Outcome:
    """Plain fp32 masters, the plain update, and weights that are the masters rounded, ties away from zero."""
    model = make_gpt(torch.bfloat16, width=12)
    optimizer = adamw(model.parameters())
    rule = rule_for(optimizer)
    assert rule is not None
    masters = [p.detach().float() for p in model.parameters()]
    states = [[torch.zeros_like(master) for _ in range(2)] for master in masters]
    outcome = Outcome()
    for step in range(steps):
        loss = model(gpt_batch(step))
        loss.backward()
        outcome.losses.append(loss.detach().clone())
        for parameter, master, own in zip(model.parameters(), masters, states, strict=True):
            assert parameter.grad is not None
            reference.update(
                rule,
                master=master,
                states=own,
                gradient=parameter.grad,
                output=None,
                hyper=rule.hyper(optimizer.param_groups[0], step + 1),
                scale=1.0,
                clip_value=None,
            )
            parameter.data.copy_(split(master)[0])
            parameter.grad = None
    outcome.weights = snapshot(model)
    state: Any = {
        number: {"master": master, "exp_avg": own[0], "exp_avg_sq": own[1]}
        for number, (master, own) in enumerate(zip(masters, states, strict=True))
    }
    outcome.state = state
    return outcome


def run(steps: int, settings: dict[str, Any]) -> Outcome:
    """The same under the engine."""
    model = make_gpt(torch.bfloat16, width=12)
    outcome = Outcome()
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(steps):
            loss = model(gpt_batch(step))
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.detach().clone())
        with engine.full_params():
            outcome.weights = snapshot(model)
        found = optimizer.state_dict()["state"]
    outcome.state = {
        number: {name: entry[name] for name in ("master", "exp_avg", "exp_avg_sq")}
        for number, entry in found.items()
    }
    return outcome


def test_twenty_steps_have_the_bits_of_whole_masters(tmp_path: Path) -> None:
    expected = {steps: oracle(steps) for steps in (20, 5)}
    entries = expected[20].state.values()
    lows = torch.cat([entry["master"].flatten().view(torch.int32) for entry in entries])
    assert (lows & 0xFFFF).count_nonzero() > lows.numel() // 2
    for number in range(len(PLACES)):
        settings = placed(number, tmp_path)
        steps = 20 if number in (2, 5) else 5
        found = run(steps, settings)
        for name in ("losses", "weights", "state"):
            wanted = getattr(expected[steps], name)
            assert_same_bits(getattr(found, name), wanted, f"{settings} {name}")
    assert list(tmp_path.iterdir()) == []


def lion(parameters: Any) -> torch.optim.Optimizer:
    return Lion(parameters, lr=1e-3, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [lion, sgd])
def test_other_optimizers_and_micro_batches(optimizer: Any, tmp_path: Path) -> None:
    recipe = Recipe(
        steps=4, accumulate=2, clip=0.5, width=12, dtype=torch.bfloat16, optimizer=optimizer
    )
    expected = train(recipe, stage=3, params="host", split_master=True, backend="inline")
    for number in (0, 3, 5):
        found = train(recipe, **placed(number, tmp_path))
        assert_same_outcome(found, expected, f"{PLACES[number]}")


def branches(settings: dict[str, Any]) -> Outcome:
    """Parameters without a gradient in some steps, and others of fp32, which are not split."""
    torch.manual_seed(0)
    model = nn.ModuleDict({str(i): OddMLP() for i in range(4)}).to(torch.bfloat16)
    model["3"].float()
    outcome = Outcome()
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(7):
            layer = model[str((0, 1, 3, 0, 2, 3, 0)[step])]
            inputs = (torch.ones(2, 7) * (step + 1)).to(next(layer.parameters()).dtype)
            loss = layer(inputs).float().square().mean()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.detach().clone())
        with engine.full_params():
            outcome.weights = snapshot(model)
        outcome.state = optimizer.state_dict()
    return outcome


def test_absent_and_fp32_parameters(tmp_path: Path) -> None:
    whole = branches({"stage": 3, "backend": "inline"})
    for number in range(len(PLACES)):
        found = branches(placed(number, tmp_path))
        # No master of so few lies between two bf16 numbers, so that weights are torch's.
        for name in ("losses", "weights", "state"):
            assert_same_bits(getattr(found, name), getattr(whole, name), f"{number} {name}")


def rank_outcome(rank: int, size: int, recipe: Recipe, settings: dict[str, Any]) -> Outcome:
    return train(recipe, rank=rank, **settings)


@pytest.mark.dist
def test_several_ranks_have_the_same_bits_in_every_tier(tmp_path: Path) -> None:
    recipe = Recipe(steps=3, clip=0.5, width=12, layers=1, batch=1, dtype=torch.bfloat16)
    expected = ranks(2, rank_outcome, recipe, placed(0, tmp_path, gradients="host"))
    whole = ranks(2, rank_outcome, recipe, {"stage": 3})
    found = ranks(2, rank_outcome, recipe, placed(5, tmp_path))
    for one, other in zip(found, expected, strict=True):
        assert_same_outcome(one, other, "all in files")
    # Rounding ties another way moves a weight by one unit in the last place, in one of 65,536 steps.
    for name, value in whole[0].weights.items():
        torch.testing.assert_close(expected[0].weights[name], value, rtol=0.02, atol=1e-3)
    assert list(tmp_path.iterdir()) == []


# Bytes ---------------------------------------------------------------------------------------------------------------


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def test_bytes_of_a_step_and_of_the_tiers(tmp_path: Path) -> None:
    model = make_gpt(torch.bfloat16, width=16, layers=3)
    numel = sum(p.numel() for p in model.parameters())
    settings = placed(5, tmp_path, gradients="host", bucket_bytes="1MiB", nvme_cache_bytes=0)
    settings |= {"nvme_buffer_bytes": "1MiB"}
    with engine_for(model, **settings) as (engine, optimizer):
        sharded: Any = engine._sharded
        chunks = [block.chunk for unit in sharded.units for block in unit.blocks]
        before, gathers = engine.ledger(), 0
        for step in range(4):
            before = engine.ledger()
            engine.backward(model(gpt_batch(step)))
            gathers = engine.ledger()["nvme_read"] - before["nvme_read"]
            optimizer.step()
            optimizer.zero_grad()
            engine.drain()
        moved = {key: engine.ledger()[key] - before[key] for key in ("nvme_read", "nvme_write")}
        memory = engine.memory()
    weights = sum(pages(2 * n) for n in chunks)
    moments = 2 * sum(pages(4 * n) for n in chunks)
    assert sum(chunks) < 1.02 * numel
    # A step reads and writes remainder, both moments and the weights: 12 bytes a parameter in place of 14.
    assert moved["nvme_read"] - gathers == weights + moments + weights
    assert moved["nvme_write"] == weights + moments + weights
    assert memory["nvme"]["params"] == memory["nvme"]["master"] == weights
    assert memory["nvme"]["moments"] == moments
    assert memory["host"]["master"] == memory["host"]["params"] == 0


def test_bytes_in_host_memory(tmp_path: Path) -> None:
    model = make_gpt(torch.bfloat16, width=16)
    settings = placed(2, tmp_path, gradients="host", bucket_bytes="1MiB")
    with engine_for(model, **settings) as (engine, _):
        chunks = sum(block.chunk for block in engine._roster.blocks)
        memory = engine.memory()
        taken = engine._budget._taken
    assert memory["host"]["master"] == 2 * chunks
    assert memory["host"]["moments"] == 8 * chunks
    assert taken["host"] <= sum(memory["host"].values()) + 64 * 100


def test_limits_count_the_split_form(tmp_path: Path) -> None:
    settings = placed(5, tmp_path, gradients="host", bucket_bytes="1MiB", nvme_cache_bytes=0)

    def build(**more: Any) -> int:
        model = make_gpt(torch.bfloat16, width=16)
        with engine_for(model, **settings, **more) as (engine, _):
            return sum(engine.memory()["nvme"].values())

    need = build()
    assert build(nvme_limit=need) == need
    with pytest.raises(BudgetError, match="nvme_limit"):
        build(nvme_limit=need - 1)


def test_fp32_weights_and_states_in_files_are_stored_once(tmp_path: Path) -> None:
    recipe = Recipe(steps=4, width=12)
    expected = train(recipe, stage=0, backend="inline")
    for optimizer, master in ((adamw, 0), (sgd, None)):
        model = make_gpt(torch.float32, width=12)
        settings = placed(5, tmp_path, split_master=False, nvme_buffer_bytes="1MiB")
        with engine_for(model, optimizer(model.parameters()), **settings) as (engine, _):
            memory = engine.memory()["nvme"]
            # A file without moments has to hold something: SGD keeps a master of its own.
            assert memory["master"] == (memory["params"] if master is None else master)
            if optimizer is adamw:
                assert memory["moments"] == 2 * memory["params"]
    settings = placed(5, tmp_path, split_master=False)
    assert_same_outcome(train(recipe, **settings), expected)


# States in and out ---------------------------------------------------------------------------------------------------


def warm(settings: dict[str, Any], steps: int = 3) -> tuple[Any, ZeroEngine, Any]:
    model = make_gpt(torch.bfloat16, width=12)
    optimizer = adamw(model.parameters())
    engine = ZeroEngine(model, optimizer, config(**settings))
    for step in range(steps):
        engine.backward(model(gpt_batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    return model, engine, optimizer


def go_on(model: Any, engine: ZeroEngine, optimizer: Any) -> dict[str, Any]:
    for step in range(5, 7):
        engine.backward(model(gpt_batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict()


@pytest.mark.parametrize("order", ["weights first", "states first", "states only"])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_state_goes_on_elsewhere(number: int, order: str, tmp_path: Path) -> None:
    """Masters come and go as fp32, so that whole and split forms read each other's."""
    model, engine, optimizer = warm(placed(number, tmp_path))
    with engine:
        state, weights = optimizer.state_dict(), engine.full_state_dict()
        expected = go_on(model, engine, optimizer)
    for other in ({"stage": 3}, placed(3, tmp_path), placed(4, tmp_path)):
        if order == "states only" and not other.get("split_master"):
            continue  # A whole master leaves the weights as they are until the next step.
        model, engine, optimizer = warm(other, steps=1)
        with engine:
            for what in order.split():
                if what == "weights" or (what == "first" and order.startswith("states")):
                    with engine.full_params(writeback=True):
                        model.load_state_dict(weights)
                else:
                    optimizer.load_state_dict(state)
            if order == "states only":
                assert_same_bits(engine.full_state_dict(), weights, f"{other} weights")
            assert_same_bits(optimizer.state_dict(), state, f"{other} loaded")
            assert_same_bits(go_on(model, engine, optimizer), expected, f"{other}")


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_writes_to_weights_are_taken_where_they_changed_something(
    number: int, tmp_path: Path
) -> None:
    model, engine, optimizer = warm(placed(number, tmp_path))
    with engine:
        before = optimizer.state_dict()["state"][0]["master"]
        with engine.full_params(writeback=True):
            weight = model.tokens.weight
            with torch.no_grad():
                weight[3] = 0.75
                weight[4] *= 1.0
        after = optimizer.state_dict()["state"][0]["master"]
        expected = before.clone()
        expected[3] = 0.75
        assert_same_bits(after, expected)
        assert (after.view(torch.int32) & 0xFFFF).count_nonzero() > after.numel() // 2


def test_a_write_of_the_master_rounded_to_even_keeps_the_master(tmp_path: Path) -> None:
    """A checkpoint of whole masters has such weights."""
    model, engine, optimizer = warm(placed(5, tmp_path))
    with engine:
        state = optimizer.state_dict()
        master: Tensor = state["state"][0]["master"]
        master[0, 0] = 1.0 + 2.0**-8  # halfway: 1.0078125 in split form, 1.0 to even
        optimizer.load_state_dict(state)
        with engine.full_params():
            assert model.tokens.weight[0, 0].item() == 1.0078125
        with engine.full_params(writeback=True), torch.no_grad():
            model.tokens.weight.copy_(master.to(torch.bfloat16))
            assert model.tokens.weight[0, 0].item() == 1.0
        assert_same_bits(optimizer.state_dict()["state"][0]["master"], master)
        with engine.full_params():
            assert model.tokens.weight[0, 0].item() == 1.0078125


def test_loading_changes_weights_that_are_gathered_next(tmp_path: Path) -> None:
    """Also where a forward without backward has left units here or on their way."""
    for number in (0, 2, 5):
        model, engine, optimizer = warm(placed(number, tmp_path, prefetch_units=2))
        with engine:
            state = optimizer.state_dict()
            for entry in state["state"].values():
                entry["master"].mul_(0.5)
            with torch.no_grad():
                model(gpt_batch(0))
            optimizer.load_state_dict(state)
            with torch.no_grad():
                found = model(gpt_batch(0))
            plain = make_gpt(torch.bfloat16, width=12)
            with torch.no_grad():
                for parameter, entry in zip(
                    plain.parameters(), state["state"].values(), strict=True
                ):
                    parameter.copy_(split(entry["master"])[0])
                assert torch.equal(found, plain(gpt_batch(0)))


def test_loading_inside_full_params_is_refused(tmp_path: Path) -> None:
    _, engine, optimizer = warm(placed(2, tmp_path))
    with engine:
        state = optimizer.state_dict()
        with engine.full_params(), pytest.raises(EngineStateError, match="outside a forward"):
            optimizer.load_state_dict(state)
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_states_are_readable_after_the_end(number: int, tmp_path: Path) -> None:
    _, engine, optimizer = warm(placed(number, tmp_path))
    expected = optimizer.state_dict()
    kept = engine.keep_states()
    engine.close()
    assert_same_bits(kept.state_dict(optimizer), expected)


def test_states_that_an_optimizer_brings_are_taken(tmp_path: Path) -> None:
    _, engine, optimizer = warm(placed(5, tmp_path))
    with engine:
        state, weights = optimizer.state_dict(), engine.full_state_dict()
    model = make_gpt(torch.bfloat16, width=12)
    model.load_state_dict(weights)
    plain = adamw(model.parameters())
    plain.load_state_dict(state)
    for parameter, entry in zip(model.parameters(), state["state"].values(), strict=True):
        # torch casts what it loads to the parameter's dtype.
        plain.state[parameter] = {key: value.clone() for key, value in entry.items()}
    with engine_for(model, plain, **placed(5, tmp_path)):
        assert_same_bits(plain.state_dict()["state"], state["state"])


# Refusals ------------------------------------------------------------------------------------------------------------


def test_an_optimizer_without_a_rule_is_refused() -> None:
    model = make_gpt(torch.bfloat16, width=12)
    optimizer = torch.optim.RMSprop(model.parameters())
    with pytest.raises(OptimizerError, match=r"RMSprop .*split master.*split_master=False"):
        ZeroEngine(model, optimizer, config(stage=3, split_master=True))


def test_fp16_and_gathered_parameters_keep_whole_masters() -> None:
    model = nn.ModuleDict({"fp16": OddMLP().half(), "bf16": OddMLP().bfloat16()})
    settings = {"stage": 3, "split_master": True, "persist_below": 12, "bucket_bytes": "1MiB"}
    with engine_for(model, **settings) as (engine, _):
        forms = {
            member.name: states.form
            for item in engine._states
            for states in item.blocks.values()
            for member in states.block.parameters
        }
    assert forms["fp16.first.weight"] == "whole"
    assert forms["bf16.first.weight"] == "split"
    assert forms["bf16.second.bias"] == "whole"


def test_a_master_that_is_not_finite_stays_what_it_is() -> None:
    """NaN and infinite masters pass through state dicts in both directions."""
    master = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38, -0.0, 1e-40])
    again = join(*split(master))
    assert_same_bits(again[1:], master[1:])
    assert again[0].isnan()
