"""The two pure parts of stage 3: how a model is cut into units, and how the next unit is guessed."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import BranchMLP, NormMLP, OddMLP, make, make_gpt
from torch import nn

from zero_plugin.errors import ConfigError
from zero_plugin.sharding.prefetch import OrderPredictor
from zero_plugin.sharding.units import UNIT_MARK, can_shard, plan_units

EVENTS = st.lists(st.integers(0, 5), max_size=60)


@given(EVENTS)
@settings(max_examples=200, deadline=None)
def test_nothing_is_predicted_that_never_followed(events: list[int]) -> None:
    predictor = OrderPredictor()
    seen: set[tuple[int, int]] = set()
    for number, event in enumerate(events):
        predictor.observe(event)
        if number:
            seen.add((events[number - 1], event))
        guesses: list[Any] = predictor.predict(4)
        assert len(guesses) <= 4
        for pair in zip([event, *guesses], guesses, strict=False):
            assert pair in seen


@given(EVENTS.filter(lambda events: len(set(events)) == len(events) > 0), st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_a_repeated_order_is_known_after_one_round(order: list[int], rounds: int) -> None:
    predictor = OrderPredictor()
    for number in range(rounds):
        for place, event in enumerate(order):
            if number and (number > 1 or place):
                assert predictor.predict(1) == [event]
            predictor.observe(event)


def test_a_branch_is_one_wrong_guess_and_memory_is_bounded() -> None:
    generator = random.Random(0)
    predictor = OrderPredictor()
    wrong = total = 0
    for _ in range(2000):
        middle = generator.choice([(3, 4), (5,)])
        for event in (0, 1, 2, *middle, 6, 7):
            guess = predictor.predict(1)
            wrong += guess != [event]
            total += 1
            predictor.observe(event)
    # Only what follows the branch can be guessed wrong: once a round at most, twice with what tells its end.
    assert wrong <= 2 * 2000
    assert len(predictor._following) < 100


def random_model(generator: random.Random) -> nn.Module:
    """Layers in lists, in one another, tied, frozen, shared and empty."""
    layers: list[nn.Module] = []

    def layer(depth: int) -> nn.Module:
        kind = generator.randrange(8)
        if depth and kind < 3:
            container: Any = [nn.ModuleList, nn.Sequential][generator.randrange(2)]
            parts = [layer(depth - 1) for _ in range(generator.randrange(4))]
            return container(parts) if container is nn.ModuleList else container(*parts)
        if depth and kind == 3:
            return nn.ModuleDict({f"part{i}": layer(depth - 1) for i in range(2)})
        if layers and kind == 4:
            return generator.choice(layers)
        made: nn.Module = [
            nn.Linear(3, 3),
            nn.LayerNorm(3),
            nn.Embedding(4, 3),
            nn.MultiheadAttention(4, 2),
        ][generator.randrange(4)]
        if layers and isinstance(made, nn.Linear) and generator.random() < 0.3:
            linear = [item for item in layers if isinstance(item, nn.Linear)]
            if linear:
                made.weight = generator.choice(linear).weight
        made.requires_grad_(generator.random() < 0.7)
        if generator.random() < 0.1:
            setattr(made, UNIT_MARK, True)
        layers.append(made)
        return made

    model = nn.Module()
    for number in range(generator.randrange(1, 5)):
        model.add_module(f"child{number}", layer(3))
    if generator.random() < 0.5:
        model.own = nn.Parameter(torch.zeros(2))
    return model


def check_plan(model: nn.Module, persist_below: int, max_bytes: int | None = None) -> None:
    plan = plan_units(model, persist_below=persist_below, max_bytes=max_bytes)
    found = [parameter for unit in plan.units for _, parameter in unit.parameters]
    assert len({id(p) for p in found}) == len(found)
    wanted = [p for p in model.parameters() if can_shard(p, persist_below)]
    assert {id(p) for p in found} == {id(p) for p in wanted}
    names = dict(model.named_parameters(remove_duplicate=False))
    position = {id(p): number for number, p in enumerate(wanted)}
    for unit in plan.units:
        assert unit.parameters
        assert all(names[name] is parameter for name, parameter in unit.parameters)
        places = [position[id(p)] for _, p in unit.parameters]
        assert places == sorted(places)
    firsts = [position[id(unit.parameters[0][1])] for unit in plan.units]
    assert firsts == sorted(firsts)
    modules = [module for module, _ in plan.uses]
    assert modules[0] is model
    assert len({id(module) for module in modules}) == len(modules)
    # Every use of a parameter is below a hooked module that needs its unit.
    needs = {id(module): set(numbers) for module, numbers in plan.uses}
    unit_of = {id(p): number for number, unit in enumerate(plan.units) for _, p in unit.parameters}
    covered = {
        number: {
            id(inner)
            for module, numbers in plan.uses
            if number in numbers
            for inner in module.modules()
        }
        for number in range(len(plan.units))
    }
    assert set().union(*needs.values()) == set(range(len(plan.units)))
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in unit_of:
                assert id(module) in covered[unit_of[id(parameter)]]


@pytest.mark.parametrize("seed", range(60))
def test_every_parameter_is_in_one_unit_in_registration_order(seed: int) -> None:
    generator = random.Random(seed)
    model = random_model(generator)
    persist_below = generator.choice([0, 0, 4, 10])
    check_plan(model, persist_below)
    with contextlib.suppress(ConfigError):
        check_plan(model, persist_below, generator.choice([40, 100, 400]))


class Routed(nn.Module):
    """A block whose experts are in a container, as it is usual."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def test_large_units_are_split_at_children_that_every_rank_runs() -> None:
    gpt = make_gpt(width=12, layers=2)
    check_plan(gpt, 0, 4000)
    plan = plan_units(gpt, persist_below=0, max_bytes=4000)
    children = ("norm_1", "norm_2", "attention", "up", "down")
    blocks = [f"blocks.{block}.{child}" for block in range(2) for child in children]
    assert [unit.name for unit in plan.units] == ["tokens", "places", *blocks, "norm"]

    model = nn.Sequential(Routed(), Routed())
    expert = 4 * (6 * 6 + 6)
    check_plan(model, 0, 4 * expert)
    plan = plan_units(model, persist_below=0, max_bytes=4 * expert)
    assert [unit.name for unit in plan.units[:3]] == ["0.gate", "0", "0.out"]
    assert {name for name, _ in plan.units[1].parameters} == {
        f"0.experts.{number}.{kind}" for number in range(3) for kind in ("weight", "bias")
    }
    plan = plan_units(model, persist_below=0, max_bytes=8 * expert)
    assert [unit.name for unit in plan.units] == ["0", "1"]


@pytest.mark.parametrize(
    ("model", "max_bytes", "named"),
    [
        (nn.Sequential(Routed(), Routed()), 400, r"'0' \(Routed\) takes 504 bytes.*experts\.0"),
        (make_gpt(width=12), 3000, r"'tokens' \(Embedding\) takes 3,216 bytes.*tokens\.weight"),
        (nn.TransformerEncoderLayer(8, 2, 16), 900, r"TransformerEncoderLayer.*tile_linears"),
    ],
)
def test_a_unit_that_cannot_be_split_is_refused(
    model: nn.Module, max_bytes: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        plan_units(model, persist_below=0, max_bytes=max_bytes)


def test_units_of_known_models() -> None:
    for model in (make_gpt(width=12), make(OddMLP), make(BranchMLP), make(NormMLP)):
        check_plan(model, 0)
    units = [unit.name for unit in plan_units(make_gpt(width=12, layers=3), persist_below=0).units]
    assert units == ["tokens", "places", "blocks.0", "blocks.1", "blocks.2", "norm"]
