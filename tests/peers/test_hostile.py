"""Uses that no manual suggests: strange models, gradients and weights changed by hand, engines misused.

Each either does what plain torch does, bit for bit, or is refused with an error that names the culprit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make, mlp_loss
from support.training import (
    SETTINGS,
    SHARDED,
    Session,
    adamw,
    assert_like_plain_torch,
    assert_same_bits,
    engine_for,
    exact_sgd,
    snapshot,
)
from torch import Tensor, nn

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.errors import (
    ConfigError,
    EngineStateError,
    GradientAccessError,
    OptimizerError,
    ParameterError,
    ZeroError,
)

HOST = {"optimizer": "host", "gradients": "host"}
DEVICE = {"optimizer": "device", "gradients": "device"}


def inputs(step: int) -> Tensor:
    """[5, 6]."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def three_steps(session: Session) -> None:
    """Backward, step, clear; three times."""
    for step in range(3):
        session.backward(session.model(inputs(step)).square().mean())
        session.update()


def three_mlp_steps(session: Session) -> None:
    """The same with the MLP's loss."""
    for step in range(3):
        session.backward(mlp_loss(session.model, step))
        session.update()


# Strange models -----------------------------------------------------------------------------------------------------


class Lists(nn.Module):
    """Parameters in lists, dictionaries and of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(6, 6) for _ in range(3)])
        self.named = nn.ParameterDict({"gain": torch.randn(6), "scalar": torch.tensor(0.5)})

    def forward(self, hidden: Tensor) -> Tensor:
        for weight in self.listed:
            hidden = torch.tanh(hidden @ weight)
        return hidden * self.named["gain"] * self.named["scalar"]


class Strided(nn.Module):
    """Parameters that are transposed, a slice, or parts of one flat buffer."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(60)
        self.turned = nn.Parameter(torch.randn(7, 6).t())
        self.slice = nn.Parameter(torch.randn(7, 3)[:, 1])
        self.square, self.bias, self.narrow = (
            nn.Parameter(flat[:36].view(6, 6)),
            nn.Parameter(flat[36:42]),
            nn.Parameter(flat[42:60].view(6, 3)),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.tanh(hidden @ self.square + self.bias)
        return (hidden @ self.turned + self.slice).sum() + (hidden @ self.narrow).sum()


class Quantised(nn.Module):
    """A frozen int8 weight beside a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(
            torch.randint(-8, 8, (6, 6), dtype=torch.int8), requires_grad=False
        )
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.codes.float() * self.scale)


class OwnParameter(nn.Parameter):
    """A subclass without a storage of its own kind."""


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = OwnParameter(torch.randn(6, 6))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


class Nothing(nn.Module):
    """Zero-sized parameters beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.rows = nn.Parameter(torch.randn(0, 6))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden @ self.weight, self.rows])


def weight_norm() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    )


def channels_last() -> nn.Module:
    image = nn.Unflatten(1, (1, 2, 3))
    return nn.Sequential(image, nn.Conv2d(1, 4, 2), nn.Conv2d(4, 3, 1)).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lists": Lists,
    "quantised": Quantised,
    "subclassed": Subclassed,
    "nothing": Nothing,
    "weight_norm": weight_norm,
    "channels_last": channels_last,
}


@pytest.mark.parametrize("which", MODELS)
def test_a_strange_model_trains_as_in_plain_torch(which: str) -> None:
    assert_like_plain_torch(MODELS[which], three_steps)


@pytest.mark.parametrize("settings", [HOST, DEVICE, {"stage": 1}], ids=str)
def test_parameters_with_strides_of_their_own(settings: dict[str, Any]) -> None:
    """They are made contiguous, so that torch may choose another kernel: the numbers are close, not the same bits."""
    found, expected = make(Strided), make(Strided)
    plain = exact_sgd(expected.parameters())
    with engine_for(found, exact_sgd(found.parameters()), **settings) as (engine, optimizer):
        for step in range(3):
            losses = [model(inputs(step)).square() * 1e-5 for model in (found, expected)]
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
            engine.backward(losses[0])
            losses[1].backward()
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
    start = make(Strided)
    for name, value in found.named_parameters():
        torch.testing.assert_close(value, expected.get_parameter(name), rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, start.get_parameter(name))


