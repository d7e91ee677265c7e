"""Which parameters are trained, and what happens to those that are not: bit for bit as in plain torch.

Each test is a script that runs once in plain torch and under several engines. Its SGD multiplies by powers of two
only, so that both compute the same numbers exactly.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.models import BranchMLP, NormMLP, OddMLP, TinyMLP, gpt_batch, make_gpt, mlp_loss
from support.training import (
    Session,
    adamw,
    assert_like_plain_torch,
    assert_same_bits,
    engine_for,
    exact_sgd,
    snapshot,
)
from torch import Tensor, nn


def train_odd(session: Session) -> None:
    for step in range(4):
        session.backward(mlp_loss(session.model, step))
        session.clip(0.25)
        session.update()


def test_frozen_unused_zero_sized_and_scalar_parameters() -> None:
    assert_like_plain_torch(OddMLP, train_odd)


def test_tied_weights() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            session.backward(session.model(gpt_batch(step)))
            session.update()
        assert session.model.head.weight is session.model.tokens.weight

    assert_like_plain_torch(lambda: make_gpt(width=12, layers=1), script)


def test_buffers_and_batch_norm() -> None:
    assert_like_plain_torch(NormMLP, train_odd)


# Parameters that are used now and then --------------------------------------------------------------------------------

CHOICES = ((0,), (1,), (0, 1), (), (1,), (2,), (0,))


def train_branches(session: Session) -> None:
    for step, chosen in enumerate(CHOICES):
        before = session.weights()
        loss = mlp_loss(session.model, step, *chosen)
        if loss.requires_grad:
            session.backward(loss)
        session.clip(0.5)
        session.update()
        after = session.weights()
        for name in before:
            used = (name.startswith("shared") and chosen) or name[:9] in {
                f"experts.{n}" for n in chosen
            }
            # Untouched bit for bit: neither by momentum, nor by weight decay, nor by its last gradient.
            if not used:
                assert torch.equal(after[name], before[name]), (step, name)
        session.notes.append(loss.detach())


def test_a_parameter_without_a_gradient_is_not_touched() -> None:
    assert_like_plain_torch(BranchMLP, train_branches)


def test_its_moments_and_step_count_are_not_touched_either() -> None:
    torch.manual_seed(0)
    model, twin = BranchMLP(), BranchMLP()
    twin.load_state_dict(model.state_dict())
    other = adamw(twin.parameters())
    with engine_for(model) as (engine, optimizer):
        for step, chosen in enumerate(CHOICES):
            before = optimizer.state_dict()["state"]
            for net, step_of in ((model, engine.backward), (twin, torch.Tensor.backward)):
                loss = mlp_loss(net, step, *chosen)
                if loss.requires_grad:
                    step_of(loss)
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
            after, expected = optimizer.state_dict()["state"], other.state_dict()["state"]
            # A parameter that was never updated has no state, as in torch.
            assert after.keys() == expected.keys()
            for number, entry in after.items():
                assert entry["step"] == expected[number]["step"]
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(
                        entry[key], expected[number][key], rtol=1e-5, atol=1e-9
                    )
                if number in before and entry["step"] == before[number]["step"]:
                    assert_same_bits(entry, before[number])


# Several optimizers ---------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(3, 7)
        self.discriminator = nn.Linear(7, 1)


def noise(step: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step))


def real(step: int) -> Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 + step)) + 1


def gan_steps(
    model: Pair, g: Any, d: Any, backward: Any, *, order: str, steps: int = 4
) -> dict[str, Tensor]:
    """The two orders people write; in both, the generator's loss leaves gradients in the discriminator."""
    for step in range(steps):
        if order == "clear late":
            g.zero_grad()
            backward(-model.discriminator(model.generator(noise(step))).mean())
            g.step()
        d.zero_grad()
        backward(-model.discriminator(real(step)).tanh().mean())
        backward(model.discriminator(model.generator(noise(step)).detach()).tanh().mean())
        d.step()
        if order == "clear early":
            g.zero_grad()
            backward(-model.discriminator(model.generator(noise(step))).mean())
            g.step()
    return snapshot(model)


@pytest.mark.parametrize("order", ["clear late", "clear early"])
def test_two_optimizers_in_the_order_of_a_gan(order: str) -> None:
    def build() -> tuple[Pair, Any, Any]:
        torch.manual_seed(0)
        model = Pair()
        return (
            model,
            exact_sgd(model.generator.parameters()),
            exact_sgd(model.discriminator.parameters()),
        )

    plain, g, d = build()
    expected = gan_steps(plain, g, d, torch.Tensor.backward, order=order)
    for settings in ({"backend": "threads", "bucket_bytes": 64}, {"stage": 0, "backend": "inline"}):
        model, g, d = build()
        with engine_for(model, [g, d], **settings) as (engine, _):
            assert_same_bits(gan_steps(model, g, d, engine.backward, order=order), expected, order)


