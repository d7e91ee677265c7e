"""Sharded checkpoints of Accelerate and the Trainer: at any number of ranks, stage and form, and what replaces what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import SMALL, accelerator_for, data, loss_of, network, sgd
from support.trainer_runs import (
    arguments,
    assert_same,
    collect,
    llama,
    plain_process,
    ranks,
    select,
    train,
    trainer_for,
)

from zero_plugin import errors
from zero_plugin.integrations._huggingface.shards import wants_folder
from zero_plugin.integrations.accelerate import ZeroOffloadPlugin

STAGE_3: dict[str, Any] = {"stage": 3, "params": "host"}
TENSORS = ("*.safetensors", "*.bin", "optimizer*", "pytorch_model*")


def tensors(folder: Path) -> list[str]:
    """Files of full tensors, but for the scheduler's."""
    found = {item.name for pattern in TENSORS for item in folder.glob(pattern) if item.is_file()}
    return sorted(name for name in found if not name.startswith(("scheduler", "training_args")))


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def states_of(accelerator: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """Full weights (rank 0's at stage 3) and momentum."""
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {"weights": weights, "optimizer": copied(optimizer.state_dict()["state"])}


def looped(load: Path | None, save: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Accelerate: load, or train three batches; save."""
    with accelerator_for(settings) as accelerator:
        model = network(seed=0 if load is None else 1)
        optimizer = sgd(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        model, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, data(count=24), schedule
        )
        if load is None:
            for batch in loader:
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        else:
            accelerator.load_state(str(load))
        accelerator.save_state(str(save))
        accelerator.wait_for_everyone()
        assert tensors(save) == []
        return {**states_of(accelerator, model, optimizer), "lr": schedule.get_last_lr()}


def trained(resume: Path | None, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Trainer: two steps and a checkpoint, or what was resumed from and a checkpoint of it."""
    from transformers import TrainerCallback

    select(settings)
    torch.manual_seed(0 if resume is None else 5)
    args = arguments(folder, max_steps=2, save_strategy="steps", save_steps=2, max_grad_norm=0.0)
    trainer = trainer_for(llama(), args)
    found: list[dict[str, Any]] = []

    def look() -> None:
        found.append(states_of(trainer.accelerator, trainer.model, trainer.optimizer))

    if resume is None:
        trainer.train()
        look()
    else:
        # A Trainer that resumes at its last step takes one more, so this looks before it.
        class Look(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                look()
                trainer._save_checkpoint(trainer.model, None)

        trainer.add_callback(Look())
        trainer.train(resume_from_checkpoint=str(resume))
    place = folder / "checkpoint-2"
    assert tensors(place) == []
    assert (place / "config.json").is_file()
    assert (place / "scheduler.pt").is_file()
    trainer.accelerator.free_memory()
    return found[0]


def travel(rank: int, size: int, folder: Path, before: int | None) -> Any:
    plain_process()
    # Shards at stage 3, and on request below it.
    settings = STAGE_3 if size == 2 else {"stage": 1, "checkpoint": "folder"}
    come = None if before is None else folder / str(before)
    found = [
        looped(come and come / "loop", folder / str(size) / "loop", settings),
        trained(
            come and come / "trainer" / "checkpoint-2", folder / str(size) / "trainer", settings
        ),
    ]
    return found if rank == 0 else None


@pytest.mark.dist
def test_checkpoints_travel_between_numbers_of_ranks(tmp_path: Path) -> None:
    first = ranks(2, travel, tmp_path, None)[0]
    for size, before in ((1, 2), (2, 1)):
        again = ranks(size, travel, tmp_path, before)[0]
        for one, other in zip(first, again, strict=True):
            assert one["weights"]
            assert one.get("lr") == other.get("lr")
            assert one["weights"].keys() == other["weights"].keys()
            for name, value in one["weights"].items():
                assert torch.equal(value, other["weights"][name]), name
            assert any(item["momentum_buffer"].any() for item in one["optimizer"].values())
            for number, item in one["optimizer"].items():
                assert torch.equal(
                    item["momentum_buffer"], other["optimizer"][number]["momentum_buffer"]
                )


def forms(_rank: int, _size: int, folder: Path) -> None:
    """One form replaces the other in a folder; each is read whatever the setting is."""
    plain_process()
    place = folder / "state"
    for form, files in (("folder", False), ("file", True), ("auto", False)):
        with accelerator_for({**STAGE_3, "checkpoint": form}) as accelerator:
            model = network()
            model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
            accelerator.backward(loss_of(model, next(iter(data()))))
            optimizer.step()
            accelerator.save_state(str(place))
            expected = states_of(accelerator, model, optimizer)
        assert bool(tensors(place)) is files
        assert (place / "zero_plugin" / "index.json").is_file() is not files
        with accelerator_for({"stage": 2}) as accelerator:
            model = network(seed=4)
            model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
            accelerator.load_state(str(place))
            found = states_of(accelerator, model, optimizer)
        for name, value in expected["weights"].items():
            assert torch.equal(value, found["weights"][name])

    # A hook is given full tensors, so they are saved.
    for form in ("auto", "folder"):
        with accelerator_for({**STAGE_3, "checkpoint": form}) as accelerator:
            model = network()
            model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
            seen: list[int] = []

            def hook(_models: Any, weights: Any, _folder: Any, seen: Any = seen) -> None:
                seen.append(sum(value.numel() for value in weights[0].values()))

            accelerator.register_save_state_pre_hook(hook)
            if form == "auto":
                accelerator.save_state(str(folder / "hooked"))
                assert seen == [sum(p.numel() for p in network().parameters())]
            else:
                with pytest.raises(errors.ConfigError, match="a hook of register_save_state"):
                    accelerator.save_state(str(folder / "hooked"))

    # Two models, of which one is prepared when it is loaded.
    with accelerator_for(STAGE_3) as accelerator:
        one, two = network(0), network(1)
        accelerator.prepare(one, two, sgd(one.parameters()), sgd(two.parameters()))
        accelerator.save_state(str(folder / "two"))
    with accelerator_for(STAGE_3) as accelerator:
        accelerator.prepare(one := network(2), sgd(one.parameters()))
        with pytest.raises(errors.CheckpointError, match="prepare all of them"):
            accelerator.load_state(str(folder / "two"))


@pytest.mark.dist
def test_forms_replace_each_other(tmp_path: Path) -> None:
    ranks(1, forms, tmp_path)


def best(_rank: int, _size: int, folder: Path) -> None:
    """`load_best_model_at_end` from shards, and resumption equal to the uninterrupted run."""
    plain_process()
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the last model is not the best
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
    }
    whole = train({**STAGE_3, "checkpoint": "file"}, "llama", folder / "file", **options)
    losses = [entry["eval_loss"] for entry in whole.logs if "eval_loss" in entry]
    assert losses[0] > losses[1]
    assert losses[2] == losses[0]
    ours = train(STAGE_3, "llama", folder / "ours", **options)
    assert tensors(folder / "ours" / "checkpoint-4") == []
    assert_same(whole, ours)
    again = train(
        STAGE_3,
        "llama",
        folder / "again",
        resume=folder / "ours" / "checkpoint-2",
        seed=5,
        **options,
    )
    again.logs = [entry for entry in again.logs if "train_loss" not in entry]
    whole.logs = [entry for entry in whole.logs if "train_loss" not in entry]
    assert_same(whole, again)
    # `save_model` writes full weights whatever the checkpoints are.
    select(STAGE_3)
    trainer = trainer_for(llama(), arguments(folder / "final", max_steps=1, max_grad_norm=0.0))
    trainer.train()
    trainer.save_model(str(folder / "final"))
    assert tensors(folder / "final") == ["model.safetensors"]
    collect(trainer)


@pytest.mark.dist
def test_the_best_model_is_read_from_shards(tmp_path: Path) -> None:
    ranks(1, best, tmp_path)


def test_which_form_is_taken() -> None:
    def wants(full_because: str = "", **settings: Any) -> bool:
        plugin = ZeroOffloadPlugin(**SMALL, **settings)
        return wants_folder(plugin.checkpoint, plugin.config, full_because=full_because)

    assert wants(stage=3)
    assert wants(stage=2, delayed_update=True)
    assert wants(stage=1, checkpoint="folder")
    assert not wants(stage=2)
    assert not wants(stage=3, checkpoint="file")
    assert not wants("of a hook", stage=3)
    with pytest.raises(errors.ConfigError, match="since of a hook: choose one"):
        wants("of a hook", stage=3, delayed_update=True)
    with pytest.raises(errors.ConfigError, match="checkpoint='both' is not one of 'auto'"):
        ZeroOffloadPlugin(checkpoint="both")  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.ConfigError, match="cannot hold an update that is delayed"):
        ZeroOffloadPlugin(stage=2, delayed_update=True, checkpoint="file")
    plugin = ZeroOffloadPlugin(stage=3, checkpoint="file")
    assert ZeroOffloadPlugin.from_environment(plugin.to_environment()) == plugin
    assert plugin != ZeroOffloadPlugin(stage=3)
