"""Every way in which autograd can be driven leaves the bits that plain torch leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import TinyMLP, features, gpt_batch, make_gpt, mlp_loss
from support.training import Session, assert_like_plain_torch, engine_for, exact_sgd, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_plugin.errors import EngineStateError, GradientAccessError


def test_plain_backward_needs_no_engine_call() -> None:
    def script(session: Session) -> None:
        for step in range(4):
            mlp_loss(session.model, step).backward()
            session.clip(0.25)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_several_backwards_before_a_step_add_up() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            for micro in range(3):
                session.backward(mlp_loss(session.model, 3 * step + micro))
            session.clip(0.25)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_no_sync_then_backward() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            if session.engine is None:
                session.backward(mlp_loss(session.model, 2 * step))
            else:
                with session.engine.no_sync():
                    session.backward(mlp_loss(session.model, 2 * step))
            session.backward(mlp_loss(session.model, 2 * step + 1))
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_a_step_after_no_sync_alone_uses_its_gradients() -> None:
    def script(session: Session) -> None:
        for step in range(2):
            if session.engine is None:
                session.backward(mlp_loss(session.model, step))
            else:
                with session.engine.no_sync():
                    session.backward(mlp_loss(session.model, step))
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_forward_backward_forward_before_a_step() -> None:
    def script(session: Session) -> None:
        model = session.model
        for step in range(3):
            first, second = mlp_loss(model, 2 * step), mlp_loss(model, 2 * step + 1)
            session.backward(second)
            session.notes.append(mlp_loss(model, 50).detach())
            session.backward(first)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_retain_graph_twice() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            loss = mlp_loss(session.model, step)
            session.backward(loss, retain_graph=True)
            session.backward(loss, retain_graph=True)
            session.backward(loss)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_backward_of_a_vector_and_of_some_inputs() -> None:
    def script(session: Session) -> None:
        model = session.model
        for step in range(3):
            output = model(features(step))
            session.backward(output, gradient=torch.full_like(output, 0.125))
            session.backward(mlp_loss(model, step), inputs=[model.first.weight])
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_a_gradient_penalty() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            inputs = features(step).requires_grad_()
            output = session.model(inputs).sum()
            (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
            session.backward(
                mlp_loss(session.model, step) + (slope.norm(dim=1) - 1).square().mean()
            )
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_a_penalty_on_the_gradients_of_the_weights() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            loss = mlp_loss(session.model, step)
            slopes = torch.autograd.grad(loss, list(session.model.parameters()), create_graph=True)
            session.backward(loss + sum(slope.square().sum() for slope in slopes))
            session.update()

    assert_like_plain_torch(TinyMLP, script)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_backward_with_create_graph() -> None:
    def script(session: Session) -> None:
        for step in range(2):
            session.backward(mlp_loss(session.model, step), create_graph=True)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_autograd_grad_on_the_weights_leaves_their_gradients_alone(when: str) -> None:
    def look(session: Session) -> None:
        found = torch.autograd.grad(mlp_loss(session.model, 9), list(session.model.parameters()))
        session.notes.append([item.clone() for item in found])

    def script(session: Session) -> None:
        for step in range(3):
            if when == "before":
                look(session)
            session.backward(mlp_loss(session.model, 2 * step))
            if when == "between":
                look(session)
            session.backward(mlp_loss(session.model, 2 * step + 1))
            if when == "after":
                look(session)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_hooks_of_the_user_change_the_gradient_that_is_used() -> None:
    def script(session: Session) -> None:
        weight: Tensor = session.model.first.weight
        handle = weight.register_hook(lambda grad: grad * 2)
        for step in range(3):
            session.backward(mlp_loss(session.model, step))
            session.update()
        handle.remove()

    assert_like_plain_torch(TinyMLP, script)


def test_a_stale_graph_is_refused_as_in_plain_torch() -> None:
    model = TinyMLP()
    with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
        loss = mlp_loss(model, 0)
        engine.backward(loss, retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# Checkpointing --------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two layers under checkpoints, and a weight that is used in two of them and once outside."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(7, 7)
        self.shared = nn.Linear(7, 7)
        self.second = nn.Linear(7, 5)

    def part(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.shared(torch.tanh(self.first(hidden))))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.shared(hidden)
        for _ in range(2):
            hidden = checkpoint(self.part, hidden, use_reentrant=self.reentrant)
        return self.second(hidden)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_weight_used_in_two_checkpoints_and_once_outside(
    reentrant: bool, accumulate: int
) -> None:
    def script(session: Session) -> None:
        for step in range(3):
            for micro in range(accumulate):
                session.backward(mlp_loss(session.model, step * accumulate + micro))
            session.clip(0.25)
            session.update()

    # Under a reentrant checkpoint autograd hands over one gradient a use. Their sum is taken in the order in which
    # they come, whatever the buckets.
    assert_like_plain_torch(lambda: Checkpointed(reentrant=reentrant), script)


@pytest.mark.parametrize("reentrant", [True, False])
def test_everything_inside_one_checkpoint_with_a_plain_backward(reentrant: bool) -> None:
    def script(session: Session) -> None:
        for step in range(3):
            inputs = features(step).requires_grad_()
            checkpoint(session.model, inputs, use_reentrant=reentrant).square().mean().backward()
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_checkpointed_gpt() -> None:
    def script(session: Session) -> None:
        model = session.model
        for step in range(2):
            tokens = gpt_batch(step)
            hidden = model.tokens(tokens)
            for block in model.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=step == 0)
            session.backward(model.head(model.norm(hidden)).square().mean())
            session.update()

    assert_like_plain_torch(lambda: make_gpt(width=12, layers=2), script)


# Broken steps ---------------------------------------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    """Raises in backward."""

    error: type[BaseException] = RuntimeError

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Raises.error("broken on purpose")


class Breakable(TinyMLP):
    """Raises between its two layers when told to."""

    mode = ""

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(features))
        if self.mode == "forward":
            raise RuntimeError("broken on purpose")
        if self.mode == "backward":
            hidden = Raises.apply(hidden)
        return self.second(hidden)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("plain_backward", [False, True])
@pytest.mark.parametrize("accumulated", [False, True])
def test_training_goes_on_after_an_exception(
    error: type[BaseException],
    mode: str,
    plain_backward: bool,
    accumulated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Raises, "error", error)

    def script(session: Session) -> None:
        backward: Callable[[Tensor], Any] = (
            torch.Tensor.backward if plain_backward else session.backward
        )
        for step in range(5):
            if accumulated:
                backward(mlp_loss(session.model, 50 + step))
            session.model.mode = mode if step in (1, 2) else ""
            if session.model.mode:
                with pytest.raises((error, RuntimeError), match="broken on purpose"):
                    backward(mlp_loss(session.model, step))
                session.model.mode = ""
                session.optimizer.zero_grad()
                continue
            backward(mlp_loss(session.model, step))
            session.clip(0.25)
            session.update()

    assert_like_plain_torch(Breakable, script)


def test_gradients_not_cleared_after_a_step() -> None:
    # Plain torch adds the next gradient to the last one; so do we, or we say so. Never silently another number.
    model = TinyMLP()
    with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        before = snapshot(model)

        def next_step() -> None:
            engine.backward(mlp_loss(model, 1))
            optimizer.step()

        with pytest.raises(EngineStateError, match="call zero_grad"):
            next_step()
        optimizer.zero_grad()
        engine.backward(mlp_loss(model, 2))
        optimizer.step()
        assert not torch.equal(model.first.weight, before["first.weight"])


# Parameter.grad -------------------------------------------------------------------------------------------------------


def test_the_stand_in_answers_metadata_and_refuses_values() -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        grad = model.first.weight.grad
        assert grad is not None
        assert grad.shape == model.first.weight.shape
        assert grad.dtype == torch.float32
        assert grad.device == model.first.weight.device
        assert grad.numel() == 91
        assert not grad.is_sparse
        assert "first.weight" in repr(grad)


USES: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_norm_ foreach": lambda m: nn.utils.clip_grad_norm_(
        m.parameters(), 1.0, foreach=True
    ),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "arithmetic": lambda m: m.first.weight.grad * 2,
    "in place": lambda m: m.first.weight.grad.mul_(2),
    "clone": lambda m: m.first.weight.grad.clone(),
    "detach": lambda m: m.first.weight.grad.detach().sum(),
    "item": lambda m: m.second.bias.grad[0].item(),
    "numpy": lambda m: m.first.weight.grad.numpy(),
    "numpy of a copy": lambda m: m.first.weight.grad.clone().numpy(),
    "norm": lambda m: m.first.weight.grad.norm(),
    "data": lambda m: m.first.weight.grad.data.sum(),
    "isfinite": lambda m: torch.isfinite(m.first.weight.grad).all(),
    "stack": lambda m: torch.cat([p.grad.view(-1) for p in m.parameters()]),
    "foreach": lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 2.0),
    "all_reduce-like copy": lambda m: torch.zeros(13, 7).copy_(m.first.weight.grad),
    "tolist": lambda m: m.second.bias.grad.tolist(),
    "scaler": lambda m: unscale(m),  # noqa: PLW0108 - defined below
}


def unscale(model: nn.Module) -> None:
    """What a GradScaler does before clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("use", list(USES))
