"""Every placement of parameters, optimizer states and gradients gives the bits of stage 0, NVMe included."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import OddMLP, gpt_batch, make_gpt
from support.training import (
    Outcome,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    engine_for,
    ranks,
    snapshot,
    train,
)
from torch import nn

TIERS = ("device", "host", "nvme")
PLACEMENTS = [
    {"params": params, "optimizer": optimizer, "gradients": gradients}
    for params, optimizer, gradients in itertools.product(TIERS, repeat=3)
    if "nvme" in (params, optimizer, gradients)
]
BACKENDS = ("inline", "threads", "chaos")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def placed(number: int, path: Path) -> dict[str, Any]:
    return {
        "stage": 3,
        **PLACEMENTS[number],
        "nvme_path": str(path),
        "backend": BACKENDS[number % 3],
        "backend_seed": number,
        "bucket_bytes": (256, 4096, "32MiB")[(number // 3) % 3],
        "prefetch_units": (1, 0, 2)[(number // 2) % 3],
        "nvme_buffer_bytes": ("256MiB", 4 * 3 * 4096)[number % 2],
    }


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_placement_has_the_bits_of_stage_0(
    dtype: str, accumulate: int, tmp_path: Path
) -> None:
    recipe = Recipe(
        steps=6 if accumulate == 1 else 4,
        accumulate=accumulate,
        clip=0.5,
        dtype=DTYPES[dtype],
        width=12,
    )
    expected = train(recipe, stage=0, backend="inline")
    for number in range(accumulate // 2, len(PLACEMENTS), 2):
        settings = placed(number, tmp_path)
        assert_same_outcome(train(recipe, **settings), expected, str(settings))
    assert list(tmp_path.iterdir()) == []


def branches(settings: dict[str, Any]) -> Outcome:
    """Parameters without a gradient in some steps: their part of a block on NVMe must stay as it is."""
    torch.manual_seed(0)
    model = nn.ModuleDict({str(i): OddMLP() for i in range(3)})
    outcome = Outcome()
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(6):
            layer = model[str((0, 1, 2, 0, 0, 2)[step])]
            loss = layer(torch.ones(2, 7) * (step + 1)).square().mean()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.detach().clone())
        with engine.full_params():
            outcome.weights = snapshot(model)
    return outcome


def test_absent_parameters_stay_as_they_are(tmp_path: Path) -> None:
    expected = branches({"stage": 0, "backend": "inline"})
    for number in range(len(PLACEMENTS)):
        settings = placed(number, tmp_path)
        found = branches(settings)
        for name in ("losses", "weights"):
            assert_same_bits(getattr(found, name), getattr(expected, name), f"{settings} {name}")


def rank_outcome(rank: int, size: int, recipe: Recipe, settings: dict[str, Any]) -> Outcome:
    return train(recipe, rank=rank, **settings)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_have_the_bits_of_stage_2(size: int, tmp_path: Path) -> None:
    recipe = Recipe(steps=3, accumulate=2, clip=0.5, width=12, batch=1, dtype=torch.bfloat16)
    expected = ranks(size, rank_outcome, recipe, {"stage": 2, "backend": "threads"})
    all_on_nvme = next(n for n, item in enumerate(PLACEMENTS) if set(item.values()) == {"nvme"})
    found = ranks(size, rank_outcome, recipe, placed(all_on_nvme, tmp_path))
    for one, other in zip(found, expected, strict=True):
        assert_same_outcome(one, other, "all on NVMe")
    assert list(tmp_path.iterdir()) == []


def test_bytes_of_weights_and_gradients(tmp_path: Path) -> None:
    """Weights: read for each gather, written once a step. Gradients: written once and read once, 2 bytes each in bf16."""
    model = make_gpt(torch.bfloat16, width=16, layers=3)
    settings = {"stage": 3, "params": "nvme", "gradients": "nvme", "nvme_path": str(tmp_path)}
    before: Any = None
    with engine_for(model, **settings, backend="inline", bucket_bytes="32MiB") as (
        engine,
        optimizer,
    ):
        sharded: Any = engine._sharded
        blocks = [block for unit in sharded.units for block in unit.blocks]
        chunks = {block.index: -(-2 * block.chunk // 4096) * 4096 for block in blocks}
        for step in range(6):
            if step == 4:
                before = engine.ledger()
            engine.backward(model(gpt_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        after = engine.ledger()
        memory = engine.memory()
    written = sum(chunks.values())
    assert after["nvme_write"] - before["nvme_write"] == 2 * 2 * written
    names = {block.index: block.name for block in blocks}
    uses = {
        index: 1 if "places" in names[index] else 2 for index in chunks
    }  # Each unit is read for forward and backward; the position table's gradient does not need it.
    reads = sum(chunks[index] * count for index, count in uses.items())
    assert after["nvme_read"] - before["nvme_read"] == 2 * (reads + written)
    assert memory["nvme"]["params"] == memory["nvme"]["gradients"] == written
    assert memory["host"]["params"] == memory["host"]["gradients"] == 0
    assert memory["device"]["params"] == 0
