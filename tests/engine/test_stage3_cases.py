"""Ways of writing and using a model that sharded weights must not notice: bit for bit as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.models import features
from support.training import SHARDED, Session, assert_like_plain_torch, exact_sgd
from torch import Tensor, nn

STEPS = 4


def square(outputs: Tensor) -> Tensor:
    """A loss whose gradient is not the same for all outputs."""
    return (outputs - 0.25).square().mean()


def check(
    make_model: Callable[[], nn.Module],
    loss_of: Callable[[Any, int], Tensor] = lambda model, step: square(model(features(step))),
    make_optimizer: Callable[..., Any] = exact_sgd,
) -> None:
    """Train, look at the model without gradients in between, and compare with plain torch."""

    def script(session: Session) -> None:
        for step in range(STEPS):
            loss = loss_of(session.model, step)
            session.backward(loss)
            session.clip(0.5)
            session.update()
            with torch.no_grad():
                session.notes += [loss.detach().clone(), loss_of(session.model, 50 + step)]

    assert_like_plain_torch(make_model, script, make_optimizer, SHARDED)


class Layers(nn.Module):
    """Three equal layers, which are units, and what a subclass does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def other_modules_weight(self: Any, hidden: Tensor) -> Tensor:
    first, second, third = self.layers
    hidden = F.linear(torch.tanh(first(hidden)), second.weight, third.bias)
    return second(hidden) + hidden @ third.weight.t() + first.weight[2] * first.weight.norm()


def called_twice(self: Any, hidden: Tensor) -> Tensor:
    first, second, third = self.layers
    return third(torch.tanh(first(second(torch.tanh(first(first(hidden)))))))


def never_called(self: Any, hidden: Tensor) -> Tensor:
    return torch.tanh(self.layers[0](hidden)) + self.layers[2](hidden)


def inside_one_another(self: Any, hidden: Tensor) -> Tensor:
    first, second, third = self.layers
    return first(hidden * second.weight.mean()) + second(third(hidden)) * (first.bias + third.bias)


def in_place_on_outputs(self: Any, hidden: Tensor) -> Tensor:
    for layer in self.layers:
        hidden = layer(hidden)
        hidden += 1.0
        hidden = hidden.relu_()
    return hidden


def custom_function(self: Any, hidden: Tensor) -> Tensor:
    for layer in self.layers:
        hidden = torch.tanh(Product.apply(hidden, layer.weight) + layer.bias)
    return hidden


