"""The HF Trainer with `bf16`, `fp16` and `torch_compile`: trained, evaluated and resumed as the stock Trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_runs import Run, assert_same, plain_process, ranks, train

SETTINGS: tuple[dict[str, Any], ...] = (
    {"stage": 2, "checkpoint": "folder"},
    {"stage": 3, "params": "host", "checkpoint": "file"},
)
COMMON: dict[str, Any] = {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


def without_means(run: Run) -> Run:
    """The mean over a run counts the steps of that run only."""
    logs = [entry for entry in run.logs if "train_loss" not in entry]
    return Run(logs=logs, weights=run.weights, norm_bound=run.norm_bound)


def do_fp16_here() -> None:
    """Let Accelerate do fp16 on the CPU, which torch can: it takes the CPU for a device that cannot, and trains in fp32."""
    import accelerate.accelerator
    import transformers.trainer

    class Half(accelerate.accelerator.Accelerator):
        @property
        def device(self) -> Any:
            is_asked_about_fp16 = "scaler" in vars(self) and "_optimizers" not in vars(self)
            return torch.device("cuda") if is_asked_about_fp16 else super().device

    accelerate.accelerator.get_grad_scaler = lambda *_, **__: torch.amp.GradScaler("cpu")
    transformers.trainer.Accelerator = Half


def precisions(_rank: int, _size: int, folder: Path, kind: str) -> None:
    plain_process()
    options = {**COMMON, **KINDS[kind]}
    if kind == "fp16":
        do_fp16_here()
    stock = train(None, "llama", folder / "stock", **options)
    for number, settings in enumerate(SETTINGS):
        place = folder / str(number)
        assert_same(stock, train(settings, "llama", place, **options))
        if kind == "compiled" and number == 0:
            continue  # each run compiles anew
        again = train(
            settings, "llama", folder / "again", resume=place / "checkpoint-2", seed=5, **options
        )
        assert_same(without_means(stock), without_means(again))
    if kind == "fp16":
        for number in range(len(SETTINGS)):
            ours, theirs = (
                torch.load(folder / name / "checkpoint-2" / "scaler.pt", weights_only=True)
                for name in (str(number), "stock")
            )
            assert ours == theirs
            assert ours["scale"] > 1


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_precisions_and_compilation_have_the_stock_trainers_bits(tmp_path: Path, kind: str) -> None:
    ranks(1, precisions, tmp_path, kind)
