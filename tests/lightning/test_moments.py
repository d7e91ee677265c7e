"""Moments in bf16 and 8 bits under Lightning: resumed by `ckpt_path`, from a file and from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.lightning_runs import adamw, fit, ranks, saver, short


def resumed(_rank: int, size: int, folder: Path) -> None:
    from zero_plugin.integrations.lightning import ZeroOffloadStrategy

    options: dict[str, Any] = {"module": adamw, "loaders": short(), "max_epochs": 2}
    fp32 = fit(ZeroOffloadStrategy(stage=2), size, **options)
    for kind in ("bf16", "int8"):
        for form, stage in (("file", 2), ("folder", 3)):
            settings: dict[str, Any] = {"stage": stage, "checkpoint": form, "moment_dtype": kind}
            place = folder / f"{kind}-{form}"
            whole = fit(
                ZeroOffloadStrategy(**settings),
                size,
                enable_checkpointing=True,
                callbacks=[saver(place)],
                **options,
            )
            saved = place / "epoch=0.ckpt"
            assert saved.is_dir() is (form == "folder")
            again = fit(ZeroOffloadStrategy(**settings), size, ckpt_path=saved, **options)
            half = len(whole.losses) // 2
            assert whole.losses[half:] == again.losses
            assert whole.losses != fp32.losses
            for name, value in whole.weights.items():
                assert torch.equal(value, again.weights[name]), name


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path: Path) -> None:
    ranks(1, resumed, tmp_path)
