"""TRL's trainers on us and on stock Accelerate: SFT, DPO with a reference model, rewards, GRPO with its generation.

The optimizer is SGD with powers of two, so that every run has the stock run's bits, in memory and in files.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_runs import PRELOAD, VOCABULARY, llama, plain_process, ranks, select

pytest.importorskip("trl", reason="TRL is an optional package: pip install trl")

TRL_PRELOAD = (*PRELOAD, "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
PLACES: tuple[dict[str, Any], ...] = (
    {"stage": 2},
    {"stage": 3, "params": "host"},
    {"stage": 2, "optimizer": "nvme", "gradients": "nvme"},
    {"stage": 3, "params": "nvme", "optimizer": "nvme", "gradients": "nvme"},
)
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


def made(model: Any, kind: Any, args: Any, *columns: str, **options: Any) -> Any:
    """A trainer of TRL's with our optimizer; `model` is one, or the folder that it is loaded from."""
    if not isinstance(model, str):
        sgd = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.5)
        options["optimizers"] = (sgd, None)
    return kind(
        model=model,
        args=args,
        train_dataset=dataset(*columns),
        processing_class=tokenizer(),
        **options,
    )


def sft(folder: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    return made(llama(), SFTTrainer, SFTConfig(str(folder), max_length=16, **COMMON), "text")


def dpo(folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(1)
    reference = llama()
    torch.manual_seed(0)
    args = DPOConfig(str(folder), max_length=16, **COMMON)
    return made(llama(), DPOTrainer, args, "prompt", "chosen", "rejected", ref_model=reference)


def dpo_synced(folder: Path) -> Any:
    """The reference follows the model, by a callback that reads and writes both in place."""
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(1)
    reference = llama()
    torch.manual_seed(0)
    args = DPOConfig(
        str(folder),
        max_length=16,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.5,
        **COMMON,
    )
    return made(llama(), DPOTrainer, args, "prompt", "chosen", "rejected", ref_model=reference)


def dpo_loaded(folder: Path) -> Any:
    """Model and reference read by TRL itself, at stage 3 straight into shards."""
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(str(folder), max_length=16, **COMMON)
    return made(str(folder / "llama"), DPOTrainer, args, "prompt", "chosen", "rejected")


def reward(folder: Path) -> Any:
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    args = RewardConfig(str(folder), max_length=16, **COMMON)
    return made(model, RewardTrainer, args, "chosen", "rejected")


def grpo(folder: Path) -> Any:
    """The policy read by TRL, and so the reference that its divergence is measured from."""
    from trl import GRPOConfig, GRPOTrainer

    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    rewards: Any = lengths
    args = GRPOConfig(
        str(folder),
        max_completion_length=6,
        num_generations=4,
        beta=0.5,
        **{**COMMON, "per_device_train_batch_size": 4},
    )
    return made(str(folder / "llama"), GRPOTrainer, args, "prompt", reward_funcs=rewards)


KINDS = {
    "sft": sft,
    "dpo": dpo,
    "dpo_synced": dpo_synced,
    "dpo_loaded": dpo_loaded,
    "reward": reward,
    "grpo": grpo,
}


def trained(rank: int, _size: int, folder: Path, kinds: list[str], places: list[Any]) -> None:
    plain_process()
    torch.manual_seed(0)
    if rank == 0:
        llama().save_pretrained(folder / "llama")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    for kind in kinds:
        outcomes: list[Any] = []
        for settings in (None, *places):
            select(settings)
            torch.manual_seed(0)
            trainer = KINDS[kind](folder)
            trainer.train()
            logs = [
                {key: value for key, value in entry.items() if key in ("loss", "grad_norm", "kl")}
                for entry in trainer.state.log_history
                if "loss" in entry
            ]
            weights = {
                name: value.clone()
                for name, value in trainer.accelerator.get_state_dict(trainer.model).items()
            }
            if settings is not None:
                held = trainer.accelerator.zero_engines[0].memory()["nvme"]
                assert (sum(held.values()) > 0) is ("nvme" in settings.values())
            trainer.accelerator.free_memory()
            outcomes.append((logs, weights))
        stock, *ours = outcomes
        assert len(stock[0]) == 2
        for settings, (logs, weights) in zip(places, ours, strict=True):
            for one, other in zip(stock[0], logs, strict=True):
                assert one.keys() == other.keys()
                for key, value in one.items():
                    # The norm is formed more exactly than torch forms it; four digits are printed.
                    bound = 1e-6 * value if key == "grad_norm" else 0.0
                    assert abs(value - other[key]) <= bound, (
                        kind,
                        settings,
                        key,
                        value,
                        other[key],
                    )
            assert weights or (rank > 0 and settings["stage"] == 3)
            for name, value in weights.items():
                assert torch.equal(value, stock[1][name]), (kind, settings, name)


def with_files(folder: Path) -> list[dict[str, Any]]:
    (folder / "nvme").mkdir()
    files = {"nvme_path": str(folder / "nvme"), "nvme_buffer_bytes": "1MiB"}
    return [{**item, **files} if "nvme" in item.values() else item for item in PLACES]


@pytest.mark.dist
@pytest.mark.parametrize(
    "kinds", [("sft", "dpo_synced", "reward"), ("dpo_loaded", "grpo")], ids=str
)
def test_trainers_equal_stock_ones(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    ranks(1, trained, tmp_path, list(kinds), with_files(tmp_path), preload=TRL_PRELOAD)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_reference_model_and_generation_on_two_processes(tmp_path: Path, kind: str) -> None:
    ranks(2, trained, tmp_path, [kind], with_files(tmp_path), preload=TRL_PRELOAD)
