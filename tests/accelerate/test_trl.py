"""TRL's trainers on us and on stock Accelerate: SFT, DPO with a reference model, rewards, GRPO with its generation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_runs import PRELOAD, VOCABULARY, llama, plain_process, ranks, select

pytest.importorskip("trl", reason="TRL is an optional package: pip install trl")

TRL_PRELOAD = (*PRELOAD, "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
PLACES: tuple[dict[str, Any], ...] = ({"stage": 2}, {"stage": 3, "params": "host"})
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "learning_rate": 0.0625,
    "lr_scheduler_type": "constant",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "max_grad_norm": 0.0,
    "optim": "sgd",
}


def tokenizer() -> Any:
    """One word a token: "w3 w17"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def sentence(source: random.Random, words: int) -> str:
    return " ".join(f"w{source.randrange(2, VOCABULARY)}" for _ in range(words))


def dataset(*columns: str) -> Any:
    from datasets import Dataset

    source = random.Random(0)
    return Dataset.from_list([{name: sentence(source, 6) for name in columns} for _ in range(16)])


def sft(folder: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=llama(),
        args=SFTConfig(str(folder), max_length=16, **COMMON),
        train_dataset=dataset("text"),
        processing_class=tokenizer(),
    )


def dpo(folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(1)
    reference = llama()
    torch.manual_seed(0)
    return DPOTrainer(
        model=llama(),
        ref_model=reference,
        args=DPOConfig(str(folder), max_length=16, **COMMON),
        train_dataset=dataset("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
    )


def reward(folder: Path) -> Any:
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return RewardTrainer(
        model=LlamaForSequenceClassification(config),
        args=RewardConfig(str(folder), max_length=16, **COMMON),
        train_dataset=dataset("chosen", "rejected"),
        processing_class=tokenizer(),
    )


def grpo(folder: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    rewards: Any = lengths

    options = {**COMMON, "per_device_train_batch_size": 4}
    return GRPOTrainer(
        model=llama(),
        reward_funcs=rewards,
        args=GRPOConfig(
            str(folder), max_completion_length=6, num_generations=4, beta=0.0, **options
        ),
        train_dataset=dataset("prompt"),
        processing_class=tokenizer(),
    )


KINDS = {"sft": sft, "dpo": dpo, "reward": reward, "grpo": grpo}


def trained(rank: int, _size: int, folder: Path, kinds: list[str]) -> None:
    plain_process()
    for kind in kinds:
        outcomes: list[Any] = []
        for settings in (None, *PLACES):
            select(settings)
            torch.manual_seed(0)
            trainer = KINDS[kind](folder)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            weights = {
                name: value.clone()
                for name, value in trainer.accelerator.get_state_dict(trainer.model).items()
            }
            trainer.accelerator.free_memory()
            outcomes.append((losses, weights))
        stock, *ours = outcomes
        assert len(stock[0]) == 2
        for number, (losses, weights) in enumerate(ours):
            assert losses == pytest.approx(stock[0], rel=1e-5, abs=1e-6), kind
            assert weights or (rank > 0 and number == 1)
            for name, value in weights.items():
                torch.testing.assert_close(value, stock[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.dist
def test_trainers_equal_stock_ones(tmp_path: Path) -> None:
    ranks(1, trained, tmp_path, list(KINDS), preload=TRL_PRELOAD)


@pytest.mark.dist
def test_reference_model_and_generation_on_two_processes(tmp_path: Path) -> None:
    ranks(2, trained, tmp_path, ["dpo", "grpo"], preload=TRL_PRELOAD)
