"""Which torch optimizers have a compiled rule, and what a hyper row holds."""

from __future__ import annotations

import copy
import math
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from support.native import CASE_IDS, CASES, Problem, make_optimizer

from zero_plugin.errors import OptimizerError
from zero_plugin.optim import reference
from zero_plugin.optim.lion import Lion
from zero_plugin.optim.rule import ADAM, ADAMW, SGD_MOMENTUM, SGD_PLAIN, rule_for, why_not


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, dtype=dtype))]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_state_names_and_initial_values_are_torchs(kind, options):
    (parameter,) = parameters()
    optimizer = make_optimizer(kind, [parameter], options)
    rule = rule_for(optimizer)
    assert rule is not None
    assert why_not(optimizer) is None
    start = rule.initial_state(optimizer.param_groups[0])
    assert len(start) == len(rule.state_names)
    parameter.grad = torch.zeros(3)
    optimizer.step()
    names = [name for name in optimizer.state[parameter] if name != "step"]
    if options.get("momentum", 0) == 0 and kind is torch.optim.SGD:
        names = []  # torch keeps an empty entry
    assert tuple(names) == rule.state_names
    if kind is torch.optim.Adagrad:
        assert start == (options.get("initial_accumulator_value", 0.0),)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "param group 0 has amsgrad=True"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "has differentiable=True"),
        (lambda p: torch.optim.Adam(p, capturable=True), "has capturable=True"),
        (torch.optim.RMSprop, r"torch.optim.rmsprop.RMSprop is not one of"),
    ],
)
def test_what_has_no_rule_is_named(make, reason):
    optimizer = make(parameters())
    assert rule_for(optimizer) is None
    explanation = why_not(optimizer)
    assert explanation is not None
    assert re.search(reason, explanation)


def test_a_subclass_may_do_anything_so_it_has_no_rule():
    class Custom(torch.optim.AdamW):
        pass

    assert rule_for(Custom(parameters())) is None
    assert "Custom" in str(why_not(Custom(parameters())))


def test_other_dtypes_have_no_rule():
    assert "torch.float64" in str(why_not(torch.optim.AdamW(parameters(torch.float64))))
    assert rule_for(torch.optim.AdamW(parameters(torch.complex64))) is None
    assert rule_for(torch.optim.AdamW(parameters(torch.bfloat16))) is ADAMW


def test_implementation_choices_do_not_matter():
    assert rule_for(torch.optim.AdamW(parameters(), fused=True)) is ADAMW
    assert rule_for(torch.optim.Adam(parameters(), foreach=True)) is ADAM


def test_adam_with_decoupled_decay_is_adamw():
    group = torch.optim.Adam(
        parameters(), weight_decay=0.1, decoupled_weight_decay=True
    ).param_groups[0]
    assert ADAM.hyper(group, 3) == ADAMW.hyper(group, 3)
    assert ADAM.hyper(group, 3) != ADAM.hyper(group | {"decoupled_weight_decay": False}, 3)


def test_sgd_without_momentum_has_no_state():
    assert rule_for(torch.optim.SGD(parameters(), lr=0.1)) is SGD_PLAIN
    mixed = torch.optim.SGD(
        [
            {"params": parameters(), "momentum": 0.0},
            {"params": parameters(), "momentum": 0.9},
        ],
        lr=0.1,
    )
    assert rule_for(mixed) is SGD_MOMENTUM
    with pytest.raises(OptimizerError, match=r"momentum became 0\.9 after setup"):
        SGD_PLAIN.hyper(mixed.param_groups[1], 1)


def test_hyper_rows_take_tensors_and_any_step():
    group = torch.optim.AdamW(parameters(), lr=torch.tensor(0.5)).param_groups[0]
    row = ADAMW.hyper(group, 10**7)
    assert len(row) == 16
    assert all(isinstance(value, float) and math.isfinite(value) for value in row)
    assert row[8] == -0.5
    with pytest.raises(OptimizerError, match="step is 0; the first update is step 1"):
        ADAMW.hyper(group, 0)


def test_the_reference_counts_states():
    with pytest.raises(
        OptimizerError, match=r"rule adamw has the states \('exp_avg', 'exp_avg_sq'\), but 1"
    ):
        reference.update(
            ADAMW,
            master=torch.zeros(1),
            states=[torch.zeros(1)],
            gradient=torch.zeros(1),
            output=None,
            hyper=[0.0] * 16,
            scale=1.0,
            clip_value=None,
        )


def test_fused_multiply_add_of_the_reference_is_exact():
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-60, 60, (3, 20_000), generator=generator)
    a, b, c = torch.randn(3, 20_000, generator=generator) * torch.exp2(exponents.float())
    # Near cancellation, and halfway cases that rounding twice gets wrong.
    c[:5000] = -(a * b)[:5000]
    a[5000:10_000] = 1 + 2.0**-12
    b[5000:10_000] = 1 + 2.0**-12
    c[5000:10_000] = torch.randn(5000, generator=generator) * 2.0**-54
    result = reference._fused(a, b, c)
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), result.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error = abs(Fraction(got) - exact)
        here = torch.tensor(got)
        for neighbour in (torch.nextafter(here, torch.tensor(d)) for d in (torch.inf, -torch.inf)):
            if torch.isfinite(neighbour):
                assert error <= abs(Fraction(neighbour.item()) - exact)


class TestLion:
    def test_equals_its_rule(self):
        start = torch.randn(1001, generator=torch.Generator().manual_seed(2))
        parameter = torch.nn.Parameter(start.clone())
        options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
        optimizer = Lion([parameter], **options)
        mine = Problem.create(Lion, options, start)
        for seed in range(20):
            gradient = torch.randn(1001, generator=torch.Generator().manual_seed(seed))
            parameter.grad = gradient.clone()
            optimizer.step()
            mine.plain(gradient)
            assert torch.equal(parameter.detach(), mine.master)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], mine.states[0])

    def test_first_step_by_hand(self):
        parameter = torch.nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))
        optimizer = Lion([parameter], lr=0.5, betas=(0.5, 0.75), weight_decay=0.5)
        parameter.grad = torch.tensor([2.0, -4.0, 0.0])
        loss = optimizer.step(lambda: 3.0)
        assert loss == 3.0
        assert parameter.tolist() == [0.25, -0.25, 1.5]
        assert optimizer.state[parameter]["exp_avg"].tolist() == [0.5, -1.0, 0.0]
        assert optimizer.state[parameter]["step"] == 1

    def test_state_dict_round_trip(self):
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = Lion([parameter], lr=0.1, maximize=True)
        parameter.grad = torch.tensor([1.0, -1.0, 0.5, 0.0])
        optimizer.step()
        other_parameter = torch.nn.Parameter(parameter.detach().clone())
        other = Lion([other_parameter], lr=0.3)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, o in ((parameter, optimizer), (other_parameter, other)):
            p.grad = torch.tensor([-1.0, 1.0, -0.5, 1.0])
            o.step()
        assert torch.equal(parameter, other_parameter)

    def test_parameters_without_gradient_are_not_touched(self):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = Lion([parameter], lr=0.1, weight_decay=0.5)
        optimizer.step()
        assert torch.equal(parameter, torch.ones(2))
        assert not optimizer.state[parameter]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": -1.0}, "lr is -1.0"),
            ({"betas": (0.9, 1.0)}, "betas are"),
            ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ],
    )
    def test_wrong_settings_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            Lion(parameters(), **options)

    def test_sparse_gradients_are_refused(self):
        parameter = torch.nn.Parameter(torch.ones(2, 2))
        parameter.grad = torch.ones(2, 2).to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            Lion([parameter]).step()