def test_an_embedding_with_padding_and_a_norm_bound() -> None:
    """`max_norm` writes the weight inside forward; `padding_idx` leaves a row without a gradient."""

    def script(session: Session) -> None:
        for step in range(3):
            ids = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(step))
            session.backward(session.model(ids).square().mean())
            session.update()

    assert_like_plain_torch(lambda: nn.Embedding(9, 6, padding_idx=0), script)
    assert_like_plain_torch(lambda: nn.Embedding(9, 6, max_norm=1.0), script, settings=SETTINGS)
    # At stage 3 the bound would be lost with the gathered copy, so it is refused.
    with pytest.raises(ParameterError, match="'weight' was written to while it was gathered"):
        assert_like_plain_torch(
            lambda: nn.Embedding(9, 6, max_norm=1.0), script, settings=SHARDED[:1]
        )


@pytest.mark.parametrize("bucket", [64, "10TB"])
def test_buckets_of_any_size(bucket: int | str) -> None:
    assert_like_plain_torch(TinyMLP, three_mlp_steps, settings=({"bucket_bytes": bucket},))


def test_five_thousand_scalars() -> None:
    def many() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(5000)])

    def script(session: Session) -> None:
        session.backward(torch.stack(list(session.model)).square().sum())
        session.update()

    assert_like_plain_torch(many, script, settings=({"bucket_bytes": 4096},))


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "complex": (
        lambda: nn.Linear(4, 4, dtype=torch.complex64),
        ParameterError,
        "weight.*complex64",
    ),
    "double": (lambda: nn.Linear(4, 4, dtype=torch.float64), ParameterError, "weight.*float64"),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), ParameterError, "weight.*meta"),
    "lazy": (lambda: nn.LazyLinear(4), ParameterError, "uninitialised.*batch"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_parameter_that_cannot_be_managed_is_named(which: str) -> None:
    factory, error, message = REFUSED[which]
    model = factory()
    before = threading.active_count()
    with pytest.raises(error, match=message):
        ZeroEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(threads=1))
    assert threading.active_count() == before


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = SparseNet()
    with engine_for(model, torch.optim.SGD(model.parameters(), lr=0.1)) as (engine, _):
        with pytest.raises(EngineStateError, match=r"table\.weight.*sparse=False"):
            engine.backward(model.table(torch.tensor([1, 2])).sum())
        assert not model.table.weight.grad


@pytest.mark.parametrize("turned", [False, True])
def test_two_parameters_over_one_memory_are_refused(turned: bool) -> None:
    """`v = nn.Parameter(w.data)`: with two masters the last upload would win, silently."""
    model = nn.Module()
    model.first = nn.Parameter(torch.randn(6, 6))
    model.second = nn.Parameter(model.first.data.t() if turned else model.first.data)
    with pytest.raises(ParameterError, match=r"first.*second|second.*first"):
        ZeroEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(threads=1))


# Gradients by hand --------------------------------------------------------------------------------------------------


def set_all(session: Session) -> None:
    for step in range(3):
        for parameter in session.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.125 * (step + 1))
        session.update()


def set_one_before_backward(session: Session) -> None:
    for step in range(3):
        session.model.first.weight.grad = torch.ones(13, 7)
        session.backward(mlp_loss(session.model, step))
        session.update()


def replace_one_after_backward(session: Session) -> None:
    for step in range(3):
        session.backward(mlp_loss(session.model, step))
        session.model.first.weight.grad = torch.full((13, 7), 0.25)
        session.update()


def drop_one_after_backward(session: Session) -> None:
    for step in range(3):
        session.backward(mlp_loss(session.model, step))
        session.model.first.weight.grad = None
        session.update()


