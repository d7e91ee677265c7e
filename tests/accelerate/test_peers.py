"""Reports against Accelerate and the Trainer with sharded weights; the numbers are those of docs/differences.md."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import accelerator_for, data, loss_of, network, sgd
from support.trainer_runs import (
    arguments,
    collect,
    gpt2,
    plain_process,
    ranks,
    select,
    trainer_for,
)

STAGE_3: dict[str, Any] = {"stage": 3, "params": "host"}


def steps(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    losses: list[float] = []
    for batch in loader:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def uneven(_rank: int, _size: int) -> None:
    """Three batches on rank 0 and two on rank 1, which `even_batches=False` leaves so."""
    from accelerate import DataLoaderConfiguration

    found: list[Any] = []
    for settings in (None, {"stage": 2}, STAGE_3):
        config = DataLoaderConfiguration(even_batches=False)
        with accelerator_for(settings, dataloader_config=config) as accelerator:
            model = network()
            model, optimizer, loader, held_out = accelerator.prepare(
                model, sgd(model.parameters()), data(count=24), data(count=20, seed=1)
            )
            first = steps(accelerator, model, optimizer, loader)
            engine = accelerator.zero_engines[0] if settings is STAGE_3 else None
            plain = model.module if settings is None else model
            with torch.no_grad():
                if engine is None:
                    losses = [float(loss_of(plain, batch)) for batch in held_out]
                else:
                    with engine.full_params():
                        losses = [float(loss_of(plain, batch)) for batch in held_out]
            found.append((first, losses, steps(accelerator, model, optimizer, loader)))
    assert found[0] == found[1] == found[2]


@pytest.mark.dist
def test_32_training_goes_on_after_an_uneven_evaluation() -> None:
    ranks(2, uneven)


def written(rank: int, _size: int, folder: Path) -> None:
    """The usual way to write a model with Accelerate, of a model whose head is tied to its embedding."""
    from transformers import GPT2LMHeadModel

    plain_process()
    torch.manual_seed(0)
    before = {name: value.clone() for name, value in gpt2().state_dict().items()}
    for settings in ({"stage": 2}, STAGE_3):
        with accelerator_for(settings) as accelerator:
            torch.manual_seed(0)
            model = gpt2()
            model, _ = accelerator.prepare(model, sgd(model.parameters()))
            place = folder / str(settings["stage"])
            accelerator.unwrap_model(model).save_pretrained(
                place,
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(model),
            )
            accelerator.wait_for_everyone()
        again = GPT2LMHeadModel.from_pretrained(place)
        assert again.lm_head.weight is again.transformer.wte.weight
        for name, value in again.state_dict().items():
            assert torch.equal(value, before[name]), (rank, name)


@pytest.mark.dist
def test_38_and_66_what_save_pretrained_writes_is_whole(tmp_path: Path) -> None:
    ranks(2, written, tmp_path)


def rotated(_rank: int, _size: int, folder: Path) -> None:
    """The oldest checkpoints go, the last one is found, and what a killed save left is not taken for one."""
    plain_process()
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "max_grad_norm": 0.0,
    }

    def run(resume: Any, **changed: Any) -> Any:
        select(STAGE_3)
        torch.manual_seed(0)
        trainer = trainer_for(gpt2(), arguments(folder, **{**options, **changed}))
        trainer.train(resume_from_checkpoint=resume)
        return collect(trainer)

    whole = run(None)
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    shutil.rmtree(folder / "checkpoint-4")
    again = run(True)
    for name, value in whole.weights.items():
        assert torch.equal(value, again.weights[name])
    # Killed while the shards were written: the folder is there, with the Trainer's state, and no index.
    torn = folder / "checkpoint-5"
    shutil.copytree(folder / "checkpoint-4", torn)
    (torn / "zero_plugin" / "index.json").unlink()
    with pytest.raises(Exception, match="checkpoint-5"):
        run(str(torn), max_steps=6)
    again = run(str(folder / "checkpoint-3"))
    for name, value in whole.weights.items():
        assert torch.equal(value, again.weights[name])


@pytest.mark.dist
def test_43_rotation_leaves_what_can_be_resumed_from(tmp_path: Path) -> None:
    ranks(1, rotated, tmp_path)


def distilled(_rank: int, _size: int, folder: Path) -> None:
    """A frozen teacher that was loaded straight into shards, and a student; the teacher also with an optimizer of its own."""
    from transformers import GPT2LMHeadModel

    plain_process()
    tokens = torch.randint(2, 64, (3, 2, 12), generator=torch.Generator().manual_seed(0))
    found: list[Any] = []
    for settings in (None, STAGE_3):
        with accelerator_for(settings) as accelerator:
            teacher = GPT2LMHeadModel.from_pretrained(folder)
            torch.manual_seed(1)
            student = gpt2()
            teacher = accelerator.prepare_model(teacher, evaluation_mode=True).eval()
            student, optimizer = accelerator.prepare(student, sgd(student.parameters()))
            losses: list[float] = []
            for batch in tokens:
                with torch.no_grad():
                    wanted = teacher(batch).logits
                loss = torch.nn.functional.mse_loss(student(batch).logits, wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            found.append(losses)
    assert found[0] == found[1]
    assert found[0][0] != found[0][-1]


@pytest.mark.dist
def test_67_a_teacher_in_shards_and_a_student(tmp_path: Path) -> None:
    torch.manual_seed(5)
    gpt2().save_pretrained(tmp_path)
    ranks(2, distilled, tmp_path)
