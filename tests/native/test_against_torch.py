"""The compiled rules against torch's optimizers and against a float64 run."""

from __future__ import annotations

import pytest
import torch
from support.native import CASE_IDS, CASES, Problem, make_optimizer

from zero_plugin.kernels import Kernels

NUMEL = 20_011
NUM_STEPS = 200


def ulp(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    return torch.nextafter(magnitude, torch.tensor(torch.inf)) - magnitude


def fixed_gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(NUMEL, generator=generator) * 0.3
    return [(direction + torch.randn(NUMEL, generator=generator)) * 0.05 for _ in range(NUM_STEPS)]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_two_hundred_steps(kind, options):
    """Within 1e-6 relative plus 1e-7 of torch, and no farther from a float64 run than torch."""
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) * 0.1
    mine = Problem.create(kind, options, start)
    plain = torch.nn.Parameter(start.clone())
    exact = torch.nn.Parameter(start.double())
    plain_optimizer = make_optimizer(kind, [plain], options)
    exact_optimizer = make_optimizer(kind, [exact], options)
    with Kernels(threads=2) as handle:
        for gradient in fixed_gradients(2):
            plain.grad, exact.grad = gradient.clone(), gradient.double()
            plain_optimizer.step()
            exact_optimizer.step()
            mine.native(handle, gradient)
    torch.testing.assert_close(mine.master, plain.detach(), rtol=1e-6, atol=1e-7)
    my_error = (mine.master.double() - exact.detach()).abs()
    torch_error = (plain.detach().double() - exact.detach()).abs()
    assert my_error.max() <= 1.05 * torch_error.max()
    assert my_error.square().mean().sqrt() <= 1.05 * torch_error.square().mean().sqrt()


@pytest.mark.parametrize("step", [1, 2, 50])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_one_step_from_the_same_state(kind, options, step):
    """Within 1 unit in the last place of the weight plus 8 of the update."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(NUMEL, generator=generator)
    plain = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer(kind, [plain], options)
    for _ in range(step - 1):
        plain.grad = torch.randn(NUMEL, generator=generator) * 0.1
        optimizer.step()
    before = plain.detach().clone()
    mine = Problem.create(kind, options, before)
    if step > 1:
        mine.states = [optimizer.state[plain][name].clone() for name in mine.rule.state_names]
    mine.step = step - 1
    gradient = torch.randn(NUMEL, generator=generator) * 0.1
    plain.grad = gradient.clone()
    optimizer.step()
    with Kernels(threads=1) as handle:
        mine.native(handle, gradient)
    after = plain.detach()
    bound = ulp(after) + 8 * ulp(after - before)
    assert ((mine.master - after).abs() <= bound).all()
    assert not torch.equal(mine.master, before)


def test_sgd_and_lion_are_torch_bit_for_bit():
    """Where torch's square root is not involved, nothing differs on a processor with fused multiply-add."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch itself does not fuse multiply and add on this processor")
    compared = 0
    for kind, options in CASES:
        if kind.__name__ not in ("SGD", "Lion"):
            continue
        start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(4))
        mine = Problem.create(kind, options, start)
        plain = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer(kind, [plain], options)
        with Kernels(threads=1) as handle:
            for gradient in fixed_gradients(5)[:20]:
                plain.grad = gradient.clone()
                optimizer.step()
                mine.native(handle, gradient)
        assert torch.equal(mine.master, plain.detach())
        compared += 1
    assert compared == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_the_rounded_master(dtype):
    """As fp32 master weights, torch's AdamW and a cast, the plain way to train in low precision."""
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(6))
    mine = Problem.create(torch.optim.AdamW, {}, start, dtype)
    plain = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer(torch.optim.AdamW, [plain], {})
    with Kernels(threads=2) as handle:
        for gradient in fixed_gradients(7)[:20]:
            low = gradient.to(dtype)
            plain.grad = low.float()
            optimizer.step()
            mine.native(handle, low)
            assert mine.output is not None
            assert torch.equal(mine.output, mine.master.to(dtype))
    torch.testing.assert_close(mine.master, plain.detach(), rtol=1e-6, atol=1e-7)
