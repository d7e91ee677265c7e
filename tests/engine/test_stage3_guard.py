"""What a sharded parameter answers while its weights are not here: the truth or a clear refusal, and never a crash."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import TinyMLP, features, mlp_loss
from support.training import assert_same_bits, engine_for, exact_sgd, ranks, snapshot
from torch import Tensor, nn

from zero_plugin.errors import ParameterError, ZeroError
from zero_plugin.sharding.guard import ReleasedParameter


def build() -> Any:
    torch.manual_seed(0)
    return TinyMLP()


def sharded(model: nn.Module, **settings: Any) -> Any:
    return engine_for(model, exact_sgd(model.parameters()), stage=3, **settings)


def test_metadata_is_true() -> None:
    model, plain = build(), build()
    identities = {id(p) for p in model.parameters()}
    with sharded(model):
        for released, true in zip(model.parameters(), plain.parameters(), strict=True):
            assert id(released) in identities
            assert isinstance(released, (nn.Parameter, ReleasedParameter))
            assert isinstance(released, Tensor)
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf"):
                assert getattr(released, name) == getattr(true, name), name
            for name in ("size", "numel", "nelement", "dim", "element_size", "stride", "__len__"):
                assert getattr(released, name)() == getattr(true, name)(), name
            assert released.is_floating_point()
            assert released.is_contiguous()
            assert released.nbytes == true.nbytes
            assert hash(released) == id(released)
            assert released in {released}
            assert released.grad is None
            released.grad = None
            del released.grad
            released.requires_grad_(False)
            assert not released.requires_grad
            released.requires_grad = True
        assert "'first.weight', sharded, shape=(13, 7)" in repr(model.first.weight)
        assert "requires_grad=True" in str(model.first.weight)
        assert sum(p.numel() for p in model.parameters()) == 13 * 7 + 13 + 5 * 13 + 5
        assert "Linear(in_features=7" in repr(model)


def as_closed(model: Any) -> None:
    torch.save(model.state_dict(), io.BytesIO())


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "detach": lambda p, m: p.detach(),
    "data": lambda p, m: p.data,
    "numpy": lambda p, m: p.numpy(),
    "data_ptr": lambda p, m: p.data_ptr(),
    "untyped_storage": lambda p, m: p.untyped_storage(),
    "storage": lambda p, m: p.storage(),
    "deepcopy": lambda p, m: copy.deepcopy(p),
    "copy": lambda p, m: copy.copy(p),
    "pickle": lambda p, m: pickle.dumps(p),
    "torch.save": lambda p, m: torch.save(p, io.BytesIO()),
    "state_dict": lambda p, m: m.state_dict(),
    "save state_dict": lambda p, m: as_closed(m),
    "deepcopy of the model": lambda p, m: copy.deepcopy(m),
    "dlpack": lambda p, m: torch.from_dlpack(p),
    "share_memory_": lambda p, m: p.share_memory_(),
    "as_subclass": lambda p, m: p.as_subclass(nn.Parameter),
    "Parameter": lambda p, m: nn.Parameter(p),
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda p, m: p.add_(1),
    "+=": lambda p, m: p.__iadd__(1),
    "copy_": lambda p, m: p.copy_(torch.zeros(13, 7)),
    "zero_": lambda p, m: p.zero_(),
    "set_": lambda p, m: p.set_(),
    "set_ to another": lambda p, m: p.set_(torch.zeros(13, 7)),
    "resize_": lambda p, m: p.resize_(2, 2),
    "data =": lambda p, m: setattr(p, "data", torch.zeros(13, 7)),
    "setitem": lambda p, m: p.__setitem__(0, 1.0),
    "out=": lambda p, m: torch.add(torch.ones(13, 7), 1, out=p),
    "out= of several": lambda p, m: torch.max(torch.ones(13, 7), dim=1, out=(p, torch.zeros(7))),
    "init": lambda p, m: nn.init.normal_(p),
    "foreach": lambda p, m: torch._foreach_add_([p], 1.0),
    "foreach copy": lambda p, m: torch._foreach_copy_([p], [torch.zeros(13, 7)]),
    "inplace=True": lambda p, m: F.relu(p, inplace=True),
    "a view": lambda p, m: p[0].zero_(),
    "a view of a view": lambda p, m: p.view(-1)[2:5].unsqueeze(0).fill_(1.0),
    "load_state_dict": lambda p, m: m.load_state_dict(build().state_dict()),
    "reset_parameters": lambda p, m: m.first.reset_parameters(),
    "to": lambda p, m: m.to(torch.float64),
    "module_load": lambda p, m: p.module_load(torch.zeros(13, 7)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", [*REFUSED, *WRITES])
def test_memory_and_writes_are_refused(what: str, grad: bool) -> None:
    model = build()
    before = snapshot(model)
    with sharded(model) as (engine, _), torch.set_grad_enabled(grad):
        cure = "full_params" if what in REFUSED else "full_params.writeback=True"
        # Under gradients torch itself refuses some writes to a leaf, in its own words.
        with pytest.raises((ParameterError, RuntimeError)) as caught:
            {**REFUSED, **WRITES}[what](model.first.weight, model)
        if isinstance(caught.value, ZeroError):
            assert caught.match(cure)
        else:
            assert grad or what == "load_state_dict", caught.value
            assert caught.match("leaf Variable that requires grad|out=...|first.weight")
        with engine.full_params():
            assert_same_bits(snapshot(model), before)
        assert model.first.weight.is_leaf


@pytest.mark.parametrize("what", [name for name in WRITES if name != "set_"])
def test_a_refused_write_names_the_parameter(what: str) -> None:
    model = build()
    refusal = pytest.raises((ParameterError, RuntimeError), match=r"first|view of a sharded")
    with sharded(model), torch.no_grad(), refusal:
        WRITES[what](model.first.weight, model)


def test_computing_outside_a_module_gives_the_true_values() -> None:
    model, plain = build(), build()
    rows = features(0)
    uses: list[Callable[[Any], Any]] = [
        lambda m: F.linear(rows, m.first.weight, m.first.bias),
        lambda m: rows @ m.first.weight.t(),
        lambda m: m.first.weight[2:4],
        lambda m: m.first.weight.norm(),
        lambda m: sum(p.square().sum() for p in m.parameters()),
        lambda m: m.first.weight.view(7, 13).transpose(0, 1)[1:].contiguous(),
        lambda m: torch.cat([p.flatten() for p in m.parameters()]),
        lambda m: torch.stack([m.first.weight, m.first.weight]),
        lambda m: m.first.weight.split(5)[1] * 2,
        lambda m: nn.utils.parameters_to_vector(m.parameters()),
        lambda m: torch.einsum("ij,kj->ik", rows, m.first.weight),
        lambda m: m.first.bias.expand(3, -1) + 1,
        lambda m: m.first.weight.double(),
        lambda m: torch.tensor(m.first.bias.tolist()),
        lambda m: torch.tensor([float(m.first.bias[3].item()), m.first.bias[1].item()]),
        lambda m: torch.stack(list(m.first.bias)),
        lambda m: F.embedding(torch.tensor([1, 3]), m.first.weight),
        lambda m: torch._foreach_norm(list(m.parameters()))[2],
        lambda m: m.first.weight.max(dim=1).values,
        lambda m: torch.where(m.first.weight > 0, m.first.weight, 0.0),
    ]
    with sharded(model) as (engine, _):
        for number, use in enumerate(uses):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    found, expected = use(model), use(plain)
                    assert_same_bits({"": found * 1}, {"": expected}, f"use {number}")
                    assert found.requires_grad or number in (13, 14) or not grad
            engine._sharded.gatherer.release_all()
            # A copy made of a view outlives the weights' stay.
            assert_same_bits({"": found * 1}, {"": expected}, f"use {number}, later")


def test_a_view_can_be_saved_copied_and_trained_through() -> None:
    model, plain = build(), build()
    with sharded(model):
        with torch.no_grad():
            view, true = model.first.weight[1:3], plain.first.weight[1:3].detach()
        stored = io.BytesIO()
        torch.save({"rows": view}, stored)
        stored.seek(0)
        assert_same_bits(torch.load(stored, weights_only=True), {"rows": true})
        assert type(copy.deepcopy(view)) is Tensor
        assert torch.equal(copy.deepcopy(view), true)
        assert (view.numpy() == true.numpy()).all()
        rows = features(0).requires_grad_()
        (rows @ view.t()).sum().backward()
        found: Any = rows.grad
        rows.grad = None
        (rows @ true.t()).sum().backward()
        expected: Any = rows.grad
        assert torch.equal(found, expected)


def test_frozen_weights_are_used_in_graphs_outside_their_module() -> None:
    model, plain = build(), build()
    for each in (model, plain):
        each.first.requires_grad_(False)
    with engine_for(model, exact_sgd(model.second.parameters()), stage=3) as (engine, _):
        found: Any = features(0).requires_grad_()
        expected: Any = features(0).requires_grad_()
        engine.backward((found @ model.first.weight.t()).square().sum())
        (expected @ plain.first.weight.t()).square().sum().backward()
        assert torch.equal(found.grad, expected.grad)


SILENT = {
    "new": "uninitialised memory",
    "new_empty": "uninitialised memory",
    "__repr__": "names the parameter",
    "__str__": "names the parameter",
    "__format__": "names the parameter",
    "__hash__": "an identity",
    "__dir__": "names",
}
"""Methods whose value is not compared."""

NOT_CALLED = {
    "dequantize": "torch turns a plain parameter into a non-leaf",
    **dict.fromkeys(
        {*dir(object), "__dict__", "__module__", "__weakref__", "__slots__"}
        | {"__del__", "__torch_function__", "__torch_dispatch__"},
        "of the object, not of the tensor",
    ),
}


def is_same(one: Any, other: Any) -> bool:
    """Whether two results are equal; `one` of the plain parameter, `other` of the sharded one."""
    if isinstance(other, Tensor):
        if not isinstance(one, Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        if one.device.type == "meta" or one.is_quantized:
            return one.device == other.device
        with torch.no_grad():
            pair = [(item * 1).to_dense().to(torch.complex128) for item in (one, other)]
        return torch.equal(*(torch.view_as_real(item).nan_to_num() for item in pair))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, (int, float, bool, str, complex, type(None), torch.dtype, torch.Size)):
        return one == other
    return type(one) is type(other)


def outcome(parameter: Any, name: str, arguments: tuple[Any, ...] | None) -> tuple[str, Any]:
    torch.default_generator.manual_seed(1)
    try:
        found = getattr(parameter, name)
        return "value", found if arguments is None else found(*arguments)
    except ZeroError as error:
        return "refused", error
    except Exception as error:  # noqa: BLE001 - torch's own, of every kind
        return "error", error


def try_everything(rank: int, size: int, grad: bool) -> dict[str, int]:
    """Every method and property of a tensor, with several arguments, on a plain parameter and on a sharded one."""
    warnings.simplefilter("ignore")
    model = build()
    before = snapshot(model)
    ones, integers = torch.ones(13, 7), torch.zeros(13, 7, dtype=torch.long)
    many: list[tuple[Any, ...]] = [
        (),
        (2,),
        (0, 1),
        (ones,),
        (ones.t(),),
        (integers,),
        (0, integers),
        (torch.float64,),
        (ones, ones),
    ]
    counts = {"value": 0, "refused": 0, "error": 0}
    names = [name for name in dir(Tensor) if not name.startswith("_") or name.endswith("__")]
    with sharded(model, backend="inline") as (engine, _), torch.set_grad_enabled(grad):
        released = model.first.weight
        gatherer = engine._sharded.gatherer
        unit = gatherer._unit_of[id(released)]
        for name in names:
            if name in NOT_CALLED:
                continue
            is_method = callable(getattr(Tensor, name))
            for arguments in many if is_method else [None]:
                gatherer.release_all()
                assert isinstance(released, ReleasedParameter), name
                expected = outcome(nn.Parameter(before["first.weight"].clone()), name, arguments)
                found = outcome(released, name, arguments)
                counts[found[0]] += 1
                if found[0] != "refused" and name not in SILENT:
                    assert found[0] == expected[0], (name, arguments, found, expected)
                    if found[0] == "value":
                        assert is_same(expected[1], found[1]), (name, arguments, found, expected)
                assert released.is_leaf, (name, arguments)
                for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    setattr(released, hooks, None)
                released.grad = None
                released.requires_grad_(True)
            gatherer.release_all()
            gatherer.bring(unit)
            member = next(m for m in unit.members if m.parameter is released)
            assert torch.equal(member.alias.view(13, 7), before["first.weight"]), name
    return counts


@pytest.mark.parametrize("grad", [True, False])
def test_every_method_gives_the_true_value_or_a_refusal(grad: bool) -> None:
    # In a process of its own: what goes wrong here is a crash.
    (counts,) = ranks(1, try_everything, grad)
    assert counts["value"] > 600
    assert counts["refused"] > 300


def test_a_released_parameter_after_its_engine_is_gone() -> None:
    model = build()
    with sharded(model):
        pass
    assert type(model.first.weight) is nn.Parameter
    assert_same_bits(snapshot(model), snapshot(build()))


def test_a_full_step_after_refusals() -> None:
    found, expected = build(), build()
    optimizer = exact_sgd(expected.parameters())
    with sharded(found) as (engine, ours):
        for step in range(3):
            for what in ("add_", "foreach", "a view", "module_load"):
                with torch.no_grad(), pytest.raises(ParameterError):
                    WRITES[what](found.first.weight, found)
            engine.backward(mlp_loss(found, step))
            mlp_loss(expected, step).backward()
            for each in (ours, optimizer):
                each.step()
                each.zero_grad()
        with engine.full_params():
            assert_same_bits(snapshot(found), snapshot(expected))


def test_converting_to_what_it_is_needs_no_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with engine_for(model, stage=3) as (engine, _):
        sharded: Any = engine._sharded
        before = list(model.parameters())
        model.to("cpu").float().cpu().to(torch.float32).to(before[0].device)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert sharded.gatherer.gathered_bytes == 0
        with pytest.raises(ParameterError, match=r"was written to \(data\)"):
            model.to(torch.bfloat16)
        with pytest.raises(ParameterError, match=r"was written to \(data\)"):
            model.half()


def test_the_model_under_vmap() -> None:
    model, plain = build(), build()
    inputs = features(0)
    with sharded(model):
        found = torch.func.vmap(model)(inputs)
        weight = model.first.weight
        product = torch.func.vmap(lambda row: F.linear(row, weight))(inputs)
    assert torch.allclose(found, torch.func.vmap(plain)(inputs))
    assert torch.allclose(product, F.linear(inputs, plain.first.weight))


BEHIND_PYTHON: dict[str, Callable[[Any], Any]] = {
    "torch.Tensor": torch.Tensor,
    "vmap": torch.func.vmap(lambda row: row * 1.0),
}
"""What reads a parameter's memory without asking `__torch_function__`: outside the promise, see docs/differences.md."""