def test_a_gradient_that_the_engine_owns_cannot_be_used_by_accident(use: str) -> None:
    model = TinyMLP()
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        with pytest.raises(GradientAccessError, match=r"engine\.clip_grad_norm_.*full_grads"):
            USES[use](model)


def test_full_grads_are_torchs() -> None:
    model, twin = TinyMLP(), TinyMLP()
    twin.load_state_dict(model.state_dict())
    unused = model.first.bias
    for net in (model, twin):
        net.first.bias.requires_grad_(False)
    with engine_for(model) as (engine, optimizer):
        for step in range(2):
            engine.backward(mlp_loss(model, step))
            mlp_loss(twin, step).backward()
        engine.clip_grad_norm_(1e-3)
        with engine.full_grads():
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if ours.grad is not None and theirs.grad is not None:
                    assert torch.equal(ours.grad, theirs.grad)
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        assert unused.grad is None
        with pytest.raises(GradientAccessError):
            model.first.weight.grad.sum()  # type: ignore[union-attr]
        before = snapshot(model)
        optimizer.step()
        assert not torch.equal(before["first.weight"], model.first.weight)


# Clearing -------------------------------------------------------------------------------------------------------------

CLEARS: dict[str, Callable[[Session], Any]] = {
    "optimizer": lambda s: s.optimizer.zero_grad(),
    "optimizer, to zero": lambda s: s.optimizer.zero_grad(set_to_none=False),
    "model": lambda s: s.model.zero_grad(),
    "model, to zero": lambda s: s.model.zero_grad(set_to_none=False),
    "by hand": lambda s: [setattr(p, "grad", None) for p in s.model.parameters()],
    "part by hand": lambda s: setattr(s.model.first.weight, "grad", None),
}


