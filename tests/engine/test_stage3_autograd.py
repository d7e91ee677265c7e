"""Sharded weights under every way of driving autograd: checkpoints, hooks, evaluation between, several graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import features
from support.training import (
    SHARDED,
    Session,
    assert_like_plain_torch,
    assert_same_bits,
    engine_for,
    exact_sgd,
    snapshot,
)
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from zero_plugin.errors import ParameterError

STEPS = 4
KINDS = (False, True)
TORCH_C: Any = torch._C


def square(outputs: Tensor) -> Tensor:
    return (outputs - 0.25).square().mean()


def check(
    make_model: Callable[[], nn.Module],
    script: Callable[[Session], None] | None = None,
) -> None:
    def train(session: Session) -> None:
        for step in range(STEPS):
            loss = square(session.model(features(step).requires_grad_()))
            session.backward(loss)
            session.notes.append(loss.detach().clone())
            session.clip(0.5)
            session.update()
            if session.engine is not None:
                sharded: Any = session.engine._sharded
                # No pair of hooks is left behind, and no weights.
                assert TORCH_C._autograd._top_saved_tensors_default_hooks(True) is None
                assert sharded.gatherer.gathered_bytes == 0
                assert not sharded.gatherer.is_computing

    assert_like_plain_torch(make_model, script or train, settings=SHARDED)


class Block(nn.Module):
    """Two layers, the second of which keeps its output for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.second(torch.tanh(self.first(hidden))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(7, 5)

    def run(self, blocks: Any, hidden: Tensor) -> Tensor:
        for block in blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.run(self.blocks, hidden))


# Checkpoints ----------------------------------------------------------------------------------------------------------


def around_units(model: Any, hidden: Tensor, point: Any) -> Tensor:
    for block in model.blocks:
        hidden = point(block, hidden)
    return model.head(hidden)


def several_units_in_a_segment(model: Any, hidden: Tensor, point: Any) -> Tensor:
    hidden = point(functools.partial(model.run, model.blocks[:2]), hidden)
    hidden = point(functools.partial(model.run, model.blocks[2:]), hidden)
    return point(model.head, hidden)


def one_unit_twice(model: Any, hidden: Tensor, point: Any) -> Tensor:
    for number in (0, 1, 0, 1, 0):
        hidden = point(model.blocks[number], hidden)
    return model.head(model.blocks[0](hidden))


def nested(model: Any, hidden: Tensor, point: Any) -> Tensor:
    def inner(hidden: Tensor) -> Tensor:
        return model.blocks[1](point(model.blocks[0], hidden))

    def outer(hidden: Tensor) -> Tensor:
        return point(model.blocks[2], point(inner, hidden))

    return model.head(point(outer, hidden))


