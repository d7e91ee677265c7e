"""`optim=` names of the Trainer: which run compiled, which fall back, and which are refused with the reason."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_runs import arguments, examples, llama, plain_process, ranks, select

from zero_plugin import Lion, errors

# What runs, and against what of the stock Trainer it is compared.
COMPILED: dict[str, str] = {
    "adamw_torch": "ZeroAdamW",
    "adamw_torch_fused": "ZeroAdamW",
    "paged_adamw_32bit": "ZeroAdamW",
    "adagrad": "ZeroAdagrad",
    "sgd": "ZeroSGD",
    "lion_32bit": "ZeroLion",
    "paged_lion_32bit": "ZeroLion",
}
STOCK = {"paged_adamw_32bit": "adamw_torch"}
FALLS_BACK = {"rmsprop": "ZeroRMSprop"}
REFUSED = {
    "adafactor": "update of one element depends on the others",
    "adamw_bnb_8bit": "moment_dtype='int8'",
    "adamw_torch_4bit": "moment_dtype='int8'",
    "lion_8bit": "use optim='lion_32bit'",
    "paged_ademamix_8bit": "CUDA kernels of bitsandbytes",
    "galore_adamw_layerwise": "projects whole gradient matrices",
    "apollo_adamw": "projects whole gradient matrices",
    "lomo": "inside backward from whole gradients",
    "schedule_free_adamw": "a second set of weights",
}


def trained(settings: Any, name: str, folder: Path, classes: Any = None) -> tuple[Any, str]:
    """Final weights after two steps, and the class of the optimizer."""
    from transformers import Trainer

    select(settings)
    torch.manual_seed(0)
    rate = 0.0625 if name == "sgd" else 1e-3
    args = arguments(
        folder, optim=name, learning_rate=rate, weight_decay=0.1, max_steps=2, max_grad_norm=0.0
    )
    data: Any = examples()
    extra: dict[str, Any] = {} if classes is None else {"optimizer_cls_and_kwargs": classes}
    trainer = Trainer(model=llama(), args=args, train_dataset=data, **extra)
    try:
        trainer.train()
        kind = type(getattr(trainer.optimizer, "optimizer", None)).__name__
        state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model)
        return {key: value.clone() for key, value in state.items()}, kind
    finally:
        trainer.accelerator.free_memory()


def every(_rank: int, _size: int, folder: Path, names: list[str]) -> list[tuple[str, bool]]:
    """Compare with the stock Trainer; gives the class, and whether it was said to run as plain torch."""
    plain_process()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zero_plugin").addHandler(handler)
    found: list[tuple[str, bool]] = []
    for name in names:
        lion = (Lion, {"lr": 1e-3, "betas": (0.9, 0.999)}) if "lion" in name else None
        expected, _ = trained(None, STOCK.get(name, name), folder, lion)
        said.clear()
        ours, kind = trained({"stage": 2}, name, folder)
        for key, value in expected.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)
        found.append((kind, any("plain torch" in line for line in said)))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("kinds", [COMPILED, FALLS_BACK], ids=["compiled", "plain torch"])
def test_names_that_run(tmp_path: Path, kinds: dict[str, str]) -> None:
    (found,) = ranks(1, every, tmp_path, list(kinds))
    assert found == [(kind, kinds is FALLS_BACK) for kind in kinds.values()]


def refused(_rank: int, _size: int, folder: Path) -> None:
    from transformers.training_args import OptimizerNames

    from zero_plugin.integrations._huggingface.optimizers import choose

    plain_process()
    for name, reason in REFUSED.items():
        with pytest.raises((errors.ConfigError, errors.OptimizerError), match=reason):
            trained({"stage": 2}, name, folder)
    # A new release's new names are looked at, and put into one of the lists or the table of the docs.
    left: set[str] = set()
    for item in OptimizerNames:
        with contextlib.suppress(errors.ConfigError):
            if choose(arguments(folder, optim=item.value)) is None:
                left.add(str(item.value))
    text = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text()
    assert {name for name in left if f"`{name}`" not in text} == set()


@pytest.mark.dist
def test_names_that_are_refused_say_why(tmp_path: Path) -> None:
    ranks(1, refused, tmp_path)