def set_strided(session: Session) -> None:
    for _ in range(3):
        session.model.first.weight.grad = (torch.arange(91.0).view(7, 13) * 0.0625).t()
        session.model.second.weight.grad = torch.ones(1, 13).expand(5, 13)
        session.update()


@pytest.mark.parametrize(
    "script",
    [
        set_all,
        set_one_before_backward,
        replace_one_after_backward,
        drop_one_after_backward,
        set_strided,
    ],
    ids=lambda script: script.__name__,
)
def test_gradients_set_by_hand(script: Callable[[Session], None]) -> None:
    assert_like_plain_torch(TinyMLP, script)


def test_a_backward_inside_full_grads_is_refused() -> None:
    """The gathered gradient stands in `Parameter.grad` there; autograd would add to it, and it would count twice."""
    model = make(TinyMLP)
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        with pytest.raises(EngineStateError, match="full_grads"), engine.full_grads():
            engine.backward(mlp_loss(model, 1))


def test_full_grads_inside_full_grads() -> None:
    model = make(TinyMLP)
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        with engine.full_grads():
            outer = model.first.weight.grad
            with engine.full_grads():
                inner = model.first.weight.grad.clone()
            assert torch.equal(model.first.weight.grad, inner)
            assert torch.equal(outer, inner)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces what it then leaves alone
def test_a_whole_training_step_under_torch_compile() -> None:
    found, expected = make(TinyMLP), make(TinyMLP)
    plain = exact_sgd(expected.parameters())
    with engine_for(found, exact_sgd(found.parameters())) as (engine, optimizer):

        @torch.compile(backend="eager")
        def train(step: int) -> None:
            engine.backward(mlp_loss(found, step))
            optimizer.step()
            optimizer.zero_grad()

        for step in range(2):
            train(step)
            mlp_loss(expected, step).backward()
            plain.step()
            plain.zero_grad()
    assert_same_bits(snapshot(found), snapshot(expected))


# Weights changed under the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [HOST, DEVICE, {"optimizer": "device", "gradients": "host"}], ids=str
)
def test_data_swapped_between_steps(settings: dict[str, Any]) -> None:
    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, step))
            if step == 1:
                session.model.first.weight.data = torch.full((13, 7), 0.125)
            session.update()
            if step == 2:
                session.model.second.weight.data = torch.full((13, 5), 0.25).t()

    assert_like_plain_torch(TinyMLP, script, settings=(settings,))


@pytest.mark.parametrize("settings", [HOST, DEVICE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_another_dtype_after_the_engine_is_refused(
    settings: dict[str, Any], dtype: torch.dtype, when: str
) -> None:
    """Writing fp32 updates through a pointer to bf16 weights would corrupt memory."""
    model = make(TinyMLP)
    with engine_for(model, **settings) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ParameterError, match=r"first\.weight"):  # noqa: PT012
            if when == "before step":
                engine.backward(mlp_loss(model, 1))
                for parameter in model.parameters():
                    parameter.grad = None
            model.to(dtype)
            if when == "before backward":
                engine.backward(model(torch.ones(2, 7, dtype=dtype)).sum())
            optimizer.step()


def test_another_shape_after_the_engine_is_refused() -> None:
    model = make(TinyMLP)
    with engine_for(model) as (engine, optimizer):
        model.first.weight.data = torch.randn(20, 7)
        model.first.bias.data = torch.randn(20)
        model.second.weight.data = torch.randn(5, 20)
        shapes = r"first\.weight.*13, 7.*20, 7|first\.weight.*20, 7.*13, 7"
        with pytest.raises(ParameterError, match=shapes):  # noqa: PT012
            engine.backward(model(torch.ones(2, 7)).sum())
            optimizer.step()


@pytest.mark.parametrize("settings", [HOST, DEVICE], ids=str)
@pytest.mark.parametrize("how", ["parameter", "detach", "state_dict", "vector"])
def test_weights_written_between_steps_are_trained_on(settings: dict[str, Any], how: str) -> None:
    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, step))
            session.update()
            if step == 1:
                write(session.model, how)

    assert_like_plain_torch(TinyMLP, script, settings=(settings,))


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_weights_written_behind_autograds_back(how: str) -> None:
    """`p.data.clamp_(...)`, as old WGAN code has it, where the weights are their own master."""

    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, step))
            session.update()
            if step == 1:
                write(session.model, how)

    assert_like_plain_torch(TinyMLP, script, settings=(DEVICE,))


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_weights_written_behind_autograds_back_are_undone_by_a_host_master(how: str) -> None:
    """Such a write leaves no trace to see; the documents say so, and that the next step undoes it."""
    found = []
    for written in (False, True):
        model = make(TinyMLP)
        with engine_for(model, exact_sgd(model.parameters()), **HOST) as (engine, optimizer):
            # The gradient is made before the write, so that the write shows in the weights alone.
            engine.backward(mlp_loss(model, 0))
            if written:
                write(model, how)
            optimizer.step()
            found.append(snapshot(model))
    assert_same_bits(found[0], found[1])