def weights_outside(model: Any, hidden: Tensor, point: Any) -> Tensor:
    def part(hidden: Tensor) -> Tensor:
        hidden = hidden @ model.blocks[2].second.weight @ model.blocks[3].first.weight
        return model.blocks[0](hidden) * model.head.bias.sum()

    return model.head(point(part, point(part, hidden)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize(
    "forward", [around_units, several_units_in_a_segment, one_unit_twice, nested, weights_outside]
)
def test_checkpoints(forward: Any, reentrant: bool, early_stop: bool) -> None:
    point = functools.partial(checkpoint, use_reentrant=reentrant)

    class Checkpointed(Blocks):
        def forward(self, hidden: Tensor) -> Tensor:
            return forward(self, hidden, point)

    with set_checkpoint_early_stop(early_stop):
        check(Checkpointed)


@pytest.mark.parametrize("reentrant", KINDS)
def test_a_checkpoint_inside_a_unit(reentrant: bool) -> None:
    class Inner(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            middle = checkpoint(self.part, hidden, use_reentrant=reentrant)
            return checkpoint(self.second, middle, use_reentrant=reentrant)

        def part(self, hidden: Tensor) -> Tensor:
            return torch.tanh(self.first(hidden))

    class Checkpointed(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Inner() for _ in range(3))

    check(Checkpointed)


@pytest.mark.parametrize("reentrant", KINDS)
def test_checkpoint_sequential(reentrant: bool) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(5)))

        def forward(self, hidden: Tensor) -> Tensor:
            return checkpoint_sequential(self.blocks, 2, hidden, use_reentrant=reentrant)

    check(Segments)


@pytest.mark.parametrize("inside", [False, True])
def test_selective_checkpoints(inside: bool) -> None:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    class Inner(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            if not inside:
                return super().forward(hidden)
            return checkpoint(super().forward, hidden, use_reentrant=False, context_fn=contexts)

    class Selective(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Inner() for _ in range(3))

        def forward(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                if inside:
                    hidden = block(hidden)
                else:
                    hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
            return self.head(hidden)

    check(Selective)


@pytest.mark.parametrize("where", ["around the model", "around a block", "inside a block"])
@pytest.mark.parametrize("kind", ["save_on_cpu", "own hooks"])
def test_saved_tensor_hooks_of_the_user(where: str, kind: str) -> None:
    def hooks() -> Any:
        if kind == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(
            lambda x: x.clone().numpy, lambda x: torch.from_numpy(x())
        )

    class Inner(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            with hooks() if where == "inside a block" else contextlib.nullcontext():
                return super().forward(hidden)

    class Hooked(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Inner() for _ in range(3))

        def forward(self, hidden: Tensor) -> Tensor:
            with hooks() if where == "around the model" else contextlib.nullcontext():
                for block in self.blocks:
                    with hooks() if where == "around a block" else contextlib.nullcontext():
                        hidden = block(hidden)
                return self.head(hidden)

    check(Hooked)


@pytest.mark.parametrize("reentrant", [None, *KINDS])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_going_on_after_an_exception(where: str, reentrant: bool | None) -> None:
    class Trip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, armed: Any) -> Tensor:
            ctx.armed = armed
            return hidden * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            if ctx.armed:
                raise ArithmeticError("tripped in backward")
            return grad, None

    class Tripping(Blocks):
        armed = False

        def forward(self, hidden: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                call = functools.partial(self.part, block, number)
                hidden = (
                    call(hidden)
                    if reentrant is None
                    else checkpoint(call, hidden, use_reentrant=reentrant)
                )
            return self.head(hidden)

        def part(self, block: Any, number: int, hidden: Tensor) -> Tensor:
            hidden = Trip.apply(block(hidden), self.armed and where == "backward" and number == 1)
            if self.armed and where == "forward" and number == 2:
                return block(hidden[:, :3])  # Raises inside the unit.
            return hidden

    def script(session: Session) -> None:
        for step in range(STEPS):
            if step in (1, 2):
                session.model.armed = True
                with pytest.raises((ArithmeticError, RuntimeError), match=r"tripped|shapes"):
                    session.backward(square(session.model(features(step).requires_grad_())))
                session.model.armed = False
                session.optimizer.zero_grad()
            session.backward(square(session.model(features(step).requires_grad_())))
            session.clip(0.5)
            session.update()
            if session.engine is not None:
                sharded: Any = session.engine._sharded
                assert TORCH_C._autograd._top_saved_tensors_default_hooks(True) is None
                assert sharded.gatherer.gathered_bytes == 0

    check(Tripping, script)


# Evaluation and several graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [False, True])
def test_evaluation_first_and_between(mode: Any, first: bool) -> None:
    def look(session: Session, step: int) -> None:
        session.model.eval()
        with mode():
            for more in range(2):
                outputs = session.model(features(70 + step + more))
                rows = outputs + outputs @ session.model.head.weight[:, :5]
                session.notes.append(rows.clone() if mode is torch.no_grad else rows.tolist())
        session.model.train()

    def script(session: Session) -> None:
        for step in range(STEPS):
            if first:
                look(session, step)
            loss = square(session.model(features(step)))
            look(session, step)
            session.backward(loss)
            look(session, step)
            session.clip(0.5)
            session.update()

    check(Blocks, script)


def test_several_forwards_and_backwards_in_every_order() -> None:
    def script(session: Session) -> None:
        model = session.model
        for step in range(STEPS):
            losses = [square(model(features(9 * step + i))) for i in range(3)]
            for number in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))[step]:
                session.backward(losses[number])
                session.notes.append(square(model(features(80 + step))).detach())
            session.backward(losses[0] * 0 + square(model(features(99))), retain_graph=True) if (
                step < 0
            ) else None
            session.clip(0.5)
            session.update()

    check(Blocks, script)


def test_one_graph_many_times_and_losses_that_share_a_part() -> None:
    def script(session: Session) -> None:
        model = session.model
        for step in range(STEPS):
            hidden = model.run(model.blocks[:2], features(step))
            one = square(model.head(model.blocks[2](hidden)))
            two = square(model.head(model.blocks[3](hidden)))
            session.backward(one, retain_graph=True)
            session.backward(two, retain_graph=True)
            session.backward(one + two)
            session.clip(0.5)
            session.update()

    check(Blocks, script)


def test_autograd_grad_of_everything_and_plain_backward() -> None:
    def script(session: Session) -> None:
        model = session.model
        for step in range(STEPS):
            inputs = features(step).requires_grad_()
            loss = square(model(inputs))
            wanted = [inputs, *model.parameters()]
            found = torch.autograd.grad(loss, wanted, retain_graph=True)
            session.notes += [item.clone() for item in found]
            slopes = torch.autograd.grad(square(model(inputs)), wanted[:3], create_graph=True)
            (loss + sum(slope.square().sum() for slope in slopes)).backward()
            session.update()

    check(Blocks, script)


def test_a_gradient_penalty_through_checkpoints() -> None:
    class Checkpointed(Blocks):
        def forward(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return self.head(hidden)

    def script(session: Session) -> None:
        for step in range(STEPS):
            inputs = features(step).requires_grad_()
            outputs = session.model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            session.backward(square(outputs) + (slope.norm(dim=1) - 1).square().mean())
            session.update()
            assert TORCH_C._autograd._top_saved_tensors_default_hooks(True) is None

    check(Checkpointed, script)


@pytest.mark.parametrize("reentrant", [None, *KINDS])
def test_a_step_between_forward_and_backward_is_refused_as_in_plain_torch(
    reentrant: bool | None,
) -> None:
    class Maybe(Blocks):
        def forward(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(hidden)

    model = Maybe()
    with engine_for(model, exact_sgd(model.parameters()), stage=3) as (engine, optimizer):
        stale = square(model(features(0)))
        engine.backward(square(model(features(1))))
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(stale)
        engine.backward(square(model(features(1))))
        optimizer.step()


def test_an_in_place_change_of_an_activation_is_refused_as_in_plain_torch() -> None:
    class Changing(Blocks):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden = torch.exp(self.blocks[0](hidden))
            hidden.add_(1.0)
            return self.head(hidden)

    class ChangingInside(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden = torch.exp(self.first(hidden))
            hidden.add_(1.0)
            return self.second(hidden)

    inside = Blocks()
    inside.blocks = nn.ModuleList(ChangingInside() for _ in range(2))
    for model in (Changing(), inside):
        with engine_for(model, exact_sgd(model.parameters()), stage=3) as (engine, _):
            loss = square(model(features(0)))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                engine.backward(loss)


@pytest.mark.parametrize("grad", [False, True])
def test_a_write_inside_a_forward_is_found(grad: bool) -> None:
    class Writing(Block):
        armed = True

        def forward(self, hidden: Tensor) -> Tensor:
            if self.armed:
                with torch.no_grad():
                    self.first.weight.clamp_(-0.1, 0.1)
            return super().forward(hidden)

    model = Blocks()
    model.blocks[1] = Writing()
    model.blocks[2] = Writing()
    before = snapshot(model)
    with engine_for(model, exact_sgd(model.parameters()), stage=3) as (engine, _):
        refusal = pytest.raises(
            ParameterError, match=r"blocks\.1\.first\.weight.*full_params\(writeback"
        )
        with torch.set_grad_enabled(grad), refusal:
            model(features(0))
        model.blocks[1].armed = model.blocks[2].armed = False
        with engine.full_params():
            assert_same_bits(snapshot(model), before)
        engine.backward(square(model(features(0))))


# Hooks and libraries --------------------------------------------------------------------------------------------------


def test_hooks_of_other_libraries_that_read_weights() -> None:
    def script(session: Session) -> None:
        block, seen = session.model.blocks[1], session.notes

        def note(module: Any, *_: Any) -> None:
            with torch.no_grad():
                seen.append(module.first.weight.norm())

        def note_backward(module: Any, *_: Any) -> None:
            with torch.no_grad():
                seen.append(module.second.weight.square().sum())

        handles = [
            block.register_forward_pre_hook(note),
            block.register_forward_hook(note),
            block.register_forward_pre_hook(note, prepend=True),
            block.register_forward_hook(note, prepend=True),
            block.register_full_backward_hook(note_backward),
            block.register_full_backward_pre_hook(note_backward),
            block.first.register_forward_hook(lambda module, inputs, output: output * 1.5),
            block.first.weight.register_hook(lambda grad: grad * 2),
        ]
        for step in range(STEPS):
            outputs = session.model(features(step))
            outputs.register_hook(lambda grad: grad * 0.5)
            session.backward(square(outputs))
            session.clip(0.5)
            session.update()
        for handle in handles:
            handle.remove()

    check(Blocks, script)


def test_global_module_hooks() -> None:
    def script(session: Session) -> None:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: output * 1.25 if isinstance(module, Block) else None
        )
        try:
            for step in range(STEPS):
                session.backward(square(session.model(features(step))))
                session.update()
        finally:
            handle.remove()

    check(Blocks, script)


def weight_normed() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.first)
    nn.utils.parametrizations.weight_norm(model.head)
    return model


def spectral_normed() -> nn.Module:
    model = Blocks()
    nn.utils.parametrizations.spectral_norm(model.blocks[1].second)
    nn.utils.parametrizations.spectral_norm(model.head)
    return model


def orthogonal() -> nn.Module:
    model = Blocks()
    nn.utils.parametrizations.orthogonal(model.blocks[1].second)
    nn.utils.parametrizations.orthogonal(model.head)
    return model


def parametrised() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5 + weight.flip(0) * 0.5

    class Same(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight

    model = Blocks()
    for layer, kind in ((model.blocks[0].first, Symmetric()), (model.head, Symmetric())):
        nn.utils.parametrize.register_parametrization(layer, "weight", kind)
    nn.utils.parametrize.register_parametrization(model.blocks[2].first, "weight", Same())
    nn.utils.parametrize.register_parametrization(model.head, "bias", Same())
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def old_weight_norm() -> nn.Module:
    model = Blocks()
    for layer in (model.blocks[0].first, model.head):
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(layer)
    return model


def old_spectral_norm() -> nn.Module:
    model = Blocks()
    for layer in (model.blocks[0].first, model.head):
        nn.utils.spectral_norm(layer)
    return model


@pytest.mark.parametrize(
    "make_model",
    [weight_normed, spectral_normed, orthogonal, parametrised, old_weight_norm, old_spectral_norm],
)
def test_parametrised_weights(make_model: Any) -> None:
    check(make_model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_units(backend: str) -> None:
    def script(session: Session) -> None:
        torch._dynamo.reset()
        for block in session.model.blocks[:2]:
            block.compile(backend=backend)
        part = torch.compile(session.model.blocks[2], backend=backend)
        for step in range(STEPS):
            hidden = session.model.run(session.model.blocks[:2], features(step))
            session.backward(square(session.model.head(part(hidden))))
            session.clip(0.5)
            session.update()

    check(Blocks, script)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend: str) -> None:
    def script(session: Session) -> None:
        torch._dynamo.reset()
        model = torch.compile(session.model, backend=backend)
        for step in range(STEPS):
            session.backward(square(model(features(step))))
            session.clip(0.5)
            session.update()

    check(Blocks, script)


@pytest.mark.parametrize("reentrant", [None, *KINDS])
def test_autocast(reentrant: bool | None) -> None:
    class Cast(Blocks):
        def forward(self, hidden: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                for block in self.blocks:
                    # The same weight twice: autocast keeps its cast copy.
                    for _ in range(2):
                        hidden = (
                            block(hidden)
                            if reentrant is None
                            else checkpoint(block, hidden, use_reentrant=reentrant)
                        )
                return self.head(hidden).float()

    check(Cast)