@pytest.mark.parametrize("clear", list(CLEARS))
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_every_way_to_clear_gradients(clear: str, when: str) -> None:
    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, 2 * step))
            if when == "before the step":
                CLEARS[clear](session)
                if step % 2:
                    session.backward(mlp_loss(session.model, 2 * step + 1))
                session.update()
            else:
                session.optimizer.step()
                CLEARS[clear](session)
                if clear == "part by hand":
                    session.optimizer.zero_grad()
            session.notes.append([p.grad is None for p in session.model.parameters()])

    assert_like_plain_torch(TinyMLP, script)


def test_a_step_without_a_backward_changes_nothing() -> None:
    def script(session: Session) -> None:
        session.optimizer.step()
        session.backward(mlp_loss(session.model, 0))
        session.update()
        session.optimizer.step()
        session.clip(1.0)
        session.optimizer.zero_grad(set_to_none=False)
        session.optimizer.step()

    assert_like_plain_torch(TinyMLP, script)


@pytest.mark.parametrize("after_backward", [False, True])
def test_gradients_that_user_code_sets(after_backward: bool) -> None:
    def script(session: Session) -> None:
        for step in range(3):
            if after_backward:
                session.backward(mlp_loss(session.model, step))
            # Replaces the gradient, as assignment does in plain torch.
            session.model.first.weight.grad = torch.full((13, 7), 0.25)
            session.update()

    assert_like_plain_torch(TinyMLP, script)
