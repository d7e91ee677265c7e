"""A step returns while its update runs, and whoever touches a weight meets the finished one."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make, mlp_loss
from support.training import assert_same_bits, config, exact_sgd, snapshot
from torch import Tensor, nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import LaneError
from zero_plugin.optim.blocks import BlockUpdate
from zero_plugin.sharding.pending import PendingParameter

DEADLINE = 20.0


class Gates:
    """Holds the update of each block back until it is let through."""

    def __init__(self) -> None:
        self.open: dict[int, threading.Event] = {}
        self.broken: set[int] = set()

    def of(self, block: int) -> threading.Event:
        return self.open.setdefault(block, threading.Event())

    def pass_all(self) -> None:
        for number in range(64):
            self.of(number).set()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    gates = Gates()
    apply = BlockUpdate.apply

    def gated(update: BlockUpdate, kernels: Any) -> None:
        number = update.states.block.index
        assert gates.of(number).wait(DEADLINE), (
            f"the update of block {number} was never let through"
        )
        if number in gates.broken:
            raise ValueError("the update is broken")
        apply(update, kernels)

    monkeypatch.setattr(BlockUpdate, "apply", gated)
    yield gates
    gates.pass_all()


class Stack(nn.Module):
    """Layers whose forwards are noted."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.before: Callable[[int], None] = lambda _: None

    def forward(self, values: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            self.before(number)
            values = torch.tanh(layer(values))
        return values


def stack() -> Any:
    return make(Stack)


def a_block_each(model: nn.Module, **settings: Any) -> ZeroEngine:
    """An engine with a block for each layer of the stack."""
    return ZeroEngine(
        model, exact_sgd(model.parameters()), config(**{"bucket_bytes": 300, **settings})
    )


def stepped(model: nn.Module, engine: ZeroEngine, seed: int = 3) -> None:
    torch.manual_seed(seed)
    engine.backward(model(torch.randn(5, 8)).square().mean())
    engine.step()


def is_pending(model: nn.Module) -> list[bool]:
    return [isinstance(item, PendingParameter) for item in model.parameters()]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_forward_waits_for_each_unit_when_it_comes_to_it(stage: int, gates: Gates) -> None:
    model, plain = stack(), stack()
    with a_block_each(plain, overlap=False) as engine:
        gates.pass_all()
        stepped(plain, engine)
        engine.zero_grad()
        expected = plain(torch.ones(2, 8)).detach()
    gates.open.clear()
    with a_block_each(model, stage=stage, prefetch_units=0 if stage == 3 else 1) as engine:
        blocks = [block.index for block in engine._roster.blocks]
        assert len(blocks) == 4
        stepped(model, engine)
        engine.zero_grad()
        reached: list[int] = []

        def before(number: int) -> None:
            # Only now does the update of this layer run; the later ones stand still.
            reached.append(number)
            gates.of(blocks[number]).set()

        model.before = before
        assert torch.equal(model(torch.ones(2, 8)).detach(), expected)
        assert reached == [0, 1, 2, 3]


def test_step_returns_before_any_update_has_run(gates: Gates) -> None:
    model = stack()
    with a_block_each(model) as engine:
        before = [engine._roster.members[i].alias.clone() for i in range(8)]
        stepped(model, engine)
        assert all(is_pending(model))
        for member, old in zip(engine._roster.members, before, strict=True):
            assert torch.equal(member.alias, old)
        # What a parameter is can be asked at once.
        weight: Any = model.layers[0].weight
        assert weight.shape == (8, 8)
        assert (weight.dtype, weight.requires_grad, weight.is_leaf) == (torch.float32, True, True)
        assert isinstance(weight, nn.Parameter)
        assert all(is_pending(model))
        gates.pass_all()
        engine.wait_for_update()
        assert not any(is_pending(model))
        assert not any(module._forward_pre_hooks for module in model.modules())


TOUCHES: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda _, p: p + 0,
    "data": lambda _, p: p.data.clone(),
    "detach": lambda _, p: p.detach().clone(),
    "numpy": lambda _, p: torch.from_numpy(p.detach().numpy().copy()),
    "tolist": lambda _, p: torch.tensor(p.tolist()),
    "index": lambda _, p: torch.stack([p[i] for i in range(8)]),
    "out of a list": lambda _, p: torch.stack([p, p])[1],
    "foreach": lambda _, p: torch._foreach_mul([p.detach()], 1.0)[0],
    "deepcopy": lambda _, p: copy.deepcopy(p).detach(),
    "deepcopy of the module": lambda m, _: copy.deepcopy(m).layers[0].weight.detach(),
    "pickle": lambda _, p: pickle.loads(pickle.dumps(p)).detach(),
    "torch.save": lambda _, p: saved(p),
    "state_dict": lambda m, _: m.state_dict()["layers.0.weight"].clone(),
    "repr": lambda _, p: (repr(p), p.detach().clone())[1],
    "norm": lambda _, p: (torch.nn.utils.get_total_norm([p]), p.detach().clone())[1],
    "functional": lambda _, p: nn.functional.linear(torch.eye(8), p).detach().T,
    "functional_call": lambda m, p: (
        torch.func.functional_call(
            m.layers[0], {"weight": p, "bias": torch.zeros(8)}, (torch.eye(8),)
        )
        .detach()
        .T
    ),
    "custom function": lambda m, _: OfModule.apply(m.layers[0]).detach(),
    "write": lambda _, p: written(p),
    "copy from": lambda _, p: torch.empty(8, 8).copy_(p.detach()),
    "set data": lambda _, p: replaced(p),
}


