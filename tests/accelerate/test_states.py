"""Checkpoints, several models and optimizers, and the order of `prepare`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import (
    STAGES,
    accelerator_for,
    data,
    loss_of,
    network,
    ranks,
    sgd,
)
from torch import nn


def steps(accelerator: Any, model: Any, optimizer: Any, loader: Any, losses: list[float]) -> None:
    for batch in loader:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))


def train(
    settings: dict[str, Any] | None,
    *,
    save: Path | None = None,
    load: Path | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, Any]]:
    """Two epochs; the second one from `load` if that is given."""
    losses: list[float] = []
    with accelerator_for(settings, **options) as accelerator:
        model = network(seed=0 if load is None else 1)
        model, optimizer, loader = accelerator.prepare(
            model, sgd(model.parameters()), data(count=24)
        )
        if load is None:
            steps(accelerator, model, optimizer, loader, losses)
            if save is not None:
                accelerator.save_state(str(save))
                accelerator.wait_for_everyone()
        else:
            accelerator.load_state(str(load))
        losses.clear()
        steps(accelerator, model, optimizer, loader, losses)
        state = accelerator.get_state_dict(model)
        return losses, {n.removeprefix("module."): v.clone() for n, v in state.items()}


def assert_equal(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[0]
    for name in one[1].keys() & other[1].keys():
        assert torch.equal(one[1][name], other[1][name]), name


def resumed(_rank: int, _size: int, folder: Path) -> None:
    stock = train(None, save=folder / "stock")
    assert_equal(train({"stage": 2}, load=folder / "stock"), stock)
    for number, settings in enumerate(STAGES[::3]):
        place = folder / str(number)
        assert_equal(train(settings, save=place), stock)
        assert_equal(train(settings, load=place), stock)
    # any stage reads what any other wrote
    assert_equal(train(STAGES[0], load=folder / "1"), stock)


def fewer(_rank: int, _size: int, folder: Path) -> None:
    """What two ranks wrote is read by one, here at stage 3."""
    again = train({"stage": 3}, load=folder / "1")
    assert all(torch.isfinite(torch.tensor(again[0])))
    with accelerator_for({"stage": 1}) as accelerator:
        model = network(seed=3)
        model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
        accelerator.load_state(str(folder / "1"))
        state = optimizer.state_dict()["state"]
        assert state
        assert all(item["momentum_buffer"].abs().sum() > 0 for item in state.values())


@pytest.mark.dist
def test_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    ranks(2, resumed, tmp_path)
    ranks(1, fewer, tmp_path)


def models_saved(_rank: int, _size: int, folder: Path) -> None:
    for number, settings in enumerate((None, *STAGES[1::2])):
        with accelerator_for(settings) as accelerator:
            model = network()
            model, _ = accelerator.prepare(model, sgd(model.parameters()))
            place = folder / str(number)
            accelerator.save_model(model, str(place))
            accelerator.wait_for_everyone()
            assert accelerator.unwrap_model(model) is not None
        from safetensors.torch import load_file

        saved = load_file(place / "model.safetensors")
        for name, value in network().state_dict().items():
            assert torch.equal(saved[name.removeprefix("module.")], value)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_save_model_writes_full_weights(tmp_path: Path, size: int) -> None:
    ranks(size, models_saved, tmp_path)


def orders(_rank: int, _size: int) -> None:
    def outcome(settings: Any, prepare: Any) -> list[float]:
        losses: list[float] = []
        with accelerator_for(settings) as accelerator:
            model = network()
            model, optimizer, loader = prepare(
                accelerator, model, sgd(model.parameters()), data(count=24)
            )
            steps(accelerator, model, optimizer, loader, losses)
        return losses

    def together(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> Any:
        return accelerator.prepare(model, optimizer, loader)

    def backwards(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> Any:
        return accelerator.prepare(loader, optimizer, model)[::-1]

    def piecemeal(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> Any:
        loader = accelerator.prepare(loader)
        model = accelerator.prepare(model)
        return model, accelerator.prepare(optimizer), loader

    def optimizer_first(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> Any:
        optimizer = accelerator.prepare(optimizer)
        return accelerator.prepare(model), optimizer, accelerator.prepare(loader)

    def single(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> Any:
        model = accelerator.prepare_model(model)
        optimizer = accelerator.prepare_optimizer(optimizer)
        return model, optimizer, accelerator.prepare_data_loader(loader)

    for settings in ({"stage": 3},):
        expected = outcome(None, together)
        for prepare in (together, backwards, piecemeal, optimizer_first, single):
            assert outcome(settings, prepare) == expected, prepare


@pytest.mark.dist
def test_prepare_in_any_order() -> None:
    ranks(1, orders)


def several(_rank: int, _size: int) -> None:
    def outcome(settings: Any, kind: str) -> list[Any]:
        losses: list[Any] = []
        with accelerator_for(settings) as accelerator:
            one, two = network(0), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
            if kind == "one optimizer over two models":
                optimizers = [sgd(itertools.chain(one.parameters(), two.parameters()))]
            elif kind == "two optimizers on one model":
                optimizers = [
                    sgd(one[:2].parameters()),
                    sgd(one[2:].parameters()),
                    sgd(two.parameters()),
                ]
            else:
                optimizers = [sgd(one.parameters()), sgd(two.parameters())]
            one, two, loader, *optimizers = accelerator.prepare(
                one, two, data(count=24), *optimizers
            )
            for features, labels in loader:
                loss = nn.functional.cross_entropy(two(one(features)), labels)
                accelerator.backward(loss)
                both = [*one.parameters(), *two.parameters()]
                losses.append(float(accelerator.clip_grad_norm_(both, 0.1)))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(float(loss.detach()))
            for model in (one, two):
                losses += [
                    float(value.double().sum())
                    for value in accelerator.get_state_dict(model).values()
                ]
        return losses

    for kind in (
        "two models, two optimizers",
        "one optimizer over two models",
        "two optimizers on one model",
    ):
        stock = outcome(None, kind)
        for settings in STAGES[1:3]:
            ours = outcome(settings, kind)
            if ours and len(ours) == len(stock):
                torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
            else:
                assert _rank > 0  # stage 3 gives the state dict to rank 0
                torch.testing.assert_close(ours, stock[: len(ours)], rtol=1e-5, atol=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_several_models_and_optimizers(size: int) -> None:
    ranks(size, several)
