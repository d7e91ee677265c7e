"""Moments in bf16 and 8 bits under Accelerate and the Trainer: a resumed run has the bits of the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import accelerator_for, data, loss_of, network
from support.trainer_runs import plain_process, ranks, train

KINDS = ("bf16", "int8")
PLACES: tuple[dict[str, Any], ...] = (
    {"stage": 2, "checkpoint": "file"},
    {"stage": 3, "params": "host", "checkpoint": "folder"},
)


def looped(settings: dict[str, Any], *, save: Path | None = None, load: Path | None = None) -> Any:
    """Six steps of AdamW, a save, and six more; or a load and the last six."""
    losses: list[float] = []
    with accelerator_for(settings) as accelerator:
        model = network(seed=0 if load is None else 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data(count=24))
        for part in range(2):
            if load is not None and part == 0:
                accelerator.load_state(str(load))
                continue
            for batch in loader:
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            if save is not None and part == 0:
                accelerator.save_state(str(save))
        states = optimizer.state_dict()["state"]
        weights = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
        kept = {(n, k): v.clone() for n, item in states.items() for k, v in item.items()}
    return losses[-6:], weights | kept


def resumed(_rank: int, _size: int, folder: Path) -> None:
    plain_process()
    fp32 = looped({"stage": 2})
    options: dict[str, Any] = {
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    for kind in KINDS:
        for number, place in enumerate(PLACES):
            settings = {**place, "moment_dtype": kind}
            folder_of = folder / f"{kind}-{number}"
            whole = looped(settings, save=folder_of / "state")
            again = looped(settings, load=folder_of / "state")
            assert whole[0] == again[0] != fp32[0]
            assert whole[1].keys() == again[1].keys()
            for name, value in whole[1].items():
                assert torch.equal(value, again[1][name]), name

            first = train(settings, "llama", folder_of / "run", **options)
            second = train(
                settings,
                "llama",
                folder_of / "again",
                resume=folder_of / "run" / "checkpoint-2",
                seed=5,
                **options,
            )
            assert [e["loss"] for e in first.logs if "loss" in e][2:] == [
                e["loss"] for e in second.logs if "loss" in e
            ][2:]
            for name, value in first.weights.items():
                assert torch.equal(value, second.weights[name]), name


@pytest.mark.dist
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path: Path) -> None:
    ranks(1, resumed, tmp_path)
