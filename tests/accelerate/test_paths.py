"""Ways through the Trainer that leave its main loop: batches that do not fit, and uploads."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.trainer_runs import (
    arguments,
    assert_same,
    collect,
    llama,
    plain_process,
    ranks,
    select,
    trainer_for,
)

STAGES: tuple[dict[str, Any], ...] = ({"stage": 2}, {"stage": 3, "params": "host"})


def short_of_memory(counts: list[int], where: str) -> Any:
    """A Trainer whose third micro-batch does not fit; counts the samples of each."""
    from transformers import Trainer

    def fail(_parameter: Any = None) -> None:
        if len(counts) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    class Short(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            counts.append(inputs["input_ids"].shape[0])
            if where == "forward":
                fail()
            elif len(counts) == 1:
                next(model.parameters()).register_post_accumulate_grad_hook(fail)
            return super().training_step(model, inputs, *args, **kwargs)

    return Short


def too_large(_rank: int, _size: int, folder: Path) -> None:
    """A micro-batch does not fit, in the forward or in the backward, so the run begins anew with a smaller one."""
    plain_process()
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "auto_find_batch_size": True,
        "train_sampling_strategy": "group_by_length",
        "max_grad_norm": 0.0,
    }
    for where in ("forward", "backward"):
        runs: list[Any] = []
        for settings in (None, *STAGES):
            counts: list[int] = []
            select(settings)
            torch.manual_seed(0)
            kind = short_of_memory(counts, where)
            trainer = trainer_for(llama(), arguments(folder, **options), kind=kind)
            trainer.train()
            assert counts[:3] == [4, 4, 4]
            assert set(counts[3:]) == {counts[3]}
            assert counts[3] < 4
            runs.append(collect(trainer))
        for run in runs[1:]:
            assert_same(runs[0], run)


@pytest.mark.dist
def test_a_batch_that_does_not_fit_is_made_smaller(tmp_path: Path) -> None:
    ranks(1, too_large, tmp_path)


class Hub:
    """Takes what is uploaded."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.uploads: list[Path] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=name)

    def upload_folder(
        self, *, folder_path: str, ignore_patterns: Any = (), run_as_future: bool, **_: Any
    ) -> Any:
        copy = self.place / str(len(self.uploads))
        shutil.copytree(folder_path, copy, ignore=shutil.ignore_patterns(*ignore_patterns))
        self.uploads.append(copy)
        done = SimpleNamespace(done=lambda: True, result=lambda: None)
        return done if run_as_future else SimpleNamespace(commit_url="there")


def uploaded(rank: int, _size: int, folder: Path) -> None:
    import transformers.trainer
    from transformers import LlamaForCausalLM

    plain_process()
    runs: list[list[dict[str, Any]]] = []
    for number, settings in enumerate((None, *STAGES)):
        hub = Hub(folder / f"hub-{number}-{rank}")
        transformers.trainer.hf_api = lambda hub=hub: hub
        select(settings)
        torch.manual_seed(0)
        args = arguments(
            folder / str(number),
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
            max_grad_norm=0.0,
            push_to_hub=True,
            hub_strategy="checkpoint",
        )
        trainer = trainer_for(llama(), args)
        trainer.create_model_card = lambda **_: None  # asks the Hub about the base model
        trainer.train()
        trainer.save_model()
        trainer.push_to_hub()
        collect(trainer)
        assert bool(hub.uploads) is (rank == 0)
        select(None)  # at stage 3 a model would be read into shards, by all ranks
        models = [p for p in hub.uploads if (p / "model.safetensors").is_file()]
        runs.append([LlamaForCausalLM.from_pretrained(p).state_dict() for p in models])
        # the checkpoint that goes with them can be resumed from: shards, or full tensors
        states = [
            p
            for p in hub.uploads
            if (p / "optimizer.pt").is_file() or (p / "zero_plugin" / "index.json").is_file()
        ]
        assert len(states) == (2 if rank == 0 else 0)
    stock, *others = runs
    assert rank > 0 or len(stock) >= 4
    for ours in others:
        assert len(ours) == len(stock)
        for one, other in zip(ours, stock, strict=True):
            assert all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.dist
def test_uploads_hold_full_weights(tmp_path: Path) -> None:
    ranks(2, uploaded, tmp_path)