def write(model: Any, how: str) -> None:
    """Clamps the first weight to [-1/8, 1/8]."""
    weight = model.first.weight
    if how == "parameter":
        with torch.no_grad():
            weight.clamp_(-0.125, 0.125)
    elif how == "detach":
        weight.detach().clamp_(-0.125, 0.125)
    elif how == "state_dict":
        model.state_dict()["first.weight"].clamp_(-0.125, 0.125)
    elif how == "vector":
        vector = nn.utils.parameters_to_vector(model.parameters()).clamp(-0.125, 0.125)
        nn.utils.vector_to_parameters(vector, model.parameters())
    elif how == "data":
        weight.data.clamp_(-0.125, 0.125)
    else:
        array = weight.detach().numpy()
        array.clip(-0.125, 0.125, out=array)


def test_the_same_dtype_again_changes_nothing() -> None:
    def script(session: Session) -> None:
        for step in range(3):
            session.model.to(torch.float32).to("cpu")
            session.backward(mlp_loss(session.model, step))
            session.update()

    assert_like_plain_torch(TinyMLP, script)


# Param groups edited ------------------------------------------------------------------------------------------------


def test_edited_hyper_parameters_are_used_at_once() -> None:
    def script(session: Session) -> None:
        group = session.optimizer.param_groups[0]
        for step in range(4):
            session.backward(mlp_loss(session.model, step))
            if step == 2:
                group.update(lr=0.25, momentum=0.25, weight_decay=0.0, maximize=True)
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_a_parameter_taken_out_of_its_group_rests() -> None:
    def script(session: Session) -> None:
        for step in range(4):
            session.backward(mlp_loss(session.model, step))
            if step == 2:
                session.optimizer.param_groups[0]["params"].pop()
            session.update()

    assert_like_plain_torch(TinyMLP, script)


@pytest.mark.parametrize("how", ["edit", "add"])
def test_an_option_without_a_compiled_rule_is_refused_later_too(how: str) -> None:
    """`amsgrad=True` set after the engine was built was ignored."""
    model = make(TinyMLP)
    optimizer = torch.optim.AdamW(model.first.parameters())

    def change_and_step(engine: ZeroEngine) -> None:
        if how == "edit":
            optimizer.param_groups[0]["amsgrad"] = True
        else:
            optimizer.add_param_group({"params": model.second.parameters(), "amsgrad": True})
        engine.backward(mlp_loss(model, 0))
        optimizer.step()

    with (
        engine_for(model, optimizer) as (engine, _),
        pytest.raises(OptimizerError, match="amsgrad"),
    ):
        change_and_step(engine)


# Engines misused ----------------------------------------------------------------------------------------------------


