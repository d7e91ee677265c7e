"""Sharded parameters under Fabric, for what `test_fabric.py` does not run under every name."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import NAMES, SHARDED, data, network, ranks, sgd, spelling
from torch import Tensor, nn

from zero_plugin.integrations.lightning import FabricZeroOffloadStrategy

SIZES = [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.dist)]


def make_fabric(strategy: Any, size: int, **options: Any) -> Any:
    spelling("lightning.pytorch")  # warnings are errors
    fabric = importlib.import_module("lightning.fabric").Fabric(
        strategy=strategy, accelerator="cpu", devices=size, **options
    )
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    return fabric


def steps(fabric: Any, model: Any, optimizer: Any, **clip: Any) -> list[Tensor]:
    """One epoch; the losses."""
    losses = []
    for features, labels in fabric.setup_dataloaders(data()):
        loss = nn.functional.cross_entropy(model(features).float(), labels)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def full_weights(fabric: Any, model: Any) -> dict[str, Tensor]:
    with contextlib.ExitStack() as stack:
        for engine in fabric.strategy.engines:
            stack.enter_context(engine.full_params())
        return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    (losses, weights), (more_losses, more_weights) = one, other
    return all(torch.equal(a, b) for a, b in zip(losses, more_losses, strict=True)) and all(
        torch.equal(weights[name], more_weights[name]) for name in weights.keys() | more_weights
    )


# ------------------------------------------------------------------ set-up


def apart(rank: int, size: int) -> None:
    """`setup_module` first, then an optimizer built on it, as FSDP wants it."""
    results = []
    for together in (True, False):
        for name in NAMES:
            fabric = make_fabric(name, size)
            with fabric.init_module(empty_init=False):
                model = network()
            if together:
                model, optimizer = fabric.setup(model, sgd(model.parameters()))
            else:
                model = fabric.setup_module(model)
                optimizer = fabric.setup_optimizers(sgd(model.parameters()))
            losses = steps(fabric, model, optimizer, max_norm=0.5)
            (engine,) = fabric.strategy.engines
            assert engine.model is model.module
            results.append((losses, full_weights(fabric, model)))
            fabric.strategy.teardown()
    assert all(same(results[0], result) for result in results[1:])


@pytest.mark.parametrize("size", SIZES)
def test_module_and_optimizer_may_be_set_up_one_after_the_other(size: int) -> None:
    ranks(size, apart)


def wrong_order(rank: int, size: int) -> None:
    from zero_plugin.errors import EngineStateError

    fabric = make_fabric("zero_3", size)
    model = network()
    first, second = sgd(model[0].parameters()), sgd(model[3].parameters())
    with pytest.raises(EngineStateError, match=r"call fabric\.setup\(module, optimizer"):
        fabric.setup_optimizers(first)
    model = fabric.setup_module(model)
    with pytest.raises(EngineStateError, match="after another optimizer of it"):
        fabric.setup_optimizers(first, second)
    fabric.strategy.teardown()


@pytest.mark.parametrize("size", SIZES)
def test_a_second_optimizer_after_the_module_is_refused(size: int) -> None:
    ranks(size, wrong_order)


def late_weights(rank: int, size: int, folder: Path) -> None:
    """Built empty, set up, and only then filled from a file."""
    results = []
    torch.manual_seed(3)
    if rank == 0:
        torch.save(network().state_dict(), folder / "raw.pt")
    for name in ("zero_2", *SHARDED):
        fabric = make_fabric(name, size, precision="bf16-true")
        fabric.barrier()
        with fabric.init_module(empty_init=True):
            model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # what was there before, a NaN perhaps, is nobody's business
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        fabric.load_raw(folder / "raw.pt", model)
        results.append((steps(fabric, model, optimizer), full_weights(fabric, model)))
        fabric.strategy.teardown()
    assert all(same(results[0], result) for result in results[1:])


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_model_is_filled_after_setup(size: int, tmp_path: Path) -> None:
    ranks(size, late_weights, tmp_path)


# ------------------------------------------------------------------ checkpoints


def files(rank: int, size: int, folder: Path) -> None:
    found = {}
    for name in ("zero_2", "zero_3"):
        # Files are what is looked at here; at stage 3 folders are what is written unless one asks.
        places: Any = {"params": "device"} if name == "zero_3" else {}
        wanted = FabricZeroOffloadStrategy(
            stage=int(name[-1]), optimizer="device", gradients="device", checkpoint="file", **places
        )
        fabric = make_fabric(wanted, size)
        model = network()
        model, optimizer = fabric.setup(model, sgd(model.parameters()))
        steps(fabric, model, optimizer)
        path = folder / f"{name}.ckpt"
        keep = {"model": lambda key, value: not key.startswith("1.")}
        fabric.save(path, {"model": model, "part": model.module[3], "o": optimizer}, filter=keep)
        fabric.barrier()
        found[name] = torch.load(path, weights_only=True)
        state = fabric.strategy.get_module_state_dict(model.module)
        assert len(state) == (0 if name == "zero_3" and rank else 6)
        fabric.strategy.teardown()
    assert list(found["zero_2"]["model"]) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    for key in ("model", "part"):
        assert list(found["zero_2"][key]) == list(found["zero_3"][key])
        for name, value in found["zero_2"][key].items():
            assert torch.equal(value, found["zero_3"][key][name])


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_that_of_stage_2_and_parts_and_filters_work(size: int, tmp_path: Path) -> None:
    ranks(size, files, tmp_path)


def state_dict_of_the_module(rank: int, size: int) -> str:
    from zero_plugin.errors import ParameterError

    fabric = make_fabric("zero_3", size)
    model = network()
    model, _ = fabric.setup(model, sgd(model.parameters()))
    with pytest.raises(ParameterError) as caught:
        model.state_dict()
    fabric.strategy.teardown()
    return str(caught.value)


@pytest.mark.parametrize("size", SIZES)
def test_the_modules_own_state_dict_says_what_to_call(size: int) -> None:
    for message in ranks(size, state_dict_of_the_module):
        assert "'0.weight'" in message
        assert "full_state_dict()" in message


# ------------------------------------------------------------------ the end


def closed_with_weights(rank: int, size: int) -> None:
    results = []
    for name in ("zero_2", *SHARDED):
        fabric = make_fabric(name, size)
        model = network()
        model, optimizer = fabric.setup(model, sgd(model.parameters()))
        losses = steps(fabric, model, optimizer)
        (engine,) = fabric.strategy.engines
        engine.close(gather=True)
        assert type(model.module[0].weight) is nn.Parameter
        results.append((losses, {k: v.clone() for k, v in model.state_dict().items()}))
        fabric.strategy.teardown()
        with torch.no_grad():
            assert model(torch.ones(1, 8)).isfinite().all()
    assert all(same(results[0], result) for result in results[1:])


@pytest.mark.parametrize("size", SIZES)
def test_an_engine_closed_with_gather_leaves_whole_weights_on_every_rank(size: int) -> None:
    ranks(size, closed_with_weights)