class Product(torch.autograd.Function):
    """`hidden @ weight.T`, which keeps the weight as a user's function does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ hidden


@pytest.mark.parametrize(
    "forward",
    [
        other_modules_weight,
        called_twice,
        never_called,
        inside_one_another,
        in_place_on_outputs,
        custom_function,
    ],
)
def test_layers_used_in_an_unusual_way(forward: Any) -> None:
    check(type("Unusual", (Layers,), {"forward": forward}))


def test_a_regulariser_in_the_loss() -> None:
    check(
        Layers,
        lambda model, step: (
            square(model(features(step)))
            + sum(p.norm() for p in model.parameters()) / 64
            + model.layers[1].weight.view(-1)[3:20].abs().sum() / 64
        ),
    )


def test_a_branch_and_an_order_chosen_each_step() -> None:
    class Chosen(Layers):
        def forward(self, hidden: Tensor, order: Any = ()) -> Tensor:
            for number in order:
                hidden = torch.tanh(self.layers[number](hidden))
            return hidden

    orders = [(0, 1, 2), (2, 1, 0), (1,), (0, 0, 2, 1)]
    check(
        Chosen, lambda model, step: square(model(features(step), orders[step % 4]).requires_grad_())
    )


def test_experts_chosen_by_the_data() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(7, 4)
            self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
            self.last = nn.Linear(7, 3)

        def forward(self, hidden: Tensor) -> Tensor:
            gates = self.router(hidden).softmax(dim=1)
            best = gates.argmax(dim=1)
            mixed = torch.zeros_like(hidden)
            for number, expert in enumerate(self.experts):
                rows = (best == number).nonzero().flatten()
                if len(rows):
                    mixed = mixed.index_add(
                        0, rows, expert(hidden[rows]) * gates[rows, number, None]
                    )
            return self.last(mixed)

    check(Experts)


class Tied(nn.Module):
    """One weight in two places of three, and one layer in two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.again = self.layers[1]
        self.layers[2].weight = self.layers[0].weight
        self.head = nn.Linear(7, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.table(torch.tensor([1, 5, 1, 0, 3, 2]))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(self.again(hidden) + self.table.weight[:6])


def test_tied_weights() -> None:
    check(Tied)


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank part (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7)
        self.base.requires_grad_(False)
        self.down = nn.Linear(7, 2, bias=False)
        self.up = nn.Linear(2, 7, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


class Frozen(nn.Module):
    """Frozen, partly frozen and trained units."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(7, 7)
        self.layers = nn.ModuleList([Adapted(), Adapted(), Adapted()])
        self.head = nn.Linear(7, 3)
        self.table.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.table(hidden)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden + self.table.weight[0])


@pytest.mark.parametrize("only_trained", [False, True])
def test_frozen_and_partly_frozen_units(only_trained: bool) -> None:
    check(
        Frozen,
        make_optimizer=lambda parameters: exact_sgd(
            [p for p in parameters if p.requires_grad or not only_trained]
        ),
    )


def test_units_frozen_and_unfrozen_between_steps() -> None:
    def script(session: Session) -> None:
        layers = session.model.layers
        for step in range(8):
            layers[0].base.requires_grad_(step >= 2)
            layers[1].requires_grad_(step >= 4)
            layers[2].requires_grad_(step not in (3, 5))
            session.backward(square(session.model(features(step))))
            session.clip(0.5)
            session.update()
        session.notes.append(session.weights())

    assert_like_plain_torch(Frozen, script, settings=SHARDED)


class Pair(NamedTuple):
    hidden: Tensor
    more: Any


@dataclass
class Result:
    hidden: Tensor
    parts: dict[str, Any]


@dataclass(frozen=True)
class Fixed:
    hidden: Tensor


class Nested(nn.Module):
    """Its result is nested, and holds a view of its weight, and the weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(7, 7)

    def forward(self, hidden: Tensor) -> Any:
        hidden, row, weight = self.layer(hidden), self.layer.weight[1:3], self.layer.weight
        columns = weight.t().unsqueeze(0)
        if self.kind == "tuple":
            return (hidden, (row, [columns]))
        if self.kind == "named tuple":
            return Pair(hidden, {"row": row, "columns": [columns, 3]})
        if self.kind == "dataclass":
            return Result(hidden, {"row": (row,), "columns": Fixed(columns)})
        import transformers.modeling_outputs as outputs

        return outputs.BaseModelOutputWithPooling(
            last_hidden_state=hidden, pooler_output=row, hidden_states=(columns,)
        )


class Nest(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([Nested(kind), Nested(kind), Nested(kind)])

    def forward(self, hidden: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            found = layer(hidden)
            if self.kind == "tuple":
                hidden, (row, (columns,)) = found
            elif self.kind == "named tuple":
                hidden, row, columns = found.hidden, found.more["row"], found.more["columns"][0]
            elif self.kind == "dataclass":
                hidden, row = found.hidden, found.parts["row"][0]
                columns = found.parts["columns"].hidden
            else:
                hidden, row, (columns,) = found[0], found["pooler_output"], found.hidden_states
                assert found.pooler_output is row
            hidden = torch.tanh(hidden)
            total = total + row.sum() * 0.5 + columns.square().mean() + (hidden @ columns[0]).mean()
        return total + hidden


@pytest.mark.parametrize("kind", ["tuple", "named tuple", "dataclass", "ModelOutput"])
def test_nested_outputs_with_views_of_weights(kind: str) -> None:
    check(lambda: Nest(kind))


class Places(nn.Module):
    """Position embeddings as many models write them: a module that returns a part of its weight, or the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 7))
        self.token = nn.Parameter(torch.randn(1, 7))

    def forward(self, length: int) -> Any:
        return self.weight[:length], self.token, self.token.expand(length, -1)


def test_a_module_that_returns_its_weight() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = Places()
            self.layer = nn.Linear(7, 5)

        def forward(self, hidden: Tensor) -> Tensor:
            rows, token, tokens = self.places(len(hidden))
            return self.layer(hidden + rows + tokens) + token.sum()

    check(Placed)


class Rooted(nn.Module):
    """Parameters of every odd kind, owned by the root or in a list or a dict."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 7))
        self.several = nn.ParameterList([torch.randn(7), torch.randn(7, 7)])
        self.named = nn.ParameterDict({"gain": torch.randn(7), "fixed": torch.randn(7)})
        self.named["fixed"].requires_grad_(False)
        self.deep = nn.ModuleDict({"layer": Layers(), "other": nn.Linear(7, 7)})
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(dim=0), 0.25)
            self.count += 1
        hidden = hidden * self.scale + self.shift + self.empty.sum() - self.mean
        hidden = hidden @ self.several[1] + self.several[0] * self.named["gain"]
        return self.deep["other"](self.deep["layer"](hidden)) + self.named["fixed"] * self.count


def test_parameters_of_the_root_in_lists_and_dicts_of_no_size_and_of_no_dimension() -> None:
    check(Rooted)


class Attending(nn.Module):
    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.up = nn.Linear(7, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.up(hidden).unsqueeze(0)
        hidden = hidden + self.first(hidden, hidden, hidden, need_weights=False)[0]
        return self.encoder(hidden)


def test_attention_and_encoder_layers_of_torch() -> None:
    check(Attending)


def test_the_fast_path_of_encoder_layers_in_evaluation() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        model.train(torch.is_grad_enabled())
        return square(model(features(step)))

    check(Attending, loss_of)


def test_recurrent_convolution_and_norm_layers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Conv1d(1, 3, 3, padding=1)
            self.norm = nn.BatchNorm1d(3)
            self.memory = nn.LSTM(7, 6, num_layers=2, batch_first=True)
            self.cell = nn.GRUCell(6, 5)
            self.last = nn.Bilinear(5, 5, 4)

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.norm(self.wide(hidden.unsqueeze(1)))
            hidden, _ = self.memory(hidden)
            state = torch.zeros(len(hidden), 5)
            for place in range(hidden.shape[1]):
                state = self.cell(hidden[:, place], state)
            return self.last(state, state)

    check(Mixed)


def test_functional_call_with_other_weights() -> None:
    def loss_of(model: Any, step: int) -> Tensor:
        others = {
            f"layers.{number}.weight": torch.eye(7) * 0.5 + layer.weight * 0.25
            for number, layer in enumerate(model.layers)
        }
        found = torch.func.functional_call(model, others, (features(step),))
        return square(found) + square(model(features(step + 9)))

    check(Layers, loss_of)


@pytest.mark.parametrize("inside", [False, True])
def test_meta_learning_steps_through_the_weights(inside: bool) -> None:
    """One inner step of gradient descent, and the gradient through it."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        if not torch.is_grad_enabled():
            return torch.zeros(())
        names = [name for name, _ in model.named_parameters()]
        weights = dict(model.named_parameters())
        loss = square(model(features(step)))
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=inside)
        fast = {name: weights[name] - 0.5 * grad for name, grad in zip(names, grads, strict=True)}
        return square(torch.func.functional_call(model, fast, (features(step + 20),)))

    check(Layers, loss_of)