def test_engine_step_steps_every_optimizer() -> None:
    def build() -> tuple[Pair, list[Any]]:
        torch.manual_seed(0)
        model = Pair()
        return model, [
            exact_sgd(part.parameters()) for part in (model.generator, model.discriminator)
        ]

    model, (g, d) = build()
    twin, (g2, d2) = build()
    with engine_for(model, [g, d]) as (engine, _):
        engine.backward(model.discriminator(model.generator(noise(0))).sum())
        engine.step()
        engine.zero_grad()
        engine.backward(model.discriminator(model.generator(noise(1))).sum())
        engine.step(g)
        twin.discriminator(twin.generator(noise(0))).sum().backward()
        for item in (g2, d2):
            item.step()
            item.zero_grad()
        twin.discriminator(twin.generator(noise(1))).sum().backward()
        g2.step()
        assert_same_bits(snapshot(model), snapshot(twin))


# Freezing and growing -------------------------------------------------------------------------------------------------


def test_freezing_and_unfreezing_after_setup() -> None:
    def script(session: Session) -> None:
        first: Any = session.model.first
        for step in range(8):
            if step in (2, 6):
                first.requires_grad_(False)
            if step == 4:
                first.requires_grad_(True)
            before = session.weights()["first.weight"]
            session.backward(mlp_loss(session.model, step))
            session.update()
            after = session.weights()["first.weight"]
            assert torch.equal(before, after) == (step in (2, 3, 6, 7))

    assert_like_plain_torch(TinyMLP, script)


@pytest.mark.parametrize("plain_backward", [False, True])
def test_a_backbone_that_starts_frozen_is_unfrozen_later(plain_backward: bool) -> None:
    def build() -> nn.Module:
        model = TinyMLP()
        model.first.requires_grad_(False)
        return model

    def script(session: Session) -> None:
        for step in range(5):
            if step == 2:
                session.model.first.requires_grad_(True)
            loss = mlp_loss(session.model, step)
            loss.backward() if plain_backward else session.backward(loss)
            session.clip(0.25)
            session.update()

    assert_like_plain_torch(build, script)


def test_a_param_group_added_after_setup() -> None:
    def script(session: Session) -> None:
        for step in range(4):
            if step == 2:
                late = list(session.model.second.parameters())
                session.optimizer.add_param_group({"params": late, "lr": 0.5})
            session.backward(mlp_loss(session.model, step))
            session.update()
            # Plain torch keeps adding gradients up in parameters that no optimizer clears.
            session.model.zero_grad()

    def only_first(parameters: Any) -> Any:
        return exact_sgd(list(itertools.islice(parameters, 2)))

    assert_like_plain_torch(TinyMLP, script, only_first)


def test_groups_have_their_own_hyper_parameters() -> None:
    def grouped(parameters: Any) -> Any:
        first, *rest = parameters
        groups = [
            {"params": [first], "lr": 0.5, "weight_decay": 0.0},
            {"params": rest, "momentum": 0.25, "nesterov": True},
        ]
        return exact_sgd(groups)

    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, step))
            session.optimizer.param_groups[1]["lr"] = 2.0 ** -(step + 2)
            session.update()

    assert_like_plain_torch(TinyMLP, script, grouped)


# Weights that user code writes ----------------------------------------------------------------------------------------


def write_clamp(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.125, 0.125)


def write_replace(model: Any) -> None:
    model.first.weight.data = torch.full_like(model.first.weight, 0.5)


def write_load(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def write_init(model: Any) -> None:
    torch.manual_seed(3)
    nn.init.normal_(model.second.weight)


def write_swap(model: Any) -> None:
    average = [parameter.detach() * 0.5 for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), average, strict=True):
            held = parameter.clone()
            parameter.copy_(mean)
            mean.copy_(held)


@pytest.mark.parametrize(
    "write",
    [
        write_clamp,
        write_replace,
        write_load,
        write_init,
        write_swap,
    ],
)
@pytest.mark.parametrize("when", ["after the step", "before the step"])
def test_weights_that_user_code_writes_are_trained_on(write: Any, when: str) -> None:
    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, step))
            if step == 2 and when == "before the step":
                with session.full_params(writeback=True):
                    write(session.model)
            session.update()
            if step == 2 and when == "after the step":
                with session.full_params(writeback=True):
                    write(session.model)

    assert_like_plain_torch(TinyMLP, script)


def test_writes_of_low_precision_weights_reach_the_master() -> None:
    torch.manual_seed(0)
    model = TinyMLP().bfloat16()
    optimizer = exact_sgd(model.parameters(), weight_decay=0.0, lr=2.0**-18)
    with engine_for(model, optimizer):
        with torch.no_grad():
            model.first.weight.fill_(0.0625)
        model(torch.ones(2, 7, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        master = optimizer.state_dict()["state"][0]["master"]
        # An update far below the resolution of bf16 shows in the master, which starts from what was written.
        assert torch.equal(model.first.weight, torch.full_like(model.first.weight, 0.0625))
        assert ((master - 0.0625).abs() < 1e-4).all()
        assert (master != 0.0625).any()


def test_a_write_of_equal_values_keeps_the_masters_low_bits() -> None:
    torch.manual_seed(0)
    model = TinyMLP().bfloat16()
    with engine_for(model, exact_sgd(model.parameters(), lr=2.0**-12)) as (engine, optimizer):
        engine.backward(model(torch.ones(2, 7, dtype=torch.bfloat16)).sum())
        optimizer.step()
        before = optimizer.state_dict()
        assert any((e["master"] != e["master"].bfloat16()).any() for e in before["state"].values())
        model.load_state_dict(snapshot(model))
        assert_same_bits(optimizer.state_dict(), before)
