"""Reports about states in files: lost tails, full disks found too late, buffers that run out, wrong weights.

The number in a name or docstring is the case's number in docs/differences.md; cases that are not here are covered by
the tests named there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import TinyMLP, features, make, mlp_loss
from support.training import (
    SMALL,
    Recipe,
    adamw,
    assert_same_bits,
    assert_same_outcome,
    engine_for,
    snapshot,
    train,
)
from torch import Tensor, nn

from zero_plugin import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.store.store import NvmeStore
from zero_plugin.trace import Ledger

PAGE = 4096
NOTHING_IN_MEMORY = {
    "stage": 3,
    "params": "nvme",
    "optimizer": "nvme",
    "gradients": "nvme",
    "nvme_buffer_bytes": 4 * 3 * PAGE,
    "bucket_bytes": "1MiB",
}


def bits(folder: Path, make_model: Any, settings: dict[str, Any], steps: int = 3) -> Any:
    """Weights and norms of a few steps of a model on vectors of 7."""
    torch.manual_seed(0)
    model = make_model()
    where = {"nvme_path": folder} if "nvme" in settings.values() else {}
    norms: list[Tensor] = []
    with engine_for(model, adamw(model.parameters()), **settings, **where) as (engine, optimizer):
        for step in range(steps):
            engine.backward(model(features(step)).square().mean())
            norms.append(engine.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            return {"weights": snapshot(model), "norms": norms}


def test_8_files_take_less_memory_than_memory_does(tmp_path: Path) -> None:
    """8: NVMe offload ran out of memory where CPU offload fitted. Here its host memory is slabs, however large the model is."""
    width = 100
    held: dict[tuple[str, int], int] = {}
    for tier, layers in (("host", 24), ("nvme", 6), ("nvme", 24)):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        settings: dict[str, Any] = {
            "stage": 3,
            "params": tier,
            "optimizer": tier,
            "gradients": tier,
        }
        if tier == "nvme":
            settings |= {"nvme_path": tmp_path, "nvme_buffer_bytes": "128KiB"}
        with engine_for(model, adamw(model.parameters()), **settings) as (engine, optimizer):
            engine.backward(model(torch.ones(2, width)).sum())
            optimizer.step()
            memory = engine.memory()
            held[tier, layers] = sum(memory["host"].values())
            assert (sum(memory["nvme"].values()) > 0) == (tier == "nvme")
    assert held["nvme", 6] == held["nvme", 24]
    assert 2 * held["nvme", 24] < held["host", 24]


def test_17_every_size_comes_back(tmp_path: Path) -> None:
    """17: a file was shorter than its tensor: the tail that is no multiple of the alignment was lost."""
    store = NvmeStore([tmp_path], rank=0, limit=None, engine="auto", checksum=True, ledger=Ledger())
    try:
        source = torch.arange(8193, dtype=torch.float32)
        extents = [store.reserve(4 * numel, f"t{numel}") for numel in range(1, 8194, 89)]
        for extent, numel in zip(extents, range(1, 8194, 89), strict=True):
            store.write(extent, 0, source[:numel].clone())
        for extent, numel in zip(extents, range(1, 8194, 89), strict=True):
            back = torch.zeros(numel)
            store.read(extent, 0, back)
            assert torch.equal(back, source[:numel]), numel
    finally:
        store.close()


class Wide(nn.Module):
    """An embedding far larger than everything else, and than the buffers; a gradient of many pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3001, 7)
        self.mix = nn.Linear(7, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = (inputs.abs() * 1000).long().clamp(max=3000)
        return self.mix(self.table(rows).sum(1)) + self.mix(inputs)


def test_18_and_21_a_parameter_larger_than_the_buffers(tmp_path: Path) -> None:
    """18: files of large gradients were empty. 21: a parameter larger than a buffer was refused.

    The embedding takes 84 kB and its states 252 kB, a buffer 12 kB.
    """
    expected = bits(tmp_path, Wide, {"stage": 0})
    assert_same_bits(bits(tmp_path, Wide, NOTHING_IN_MEMORY), expected)
    accumulated = {**NOTHING_IN_MEMORY, "params": "host"}
    assert_same_bits(bits(tmp_path, Wide, accumulated), expected)


def test_20_fifty_three_parameters_through_the_smallest_buffers(tmp_path: Path) -> None:
    """20: "Not enough buffers 0 for swapping 1" at the second step, with documented settings."""

    def many() -> nn.Module:
        layers = [nn.Linear(7, 7) for _ in range(26)]
        return nn.Sequential(*layers, nn.Linear(7, 7, bias=False))

    assert sum(1 for _ in many().parameters()) == 53
    expected = bits(tmp_path, many, {"stage": 0})
    for prefetch in (0, 1, 5):
        settings = {**NOTHING_IN_MEMORY, "prefetch_units": prefetch, "bucket_bytes": 64}
        assert_same_bits(bits(tmp_path, many, settings), expected)


def test_23_fifty_steps_have_the_bits_of_states_in_memory(tmp_path: Path) -> None:
    """23: the optimizer on NVMe learned far less than the one in memory from the same seed."""
    recipe = Recipe(steps=50, width=12, layers=1, batch=1, clip=0.5)
    in_files: dict[str, Any] = {
        **NOTHING_IN_MEMORY,
        "nvme_path": tmp_path,
        "nvme_cache_bytes": 3 * PAGE,
    }
    expected = train(recipe, stage=2, optimizer="host", gradients="host", bucket_bytes=SMALL)
    assert_same_outcome(train(recipe, **in_files), expected)


def test_25_a_fraction_on_files_is_refused_by_the_config(tmp_path: Path) -> None:
    """25: `ratio` with NVMe ended in "expected input to be on cuda"."""
    settings = {"optimizer": "nvme", "nvme_path": str(tmp_path), "ratio": 0.5}
    with pytest.raises(ConfigError, match="unknown setting 'ratio'"):
        ZeroConfig.from_dict(settings)


def test_defects_a_gradient_is_used_once_with_states_in_files(tmp_path: Path) -> None:
    """Defect a: a parameter without a gradient got its last one again, on NVMe too."""
    model = make(TinyMLP)
    settings = {**NOTHING_IN_MEMORY, "nvme_path": tmp_path}
    with engine_for(model, adamw(model.parameters(), lr=1e-2), **settings) as (engine, optimizer):
        engine.backward(mlp_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        with engine.full_params():
            before = snapshot(model)
        for step in range(1, 4):
            engine.backward(model.first(features(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            after = snapshot(model)
    assert torch.equal(after["second.weight"], before["second.weight"])
    assert torch.equal(after["second.bias"], before["second.bias"])
    assert not torch.equal(after["first.weight"], before["first.weight"])
