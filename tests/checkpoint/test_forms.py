"""Masters that are kept otherwise: split from bf16 weights, in files, and one update ahead of the weights that are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import TinyMLP, make
from support.training import adamw, assert_same_bits, config

from zero_plugin import ZeroEngine
from zero_plugin.checkpoint import source
from zero_plugin.checkpoint.plain import read_state_dict

FORMS: dict[str, dict[str, Any]] = {
    "whole": {"stage": 2},
    "split": {"stage": 3, "params": "host", "split_master": True},
    "split in files": {"stage": 3, "params": "nvme", "optimizer": "nvme", "split_master": True},
    "int8": {"stage": 1, "moment_dtype": "int8"},
    "split, bf16": {"stage": 3, "params": "host", "split_master": True, "moment_dtype": "bf16"},
    "int8 in files": {"stage": 2, "optimizer": "nvme", "moment_dtype": "int8"},
    "delayed": {"stage": 2, "delayed_update": True, "delayed_update_warmup": 2},
    "delayed, sharded": {"stage": 3, "delayed_update": True, "delayed_update_warmup": 2},
    "delayed in files": {
        "stage": 2,
        "optimizer": "nvme",
        "delayed_update": True,
        "delayed_update_warmup": 2,
    },
}


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranges in every slice."""
    monkeypatch.setattr(source, "_RANGE", 32)


def build(form: str, folder: Path, seed: int = 0) -> tuple[Any, Any, ZeroEngine]:
    settings = dict(FORMS[form])
    if "files" in form:
        settings |= {"nvme_path": folder}
    model = make(TinyMLP, seed=seed).to(torch.bfloat16)
    optimizer = adamw(model.parameters(), lr=1e-2)
    return model, optimizer, ZeroEngine(model, optimizer, config(**settings))


def train(model: Any, engine: ZeroEngine, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(6, 7, generator=generator).bfloat16()).square().mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
    return losses


def end(engine: ZeroEngine) -> Any:
    """Everything after every update."""
    engine.drain()
    state = engine.full_state_dict(), engine.optimizer_state_dict(engine.optimizers[0])
    engine.close()
    return state


@pytest.mark.parametrize(
    ("form", "asynchronous"),
    [*((form, False) for form in FORMS), ("split in files", True), ("delayed, sharded", True)],
)
def test_a_run_goes_on_bit_for_bit(form: str, asynchronous: bool, tmp_path: Path) -> None:
    model, _, engine = build(form, tmp_path)
    train(model, engine, range(5))
    engine.save_checkpoint(tmp_path / "ck", asynchronous=asynchronous)
    wanted = train(model, engine, range(5, 9))
    state = end(engine)
    model, _, engine = build(form, tmp_path, seed=1)
    engine.load_checkpoint(tmp_path / "ck")
    assert train(model, engine, range(5, 9)) == wanted
    assert_same_bits(end(engine), state)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("split", "whole"),
        ("split in files", "split"),
        ("delayed", "split in files"),
        ("delayed, sharded", "whole"),
    ],
)
def test_masters_move_between_forms(saved: str, loaded: str, tmp_path: Path) -> None:
    model, _, engine = build(saved, tmp_path)
    train(model, engine, range(5))
    engine.save_checkpoint(tmp_path / "ck")
    wanted = end(engine)
    _, _, engine = build(loaded, tmp_path, seed=1)
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_bits(end(engine), wanted)
    exported = read_state_dict(tmp_path / "ck")
    assert_same_bits(exported, wanted[0])  # Weights alone are those after every update.