def test_a_second_engine_over_the_same_parameters_is_refused() -> None:
    """The first one's hooks take every gradient, so the second's steps would do nothing."""
    model = make(TinyMLP)
    with engine_for(model), pytest.raises(ZeroError, match=r"first\.weight|engine"):
        ZeroEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(threads=1))
    with engine_for(model) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()


def test_two_engines_on_two_halves_of_one_model() -> None:
    found, expected = make(TinyMLP), make(TinyMLP)
    plain = [exact_sgd(part.parameters()) for part in (expected.first, expected.second)]
    with (
        engine_for(found, exact_sgd(found.first.parameters())) as (one, first),
        engine_for(found, exact_sgd(found.second.parameters())) as (two, second),
    ):
        for step in range(3):
            one.backward(mlp_loss(found, step))
            mlp_loss(expected, step).backward()
            for optimizer in (first, second, *plain):
                optimizer.step()
                optimizer.zero_grad()
        assert two.world_size == 1
    assert_same_bits(snapshot(found), snapshot(expected))


@pytest.mark.parametrize("gradients", [False, True])
def test_an_engine_collected_without_close_leaves_a_plain_model(gradients: bool) -> None:
    model = make(TinyMLP)
    before = threading.active_count()

    def use() -> None:
        optimizer = adamw(model.parameters())
        engine = ZeroEngine(model, optimizer, ZeroConfig(threads=1))
        engine.backward(mlp_loss(model, 0))
        if not gradients:
            optimizer.step()
            optimizer.zero_grad()

    use()
    gc.collect()
    limit = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert threading.active_count() == before
    model.zero_grad()
    mlp_loss(model, 1).backward()
    assert type(model.first.weight.grad) is Tensor


CLOSED: dict[str, Callable[[ZeroEngine, Any, nn.Module], Any]] = {
    "backward": lambda engine, optimizer, model: engine.backward(mlp_loss(model, 0)),
    "step": lambda engine, optimizer, model: engine.step(),
    "optimizer.step": lambda engine, optimizer, model: optimizer.step(),
    "optimizer.zero_grad": lambda engine, optimizer, model: optimizer.zero_grad(),
    "optimizer.state_dict": lambda engine, optimizer, model: optimizer.state_dict(),
    "clip_grad_norm_": lambda engine, optimizer, model: engine.clip_grad_norm_(1.0),
    "clip_grad_value_": lambda engine, optimizer, model: engine.clip_grad_value_(1.0),
    "full_grads": lambda engine, optimizer, model: engine.full_grads().__enter__(),
    "full_params": lambda engine, optimizer, model: engine.full_params().__enter__(),
    "drain": lambda engine, optimizer, model: engine.drain(),
    "with": lambda engine, optimizer, model: engine.__enter__(),
    "add_param_group": lambda engine, optimizer, model: optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))]}
    ),
}


@pytest.mark.parametrize("call", CLOSED)
def test_every_call_after_close_says_so(call: str) -> None:
    model = make(TinyMLP)
    with engine_for(model) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
    with pytest.raises(EngineStateError, match=r"closed|close"):
        CLOSED[call](engine, optimizer, model)
    engine.close()
    engine.abort_step()


def test_copies_of_a_model_are_plain() -> None:
    model = make(TinyMLP)
    with engine_for(model) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_same_bits(snapshot(copied), snapshot(model))
            mlp_loss(copied, 0).backward()
            assert type(copied.first.weight.grad) is Tensor
        optimizer.step()


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_of_the_optimizer_is_refused_with_the_cure(way: str) -> None:
    model = make(TinyMLP)

    def copy_and_step(optimizer: Any) -> None:
        copied: Any = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.dumps(optimizer)
        copied.step()

    with engine_for(model) as (_, optimizer), pytest.raises(EngineStateError, match="state_dict"):
        copy_and_step(optimizer)


