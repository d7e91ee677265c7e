"""`from_pretrained` into shards, generation, and evaluation before training, at stage 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.trainer_runs import (
    arguments,
    assert_same,
    collect,
    examples,
    llama,
    plain_process,
    ranks,
    select,
    trainer_for,
)

from zero_plugin import errors
from zero_plugin.integrations._lightning.common import is_built_in_shards

STAGE_3: dict[str, Any] = {"stage": 3, "params": "host"}


def saved(folder: Path) -> Path:
    torch.manual_seed(4)
    llama().save_pretrained(folder, max_shard_size="5KB")
    return folder


def fine_tune(
    settings: Any, source: Path, folder: Path, *, evaluate_first: bool, **options: Any
) -> Any:
    from transformers import LlamaForCausalLM

    select(settings)
    args = arguments(folder, max_grad_norm=0.0, **options)
    assert args.device.type == "cpu"
    model = LlamaForCausalLM.from_pretrained(source)
    assert is_built_in_shards(model) is (settings is not None)
    trainer = trainer_for(model, args)
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    return collect(trainer)


def loaded(_rank: int, _size: int, source: Path, folder: Path) -> None:
    plain_process()
    # The stock Trainer that has evaluated before it trains leaves the model without DDP, so it is compared without that.
    stock = fine_tune(None, source, folder, evaluate_first=False)
    for evaluate_first in (False, True):
        ours = fine_tune(STAGE_3, source, folder, evaluate_first=evaluate_first)
        assert_same(stock, ours)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_from_pretrained_goes_straight_into_shards(tmp_path: Path, size: int) -> None:
    ranks(size, loaded, saved(tmp_path / "model"), tmp_path / "out")


def resumed(_rank: int, _size: int, source: Path, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    plain_process()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = fine_tune(STAGE_3, source, folder, evaluate_first=False, **options)
    select(STAGE_3)
    args = arguments(folder, max_grad_norm=0.0, **options)
    assert args.device.type == "cpu"
    trainer = trainer_for(LlamaForCausalLM.from_pretrained(source), args)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    again = collect(trainer)
    for name in whole.weights:
        assert torch.equal(whole.weights[name], again.weights[name])


@pytest.mark.dist
def test_resume_into_shards(tmp_path: Path) -> None:
    ranks(2, resumed, saved(tmp_path / "model"), tmp_path / "out")


def generated(rank: int, _size: int, source: Path) -> None:
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    plain_process()
    found: list[Any] = []
    for settings in (None, STAGE_3):
        select(settings)
        accelerator = Accelerator(cpu=True)
        model = LlamaForCausalLM.from_pretrained(source)
        # a reference model: evaluated, never trained
        model = accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        tokens = examples(count=2, seed=9)[rank % 2]["input_ids"][None]
        with torch.no_grad():
            # ranks end after different numbers of tokens
            made = cast("Any", model).generate(
                tokens, max_new_tokens=3 + 4 * rank, do_sample=False, pad_token_id=0
            )
        found.append((made, model(tokens).logits.detach()))
        accelerator.free_memory()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.dist
def test_ranks_that_generate_different_lengths_stay_in_step(tmp_path: Path) -> None:
    ranks(2, generated, saved(tmp_path / "model"))


def maps(_rank: int, _size: int, source: Path) -> None:
    from transformers import LlamaForCausalLM

    plain_process()
    select(STAGE_3)
    with pytest.raises(errors.ConfigError, match="leave device_map out"):
        LlamaForCausalLM.from_pretrained(source, device_map="balanced")
    model = LlamaForCausalLM.from_pretrained(source, device_map="auto", dtype=torch.bfloat16)
    assert is_built_in_shards(model)
    assert model.dtype == torch.bfloat16
    select({"stage": 2})
    assert not is_built_in_shards(LlamaForCausalLM.from_pretrained(source))


@pytest.mark.dist
def test_device_map_is_refused(tmp_path: Path) -> None:
    ranks(1, maps, saved(tmp_path / "model"))
