"""Two ranks that do not do the same: every failure ends with an error on both, and nothing hangs.

Several scenarios share one pair of processes, one after another, each with its own engine.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import BranchMLP, NormMLP, TinyMLP, make, mlp_loss
from support.training import engine_for, exact_sgd, ranks, snapshot
from torch import Tensor, nn

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.errors import ZeroError

pytestmark = pytest.mark.dist


class Bomb(torch.autograd.Function):
    """Passes forward and raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError("the user's own mistake")


def steps(engine: ZeroEngine, optimizer: Any, model: nn.Module, rank: int, count: int = 2) -> None:
    for step in range(count):
        engine.backward(mlp_loss(model, step, rank=rank))
        optimizer.step()
        optimizer.zero_grad()


# What both ranks can survive ----------------------------------------------------------------------------------------


def survivors(rank: int, size: int) -> dict[str, Any]:
    """Scenarios after which both ranks go on, with what they leave."""
    results: dict[str, Any] = {}
    for work in (
        hand_made_on_one_rank,
        copied_on_one_rank,
        frozen_on_one_rank,
        no_sync_on_one_rank,
        caught_in_backward_on_one_rank,
        engines_of_their_own_order,
    ):
        results[work.__name__] = work(rank)
    return results


def hand_made_on_one_rank(rank: int) -> float:
    model = make(TinyMLP)
    before = model.first.weight.detach().clone()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with engine_for(model, plain) as (_, optimizer):
        if rank == 1:
            model.first.weight.grad = torch.ones(13, 7)
        optimizer.step()
    return (before - model.first.weight).mean().item()


def copied_on_one_rank(rank: int) -> bool:
    """A model with buffers: a forward of a copy must not take part in a collective."""
    model = make(NormMLP)
    with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
        steps(engine, optimizer, model, rank, count=1)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        if rank == 0:
            for copied in copies:
                mlp_loss(copied, 0).backward()
        steps(engine, optimizer, model, rank)
    return all(type(c.first.weight.grad) is Tensor for c in copies) == (rank == 0)


def frozen_on_one_rank(rank: int) -> dict[str, Tensor]:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
        model.first.requires_grad_(rank == 0)
        steps(engine, optimizer, model, rank)
    return snapshot(model)


def no_sync_on_one_rank(rank: int) -> dict[str, Tensor]:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters()), stage=1) as (engine, optimizer):
        with engine.no_sync() if rank == 0 else contextlib.nullcontext():
            engine.backward(mlp_loss(model, 0, rank=rank))
        steps(engine, optimizer, model, rank, count=1)
    return snapshot(model)


def caught_in_backward_on_one_rank(rank: int) -> dict[str, Tensor]:
    model = make(TinyMLP)
    with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
        if rank == 1:
            with pytest.raises(ValueError, match="the user's own mistake"):
                engine.backward(model.second(Bomb.apply(model.first(torch.ones(1, 7)))).sum())
        else:
            engine.backward(mlp_loss(model, 0, rank=rank))
        optimizer.step()
        optimizer.zero_grad()
        steps(engine, optimizer, model, rank)
    return snapshot(model)


def engines_of_their_own_order(rank: int) -> dict[str, Tensor]:
    """Backwards of two engines, in the other order on the other rank."""
    models = [make(TinyMLP, seed=1), make(BranchMLP, seed=2)]
    with (
        engine_for(models[0], exact_sgd(models[0].parameters())) as (one, first),
        engine_for(models[1], exact_sgd(models[1].parameters())) as (two, second),
    ):
        works: list[Callable[[], None]] = [
            lambda: one.backward(mlp_loss(models[0], 0, rank=rank)),
            lambda: two.backward(mlp_loss(models[1], 0, rank, rank=rank)),
        ]
        for work in works if rank == 0 else reversed(works):
            work()
        for optimizer in (first, second):
            optimizer.step()
    return {
        f"{number}.{key}": value
        for number in (0, 1)
        for key, value in snapshot(models[number]).items()
    }