WRONG: dict[str, Callable[[nn.Module, Any], Any]] = {
    "no optimizer": lambda model, optimizer: ZeroEngine(model, None),  # type: ignore[arg-type]
    "an empty list": lambda model, optimizer: ZeroEngine(model, []),
    "a name": lambda model, optimizer: ZeroEngine(model, "adam"),  # type: ignore[arg-type]
    "a dict of settings": lambda model, optimizer: ZeroEngine(model, optimizer, {"stage": 2}),  # type: ignore[arg-type]
    "no module": lambda model, optimizer: ZeroEngine(None, optimizer),  # type: ignore[arg-type]
    "parameters": lambda model, optimizer: ZeroEngine(list(model.parameters()), optimizer),  # type: ignore[arg-type]
    "twice the same": lambda model, optimizer: ZeroEngine(model, [optimizer, optimizer]),
    "a stranger's": lambda model, optimizer: ZeroEngine(
        model, torch.optim.SGD(make(TinyMLP).parameters(), lr=0.1)
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_arguments_are_refused_by_us(which: str) -> None:
    model = make(TinyMLP)
    with pytest.raises(ZeroError):
        WRONG[which](model, adamw(model.parameters()))


CALLS: dict[str, Callable[[ZeroEngine, nn.Module], Any]] = {
    "nan bound": lambda engine, model: engine.clip_grad_norm_(float("nan")),
    "negative bound": lambda engine, model: engine.clip_grad_norm_(-1.0),
    "another norm": lambda engine, model: engine.clip_grad_norm_(1.0, norm_type=1.0),
    "negative value": lambda engine, model: engine.clip_grad_value_(-1.0),
    "a stranger's step": lambda engine, model: engine.step(
        torch.optim.SGD(make(TinyMLP).parameters(), lr=0.1)
    ),
}


@pytest.mark.parametrize("which", CALLS)
def test_wrong_calls_are_refused_by_us(which: str) -> None:
    model = make(TinyMLP)
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        with pytest.raises((ConfigError, EngineStateError)):
            CALLS[which](engine, model)


def test_a_bound_may_be_a_tensor_or_an_integer() -> None:
    model = make(TinyMLP)
    bounds: tuple[Any, ...] = (torch.tensor(1e6), 1_000_000)
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            norms = [engine.clip_grad_norm_(bound) for bound in bounds]
        assert norms[0] == norms[1] > 0


def test_a_step_before_any_backward_spends_nothing() -> None:
    """Some scripts step once to quiet a scheduler; the first backward then must not be refused."""

    def script(session: Session) -> None:
        session.optimizer.step()
        for step in range(3):
            session.backward(mlp_loss(session.model, step))
            session.update()

    assert_like_plain_torch(TinyMLP, script)


def test_a_scaled_engine_refuses_an_unscaled_backward() -> None:
    """With a loss scale, `loss.backward()` alone would give gradients that are too small by the scale."""
    model = make(TinyMLP)
    with engine_for(model, loss_scale=1024.0) as (engine, optimizer):
        engine.scale_loss(mlp_loss(model, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(EngineStateError, match="scale"):  # noqa: PT012
            mlp_loss(model, 1).backward()
            optimizer.step()


def test_a_default_device_of_torch_does_not_move_the_engines_own_tensors() -> None:
    """`torch.set_default_device("cuda")` is common; `meta` shows the same mistakes on a machine without one."""
    found, expected = make(TinyMLP), make(TinyMLP)
    plain = exact_sgd(expected.parameters())
    losses = [mlp_loss(found, 0)]
    with torch.device("meta"):
        engine = ZeroEngine(
            found, (optimizer := exact_sgd(found.parameters())), ZeroConfig(threads=1)
        )
    try:
        for step in range(2):
            losses = [mlp_loss(found, step)]
            mlp_loss(expected, step).backward()
            with torch.device("meta"):
                engine.backward(losses[0])
                engine.clip_grad_norm_(1e9)
                optimizer.step()
                optimizer.zero_grad()
                optimizer.state_dict()
                engine.full_state_dict()
            plain.step()
            plain.zero_grad()
    finally:
        engine.close()
    assert_same_bits(snapshot(found), snapshot(expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_of_torch_changes_nothing(dtype: torch.dtype) -> None:
    found, expected = make(TinyMLP), make(TinyMLP)
    plain = exact_sgd(expected.parameters())
    before = torch.get_default_dtype()
    with engine_for(found, exact_sgd(found.parameters())) as (engine, optimizer):
        for step in range(2):
            loss = mlp_loss(found, step)
            mlp_loss(expected, step).backward()
            torch.set_default_dtype(dtype)
            try:
                engine.backward(loss)
                engine.clip_grad_norm_(1e9)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.set_default_dtype(before)
            plain.step()
            plain.zero_grad()
    assert_same_bits(snapshot(found), snapshot(expected))


# Threads, forks, signals --------------------------------------------------------------------------------------------


def test_engines_in_four_threads_at_once() -> None:
    expected = make(TinyMLP)
    plain = exact_sgd(expected.parameters())
    for step in range(10):
        mlp_loss(expected, step).backward()
        plain.step()
        plain.zero_grad()
    models = [make(TinyMLP) for _ in range(4)]
    failures: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
                for step in range(10):
                    engine.backward(mlp_loss(model, step))
                    optimizer.step()
                    optimizer.zero_grad()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for model in models:
        assert_same_bits(snapshot(model), snapshot(expected))


IN_A_CHILD: dict[str, Callable[[ZeroEngine, Any, nn.Module], Any]] = {
    "forward": lambda engine, optimizer, model: mlp_loss(model, 1),
    "close": lambda engine, optimizer, model: engine.close(),
    "step": lambda engine, optimizer, model: (
        engine.backward(mlp_loss(model, 1)),
        optimizer.step(),
    ),
}


@pytest.mark.parametrize("waits", [True, False], ids=["at rest", "in an update"])
@pytest.mark.parametrize("what", IN_A_CHILD)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_works_or_is_told(what: str, waits: bool) -> None:
    """Data loaders fork after the engine; a child has none of its threads."""
    model = make(TinyMLP)
    with engine_for(model, backend="threads") as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        if waits:
            engine.wait_for_update()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            said = "done"
            try:
                IN_A_CHILD[what](engine, optimizer, model)
            except BaseException as error:  # noqa: BLE001 - sent to the parent
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        try:
            assert select.select([reading], [], [], 20)[0], "the child hangs"
            said = os.read(reading, 4096).decode()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reading)
        if what == "step":
            assert "fork" in said
        else:
            assert said == "done" or (not waits and "fork" in said), said
        engine.backward(mlp_loss(model, 1))
        optimizer.step()


@pytest.mark.parametrize("settings", [HOST, DEVICE], ids=str)
def test_interrupts_anywhere_in_a_step(settings: dict[str, Any]) -> None:
    """Ctrl-C at twelve moments of backward and step: each is raised, training goes on, close leaves nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    data = torch.randn(4, 256)
    interrupted = 0
    with engine_for(model, bucket_bytes="64KiB", **settings) as (engine, optimizer):

        def step() -> None:
            optimizer.zero_grad()
            engine.backward(model(data).square().mean())
            engine.clip_grad_norm_(1.0)
            optimizer.step()

        step()
        for moment in range(12):
            timer = threading.Timer(
                0.002 + 0.0017 * moment, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)
            )
            try:
                timer.start()
                while True:
                    step()
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            engine.abort_step()
            step()
        assert interrupted == 12
        assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_gradients_are_not_readable_by_accident_in_numpy_or_pickle() -> None:
    model = make(TinyMLP)
    with engine_for(model) as (engine, _):
        engine.backward(mlp_loss(model, 0))
        grad: Any = model.first.weight.grad
        for read in (
            grad.numpy,
            grad.tolist,
            grad.clone,
            lambda: pickle.dumps(grad),
            grad.data_ptr,
        ):
            with pytest.raises(GradientAccessError, match=r"first\.weight"):
                read()