@pytest.mark.parametrize("name", BEHIND_PYTHON)
def test_reads_behind_python_are_seen_under_poison_and_right_under_full_params(name: str) -> None:
    model, plain = build(), build()
    read = BEHIND_PYTHON[name]
    with sharded(model, debug_poison=True) as (engine, _):
        assert read(model.first.weight).isnan().all()
        with engine.full_params():
            assert torch.equal(read(model.first.weight), read(plain.first.weight))


@pytest.mark.parametrize("which", ["script", "trace", "child"])
def test_torchscript_is_refused(which: str) -> None:
    model: Any = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5))
    if which == "script":
        model = torch.jit.script(model)
    elif which == "trace":
        model = torch.jit.trace(model, features(0))
    else:
        model[1] = torch.jit.script(model[1])
    with pytest.raises(ParameterError, match=r"compiled by TorchScript.*plain module"):
        sharded(model).__enter__()


def test_tracing_a_sharded_model_is_refused() -> None:
    model, plain = build(), build()
    with sharded(model) as (engine, _):
        with pytest.raises(ParameterError, match=r"jit\.trace.*'first'.*full_params"):
            torch.jit.trace(model, features(0))
        with engine.full_params():
            copied = copy.deepcopy(model)
        traced: Any = torch.jit.trace(copied, features(0))
        assert torch.equal(traced(features(1)), plain(features(1)))
        model(features(0))
