"""The same HF Trainer run on stock Accelerate and on us, selected by the environment alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import STAGES
from support.trainer_runs import (
    MODELS,
    Run,
    arguments,
    assert_same,
    collect,
    examples,
    llama,
    plain_process,
    ranks,
    select,
    train,
    trainer_for,
)

FREE: dict[str, Any] = {"max_grad_norm": 0.0}


def shapes(_rank: int, size: int, folder: Path) -> None:
    """Every shape at stage 3 and in turn at 1 and 2, Llama at all; every placement is in test_matrix.py."""
    plain_process()
    options: dict[str, Any] = {**FREE, "max_steps": 3}
    for number, name in enumerate(MODELS):
        stock = train(None, name, folder, **options)
        places = (STAGES[number % 2], STAGES[2 if size == 1 else 3])
        for settings in (*STAGES[:2], STAGES[3]) if name == "llama" else places:
            assert_same(stock, train(settings, name, folder, **options))
    # MiniLM with its real weights; at stage 3 they are read into shards.
    options = {**FREE, "max_steps": 2, "learning_rate": 2.0**-10}
    stock = train(None, "minilm", folder, **options)
    for settings in STAGES[1::2] if size == 1 else STAGES[3:]:
        larger = {**settings, "bucket_bytes": "8MiB"}
        assert_same(stock, train(larger, "minilm", folder, **options))


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_every_shape_equals_the_stock_trainer(tmp_path: Path, size: int) -> None:
    ranks(size, shapes, tmp_path)


def clipped(_rank: int, _size: int, folder: Path) -> None:
    """The Trainer's own defaults: AdamW, clipping at 1.0, accumulation, bf16."""
    plain_process()
    for options in (
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.25, "learning_rate": 1e-3},
        {"bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch", **FREE},
    ):
        stock = train(None, "llama", folder, evaluate_first=True, **options)
        for settings in STAGES[1:3]:
            ours = train(settings, "llama", folder, evaluate_first=True, **options)
            bound = 2e-2 if "bf16" in options else 1e-5
            assert_same(stock, ours, tolerance=bound)


@pytest.mark.dist
def test_defaults_of_the_trainer(tmp_path: Path) -> None:
    ranks(1, clipped, tmp_path)


def resumed(_rank: int, size: int, folder: Path, settings: dict[str, Any]) -> None:
    plain_process()
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "lr_scheduler_type": "linear",
        **FREE,
    }
    stock = train(None, "llama", folder / "stock", **options)
    whole = train(settings, "llama", folder / "ours", **options)
    assert_same(stock, whole)
    # on from our checkpoint, from the stock Trainer's, and the stock Trainer on from ours
    for made, kind in (("ours", settings), ("stock", settings), ("ours", None)):
        place = folder / made / "checkpoint-2"
        again = train(kind, "llama", folder / "again", resume=place, seed=5, **options)
        # the mean over the run counts the steps of this run only
        again.logs = [entry for entry in again.logs if "train_loss" not in entry]
        expected = Run(
            logs=[entry for entry in whole.logs if "train_loss" not in entry],
            weights=whole.weights,
        )
        assert_same(again, expected)
    if size == 1 or _rank == 0:
        from transformers import LlamaForCausalLM

        saved = LlamaForCausalLM.from_pretrained(folder / "ours" / "checkpoint-4")
        assert all(bool(torch.isfinite(value).all()) for value in saved.state_dict().values())


@pytest.mark.dist
@pytest.mark.parametrize(("size", "number"), [(1, 1), (2, 2)])
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, size: int, number: int) -> None:
    # of full tensors, which the stock Trainer reads too; shards are in test_shards.py
    ranks(size, resumed, tmp_path, {**STAGES[number], "checkpoint": "file"})


def others(_rank: int, _size: int, folder: Path) -> None:
    plain_process()
    select({"stage": 3})
    model = llama()
    args = arguments(
        folder,
        save_strategy="steps",
        save_steps=4,
        save_only_model=True,
        train_sampling_strategy="group_by_length",
        auto_find_batch_size=True,
    )
    trainer = trainer_for(model, args)
    assert type(trainer).__name__ == "Trainer"
    trainer.train()
    assert not (folder / "checkpoint-4" / "optimizer.pt").exists()
    assert (folder / "checkpoint-4" / "model.safetensors").is_file()
    predicted = trainer.predict(examples(count=4, seed=2))
    assert predicted.predictions.shape[0] == 4
    # a second `train` goes on with the optimizer's states
    before = trainer.optimizer.state_dict()["state"]
    assert before
    trainer.args.max_steps = 1
    trainer.train()
    run = collect(trainer)
    assert all(entry["zero_host_bytes"] > 0 for entry in run.ours if entry)


@pytest.mark.dist
def test_the_rest_of_a_training_script(tmp_path: Path) -> None:
    ranks(1, others, tmp_path)


def generates(_rank: int, _size: int, folder: Path) -> None:
    from support.trainer_runs import t5
    from transformers import Seq2SeqTrainer

    plain_process()
    found: list[Any] = []
    for settings in (None, {"stage": 3}):
        select(settings)
        torch.manual_seed(0)
        model = t5()
        args = arguments(
            folder, predict_with_generate=True, generation_max_length=9, max_steps=2, **FREE
        )
        trainer = trainer_for(model, args, kind=Seq2SeqTrainer)
        trainer.train()
        found.append(trainer.predict(examples(count=6, seed=3)).predictions)
        trainer.accelerator.free_memory()
    assert (found[0] == found[1]).all()


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_predict_with_generate_at_stage_3(tmp_path: Path, size: int) -> None:
    ranks(size, generates, tmp_path)
