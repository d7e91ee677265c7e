"""What is in a checkpoint: plain files that others can read, nests of plain values, and nothing that runs code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.checkpoints import build, state_of, train
from support.models import BranchMLP, TinyMLP, make
from support.training import adamw, assert_same_bits, config, engine_for
from torch import nn

from zero_plugin import Lion, ZeroEngine
from zero_plugin.checkpoint import tree
from zero_plugin.errors import CheckpointError


def nest() -> dict[str, Any]:
    return {
        "none": None,
        "numbers": [1, -2.5, True, math.inf, 10**20],
        "tuple": (1, ("a", [])),
        "text": "Größe\n",
        "bytes": b"\0\xff",
        "keys": {0: "int", (1, 2): "tuple", None: 3},
        "$looks like a mark": 1,
        "marked": {"$tuple": [1]},
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(0.1),
        "array": np.arange(4, dtype=np.float32),
        "dtype": torch.float16,
    }


def test_a_nest_comes_back_as_it_was() -> None:
    tensors: dict[str, Any] = {}
    text = json.dumps(tree.encode(nest(), tensors, "extra"))
    found = tree.decode(json.loads(text), tensors.__getitem__)
    wanted = nest()
    assert np.array_equal(found.pop("array"), wanted.pop("array"))
    assert_same_bits(found, wanted)
    assert type(found["tuple"]) is tuple
    assert found["keys"] == wanted["keys"]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [object()]}, r"extra\.a\.0 is a builtins\.object"),
        ({"f": print}, r"extra\.f is a builtins\.builtin_function_or_method"),
        ({"s": {1, 2}}, r"extra\.s is a builtins\.set"),
        ({"t": torch.eye(2).to_sparse()}, r"extra\.t is a torch\.Tensor"),
    ],
)
def test_what_would_need_a_pickle_is_refused_and_named(
    value: Any, where: str, tmp_path: Path
) -> None:
    model, _, engine = build(tmp_path)
    train(model, engine, range(1))
    with pytest.raises(CheckpointError, match=where):
        engine.save_checkpoint(tmp_path / "ck", extra=value)
    assert list(tmp_path.iterdir()) == []
    train(model, engine, range(1, 2))  # The run goes on.
    engine.save_checkpoint(tmp_path / "ck")
    engine.close()


def test_the_files_are_safetensors_and_json(tmp_path: Path) -> None:
    model, _, engine = build(tmp_path)
    train(model, engine, range(2))
    engine.save_checkpoint(tmp_path / "ck", extra=nest())
    state = state_of(engine)
    engine.close()
    names = sorted(path.name for path in (tmp_path / "ck").iterdir())
    assert names == ["index.json", "rank-00000-of-00001.safetensors"]
    index = json.loads((tmp_path / "ck" / "index.json").read_text())
    assert index["parameters"]["first.weight"]["shape"] == [13, 7]
    group = index["optimizers"][0]["groups"][0]
    assert group["options"]["lr"] == 3e-3
    assert "frozen" in group["parameters"]
    with safe_open(tmp_path / "ck" / names[1], "pt") as file:
        for name, weight in state["weights"].items():
            kind = "weight" if name == "frozen" else "master"
            if weight.numel():
                found = file.get_tensor(f"{kind}/{name}[0:{weight.numel()}]")
                assert torch.equal(found, weight.view(-1))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: Lion(p, lr=1e-3),
        lambda p: torch.optim.RAdam(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    ],
    ids=["momentum", "plain SGD", "Adagrad", "Lion", "RAdam", "amsgrad"],
)
def test_every_kind_of_optimizer_goes_on(optimizer: Any, tmp_path: Path) -> None:
    """Compiled ones, ones without states, and ones that run as plain torch with scalars of their own."""
    model = make(TinyMLP)
    with engine_for(model, optimizer(model.parameters()), stage=2) as (engine, _):
        train(model, engine, range(3))
        engine.save_checkpoint(tmp_path / "ck")
        train(model, engine, range(3, 6))
        wanted = state_of(engine)
    model = make(TinyMLP, seed=1)
    with engine_for(model, optimizer(model.parameters()), stage=3) as (engine, _):
        engine.load_checkpoint(tmp_path / "ck")
        train(model, engine, range(3, 6))
        assert_same_bits(state_of(engine), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_moves_between_dtypes_and_masters_stay_exact(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make(TinyMLP).to(torch.bfloat16)
    with engine_for(model, stage=2) as (engine, optimizer):
        loss = model(torch.ones(3, 7, dtype=torch.bfloat16)).sum()
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "ck")
        saved = optimizer.state_dict()["state"]
    other = make(TinyMLP, seed=1).to(dtype)
    with engine_for(other, stage=1) as (engine, optimizer):
        engine.load_checkpoint(tmp_path / "ck")
        for number, parameter in enumerate(other.parameters()):
            master = saved[number]["master"]
            assert torch.equal(parameter, master.to(dtype))
            assert torch.equal(
                optimizer.state_dict()["state"][number]["exp_avg"], saved[number]["exp_avg"]
            )


def test_untouched_parameters_keep_their_step_counts(tmp_path: Path) -> None:
    """Step counts are per parameter: a branch that is used later begins with its own."""
    model = make(BranchMLP)
    with engine_for(model) as (engine, optimizer):
        for step in range(2):
            engine.backward(model(torch.ones(2, 7), *range(step + 1)).sum())
            engine.step()
            engine.zero_grad()
        engine.save_checkpoint(tmp_path / "ck")
        wanted = optimizer.state_dict()
    assert len(wanted["state"]) < len(list(model.parameters()))
    other = make(BranchMLP, seed=1)
    with engine_for(other, stage=3) as (engine, optimizer):
        engine.load_checkpoint(tmp_path / "ck")
        assert_same_bits(optimizer.state_dict(), wanted)


class Counted(TinyMLP):
    """A buffer that is saved, one that is not, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note: Any = ("none",)

    def forward(self, features: Any) -> Any:
        return super().forward(self.norm(features))

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_buffers_and_extra_states_of_modules(tmp_path: Path) -> None:
    model = make(Counted)
    model.note = ("seen", 3)
    with engine_for(model) as (engine, _):
        engine.backward(model(torch.randn(4, 7)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path / "ck")
    other = make(Counted, seed=1)
    with engine_for(other, stage=3) as (engine, _):
        engine.load_checkpoint(tmp_path / "ck")
        assert other.note == ("seen", 3)
        assert torch.equal(other.norm.running_mean, model.norm.running_mean)
        assert int(other.norm.num_batches_tracked) == 1


def test_two_optimizers_groups_and_loss_scale(tmp_path: Path) -> None:
    def both(model: Any) -> list[Any]:
        return [
            adamw(model.first.parameters(), lr=0.1),
            torch.optim.SGD(
                [{"params": [model.second.weight], "lr": 0.5}, {"params": [model.second.bias]}],
                lr=0.25,
                momentum=0.5,
            ),
        ]

    model = make(TinyMLP)
    optimizers = both(model)
    with ZeroEngine(model, optimizers, config(loss_scale="dynamic")) as engine:
        train(model, engine, range(2))
        optimizers[1].param_groups[0]["lr"] = 0.125
        optimizers[1].param_groups[1]["initial_lr"] = 7.0
        engine.save_checkpoint(tmp_path / "ck")
        train(model, engine, range(2, 4))
        wanted = state_of(engine)
        scale = engine.loss_scale_state()
    model = make(TinyMLP, seed=1)
    optimizers = both(model)
    with ZeroEngine(model, optimizers, config(stage=3, loss_scale="dynamic")) as engine:
        engine.load_checkpoint(tmp_path / "ck")
        assert optimizers[1].param_groups[0]["lr"] == 0.125
        assert optimizers[1].param_groups[1]["initial_lr"] == 7.0
        train(model, engine, range(2, 4))
        assert_same_bits(state_of(engine), wanted)
        assert engine.loss_scale_state() == scale


def test_weights_that_user_code_wrote_are_saved(tmp_path: Path) -> None:
    model, _, engine = build(tmp_path)
    train(model, engine, range(1))
    with torch.no_grad():
        model.first.weight.clamp_(-0.01, 0.01)
    engine.save_checkpoint(tmp_path / "ck")
    wanted = model.first.weight.clone()
    engine.close()
    model, _, engine = build(tmp_path)
    engine.load_checkpoint(tmp_path / "ck")
    assert torch.equal(model.first.weight, wanted)
    engine.close()


def test_random_numbers_go_on(tmp_path: Path) -> None:
    import random

    def draw() -> Any:
        return [torch.rand(3), random.random(), random.gauss(0, 1), np.random.rand(2).tolist()]

    _, _, engine = build(tmp_path)
    random.gauss(0, 1)  # Leaves a second one for the next call.
    engine.save_checkpoint(tmp_path / "ck")
    wanted = draw()
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_bits(draw(), wanted)
    engine.load_checkpoint(tmp_path / "ck", random_states=False)
    assert draw()[1] != wanted[1]
    engine.close()


def test_a_bar_is_shown_on_a_terminal_and_for_long_saves_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    from zero_plugin.checkpoint import progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def run(stream: io.StringIO, number: int) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        engine.save_checkpoint(tmp_path / f"ck-{number}")
        engine.load_checkpoint(tmp_path / f"ck-{number}")
        return stream.getvalue()

    _, _, engine = build(tmp_path)
    assert run(Terminal(), 0) == ""
    monkeypatch.setattr(progress, "LONG_BYTES", 1)
    assert run(io.StringIO(), 1) == ""
    shown = run(Terminal(), 2)
    assert all(f"{what} {tmp_path}" in shown for what in ("saving", "checking", "loading"))
    engine.close()