def saved(parameter: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file).detach()


@torch.no_grad()
def written(parameter: Any) -> Tensor:
    parameter.mul_(2.0)
    return (parameter / 2.0).clone()


def replaced(parameter: Any) -> Tensor:
    parameter.data = parameter.data.clone()
    return parameter.detach().clone()


class Opaque(torch.autograd.Function):
    """Code that torch does not ask about the class of its arguments."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()


class OfModule:
    """Such code in a module's forward: there the module has waited."""

    @staticmethod
    def apply(layer: nn.Linear) -> Tensor:
        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = layer

            def forward(self) -> Tensor:
                kept = layer.forward
                layer.forward = lambda _: Opaque.apply(layer.weight)  # type: ignore[assignment]
                try:
                    return self.inner(torch.zeros(1))
                finally:
                    layer.forward = kept

        return Inside()()


@pytest.mark.parametrize("touch", TOUCHES)
def test_every_way_to_a_weight_meets_the_new_one(touch: str) -> None:
    plain = stack()
    with a_block_each(plain, overlap=False) as engine:
        stepped(plain, engine)
        expected = plain.layers[0].weight.detach().clone()
    # Until an operation has ended, this backend shows NaN where it will write.
    for seed in range(3):
        model = stack()
        with a_block_each(model, backend="chaos", backend_seed=seed) as engine:
            stepped(model, engine)
            assert_same_bits(TOUCHES[touch](model, model.layers[0].weight), expected, touch)
            assert type(model.layers[0].weight) is nn.Parameter


def test_no_grad_forwards_go_the_way_they_go_without_us() -> None:
    """Torch's attention takes a fast way unless a weight is of a class it does not know."""

    def make_layer() -> Any:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    outputs = []
    for overlap in (False, True):
        layer = make_layer()
        settings = {} if overlap else {"overlap": False}
        with ZeroEngine(layer, exact_sgd(layer.parameters()), config(**settings)) as engine:
            layer.train()
            torch.manual_seed(1)
            engine.backward(layer(torch.randn(2, 3, 8)).square().mean())
            engine.step()
            layer.eval()
            with torch.no_grad():
                outputs.append(layer(torch.ones(2, 3, 8)))
    assert torch.equal(*outputs)


def test_a_scheduler_does_not_change_an_update_under_way() -> None:
    """Also for an optimizer that runs as plain torch, on a lane, later."""
    outcomes = []
    for settings in ({"overlap": False}, {"backend": "chaos"}):
        model = make(TinyMLP)
        optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
        with ZeroEngine(model, optimizer, config(**settings)) as engine:
            for step in range(4):
                engine.backward(mlp_loss(model, step))
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.zero_grad()
            outcomes.append(snapshot(model))
    assert_same_bits(*outcomes)


def test_a_broken_update_is_raised_where_its_weight_is_used(gates: Gates) -> None:
    model = stack()
    with a_block_each(model) as engine:
        stepped(model, engine)
        engine.zero_grad()
        blocks = [block.index for block in engine._roster.blocks]
        gates.broken.add(blocks[2])
        gates.pass_all()
        reached: list[int] = []
        model.before = reached.append
        with pytest.raises(LaneError, match=r"update block 2 .*ValueError: the update is broken"):
            model(torch.ones(2, 8))
        assert reached == [0, 1, 2]
        # The next step would build on it.
        gates.broken.clear()
        with pytest.raises(LaneError, match=r"the update is broken"):
            engine.wait_for_update()


def test_a_broken_update_is_raised_by_close_at_the_latest(gates: Gates) -> None:
    model = stack()
    engine = a_block_each(model)
    stepped(model, engine)
    gates.broken.add(engine._roster.blocks[0].index)
    gates.pass_all()
    with pytest.raises(LaneError, match="the update is broken"):
        engine.close()
    assert engine.closed
    assert not any(is_pending(model))


def test_closing_waits_for_the_update(gates: Gates) -> None:
    model, plain = stack(), stack()
    threading.Timer(0.2, gates.pass_all).start()
    engine = a_block_each(model)
    stepped(model, engine)
    engine.close()
    with a_block_each(plain, overlap=False) as other:
        stepped(plain, other)
    assert_same_bits(snapshot(model), snapshot(plain))


def test_a_step_waits_where_weights_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.eval_frame as frames

    model = stack()
    with a_block_each(model, backend="chaos") as engine:
        monkeypatch.setitem(frames.cached_backends, -1, object())
        stepped(model, engine)
        assert not any(is_pending(model))


def test_without_overlap_a_step_waits() -> None:
    model = stack()
    with a_block_each(model, overlap=False) as engine:
        stepped(model, engine)
        assert not any(is_pending(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_more_blocks_than_slabs_are_issued_at_once(dtype: torch.dtype, gates: Gates) -> None:
    """The host does not wait for a slab to come free: it hands one on with what must end first."""
    model = stack().to(dtype)
    with a_block_each(model, bucket_bytes=80) as engine:
        assert len(engine._roster.blocks) > 6
        torch.manual_seed(0)
        engine.backward(model(torch.randn(5, 8, dtype=dtype)).float().square().mean())
        engine.step()  # Were it to wait, nobody would open the gates.
        assert all(is_pending(model))
        gates.pass_all()
