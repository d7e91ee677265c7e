"""A delayed update in Lightning is one setting: saved in the middle of it, resumed, and applied at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.lightning_runs import adamw, assert_same, fit, ranks, saver, short
from support.ranks import mark

from zero_plugin.integrations.lightning import ZeroOffloadStrategy

WARMUP = 3


def strategy(**settings: Any) -> ZeroOffloadStrategy:
    chosen = {"delayed_update": True, "delayed_update_warmup": WARMUP, **settings}
    return ZeroOffloadStrategy(process_group_backend="gloo", **chosen)


SETTINGS: list[dict[str, Any]] = [
    {"stage": 2},
    {"stage": 2, "checkpoint": "file"},
    {"stage": 3, "params": "host"},
]


def go_on(rank: int, size: int, folder: Path) -> None:
    for number, settings in enumerate(SETTINGS):
        mark(str(settings))
        go_on_with(size, folder / str(number), settings)


def go_on_with(size: int, folder: Path, settings: dict[str, Any]) -> None:
    def run(**options: Any) -> Any:
        return fit(
            strategy(**settings),
            size,
            module=adamw,
            loaders=short(),
            gradient_clip_val=0.5,
            max_epochs=3,
            **options,
        )

    whole = run(callbacks=[saver(folder)], enable_checkpointing=True)
    found = sorted(folder.iterdir(), key=lambda path: int(path.stem.split("=")[1]))
    for number, path in enumerate(found[:2], start=1):
        resumed = run(ckpt_path=path)
        done = len(whole.losses) - len(resumed.losses)
        assert done == number * len(whole.losses) // 3 > WARMUP
        resumed.losses[:0], resumed.lrs[:0] = whole.losses[:done], whole.lrs[:done]
        assert_same(resumed, whole)


def differ(rank: int, size: int, folder: Path) -> None:
    delayed = fit(strategy(), size, module=adamw)
    exact = fit("zero_offload", size, module=adamw)
    assert all(
        torch.equal(a, b)
        for a, b in zip(delayed.losses[:WARMUP], exact.losses[:WARMUP], strict=True)
    )
    # Step N+1 sees what step N saw.
    assert not torch.equal(delayed.losses[WARMUP], exact.losses[WARMUP])
    weights = fit(
        strategy(),
        size,
        module=adamw,
        enable_checkpointing=True,
        callbacks=[saver(folder, save_weights_only=True)],
    )
    assert_same(weights, delayed)
    last = max(folder.iterdir(), key=lambda path: int(path.stem.split("=")[1]))
    module: Any = type(weights.module).load_from_checkpoint(last)
    for name, value in module.state_dict().items():
        assert torch.equal(value, delayed.weights[name]), name


def test_a_fit_goes_on_from_the_middle_of_a_delay(tmp_path: Path) -> None:
    ranks(1, go_on, tmp_path)


def test_delayed_and_exact_runs_differ_and_the_end_applies_the_last_update(tmp_path: Path) -> None:
    ranks(1, differ, tmp_path)
