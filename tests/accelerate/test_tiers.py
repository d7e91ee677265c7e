"""States in files, and the delayed update, under Accelerate and the Trainer."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import SMALL, accelerator_for, data, loss_of, network, sgd
from support.accelerate_runs import assert_same as same_loop
from support.accelerate_runs import train as loop
from support.trainer_runs import (
    arguments,
    assert_same,
    examples,
    llama,
    plain_process,
    ranks,
    select,
    train,
    trainer_for,
)

from zero_plugin import ZeroConfig, ZeroEngine

FREE: dict[str, Any] = {"max_grad_norm": 0.0}
DELAYED: dict[str, Any] = {"stage": 2, "delayed_update": True, "delayed_update_warmup": 2}


def in_files(rank: int, size: int, folder: Path) -> None:
    plain_process()
    path = folder / "nvme"
    path.mkdir(exist_ok=True)
    everything = {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}
    places: list[dict[str, Any]] = [{"stage": 3, **everything}]
    if size == 1:
        places += [{"stage": 1, "optimizer": "nvme"}, {"stage": 2, "optimizer": "nvme"}]
    stock, expected = loop(None), train(None, "llama", folder, **FREE)
    for place in places:
        settings = {**place, "nvme_path": str(path)}
        same_loop(stock, loop(settings))
        ours = train(settings, "llama", folder, **FREE)
        assert_same(expected, ours)
        assert any(entry["zero_nvme_bytes"] > 0 for entry in ours.ours if entry)
    if rank == 0 and size == 1:
        gc.collect()  # an optimizer keeps its states after `free_memory`, and with them their file
        left = [item for item in path.rglob("*") if item.is_file() and item.stat().st_size > 4096]
        assert left == []  # the engines' files went with them


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_states_in_files(tmp_path: Path, size: int) -> None:
    ranks(size, in_files, tmp_path)


def plainly(model: Any, optimizer: Any, batches: list[Any], loss: Any) -> tuple[list[float], Any]:
    """The same steps on an engine by itself."""
    engine = ZeroEngine(model, optimizer, ZeroConfig(**{**SMALL, **DELAYED}))
    losses: list[float] = []
    for batch in batches:
        found = loss(model, batch)
        engine.backward(found)
        engine.step()
        engine.zero_grad()
        losses.append(float(found.detach()))
    weights = engine.full_state_dict()
    engine.close()
    return losses, weights


def one_late(_rank: int, _size: int, folder: Path) -> None:
    plain_process()

    def by_accelerate(settings: Any) -> tuple[list[float], Any]:
        losses: list[float] = []
        with accelerator_for(settings) as accelerator:
            model = network()
            model, optimizer, loader = accelerator.prepare(model, sgd(model.parameters()), data())
            for batch in loader:
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            state = accelerator.get_state_dict(model)
            return losses, {name: value.clone() for name, value in state.items()}

    model = network()
    expected = plainly(model, sgd(model.parameters()), list(data()), loss_of)
    found = by_accelerate(DELAYED)
    assert found[0] == expected[0] != by_accelerate({"stage": 2})[0]
    for name, value in expected[1].items():
        assert torch.equal(value, found[1][name])

    seen: list[Any] = []

    def collator(items: list[Any]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        seen.append(batch)
        return batch

    select(DELAYED)
    torch.manual_seed(0)
    options: dict[str, Any] = {"data_collator": collator, "train_dataset": examples()}
    trainer = trainer_for(llama(), arguments(folder, max_steps=6, **FREE), **options)
    trainer.train()
    shown = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.accelerator.free_memory()
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)
    losses, weights = plainly(model, optimizer, seen[:6], lambda m, batch: m(**batch).loss)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == losses
    # Shown once training has ended.
    for name, value in weights.items():
        assert torch.equal(value, shown[name]), name


@pytest.mark.dist
def test_an_update_one_step_late_is_the_engines_own(tmp_path: Path) -> None:
    ranks(1, one_late, tmp_path)
