"""Small engines for tests of checkpoints: every placement by a short name, and one global batch however many ranks share it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from support.models import OddMLP, make
from support.training import adamw, config
from zero_plugin.engine import ZeroEngine

ROWS = 12
"""Rows of a global batch: divided evenly by 1, 2, 3 and 4 ranks."""

TIERS = ("device", "host", "nvme")


@dataclass(frozen=True)
class Case:
    """Where a run is: number of ranks, stage, tier of the optimizer states."""

    world: int
    stage: int
    tier: str

    def settings(self, folder: Path) -> dict[str, Any]:
        """Settings of an engine; stage 3 places its weights as the states, and buckets differ by stage."""
        chosen: dict[str, Any] = {
            "stage": self.stage,
            "optimizer": self.tier,
            "gradients": "host",
            "backend": "threads",
            "bucket_bytes": 256 << self.stage,
        }
        if self.stage == 3:
            chosen["params"] = self.tier
        if self.tier == "nvme":
            chosen |= {"nvme_path": folder, "nvme_buffer_bytes": 1 << 18}
        return chosen

    def __str__(self) -> str:
        return f"{self.world} ranks, stage {self.stage}, {self.tier}"


CASES = [
    Case(world, stage, tier) for world in (1, 2, 3, 4) for stage in (1, 2, 3) for tier in TIERS
]


def draw_pairs(count: int, seed: int = 5) -> list[tuple[Case, Case]]:
    """Pairs of (saved, loaded); every case is saved at least once, if there are as many."""
    chooser = random.Random(seed)
    sources = [*chooser.sample(CASES, len(CASES)), *chooser.choices(CASES, k=count)]
    return [(source, chooser.choice(CASES)) for source in sources[:count]]


def spread(pairs: list[tuple[Case, Case]], each: int) -> list[tuple[Case, Case]]:
    """The first pairs for each number of ranks that they are loaded at."""
    return [
        pair
        for world in (1, 2, 3, 4)
        for pair in [pair for pair in pairs if pair[1].world == world][:each]
    ]


def build(folder: Path, case: Case | None = None, **settings: Any) -> tuple[Any, Any, ZeroEngine]:
    """A seeded model with odd sizes, its optimizer and its engine."""
    model = make(OddMLP)
    optimizer = adamw(model.parameters())
    chosen = {**({} if case is None else case.settings(folder)), **settings}
    return model, optimizer, ZeroEngine(model, optimizer, config(**chosen))


def rows(step: int, rank: int, size: int) -> Tensor:
    """This rank's part of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 7, generator=generator)[rank::size]


def train(model: Any, engine: ZeroEngine, steps: range) -> None:
    """Steps on the mean over the global batch."""
    for step in steps:
        engine.backward(model(rows(step, engine.rank, engine.world_size)).square().mean())
        engine.step()
        engine.zero_grad()


def state_of(engine: ZeroEngine) -> dict[str, Any]:
    """Everything gathered, on rank 0: weights, and masters and moments."""
    return {
        "weights": engine.full_state_dict(),
        "optimizers": [
            engine.optimizer_state_dict(item, rank0_only=True) for item in engine.optimizers
        ],
    }


def content_of(place: Path) -> tuple[dict[str, Tensor], Any]:
    """Tensors and index of a checkpoint of one rank, but for what differs from save to save."""
    (file,) = place.glob("*.safetensors")
    index = json.loads((place / "index.json").read_text())
    return load_file(file), {key: index[key] for key in ("parameters", "optimizers", "pending")}
