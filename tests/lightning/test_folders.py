"""Checkpoints that are folders: the same callbacks and arguments as for files, at any number of processes and stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import (
    adamw,
    assert_same,
    fit,
    held_out,
    make_trainer,
    module_class,
    no_group_left,
    ranks,
    saver,
    short,
    spelling,
)

from zero_plugin.errors import CheckpointError
from zero_plugin.integrations._lightning.folders import Folders

SIZES = [pytest.param(1, id="1 rank"), pytest.param(2, id="2 ranks", marks=pytest.mark.dist)]


def strategy(**settings: Any) -> Any:
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    return ZeroOffloadStrategy(checkpoint="folder", **settings)


def life(rank: int, size: int, folder: Path) -> None:
    """Save by the callback, resume at another stage, evaluate, load a module, and only weights."""
    whole = fit(
        strategy(stage=2),
        size,
        module=adamw,
        loaders=short(),
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[saver(folder)],
    )
    saved = sorted(path.name for path in folder.iterdir())
    assert saved == [f"epoch={i}.ckpt" for i in range(2)]
    assert all((folder / name / "index.json").exists() for name in saved)
    half = folder / "epoch=0.ckpt"
    for ckpt_path in (half, half / "index.json"):  # A file inside names its folder.
        second = fit(
            strategy(stage=3),
            size,
            module=adamw,
            loaders=short(),
            max_epochs=2,
            ckpt_path=ckpt_path,
        )
        assert second.trainer.global_step == whole.trainer.global_step
        assert second.losses == whole.losses[len(whole.losses) // 2 :]
        assert all(torch.equal(value, whole.weights[key]) for key, value in second.weights.items())
    # A file's loader of weights, without a strategy of ours.
    pl = spelling("lightning.pytorch")
    model = module_class(pl).load_from_checkpoint(folder / "epoch=1.ckpt", optimizer="AdamW")
    assert all(torch.equal(value, whole.weights[k]) for k, value in model.state_dict().items())
    trainer = make_trainer(pl, strategy(stage=2), size)
    tested = trainer.test(adamw(pl), held_out(), ckpt_path=folder / "epoch=1.ckpt", verbose=False)
    again = trainer.test(whole.module, held_out(), verbose=False)
    assert tested == again


@pytest.mark.parametrize("size", SIZES)
def test_a_folder_is_saved_resumed_tested_and_loaded(size: int, tmp_path: Path) -> None:
    ranks(size, life, tmp_path)


def save_here(rank: int, size: int, folder: Path) -> Any:
    run = fit(
        "zero_3",
        size,
        module=adamw,
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[saver(folder, save_weights_only=False)],
    )
    run.trainer.save_checkpoint(folder / "after.ckpt")  # The engine has gone.


def resume_there(rank: int, size: int, folder: Path) -> None:
    during, after = (
        fit("zero_3_offload", size, module=adamw, max_epochs=3, ckpt_path=folder / name)
        for name in ("epoch=1.ckpt", "after.ckpt")
    )
    assert during.trainer.current_epoch == 3
    assert_same(after, during)


@pytest.mark.dist
def test_stage_3_saves_folders_that_another_number_of_processes_resumes(tmp_path: Path) -> None:
    ranks(2, save_here, tmp_path)
    assert (tmp_path / "epoch=1.ckpt" / "rank-00001-of-00002.safetensors").exists()
    assert (tmp_path / "after.ckpt" / "index.json").exists()
    ranks(1, resume_there, tmp_path)


def options(rank: int, size: int, folder: Path) -> None:
    def last(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if self.trainer.current_epoch == 1 and batch_idx == 1:
                    raise ValueError("a bug")

        return Net(optimizer="AdamW")

    with pytest.raises(ValueError, match="a bug"):
        fit(
            strategy(stage=3),
            size,
            module=last,
            max_epochs=2,
            enable_checkpointing=True,
            callbacks=[saver(folder / "failed", save_on_exception=True, save_top_k=1)],
        )
    assert any((path / "index.json").exists() for path in (folder / "failed").iterdir())
    fit(
        strategy(stage=3),
        size,
        module=adamw,
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[
            saver(folder / "weights", save_weights_only=True, save_top_k=1, monitor="val_loss")
        ],
    )
    (path,) = (folder / "weights").iterdir()  # The others were removed.
    pl = spelling("lightning.pytorch")
    trainer = make_trainer(pl, strategy(stage=3), size)
    trainer.test(adamw(pl), held_out(), ckpt_path=path, verbose=False)
    with pytest.raises(KeyError, match="optimizer"):
        fit(strategy(stage=3), size, module=adamw, ckpt_path=path)


@pytest.mark.parametrize("size", SIZES)
def test_weights_only_top_k_and_exceptions(size: int, tmp_path: Path) -> None:
    ranks(size, options, tmp_path)


def strictness(rank: int, size: int, folder: Path) -> None:
    def larger(pl: Any) -> Any:
        class Net(module_class(pl)):
            def __init__(self) -> None:
                super().__init__(optimizer="AdamW")
                self.more = torch.nn.Linear(2, 2)

        return Net()

    def lenient(pl: Any) -> Any:
        made = larger(pl)
        made.strict_loading = False
        return made

    fit(
        strategy(stage=2),
        size,
        module=lambda pl: module_class(pl)(optimizer="AdamW"),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saver(folder)],
    )
    path = folder / "epoch=0.ckpt"
    with pytest.raises(CheckpointError, match=r"more\.bias"):
        fit(strategy(stage=2), size, module=larger, max_epochs=2, ckpt_path=path)
    run = fit(strategy(stage=2), size, module=lenient, max_epochs=2, ckpt_path=path)
    assert run.trainer.current_epoch == 2
    (folder / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is a folder and not a checkpoint of zero-plugin"):
        fit(strategy(stage=2), size, ckpt_path=folder / "empty")


def test_strictness_and_foreign_folders(tmp_path: Path) -> None:
    ranks(1, strictness, tmp_path)


def opaque(rank: int, size: int, folder: Path) -> None:
    def module(pl: Any) -> Any:
        class Net(module_class(pl)):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["note"] = object()

        return Net(optimizer="AdamW")

    with pytest.raises(CheckpointError, match=r"extra\.note is a builtins\.object"):
        fit(
            strategy(stage=2),
            size,
            module=module,
            max_epochs=1,
            enable_checkpointing=True,
            callbacks=[saver(folder)],
        )
    assert list(folder.iterdir()) == []


def test_what_a_folder_cannot_hold_is_named(tmp_path: Path) -> None:
    ranks(1, opaque, tmp_path)


def fabric_folder(rank: int, size: int, folder: Path) -> None:
    from lightning.fabric import Fabric

    from zero_plugin.integrations.lightning import FabricZeroOffloadStrategy

    def start(stage: int, seed: int) -> Any:
        made = Fabric(
            accelerator="cpu",
            devices=size,
            strategy=FabricZeroOffloadStrategy(stage=stage, checkpoint="folder"),
        )
        made.launch()
        made.seed_everything(seed, verbose=False)
        net = torch.nn.Linear(5, 3)
        return made, *made.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))

    def step(fabric: Any, model: Any, optimizer: Any) -> None:
        fabric.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        optimizer.zero_grad()

    with no_group_left():
        fabric, model, optimizer = start(2, 1)
        step(fabric, model, optimizer)
        fabric.save(folder / "ck", {"model": model, "optimizer": optimizer, "step": 7})
        step(fabric, model, optimizer)
        wanted = fabric.strategy.engines[0].full_state_dict()
        fabric.strategy.teardown()
        other, model, optimizer = start(3, 2)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert other.load(folder / "ck", state) == {}
        assert state["step"] == 7
        step(other, model, optimizer)
        found = other.strategy.engines[0].full_state_dict()
        for key, value in wanted.items():
            assert torch.equal(found[key], value)
        with pytest.raises(CheckpointError, match="one module that was set up"):
            other.save(folder / "part", {"model": model})
        with pytest.raises(KeyError, match="has no 'epoch'"):
            other.load(folder / "ck", {**state, "epoch": 0})
        other.strategy.teardown()


@pytest.mark.parametrize("size", SIZES)
def test_fabric_saves_and_loads_folders(size: int, tmp_path: Path) -> None:
    ranks(size, fabric_folder, tmp_path)


def test_a_folder_after_the_fit_is_for_one_optimizer(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    checkpoint = {"state_dict": net.state_dict(), "optimizer_states": [{}, {}]}
    with pytest.raises(CheckpointError, match="holds one optimizer, here are 2: save during the"):
        Folders.save_ended(checkpoint, tmp_path / "ck", net, [])
    assert list(tmp_path.iterdir()) == []
