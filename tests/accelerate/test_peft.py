"""Adapters of PEFT under the HF Trainer: trained, saved, loaded and merged at each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import STAGES
from support.trainer_runs import (
    PRELOAD,
    arguments,
    assert_same,
    collect,
    llama,
    plain_process,
    ranks,
    select,
    trainer_for,
)

pytest.importorskip("peft", reason="PEFT is an optional package: pip install peft")

PEFT_PRELOAD = (*PRELOAD, "peft")


def configs() -> dict[str, Any]:
    from peft import LoraConfig, PromptTuningConfig

    lora: dict[str, Any] = {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    return {
        "lora": LoraConfig(**lora, init_lora_weights=False, modules_to_save=["lm_head"]),
        "dora": LoraConfig(**lora, use_dora=True),
        "tokens": LoraConfig(**lora, init_lora_weights=False, trainable_token_indices=[2, 5, 7]),
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }


def adapted(kind: str) -> Any:
    from peft import get_peft_model

    torch.manual_seed(3)
    return get_peft_model(llama(), configs()[kind])


def train(settings: dict[str, Any] | None, kind: str, folder: Path, **options: Any) -> Any:
    select(settings)
    model = adapted(kind)
    args = arguments(folder, max_grad_norm=0.0, save_strategy="steps", save_steps=2, **options)
    trainer = trainer_for(model, args)
    trainer.train()
    trainer.evaluate()
    return trainer


def adapters(rank: int, size: int, folder: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    plain_process()
    for kind in ("lora", "dora", "tokens", "prompt") if size == 1 else ("lora",):
        place = folder / kind
        stock = collect(train(None, kind, place / "stock"))
        for settings in STAGES[1::2]:
            trainer = train(settings, kind, place / "ours")
            if kind != "prompt":
                engine = trainer.accelerator.zero_engines[0]
                with engine.full_params():
                    merged = __import__("copy").deepcopy(trainer.model).merge_and_unload()
                assert all(bool(torch.isfinite(p).all()) for p in merged.parameters())
            # DoRA's norms are computed in other places of memory, so its sums may differ in the last bit
            assert_same(stock, collect(trainer), tolerance=1e-6 if kind == "dora" else 0.0)
            if rank == 0:
                ours = load_file(place / "ours" / "checkpoint-4" / "adapter_model.safetensors")
                theirs = load_file(place / "stock" / "checkpoint-4" / "adapter_model.safetensors")
                assert ours.keys() == theirs.keys()
                assert any(value.abs().sum() > 0 for value in ours.values())
                for name, value in ours.items():
                    torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6)
                torch.manual_seed(3)
                again = PeftModel.from_pretrained(llama(), str(place / "ours" / "checkpoint-4"))
                assert again.peft_config


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_adapters_equal_the_stock_trainers(tmp_path: Path, size: int) -> None:
    ranks(size, adapters, tmp_path, preload=PEFT_PRELOAD)


def resumed(_rank: int, _size: int, folder: Path) -> None:
    plain_process()
    for settings in STAGES[1::2]:
        whole = collect(train(settings, "lora", folder))
        select(settings)
        args = arguments(folder, max_grad_norm=0.0, save_strategy="steps", save_steps=2)
        trainer = trainer_for(adapted("lora"), args)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        again = collect(trainer)
        for name, value in whole.weights.items():
            assert torch.equal(value, again.weights[name]), name


@pytest.mark.dist
def test_adapters_resume(tmp_path: Path) -> None:
    ranks(1, resumed, tmp_path, preload=PEFT_PRELOAD)