def test_ranks_that_differ_within_reason() -> None:
    first, second = ranks(2, survivors)
    assert first["hand_made_on_one_rank"] == second["hand_made_on_one_rank"] == 0.5
    assert first["copied_on_one_rank"]
    assert second["copied_on_one_rank"]
    for name in (
        "frozen_on_one_rank",
        "no_sync_on_one_rank",
        "caught_in_backward_on_one_rank",
        "engines_of_their_own_order",
    ):
        for key, value in first[name].items():
            assert torch.equal(value, second[name][key]), f"{name}: {key}"
    # Averaged over two ranks of which one has none.
    plain = make(TinyMLP)
    optimizer = exact_sgd(plain.parameters())
    for step in range(2):
        for rank in range(2):
            plain.first.requires_grad_(rank == 0)
            (mlp_loss(plain, step, rank=rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(first["frozen_on_one_rank"][key], value, rtol=1e-6, atol=1e-6)


# What both ranks are told -------------------------------------------------------------------------------------------


class Letters(nn.Module):
    """The same shapes in an order that differs by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name in "ab" if rank == 0 else "ba":
            setattr(self, name, nn.Parameter(torch.full((4,), float(ord(name)))))


def construct(rank: int, what: str) -> None:
    """Builds engines that do not match, and trains a step."""
    model: nn.Module = make(TinyMLP)
    settings: dict[str, Any] = {}
    make_optimizer: Callable[..., Any] = exact_sgd
    if what == "stage":
        settings["stage"] = 2 * rank
    elif what == "bucket_bytes":
        settings["bucket_bytes"] = 128 * (rank + 1)
    elif what == "optimizer class":
        make_optimizer = exact_sgd if rank else torch.optim.AdamW
    elif what == "order of parameters":
        model = Letters(rank)
    elif what == "shape":
        model = nn.Linear(4, 3 + rank)
    elif what == "frozen":
        model.get_submodule("first").requires_grad_(rank == 0)
    with engine_for(model, make_optimizer(model.parameters()), **settings) as (engine, optimizer):
        engine.backward(sum((p.sum() for p in model.parameters()), torch.zeros(())))
        optimizer.step()


def told(rank: int, size: int) -> dict[str, str]:
    """The error of each mismatch on this rank; empty where there was none."""
    return {what: error_of(rank, what) for what in MISMATCHES}


MISMATCHES = ("stage", "bucket_bytes", "optimizer class", "order of parameters", "shape", "frozen")


def error_of(rank: int, what: str) -> str:
    try:
        construct(rank, what)
    except ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_whose_engines_do_not_match_are_told_at_once() -> None:
    first, second = ranks(2, told)
    for what, message in first.items():
        assert message, f"{what}: nothing was said"
        assert second[what], f"{what}: nothing was said on rank 1"
        assert "LaneError" not in message, f"{what}: said late: {message}"
    assert "stage" in first["stage"]
    assert "bucket_bytes" in first["bucket_bytes"]


# What one rank must not leave the other in --------------------------------------------------------------------------


def leaves(rank: int, size: int, place: str) -> str:
    """Rank 1 raises at some place; rank 0 must end with an error that names rank 1."""
    model = make(TinyMLP)
    config = ZeroConfig(threads=1, timeout_seconds=20.0, bucket_bytes=128)
    optimizer = exact_sgd(model.parameters())
    with ZeroEngine(model, optimizer, config) as engine:
        steps(engine, optimizer, model, rank, count=1)
        hidden = model.first(torch.ones(1, 7))
        if rank == 1 and place == "forward":
            raise ValueError("the user's own mistake")
        if rank == 1 and place == "backward":
            hidden = Bomb.apply(hidden)
        engine.backward(model.second(hidden).sum())
        if rank == 1 and place == "before step":
            raise ValueError("the user's own mistake")
        engine.clip_grad_norm_(1.0)
        if rank == 1 and place == "after clipping":
            raise ValueError("the user's own mistake")
        optimizer.step()
        optimizer.zero_grad()
        steps(engine, optimizer, model, rank, count=1)
    return "trained on"


@pytest.mark.parametrize("place", ["forward", "backward", "before step", "after clipping"])
def test_one_rank_raises(place: str) -> None:
    left, own = ranks(2, leaves, place, errors="return", deadline=60.0)
    assert isinstance(own, ValueError), own
    assert isinstance(left, ZeroError), left
    assert "rank 1" in str(left)


# What is refused at the start ---------------------------------------------------------------------------------------


def wrapped(rank: int, size: int) -> str:
    """The engine is given a model that DistributedDataParallel reduces already."""
    model = nn.parallel.DistributedDataParallel(make(TinyMLP))
    optimizer = exact_sgd(model.parameters())
    try:
        with ZeroEngine(model, optimizer, ZeroConfig(threads=1)) as engine:
            engine.backward(mlp_loss(model, 0, rank=rank))
            optimizer.step()
    except ZeroError as error:
        return str(error)
    return "nothing was said"


def test_a_model_wrapped_for_ddp_is_refused() -> None:
    assert all("DistributedDataParallel" in message for message in ranks(2, wrapped))


def alone(rank: int, size: int) -> list[str]:
    """Started by a launcher for two ranks, but torch.distributed was never set up."""
    model = make(TinyMLP)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ZeroEngine(model, exact_sgd(model.parameters()), ZeroConfig(threads=1)) as engine:
            assert engine.world_size == 1
    return [str(warning.message) for warning in caught]


def test_a_launcher_without_a_process_group_is_noticed() -> None:
    for messages in ranks(2, alone, store="none", env={"TORCHELASTIC_RUN_ID": "test"}):
        assert any("init_process_group" in message for message in messages)


def odd_buffers(rank: int, size: int) -> dict[str, Any]:
    """Buffers of every kind come from rank 0."""
    model = make(TinyMLP)
    buffers = {
        "buffer_flag": torch.tensor([True, False]) ^ bool(rank),
        "buffer_complex": torch.full((3,), 1.0 + rank, dtype=torch.complex64),
        "buffer_empty": torch.zeros(0),
        "buffer_scalar": torch.tensor(rank),
        "buffer_turned": torch.full((2, 3), float(rank)).t(),
        "buffer_small": torch.full((3,), rank, dtype=torch.int8),
        "buffer_double": torch.full((3,), float(rank), dtype=torch.float64),
        "buffer_tiny": torch.full((3,), float(rank)).to(torch.float8_e4m3fn),
        "buffer_places": torch.arange(4).expand(1, -1) + rank,
    }
    for name, value in buffers.items():
        model.register_buffer(name, value, persistent=name != "buffer_double")
    model.register_buffer("absent", None)
    model.codes = nn.Parameter(torch.full((3,), rank, dtype=torch.uint8), requires_grad=False)
    with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
        steps(engine, optimizer, model, rank)
        return {name: getattr(model, name).tolist() for name in (*buffers, "codes")}


def overlapping_buffer(rank: int, size: int) -> str:
    """A buffer whose elements share memory cannot be written to."""
    model = make(TinyMLP)
    model.register_buffer("mask", torch.full((1,), float(rank)).expand(4))
    try:
        with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
            steps(engine, optimizer, model, rank)
    except ZeroError as error:
        return str(error)
    return str(model.get_buffer("mask").tolist())


def test_a_buffer_that_overlaps_itself_is_named_or_equal() -> None:
    first, second = ranks(2, overlapping_buffer)
    assert first == second
    assert "mask" in first or first == "[0.0, 0.0, 0.0, 0.0]"


def test_buffers_of_every_kind_are_rank_0s() -> None:
    first, second = ranks(2, odd_buffers)
    assert first == second
    assert first["buffer_scalar"] == 0
    assert first["codes"] == [0, 0, 0]
    assert first["buffer_complex"] == [1.0 + 0.0j] * 3
